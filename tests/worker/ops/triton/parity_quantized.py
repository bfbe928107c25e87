"""Products with quantised weights against torch, and whole models of them; see `test_kernels`."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.model.model_variants import QWEN3_MOE
from tests.support.model.quantized_checkpoints import quantize
from tests.support.model.tiny_checkpoint import save_checkpoint
from worker.executor.kv_cache import allocate
from worker.executor.state import DeviceState
from worker.executor.step_batch import StepBatch
from worker.models.llama import LlamaModel
from worker.models.loader import load_model
from worker.ops.parallel import Shard
from worker.ops.quantized import (
    Encoding,
    GroupedWeight,
    QuantizedLinear,
    choose_product,
    multiply,
    pack,
)
from worker.ops.triton import quantized
from worker.types import ScheduledSequence

CPU = torch.device("cpu")
TINY = {
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "intermediate_size": 128,
}
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
on_the_interpreter = pytest.mark.skipif(
    DEVICE.type == "cuda", reason="the models are on the interpreter's device"
)
FORMS = ("fp8, blocks", "compressed, channel", "awq", "gptq, act order", "gptq, 8 bits, zeros")
TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def random_weight(encoding: Encoding, out: int, inputs: int, group: int) -> GroupedWeight:
    noise = torch.Generator().manual_seed(out + inputs)
    count = -(-inputs // group)
    scales = torch.rand(out, count, generator=noise) + 0.5
    codes = torch.randint(0, 256, (out, inputs), generator=noise, dtype=torch.uint8)
    groups = torch.arange(inputs) // group
    if encoding is Encoding.FLOAT8:
        codes[codes & 127 == 127] = 0
        return GroupedWeight(encoding, codes.view(torch.float8_e4m3fn), scales, None, groups)
    codes = codes & 15 if encoding is Encoding.UINT4 else codes
    top = 16 if encoding is Encoding.UINT4 else 256
    zeros = torch.randint(0, top, (out, count), generator=noise, dtype=torch.uint8)
    return GroupedWeight(encoding, codes, scales.half(), zeros, groups)


SHAPES = [
    *((torch.float32, rows) for rows in (0, 5, 33)),
    *((torch.float16, 1), (torch.bfloat16, 16), (torch.bfloat16, 70)),
]
SIZES = [
    (Encoding.UINT4, 24, 64, 32),
    (Encoding.UINT4, 130, 192, 64),
    (Encoding.UINT4, 40, 256, 128),
    (Encoding.UINT4, 33, 128, 128),
    (Encoding.UINT8, 40, 96, 32),
    (Encoding.UINT8, 40, 100, 100),
    (Encoding.FLOAT8, 24, 96, 96),
    (Encoding.FLOAT8, 130, 72, 72),
    (Encoding.FLOAT8, 40, 200, 128),
    (Encoding.FLOAT8, 40, 96, 32),
]
# Decoding a weight and multiplying rows of a type are apart: a weight meets a third of the shapes.
TWINS = [
    (*size, *reversed(shape))
    for i, size in enumerate(SIZES)
    for j, shape in enumerate(SHAPES)
    if (i + j) % 3 == 2
]


@pytest.mark.parametrize(("encoding", "out", "inputs", "group", "rows", "dtype"), TWINS)
def test_the_torch_twin(
    encoding: Encoding, out: int, inputs: int, group: int, rows: int, dtype: torch.dtype
) -> None:
    weight = pack([random_weight(encoding, out, inputs, group)], DEVICE)
    assert weight is not None
    noise = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, inputs, generator=noise).to(DEVICE, dtype)
    # Few numbers are far from zero: products fit float16.
    x = x * 0.01
    found = quantized.multiply(x, weight)
    assert found.dtype is dtype
    wanted = multiply(x.float(), weight)
    largest = float(wanted.abs().max()) if rows else 1.0
    allowed = TOLERANCES[dtype] * largest
    torch.testing.assert_close(found.float(), wanted, rtol=0, atol=allowed)


def test_every_float8_number_is_decoded_exactly() -> None:
    codes = torch.tensor([c for c in range(256) if c & 127 != 127], dtype=torch.uint8)
    numbers = codes.view(torch.float8_e4m3fn)
    one = torch.ones(len(codes), 1)
    none = torch.zeros(1, dtype=torch.int64)
    weight = pack([GroupedWeight(Encoding.FLOAT8, numbers.unsqueeze(1), one, None, none)], DEVICE)
    assert weight is not None
    found = quantized.multiply(torch.ones(1, 1, device=DEVICE), weight)
    assert torch.equal(found[0].cpu(), numbers.float())


def quantized_tiny(tmp_path: Path, form: str, **changes: Any) -> tuple[Path, Path]:
    """Save a quantised checkpoint; return its path and that of the weights that it stands for."""
    path = tmp_path / "model"
    path.mkdir()
    save_checkpoint(path, TINY | changes, 0.2)
    return path, quantize(path, form)


def greedy(model: LlamaModel, count: int = 6) -> list[int]:
    cache, tokens, start = allocate(4, 16, model.config, torch.float32, CPU), list(range(20)), 0
    while len(tokens) < 20 + count:
        sequence = ScheduledSequence(0, tokens[start:], start, range(4))
        step = StepBatch([sequence], DeviceState(16, CPU)).tensors
        start = len(tokens)
        with torch.inference_mode():
            logits = model.logits(model.states(step, cache)[-1:])
        tokens.append(int(logits.argmax()))
    return tokens


@pytest.mark.full
@on_the_interpreter
@pytest.mark.parametrize("form", FORMS)
def test_a_model_answers_as_with_decoded_weights(
    form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert choose_product(CPU) is quantized.multiply
    path, beside = quantized_tiny(tmp_path, form)
    with caplog.at_level(logging.WARNING):
        model = load_model(path, torch.float32, CPU)
    assert not caplog.records
    products: list[Any] = [
        getattr(layer, name)
        for layer in model.layers
        for name in ("qkv", "output", "gate_up", "down")
    ]
    assert all(isinstance(product, QuantizedLinear) for product in products)
    assert greedy(model) == greedy(load_model(beside, torch.float32, CPU))


@pytest.mark.full
@on_the_interpreter
def test_weights_that_fit_no_kernel_are_decoded_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An inner size of 96 is no multiple of 64."""
    path, beside = quantized_tiny(tmp_path, "awq", intermediate_size=96)
    with caplog.at_level(logging.WARNING):
        model = load_model(path, torch.float32, CPU)
    assert "are decoded: model.layers.0.mlp.down_proj" in caplog.text
    assert isinstance(model.layers[0].qkv, QuantizedLinear)
    assert greedy(model) == greedy(load_model(beside, torch.float32, CPU))


@on_the_interpreter
@pytest.mark.parametrize(
    ("form", "decoded"),
    [("fp8, blocks", ""), ("awq", "o_proj"), ("gptq, act order", "down_proj, model.layers.0.self")],
)
def test_shards_stay_quantised(
    form: str, decoded: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Columns stay quantised unless a shard's are no whole groups."""
    path, beside = quantized_tiny(tmp_path, form)
    layer = load_model(beside, torch.float32, CPU).layers[0]
    with caplog.at_level(logging.WARNING):
        shards = [load_model(path, torch.float32, CPU, shard=Shard(rank, 2)) for rank in range(2)]
    assert len(caplog.records) == (2 if decoded else 0)
    assert decoded in caplog.text
    own = [shard.layers[0] for shard in shards]
    assert all(isinstance(part.gate_up, QuantizedLinear) for part in own)
    every = torch.arange(64)
    for name in ("output", "down"):
        columns = torch.cat([getattr(part, name).inner.rows(every) for part in own], dim=1)
        assert torch.equal(columns, getattr(layer, name).rows(every))
    for first in (0, 64):  # gates, and what they gate
        rows = torch.cat([part.gate_up.rows(every + first) for part in own])
        assert torch.equal(rows, layer.gate_up.rows(torch.arange(128) + 2 * first))


@pytest.mark.full
@on_the_interpreter
def test_experts_are_decoded_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Their grouped products take dense weights."""
    config = {**QWEN3_MOE, "model_type": "qwen3_moe", "head_dim": 16}
    path, beside = quantized_tiny(tmp_path, "gptq", **config)
    with caplog.at_level(logging.WARNING):
        model = load_model(path, torch.float16, CPU)
    assert "are decoded: model.layers.0.mlp.experts.0.down_proj, model.layers" in caplog.text
    assert isinstance(model.layers[0].qkv, QuantizedLinear)
    found, wanted = (m.layers[0].experts for m in (model, load_model(beside, torch.float16, CPU)))
    assert found is not None
    assert wanted is not None
    assert found.stacks is not None
    assert wanted.stacks is not None
    assert all(torch.equal(*pair) for pair in zip(found.stacks, wanted.stacks, strict=True))


def test_a_row_alone_is_the_row_in_a_batch() -> None:
    """In the interpreter rows are equal to rounding only, and on a GPU as long as they are few."""
    allowed = 0.0 if DEVICE.type == "cuda" else 1e-6
    weight = pack([random_weight(Encoding.UINT4, 40, 256, 64)], DEVICE)
    assert weight is not None
    x: Tensor = torch.randn(16, 256, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    together = quantized.multiply(x, weight)
    alone = quantized.multiply(x[3:4], weight)
    torch.testing.assert_close(alone, together[3:4], rtol=allowed, atol=allowed)
