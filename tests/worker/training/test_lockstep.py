"""Rows decoded side by side are the texts that the serving engine decodes one by one."""

import dataclasses

import torch
from tiny_llama import TINY, states_of, tiny_llama

from worker.training.lockstep import LockstepDecoder


def test_every_row_is_what_the_paged_engine_computes() -> None:
    """Over several groups of rows, at different positions, past the growth of their caches."""
    target = tiny_llama()
    noise = torch.Generator().manual_seed(2)
    texts = torch.randint(0, TINY.vocab_size, (18, 70), generator=noise).tolist()
    starts = [0 if row % 3 else 5 for row in range(18)]
    decoder = LockstepDecoder(target, 18, 80)
    for position in range(5):  # two thirds of the rows are begun again after this
        decoder.step([text[position] for text in texts], [position] * 18)
    seen = []
    for offset in range(65):
        positions = [start + offset for start in starts]
        tokens = [text[at] for text, at in zip(texts, positions, strict=True)]
        seen.append(decoder.step(tokens, positions))
    for row in (0, 1, 15, 16, 17):
        wanted = states_of(target, texts[row])[starts[row] : starts[row] + 65]
        got = torch.stack([states[row] for states in seen])
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_heads_are_normalised_and_layers_left_unrotated_where_the_model_says_so() -> None:
    """As Qwen3 and SmolLM3 do."""
    plain = tiny_llama()
    scale = torch.linspace(0.5, 1.5, TINY.head_dim)
    layers = (
        dataclasses.replace(plain.layers[0], query_norm=scale, key_norm=scale.flip(0)),
        dataclasses.replace(plain.layers[1], rotates=False),
    )
    target = dataclasses.replace(plain, layers=layers)
    tokens = list(range(3, 12))
    decoder = LockstepDecoder(target, 1, 16)
    got = torch.cat([decoder.step([token], [at]) for at, token in enumerate(tokens)])
    torch.testing.assert_close(got, states_of(target, tokens), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(got, states_of(plain, tokens), atol=1e-2)
