"""A draft head gives the same results on the paged cache as in training, for its target only."""

import dataclasses
import itertools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.support.model.tiny_llama import (
    BLOCK_SIZE,
    TINY,
    empty_cache,
    states_of,
    step_of,
    tiny_llama,
)
from worker.errors import ModelError
from worker.models.draft_head import (
    HEAD_FILE,
    DraftHead,
    HeadShape,
    assemble,
    fingerprint,
    heads_directory,
    load_draft_head,
    shipped_head,
)
from worker.models.llama import LlamaModel
from worker.models.loader import load_model
from worker.ops.linear import DenseLinear, Linear, make_linear
from worker.tokenizer.checkpoint import read_checkpoint
from worker.tokenizer.tokenizer import build_tokenizer
from worker.training.store import head_metadata
from worker.training.twin import HeadTwin, teacher_of

SHAPE = HeadShape(intermediate_size=40, draft_vocab_size=23)
VOCAB = torch.arange(0, 46, 2)
TOKENS = torch.randint(0, 61, (18,), generator=torch.Generator().manual_seed(1)).tolist()
TABLE = [7, 2, 9, 4, 11]


def twin_for(target: LlamaModel) -> HeadTwin:
    noise = torch.Generator().manual_seed(3)
    twin = HeadTwin(SHAPE, teacher_of(target, VOCAB), noise)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=noise) * 0.1)
    return twin


def write(path: Path, target: LlamaModel, **changes: torch.Tensor) -> Path:
    weights = twin_for(target).weights()
    tensors = {**weights, "draft_vocab": VOCAB.to(torch.int32), **changes}
    save_file(tensors, path, head_metadata(SHAPE, target))
    return path


def serving(twin: HeadTwin, target: LlamaModel) -> DraftHead:
    return assemble(SHAPE, twin.weights(), VOCAB, target)


@torch.no_grad()
def test_the_paged_head_matches_the_trained_one() -> None:
    target = tiny_llama()
    twin = twin_for(target)
    head = serving(twin, target)
    features = states_of(target, TOKENS)[:-1]
    shifted = torch.tensor(TOKENS[1:])
    wanted = twin.passes(features[None], shifted[None], 1)[0][0]
    for cuts in ([0, 17], [0, 5, 6, 7, 13, 17]):
        cache = empty_cache(head.config)
        parts = [
            head.forward(features[a:b], step_of(TOKENS[a + 1 : b + 1], a, TABLE), cache)
            for a, b in itertools.pairwise(cuts)
        ]
        torch.testing.assert_close(torch.cat(parts), wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(head.logits(wanted), twin.logits(wanted), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_further_drafting_matches_the_later_passes_of_training() -> None:
    target = tiny_llama()
    twin = twin_for(target)
    head = serving(twin, target)
    features = states_of(target, TOKENS)
    passes = twin.passes(features[None, :-1], torch.tensor(TOKENS[1:])[None], 4)
    for known in (1, 6, 13):
        cache = empty_cache(head.config)
        step = step_of(TOKENS[1 : known + 1], 0, TABLE)
        hidden = head.forward(features[:known], step, cache)[-1:]
        for number in range(1, 4):
            row = known - 1 + number
            step = step_of([TOKENS[row + 1]], row, TABLE)
            hidden = head.forward(hidden, step, cache)
            torch.testing.assert_close(hidden[0], passes[number][0, row], rtol=1e-4, atol=1e-5)


def test_a_written_head_loads_unchanged(tmp_path: Path) -> None:
    target = tiny_llama()
    head = load_draft_head(write(tmp_path / "head.safetensors", target), target)
    assert head.draft_vocab.tolist() == VOCAB.tolist()
    assert (head.config.num_layers, head.config.kv_elements_per_token) == (1, 2 * 2 * 8)
    hidden = torch.randn(3, 32)
    wanted = twin_for(target).logits(hidden)
    torch.testing.assert_close(head.logits(hidden), wanted, rtol=1e-4, atol=1e-4)


def test_a_draft_head_uses_the_output_rows_of_an_untied_target() -> None:
    target = tiny_llama(config=dataclasses.replace(TINY, tied_head=False))
    head = serving(twin_for(target), target)
    hidden = torch.randn(2, 32)
    normed = torch.nn.functional.rms_norm(hidden, (32,), head.output_norm, TINY.rms_norm_eps)
    whole = target.head(normed)
    torch.testing.assert_close(head.logits(hidden), whole[:, VOCAB], rtol=1e-4, atol=1e-4)


def in_dtype(target: LlamaModel, dtype: torch.dtype) -> LlamaModel:
    def cast(linear: Linear, num_rows: int) -> Linear:
        return make_linear(linear.rows(torch.arange(num_rows)).to(dtype))

    layers = tuple(
        dataclasses.replace(layer, qkv=cast(layer.qkv, 64), down=cast(layer.down, 32))
        for layer in target.layers
    )
    words = DenseLinear(target.embedding.weight.to(dtype))
    return dataclasses.replace(target, embedding=words, layers=layers, dtype=dtype)


def test_the_fingerprint_distinguishes_models_but_not_dtypes() -> None:
    """Half precision rounds the smallest numbers to 0, which does not change the fingerprint."""
    target = tiny_llama()
    target.embedding.weight[0, :3] = torch.tensor([1e-9, -1e-9, 1e-30])
    for dtype in (torch.bfloat16, torch.float16):
        assert fingerprint(in_dtype(target, dtype)) == fingerprint(target)
    assert fingerprint(tiny_llama(seed=1)) != fingerprint(target)


@pytest.mark.parametrize("part", ["qkv", "down"])
def test_a_tuned_model_has_another_fingerprint(part: str) -> None:
    target, other = tiny_llama(), tiny_llama(seed=1)
    last = dataclasses.replace(target.layers[-1], **{part: getattr(other.layers[-1], part)})
    tuned = dataclasses.replace(target, layers=(*target.layers[:-1], last))
    assert fingerprint(tuned) != fingerprint(target)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"fuse": torch.zeros(32, 63)}, "tensors fuse are not"),
        ({"surplus": torch.zeros(1)}, "tensors surplus are not"),
        ({"draft_vocab": torch.full((23,), 61, dtype=torch.int32)}, "ids that the target does not"),
    ],
)
def test_a_file_that_contradicts_its_metadata_is_refused(
    tmp_path: Path, changes: dict[str, torch.Tensor], reason: str
) -> None:
    target = tiny_llama()
    path = write(tmp_path / "head.safetensors", target, **changes)
    with pytest.raises(ModelError, match=reason):
        load_draft_head(path, target)


def test_a_head_of_another_model_is_refused_with_the_remedy(tmp_path: Path) -> None:
    path = write(tmp_path / "head.safetensors", tiny_llama())
    with pytest.raises(ModelError, match=r"head\.safetensors: trained for another.*train-draft"):
        load_draft_head(path, tiny_llama(seed=1))


def test_a_file_that_is_not_a_head_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.safetensors"
    save_file({"x": torch.zeros(2)}, other)
    with pytest.raises(ModelError, match="not a draft head of ours"):
        load_draft_head(other, tiny_llama())
    with pytest.raises(ModelError, match="cannot be read"):
        load_draft_head(tmp_path / "missing.safetensors", tiny_llama())
    whole = write(tmp_path / "head.safetensors", tiny_llama()).read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(whole[:-100])
    with pytest.raises(ModelError, match="cannot be read"):
        load_draft_head(tmp_path / "cut.safetensors", tiny_llama())


def test_only_its_target_finds_a_trained_head(tmp_path: Path) -> None:
    target = tiny_llama()
    assert shipped_head(target, tmp_path) is None
    directory = tmp_path / fingerprint(target)
    directory.mkdir()
    path = write(directory / HEAD_FILE, target)
    assert shipped_head(target, tmp_path) == path
    assert shipped_head(tiny_llama(seed=1), tmp_path) is None


def test_the_environment_names_the_directory_of_heads() -> None:
    assert heads_directory({"POINTSMAN_CACHE": "/data"}) == Path("/data/heads")
    assert heads_directory({}) == Path.home() / ".cache/pointsman/heads"


# ---- the packaged head ----

# A greedy answer of this length fits in the cache of `empty_cache`.
ANSWER_TOKENS = 64
LETTER = "<|im_start|>user\nWrite a short letter to my aunt.<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.full
@pytest.mark.model
@torch.inference_mode()
def test_the_shipped_head_predicts_the_default_model(model_path: Path, tmp_path: Path) -> None:
    """The card promises more than this third on average, but the files are small."""
    target = load_model(model_path, torch.float32, torch.device("cpu"), 256)
    path = shipped_head(target, tmp_path)
    assert path is not None
    card = json.loads(path.with_suffix(".json").read_text())
    assert sum(file.stat().st_size for file in path.parent.iterdir()) < 12e6
    assert card["acceptance"]["expected_tokens_by_draft_length"]["3"] > 1.7

    tokens = build_tokenizer(read_checkpoint(model_path)).encode(LETTER, add_special_tokens=False)
    num_prompt, cache = len(tokens), empty_cache(target.config)
    table = range(-(-(num_prompt + ANSWER_TOKENS) // BLOCK_SIZE))
    parts = [target.states(step_of(tokens, 0, table), cache)]
    for _ in range(ANSWER_TOKENS):
        tokens.append(int(target.logits(parts[-1][-1:]).argmax()))
        step = step_of(tokens[-1:], len(tokens) - 1, table)
        parts.append(target.states(step, cache))
    head = load_draft_head(path, target)
    step = step_of(tokens[1:], 0, table)
    hidden = head.forward(torch.cat(parts)[:-1], step, empty_cache(head.config))
    drafts = head.draft_vocab[head.logits(hidden).argmax(dim=-1)].tolist()
    pairs = list(zip(drafts, tokens[2:], strict=False))[num_prompt - 1 :]
    assert sum(draft == token for draft, token in pairs) > len(pairs) / 3
