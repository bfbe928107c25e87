"""Products with GGUF's weights in planes against torch, and whole models; see `test_kernels`."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.model.block_weights import random_blocks, save_llama
from tests.support.model.whole_engine import Way, run_way, tokens_of, torch_config
from worker.engine.messages import AddRequest
from worker.executor.kv_cache import allocate
from worker.executor.start import build_executor
from worker.executor.state import DeviceState
from worker.executor.step_batch import StepBatch
from worker.models.llama import LlamaModel
from worker.models.loader import load_model
from worker.ops.parallel import WHOLE, Shard, VocabParallelLinear
from worker.ops.planes import PlanesLinear, PlaneWeight, choose_planes, pack
from worker.ops.triton import experts, planes
from worker.ops.triton.backend import TritonBackend
from worker.types import SamplingParams, ScheduledSequence

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CPU = torch.device("cpu")
TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
# An encoding of each layout, with columns that fill their spans and that do not.
SIZES = [
    *(("Q4_0", 64), ("Q5_1", 288), ("Q8_0", 160), ("Q4_K", 512), ("Q5_0", 64), ("Q5_K", 256)),
    *(("Q4_1", 576), ("Q6_K", 768)),
]
# The encodings of a published Q4_K_M file, and more.
MIXED = {
    "token_embd": "Q6_K",
    "blk.0.attn_q": "Q4_K",
    "blk.0.attn_k": "Q4_K",
    "blk.0.attn_v": "Q6_K",
    "blk.0.attn_output": "Q5_K",
    "blk.0.ffn_gate": "Q4_0",
    "blk.0.ffn_up": "Q4_0",
    "blk.0.ffn_down": "Q8_0",
}
# Those of a mixture: four experts, of which a shard's down projections cut blocks.
MIXTURE = {
    "token_embd": "Q6_K",
    "output": "Q4_K",
    "blk.0.ffn_gate_exps": "Q4_K",
    "blk.0.ffn_up_exps": "Q4_K",
    "blk.0.ffn_down_exps": "Q6_K",
}
PRODUCTS = ("qkv", "output", "gate_up", "down")


def packed(kind: str, outputs: int, inputs: int) -> PlaneWeight:
    found = pack([random_blocks(kind, outputs, inputs, seed=inputs)], DEVICE)
    assert found is not None
    return found[0]


def product(x: Tensor, weight: PlaneWeight) -> Tensor:
    """Written beside other numbers, as a fused product's parts are."""
    out = torch.full((len(x), weight.outputs + 3), torch.nan, dtype=x.dtype, device=x.device)
    planes.multiply(x, weight, out[:, 2:-1])
    assert out[:, [0, 1, -1]].isnan().all()
    return out[:, 2:-1]


SHAPES = [
    *((torch.float32, rows) for rows in (0, 1, 40, 300)),
    *((torch.float16, 3), (torch.bfloat16, 70), (torch.float16, 16)),
]
# Decoding a kind and multiplying rows of a type are apart: a kind meets a third of the shapes.
TWINS = [
    (*size, *reversed(shape))
    for i, size in enumerate(SIZES)
    for j, shape in enumerate(SHAPES)
    if (i + j) % 3 == 1
]


@pytest.mark.parametrize(("kind", "inputs", "rows", "dtype"), TWINS)
def test_the_torch_twin(kind: str, inputs: int, rows: int, dtype: torch.dtype) -> None:
    weight = packed(kind, 70, inputs)
    noise = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, inputs + 8, generator=noise).to(DEVICE, dtype)[:, :inputs]
    wanted = x.float() @ weight.decode().T
    found = product(x, weight)
    allowed = TOLERANCES[dtype] * (float(wanted.abs().max()) if rows else 1.0)
    torch.testing.assert_close(found.float(), wanted, rtol=0, atol=allowed)


# A kind meets one number of rows, and every other kind the larger tiles.
PAIRS = [
    *((*size, (1, 3, 17)[i % 3], torch.float32) for i, size in enumerate(SIZES)),
    *((*size, 70, torch.float16) for size in SIZES[::2]),
]


@pytest.mark.parametrize(("kind", "inputs", "rows", "dtype"), PAIRS)
def test_a_pair_takes_the_outputs_of_its_expert(
    kind: str, inputs: int, rows: int, dtype: torch.dtype
) -> None:
    """No row takes expert 2, and all take expert 4."""
    weight, noise = packed(kind, 5 * 37, inputs), torch.Generator().manual_seed(rows)
    x = torch.randn(rows, inputs, generator=noise).to(DEVICE, dtype)
    others = torch.rand(rows, 3, generator=noise).argsort(1)[:, :2]
    chosen = torch.cat((torch.full((rows, 1), 4), torch.tensor([0, 1, 3])[others]), dim=1)
    pairs = chosen.to(DEVICE).flatten()
    size = planes.tile(dtype, -(-len(pairs) // 5))
    assert (size[0] == 16) == (rows < 70)
    out = torch.full((len(pairs), 37), torch.nan, dtype=dtype, device=DEVICE)
    tiles = experts.cut(chosen.to(DEVICE), 5, size[0])
    planes.launch(x, weight, out, size, weight.spans, tiles, 3)
    whole = weight.decode().view(5, 37, inputs)[pairs]
    wanted = torch.einsum("pi,pni->pn", x.float().repeat_interleave(3, dim=0), whole)
    allowed = TOLERANCES[dtype] * float(wanted.abs().max())
    torch.testing.assert_close(out.float(), wanted, rtol=0, atol=allowed)


def test_a_part_of_a_weight_is_a_weight() -> None:
    kernels = choose_planes(DEVICE)
    assert kernels is not None
    for kind, inputs in SIZES:
        whole = PlanesLinear([packed(kind, 70, inputs)], None, kernels, torch.float32)
        part, wanted = whole.part(11, 48), whole.weights[0].decode()[11:48]
        assert torch.equal(part.weights[0].decode(), wanted)
        assert torch.equal(part.rows(torch.arange(37, device=DEVICE)), wanted)
        x = torch.randn(3, inputs, generator=torch.Generator().manual_seed(1)).to(DEVICE)
        torch.testing.assert_close(part(x), x @ wanted.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kind", "inputs"), SIZES)
def test_rows_are_decoded_exactly(kind: str, inputs: int) -> None:
    weight = packed(kind, 70, inputs)
    wanted = weight.decode()
    part = torch.empty(40, inputs, device=DEVICE)
    planes.decode(weight, part, first=7)
    assert torch.equal(part, wanted[7:47])
    chosen = torch.tensor([69, 0, 3, 3], dtype=torch.int32, device=DEVICE)
    rows = torch.empty(4, inputs, dtype=torch.float16, device=DEVICE)
    planes.decode(weight, rows, chosen)
    assert torch.equal(rows, wanted[chosen].half())


def test_a_row_alone_is_the_row_in_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter rows are equal to rounding only."""
    allowed = 0.0 if DEVICE.type == "cuda" else 1e-6
    launched = []
    merge = planes._merge_kernel

    class Counted:
        def __getitem__(self, grid: tuple[int, ...]) -> object:
            launched.append(grid)
            return merge[grid]

    monkeypatch.setattr(planes, "_merge_kernel", Counted())
    weight = packed("Q4_K", 40, 1024)
    x = torch.randn(16, 1024, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    together = product(x, weight)
    for count in (1, 7):
        alone = product(x[3 : 3 + count], weight)
        torch.testing.assert_close(alone, together[3 : 3 + count], rtol=allowed, atol=allowed)
    assert [rows for rows, _ in launched] == [16, 1, 7]  # all in splits


def greedy(model: LlamaModel) -> tuple[list[int], Tensor]:
    """Return tokens, and the logits of all steps."""
    cache = allocate(2, 16, model.config, model.dtype, CPU)
    tokens, start, seen = list(range(17)), 0, []
    while len(tokens) < 19:
        sequence = ScheduledSequence(0, tokens[start:], start, range(2))
        step = StepBatch([sequence], DeviceState(16, CPU)).tensors
        start = len(tokens)
        with torch.inference_mode():
            seen.append(model.logits(model.states(step, cache)[-1:]))
        tokens.append(int(seen[-1].argmax()))
    return tokens, torch.cat(seen)


on_the_interpreter = pytest.mark.skipif(
    DEVICE.type == "cuda", reason="the models are on the interpreter's device"
)


@pytest.mark.full
@on_the_interpreter
@pytest.mark.parametrize("head", ["Q8_0", None])
def test_a_model_answers_as_with_decoded_weights(
    head: str | None,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "mixed.gguf"
    save_llama(path, MIXED | ({} if head is None else {"output": head}))
    with caplog.at_level(logging.WARNING):
        model = load_model(path, torch.float32, CPU)
    assert not caplog.records
    layer = model.layers[0]
    assert all(isinstance(getattr(layer, name), PlanesLinear) for name in PRODUCTS)
    assert isinstance(model.embedding, PlanesLinear)
    assert isinstance(model.head, PlanesLinear)
    assert (model.head is model.embedding) == (head is None)
    assert isinstance(layer.qkv, PlanesLinear)
    assert [weight.outputs for weight in layer.qkv.weights] == [384, 128]
    tokens, logits = greedy(replace(model, backend=TritonBackend(CPU)))
    monkeypatch.delenv("TRITON_INTERPRET")
    assert choose_planes(CPU) is None
    wanted_tokens, wanted = greedy(load_model(path, torch.float32, CPU))
    assert tokens == wanted_tokens
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.full
@on_the_interpreter
def test_a_mixture_answers_as_with_decoded_experts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mixture.gguf"
    save_llama(path, MIXTURE, num_experts=4)
    with caplog.at_level(logging.WARNING):
        model = load_model(path, torch.float32, CPU)
    assert not caplog.records
    experts = model.layers[0].experts
    assert experts is not None
    assert experts.stacks is not None
    stacks = [stack for stack in experts.stacks if isinstance(stack, PlaneWeight)]
    assert [stack.outputs for stack in stacks] == [4 * 512, 4 * 256]
    places = [part.codes.untyped_storage().data_ptr() for part in stacks]
    for own, place in zip((experts.gate_up, experts.down), places, strict=True):
        (weights,) = {part.weights[0].codes.untyped_storage().data_ptr() for part in own}
        assert weights == place  # experts have no memory of their own
    found = [greedy(model), greedy(replace(model, backend=TritonBackend(CPU)))]
    monkeypatch.delenv("TRITON_INTERPRET")
    wanted_tokens, wanted = greedy(load_model(path, torch.float32, CPU))
    for tokens, logits in found:
        assert tokens == wanted_tokens
        torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)


@on_the_interpreter
def test_experts_that_cannot_stay_packed_are_decoded_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Gates and gated values in two encodings; half of a block of inputs."""
    path = tmp_path / "mixture.gguf"
    save_llama(path, MIXTURE | {"blk.0.ffn_up_exps": "Q5_K"}, num_experts=4)
    for shard, packed_outputs in ((WHOLE, 4 * 256), (Shard(1, 2), 0)):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            experts = load_model(path, torch.float16, CPU, shard=shard).layers[0].experts
        assert experts is not None
        assert experts.stacks is not None
        gate_up, down = experts.stacks
        assert isinstance(gate_up, Tensor)
        assert "are decoded: model.layers.0.mlp.experts.0." in caplog.text
        assert ("down_proj" in caplog.text) == (not packed_outputs)
        assert getattr(down, "outputs", 0) == packed_outputs


@pytest.mark.full
@on_the_interpreter
def test_two_ranks_answer_as_one_process(tmp_path: Path) -> None:
    """Embedding, head and experts are packed on both ranks."""
    path = tmp_path / "mixture.gguf"
    kinds = dict.fromkeys(("blk.0.ffn_gate_exps", "blk.0.ffn_up_exps"), "Q4_K")
    save_llama(
        path,
        kinds | {"token_embd": "Q8_0", "output": "Q5_0", "blk.0.ffn_down_exps": "Q8_0"},
        sizes=(41, 256, 64),
        num_experts=4,
    )
    for rank in range(2):
        shard = load_model(path, torch.float32, CPU, shard=Shard(rank, 2))
        experts, head = shard.layers[0].experts, shard.head
        assert isinstance(shard.embedding, PlanesLinear)
        assert isinstance(head, VocabParallelLinear)
        assert isinstance(head.inner, PlanesLinear)
        assert experts is not None
        assert all(isinstance(stack, PlaneWeight) for stack in experts.stacks or [None])
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    asked = [AddRequest(str(n), [*range(n, 9 + n)], params, 0.0) for n in range(2)]
    same = {"block_size": 8, "num_blocks_override": 200, "attention_backend": "triton"}
    answers = []
    for size in (1, 2):
        config = torch_config(path, **same, tensor_parallel_size=size, device="cpu")
        executor, _ = build_executor(config)
        try:
            answers.append(tokens_of(run_way(executor, Way(), asked)))
        finally:
            executor.shutdown()
    assert answers[0] == answers[1]


@on_the_interpreter
def test_other_encodings_are_decoded_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "other.gguf"
    save_llama(path, {"blk.0.attn_v": "Q3_K", "blk.0.ffn_down": "Q8_0"})
    with caplog.at_level(logging.WARNING):
        layer = load_model(path, torch.float32, CPU).layers[0]
    assert isinstance(layer.down, PlanesLinear)
    assert not isinstance(layer.qkv, PlanesLinear)  # queries and keys are not quantised
    assert not caplog.records
    save_llama(path, dict.fromkeys(("blk.0.attn_q", "blk.0.attn_k", "blk.0.attn_v"), "Q3_K"))
    with caplog.at_level(logging.WARNING):
        load_model(path, torch.float32, CPU)
    assert "are decoded: model.layers.0.self_attn.q_proj" in caplog.text


@on_the_interpreter
def test_shards_stay_packed_unless_a_block_is_cut(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of 256 columns is half a block of Q5_K; of Q8_0, four whole ones. The head is a part of
    the embedding, in its memory.
    """
    path = tmp_path / "mixed.gguf"
    save_llama(path, MIXED)
    with caplog.at_level(logging.WARNING):
        shards = [load_model(path, torch.float32, CPU, shard=Shard(rank, 2)) for rank in (0, 1)]
    own = [shard.layers[0] for shard in shards]
    assert "are decoded: model.layers.0.self_attn.o_proj" in caplog.text
    with monkeypatch.context() as changed:  # the interpreter reads it at its first launch
        changed.delenv("TRITON_INTERPRET")
        model = load_model(path, torch.float32, CPU)
    layer = model.layers[0]
    heads: list[Any] = [shard.head for shard in shards]
    for shard, head in zip(shards, heads, strict=True):
        assert isinstance(shard.embedding, PlanesLinear)
        memory = [part.weights[0].codes.untyped_storage() for part in (shard.embedding, head.inner)]
        assert memory[0].data_ptr() == memory[1].data_ptr()
    rows = torch.cat([head.inner.rows(torch.arange(20)) for head in heads])
    assert torch.equal(rows, model.embedding.rows(torch.arange(40)))
    every = torch.arange(256)
    for name in ("output", "down"):
        columns = torch.cat([getattr(part, name).inner.rows(every) for part in own], dim=1)
        assert torch.equal(columns, getattr(layer, name).rows(every))
    products: list[Any] = [part.qkv for part in own]
    for part, qkv in zip(own, products, strict=True):
        assert isinstance(qkv.inner, PlanesLinear)
        assert isinstance(part.gate_up, PlanesLinear)
    for first, size in ((0, 128), (256, 64), (384, 64)):  # queries, keys, values
        start = {0: 0, 256: 128, 384: 192}[first]
        rows = torch.cat([qkv.inner.rows(torch.arange(size) + start) for qkv in products])
        assert torch.equal(rows, layer.qkv.rows(torch.arange(2 * size) + first))
