"""Samples for a toy head, and toy models in files."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.support.model.tiny_llama import states_of, tiny_llama
from worker.models.llama import LlamaModel
from worker.training.store import TrainingSample


@pytest.fixture
def target() -> LlamaModel:
    return tiny_llama()


@pytest.fixture
def greedy_samples(target: LlamaModel) -> Callable[[int, int], list[TrainingSample]]:
    """Each text is a greedy continuation of four random tokens."""

    def make(count: int, length: int) -> list[TrainingSample]:
        noise = torch.Generator().manual_seed(7)
        samples = []
        for _ in range(count):
            tokens = torch.randint(0, target.config.vocab_size, (4,), generator=noise).tolist()
            while len(tokens) < length:
                tokens.append(int(target.logits(states_of(target, tokens)[-1:]).argmax()))
            is_target = torch.arange(length) >= 4
            samples.append(
                TrainingSample(torch.tensor(tokens), is_target, states_of(target, tokens)[:-1])
            )
        return samples

    return make


CONTEXT, VOCAB, HIDDEN = 48, 256, 32


@pytest.fixture
def make_model(tmp_path: Path) -> Callable[[int], Path]:
    """The embedding is the same for every seed, as when a model is tuned."""

    def make(seed: int) -> Path:
        path = tmp_path / f"model-{seed}"
        path.mkdir()
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": VOCAB,
            "hidden_size": HIDDEN,
            "intermediate_size": 40,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": CONTEXT,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
        }
        (path / "config.json").write_text(json.dumps(config))
        save_file(_weights(seed), path / "model.safetensors")
        letters = {
            letter: n for n, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
        }
        tokenizer = Tokenizer(models.BPE(letters, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.save(str(path / "tokenizer.json"))
        return path

    return make


def _weights(seed: int) -> dict[str, torch.Tensor]:
    def drawn(shape: tuple[int, ...], number: int) -> torch.Tensor:
        if len(shape) == 1:
            return torch.ones(shape)
        return torch.randn(shape, generator=torch.Generator().manual_seed(number)) * 0.5

    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (HIDDEN // 2, HIDDEN),
        "self_attn.v_proj": (HIDDEN // 2, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (40, HIDDEN),
        "mlp.up_proj": (40, HIDDEN),
        "mlp.down_proj": (HIDDEN, 40),
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
    }
    tensors = {
        f"model.layers.0.{name}.weight": drawn(shape, 100 * seed + number)
        for number, (name, shape) in enumerate(shapes.items())
    }
    embedding = drawn((VOCAB, HIDDEN), 7)
    return tensors | {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": torch.ones(HIDDEN),
    }
