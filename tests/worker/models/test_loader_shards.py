"""The shards of tensor parallelism together are the model that one process loads."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor

from tests.support.model import model_variants
from tests.support.model.quantized_checkpoints import FORMATS, quantize
from worker.errors import ConfigError
from worker.models.checkpoints import GgufCheckpoint, SafetensorsCheckpoint, WeightFile, read
from worker.models.llama import LlamaModel
from worker.models.loader import load_model, shard_config
from worker.ops.cpu.native import BlockLinear, CpuKernels, open_kernels
from worker.ops.linear import Linear
from worker.ops.parallel import Shard

CPU = torch.device("cpu")
SIZE = 2
PARTLY_ROTATED = "phi3, partly rotated, with a window"
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, tied head": ("Llama", {"tie_word_embeddings": True}),
    "llama, biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2, even vocabulary": ("Qwen2", {"vocab_size": 98, "tie_word_embeddings": False}),
    "qwen2, tied head, even vocabulary": ("Qwen2", {"vocab_size": 98, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 24}),
    **{name: model_variants.VARIANTS[name] for name in ("gemma2", "phi3", PARTLY_ROTATED)},
}


def weight(linear: Linear, rows: int) -> Tensor:
    """Return a shard's own part: of what a rank has whole, rows take the other ranks."""
    return getattr(linear, "inner", linear).rows(torch.arange(rows))


def halves(tensors: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Join shards of a product that fuses parts of `sizes`; each has its share of each part."""
    parts = [tensor.split([size // SIZE for size in sizes]) for tensor in tensors]
    return torch.cat([torch.cat(part) for part in zip(*parts, strict=True)])


def assert_shards_make(whole: LlamaModel, shards: list[LlamaModel]) -> None:
    config = whole.config
    hidden, inner, vocab = config.hidden_size, config.intermediate_size, config.vocab_size
    queries, keys = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
    for shard in shards:
        assert torch.equal(weight(shard.embedding, vocab), weight(whole.embedding, vocab))
        assert torch.equal(shard.final_norm, whole.final_norm)
    rows = -(-vocab // SIZE)
    head = torch.cat([weight(shard.head, rows) for shard in shards])
    assert torch.equal(head[:vocab], weight(whole.head, vocab))
    assert not head[vocab:].any()
    for index, layer in enumerate(whole.layers):
        own = [shard.layers[index] for shard in shards]
        for shard in own:
            assert torch.equal(shard.input_norm, layer.input_norm)
            assert torch.equal(shard.mlp_norm, layer.mlp_norm)
            if layer.query_norm is not None:
                assert torch.equal(shard.query_norm, layer.query_norm)
        fused = queries + 2 * keys
        qkv = [weight(shard.qkv, fused // SIZE) for shard in own]
        assert torch.equal(halves(qkv, (queries, keys, keys)), weight(layer.qkv, fused))
        gate_up = [weight(shard.gate_up, inner) for shard in own]
        assert torch.equal(halves(gate_up, (inner, inner)), weight(layer.gate_up, 2 * inner))
        for name in ("output", "down"):
            columns = [weight(getattr(shard, name), hidden) for shard in own]
            assert torch.equal(torch.cat(columns, dim=1), weight(getattr(layer, name), hidden))


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
@pytest.mark.parametrize("name", VARIANTS)
def test_shards_together_are_the_whole_model(
    name: str, kind: str, save_tiny: Callable[..., Any], write_gguf: Callable[..., Path]
) -> None:
    architecture, changes = VARIANTS[name]
    saved = save_tiny(architecture, **changes)
    path = saved.path if kind == "safetensors" else write_gguf(saved.model)
    whole = load_model(path, torch.float32, CPU)
    shards = [load_model(path, torch.float32, CPU, shard=Shard(r, SIZE)) for r in range(SIZE)]
    assert {shard.config.num_kv_heads for shard in shards} == {1}
    assert_shards_make(whole, shards)


@pytest.mark.parametrize("form", FORMATS)
def test_shards_of_quantised_weights_are_the_whole_model(
    form: str, save_tiny: Callable[..., Any]
) -> None:
    path = save_tiny("Llama", num_hidden_layers=1).path
    quantize(path, form)
    whole = load_model(path, torch.float32, CPU)
    shards = [load_model(path, torch.float32, CPU, shard=Shard(r, SIZE)) for r in range(SIZE)]
    assert_shards_make(whole, shards)


@pytest.mark.parametrize("name", ["mixtral", "qwen3 moe"])
def test_each_shard_has_a_part_of_every_expert(
    name: str, save_tiny: Callable[..., Any], kernels: CpuKernels | None
) -> None:
    kind, changes = model_variants.VARIANTS[name]
    path = save_tiny(kind, **changes).path
    how = (torch.float32, CPU, None, None, kernels)
    whole = load_model(path, *how)
    shards = [load_model(path, *how, shard=Shard(r, SIZE)) for r in range(SIZE)]
    hidden, inner = whole.config.hidden_size, whole.config.expert_size
    for index, layer in enumerate(whole.layers):
        own = [shard.layers[index].experts for shard in shards]
        experts = layer.experts
        assert experts is not None
        for shard in own:
            assert shard is not None
            assert shard.is_split
            count = whole.config.num_experts
            assert torch.equal(weight(shard.router, count), weight(experts.router, count))
        for n, (gate_up, down) in enumerate(zip(experts.gate_up, experts.down, strict=True)):
            parts = [weight(shard.gate_up[n], inner) for shard in own]
            assert torch.equal(halves(parts, (inner, inner)), weight(gate_up, 2 * inner))
            columns = [weight(shard.down[n], hidden) for shard in own]
            assert torch.equal(torch.cat(columns, dim=1), weight(down, hidden))


def test_an_expert_that_does_not_divide_evenly_is_refused(save_tiny: Callable[..., Any]) -> None:
    kind, changes = model_variants.VARIANTS["qwen3 moe"]
    shape = SafetensorsCheckpoint(save_tiny(kind, **changes).path).config
    with pytest.raises(ConfigError, match=r"2 does not divide .* and expert size 33: choose 1$"):
        shard_config(replace(shape, expert_size=33), Shard(1, SIZE))


@pytest.fixture(params=["torch", "native"])
def kernels(request: pytest.FixtureRequest) -> CpuKernels | None:
    if request.param == "torch":
        return None
    found = open_kernels(1)
    if found is None:
        pytest.skip("the native kernels are not built")
    return found


K_TYPE = gguf.GGMLQuantizationType.Q8_0


@pytest.mark.parametrize("form", ["none", "q8_0", "q4_1", "gguf", *FORMATS])
def test_native_shards_are_the_whole_model_as_it_is_stored(
    form: str, save_tiny: Callable[..., Any], write_gguf: Callable[..., Path]
) -> None:
    """The halves of down projections, of 48 inputs, cut blocks of 32; those of outputs do not."""
    native = open_kernels(1)
    if native is None:
        pytest.skip("the native kernels are not built")
    saved = save_tiny("Llama", num_hidden_layers=1, tie_word_embeddings=form == "gguf")
    path, quantization = saved.path, form if form in ("q8_0", "q4_1") else "none"
    if form in FORMATS:
        quantize(path, form)
    if form == "gguf":
        names = ("ffn_down", "attn_output", "attn_q", "attn_k")
        path = write_gguf(saved.model, {f"blk.0.{name}.weight": K_TYPE for name in names})
    how = (torch.float32, CPU, None, None, native, quantization)
    whole = load_model(path, *how)
    shards = [load_model(path, *how, shard=Shard(r, SIZE)) for r in range(SIZE)]
    assert whole.native is not None
    assert all(shard.native is None for shard in shards)
    for shard in shards:
        assert isinstance(shard.layers[0].output.inner, BlockLinear)
    assert_shards_make(whole, shards)


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_parts_of_tensors_match_the_whole(
    kind: str, save_tiny: Callable[..., Any], write_gguf: Callable[..., Path]
) -> None:
    saved = save_tiny("Llama", attention_bias=True, mlp_bias=True)
    types = {"blk.0.ffn_down.weight": gguf.GGMLQuantizationType.Q8_0}
    file: WeightFile = SafetensorsCheckpoint(saved.path)
    if kind == "gguf":
        file = GgufCheckpoint(write_gguf(saved.model, types))
    prefix = "model.layers.0."
    parts = {
        "mlp.down_proj.weight": (slice(0, 64), slice(40, 70)),
        "mlp.gate_proj.weight": (slice(30, 50), slice(10, 40)),
        "mlp.gate_proj.bias": (slice(30, 50),),
        "self_attn.q_proj.weight": (slice(16, 48), slice(0, 64)),
        "self_attn.q_proj.bias": (slice(16, 48),),
        "self_attn.k_proj.weight": (slice(16, 32), slice(8, 24)),
    }
    for name, part in parts.items():
        expected = read(file, prefix + name)[part]
        destination = torch.empty(expected.shape)
        file.read_into(prefix + name, destination, *(each.start for each in part))
        assert torch.equal(destination, expected), name


def test_a_shard_reads_only_its_part_of_a_file(
    save_tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = save_tiny("Llama", tie_word_embeddings=False)
    names: list[str] = []
    read_part = SafetensorsCheckpoint._tensor

    def tensor(self: SafetensorsCheckpoint, name: str, *part: slice | None) -> Tensor:
        found: Tensor = read_part(self, name, *part)  # type: ignore[arg-type]
        if found.shape == self.shapes()[name]:
            names.append(name)
        return found

    monkeypatch.setattr(SafetensorsCheckpoint, "_tensor", tensor)
    load_model(saved.path, torch.float32, CPU, shard=Shard(1, SIZE))
    assert "model.embed_tokens.weight" in names
    assert all("norm" in name or "embed_tokens" in name for name in names)


def test_a_model_that_does_not_divide_evenly_is_refused(save_tiny: Callable[..., Any]) -> None:
    saved = save_tiny("Llama", num_attention_heads=4, num_key_value_heads=4, intermediate_size=94)
    with pytest.raises(ConfigError, match=r"4 does not divide .* size 94: choose 1 or 2$"):
        load_model(saved.path, torch.float32, CPU, shard=Shard(0, 4))
