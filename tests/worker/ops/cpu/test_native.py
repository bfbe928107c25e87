"""The native kernels against torch and `gguf`, on every instruction set that the CPU has."""

import dataclasses
import logging
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.model.tiny_llama import TINY, tiny_llama
from tests.support.waiting import until
from worker.errors import ConfigError
from worker.models.config import ModelConfig
from worker.models.llama import LayerWeights, LlamaModel, native_layers
from worker.models.loader import model_rope_table
from worker.ops.cpu import native
from worker.ops.cpu.native import GGML_TYPES, BlockLinear, CpuKernels, Stored, open_kernels, stored
from worker.ops.linear import make_linear
from worker.ops.step import StepTensors

SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 12, 13, 31, 130)
COLS = 512


@pytest.fixture(params=["avx512", "avx2", "portable"])
def kernels(request: Any, monkeypatch: pytest.MonkeyPatch) -> CpuKernels:
    return opened(request.param, monkeypatch)


def opened(isa: str, monkeypatch: pytest.MonkeyPatch, threads: int = 3, **kind: bool) -> CpuKernels:
    monkeypatch.setenv(native.ISA_VARIABLE, isa)
    found = open_kernels(threads, **kind)
    if found is None:
        pytest.skip(f"this CPU has no {isa}, or there was no compiler")
    return found


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def blocks(name: str, rows: int, cols: int) -> tuple[Stored, Tensor]:
    kind = getattr(gguf.GGMLQuantizationType, name)
    if name == "F32":
        raw = noise(rows, cols).numpy().view(np.uint8)
        return Stored(name, rows, cols, raw.reshape(-1)), noise(rows, cols)
    try:
        raw = np.ascontiguousarray(gguf.quants.quantize(noise(rows, cols).numpy(), kind))
    except NotImplementedError:  # of these the package only reads: any codes, and small scales
        elements, size = gguf.GGML_QUANT_SIZES[kind]
        draw = np.random.default_rng(1)
        raw = draw.integers(0, 256, (rows, cols // elements, size), np.uint8)
        scales = draw.standard_normal((2, *raw.shape[:2])).astype(np.float16).view(np.uint8)
        places = (208, 208) if name == "Q6_K" else (0, 2)
        for place, scale in zip(places, scales.reshape(2, *raw.shape[:2], 2), strict=True):
            raw[:, :, place : place + 2] = scale
        raw = raw.reshape(rows, -1)
    raw = raw.view(np.uint8)
    return Stored(name, rows, cols, raw.reshape(-1)), torch.from_numpy(
        gguf.quants.dequantize(raw, kind)
    )


async def test_kernels_that_are_dropped_leave_no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    held = opened("portable", monkeypatch, threads=4)
    before = num_threads()
    del held
    await until(lambda: num_threads() == before - 3, what="three threads fewer")


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.mark.parametrize("name", GGML_TYPES)
def test_weights_are_those_of_the_file_and_rows_stand_alone(
    name: str, kernels: CpuKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    part, weight = blocks(name, 40, COLS)
    linear = kernels.linear([part])
    assert linear is not None
    assert torch.equal(linear.rows(torch.arange(40)), weight)
    x = noise(SIZES[-1], COLS, seed=2)
    whole = linear(x)
    exact = x.double() @ weight.double().T
    assert (whole - exact).abs().max() <= 3e-5 * weight.abs().max()
    for size in SIZES:
        assert torch.equal(linear(x[:size]), whole[:size])
    other = opened("portable", monkeypatch, threads=1).linear([part])
    assert other is not None
    assert torch.equal(other(x), whole)


@pytest.mark.parametrize("name", GGML_TYPES)
def test_int8_activations_round_inputs_and_nothing_else(
    name: str, kernels: CpuKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inputs are rounded to 127 steps of their block's largest."""
    part, weight = blocks(name, 24, COLS)
    linear = opened(kernels.isa, monkeypatch, int8_activations=True).linear([part])
    assert linear is not None
    x = noise(9, COLS, seed=3)
    rounded = x
    if name not in ("F32", "F16", "BF16"):
        units = x.view(9, -1, 32).abs().amax(-1, keepdim=True) / 127
        rounded = ((x.view(9, -1, 32) / units).round() * units).view(9, COLS)
    exact = rounded.double() @ weight.double().T
    whole = linear(x)
    assert (whole - exact).abs().max() <= 3e-5 * weight.abs().max()
    for size in (1, 3, 4, 7):
        assert torch.equal(linear(x[:size]), whole[:size])
    x[2, 5] = torch.nan
    assert linear(x).isfinite().all(-1).tolist() == [row != 2 for row in range(9)]


def test_parts_of_several_types_biases_and_residuals(kernels: CpuKernels) -> None:
    """The rows of the product do not fill a group of 16."""
    names = ("Q4_K", "Q4_K", "Q6_K")
    parts, weights = zip(*(blocks(name, 17 + i, 256) for i, name in enumerate(names)), strict=True)
    bias, weight = noise(54, seed=4), torch.cat(weights)
    linear = kernels.linear(parts, bias)
    assert linear is not None
    assert linear.shape == (54, 256)
    assert torch.equal(linear.rows(torch.tensor([53, 0, 17, 18])), weight[[53, 0, 17, 18]])
    for size in (1, 3, 20):
        x, residual = noise(size, 256, seed=5), noise(size, 54, seed=6)
        wanted = x.double() @ weight.double().T + bias + residual
        torch.testing.assert_close(linear(x, residual).double(), wanted, rtol=1e-4, atol=3e-4)


def test_parts_that_cannot_be_repacked_are_left_to_the_caller(kernels: CpuKernels) -> None:
    """One encoding is unknown, and float16 cannot hold the minimum of one scale."""
    part, _ = blocks("Q4_0", 1, 32)
    assert kernels.linear([dataclasses.replace(part, type_name="IQ2_XS")]) is None
    part.data[:2] = np.array([60000], np.float16).view(np.uint8)
    assert kernels.linear([part]) is None


def test_no_library_or_no_such_instruction_set_is_a_line_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(native.ISA_VARIABLE, "mmx")
    with caplog.at_level(logging.WARNING):
        assert open_kernels(1) is None
    assert "using torch" in caplog.text


@pytest.fixture(scope="module")
def portable_only(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler, folder = shutil.which("g++"), tmp_path_factory.mktemp("library")
    if compiler is None:
        pytest.skip("there is no g++")
    library = folder / "_kernels.so"
    sources = [native.FOLDER / f"{name}.cpp" for name in ("native", "kernels_portable", "sample")]
    flags = ("-shared", "-fPIC", "-pthread", "-std=c++20", "-O0", "-o", library)
    subprocess.run([compiler, *flags, *sources], check=True)
    return folder


@pytest.mark.full
def test_an_instruction_set_without_kernels_is_an_error_that_names_the_fix(
    portable_only: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "FOLDER", portable_only)
    monkeypatch.setenv(native.ISA_VARIABLE, "avx2")
    if not native._library(portable_only).pointsman_runs(b"avx2"):
        pytest.skip("this CPU has no avx2")
    message = r"^POINTSMAN_CPU_ISA=avx2: .*not built: build all with POINTSMAN_KERNEL_ISAS=all pip"
    with pytest.raises(ConfigError, match=message):
        open_kernels(1)


@pytest.mark.full
def test_the_best_kernels_that_were_built_are_used(
    portable_only: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native, "FOLDER", portable_only)
    monkeypatch.delenv(native.ISA_VARIABLE, raising=False)
    library = native._library(portable_only)
    if not library.pointsman_runs(b"portable"):
        pytest.skip("this CPU runs no kernels")
    with caplog.at_level(logging.WARNING):
        found = open_kernels(1)
    assert found is not None
    assert found.isa == "portable"
    could_do_better = bool(library.pointsman_runs(b"avx2"))
    assert ("since those for avx" in caplog.text) is could_do_better
    part, expected = blocks("Q4_1", 32, COLS)
    layer = found.linear([part])
    assert layer is not None
    x = noise(3, COLS, seed=1)
    torch.testing.assert_close(layer(x), x @ expected.T, rtol=1e-4, atol=1e-3)


# ---- layers ----

BASE = dataclasses.replace(
    TINY, hidden_size=64, intermediate_size=80, num_layers=1, max_context=512
)
MODELS = {
    "three queries a key": dataclasses.replace(BASE, num_heads=9, num_kv_heads=3, head_dim=64),
    "one query a key": dataclasses.replace(BASE, num_heads=4, num_kv_heads=4, head_dim=16),
    "four queries a key": dataclasses.replace(BASE, num_heads=8, num_kv_heads=2, head_dim=24),
    "eight queries a key": dataclasses.replace(BASE, num_heads=8, num_kv_heads=1, head_dim=80),
    "large heads": dataclasses.replace(BASE, num_heads=2, num_kv_heads=1, head_dim=256),
    "normed queries and keys": dataclasses.replace(
        BASE, num_heads=4, num_kv_heads=2, head_dim=32, qk_norm=True
    ),
    "a window of 20": dataclasses.replace(
        BASE, num_heads=8, num_kv_heads=2, head_dim=24, window=20
    ),
    "a window of 90": dataclasses.replace(
        BASE, num_heads=4, num_kv_heads=2, head_dim=16, window=90
    ),
}


def dense_layer(config: ModelConfig, rotates: bool = True) -> LayerWeights:
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size

    def norm(size: int) -> Tensor | None:
        return 1 + 0.2 * noise(size, seed=9) if config.qk_norm else None

    return LayerWeights(
        input_norm=1 + 0.2 * noise(hidden, seed=1),
        qkv=make_linear(0.2 * noise(queries + 2 * keys, hidden, seed=2)),
        output=make_linear(0.2 * noise(hidden, queries, seed=3)),
        mlp_norm=1 + 0.2 * noise(hidden, seed=4),
        gate_up=make_linear(0.2 * noise(2 * inner, hidden, seed=5)),
        down=make_linear(0.2 * noise(hidden, inner, seed=6)),
        query_norm=norm(config.head_dim),
        key_norm=norm(config.head_dim),
        rotates=rotates,
        window=config.window or None,
    )


def native_layer(kernels: CpuKernels, layer: LayerWeights, config: ModelConfig) -> LayerWeights:
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    rows = {
        "qkv": queries + 2 * keys,
        "output": config.hidden_size,
        "gate_up": 2 * config.intermediate_size,
        "down": config.hidden_size,
    }
    products = {
        name: kernels.linear([stored(getattr(layer, name).rows(torch.arange(count)))])
        for name, count in rows.items()
    }
    return dataclasses.replace(layer, **products)


class Run:
    """The cache is full of nan where nothing was written."""

    def __init__(
        self,
        layer: LayerWeights,
        config: ModelConfig,
        block_size: int,
        first_position: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        model = tiny_llama(config=config)
        self.size = block_size
        self.first_position = first_position
        kernels = layer.qkv.kernels if isinstance(layer.qkv, BlockLinear) else None
        rope = model_rope_table(config, config.max_context, torch.device("cpu"))
        self.model: LlamaModel = dataclasses.replace(
            model,
            layers=(layer,),
            kernels=kernels,
            native=native_layers([layer], config),
            rope=rope,
        )
        shape = (1, 64, 2, config.num_kv_heads, block_size, config.head_dim)
        self.cache = torch.full(shape, torch.nan, dtype=dtype)

    def step(self, *shares: tuple[int, int, int]) -> Tensor:
        """A share is a text, its first position and its tokens; a text's blocks are its own."""
        ints, width = torch.int32, 64 // 4
        positions = [p for _, start, count in shares for p in range(start, start + count)]
        texts = [text for text, _, count in shares for _ in range(count)]
        slots = [
            (text + 4 * (p // self.size)) * self.size + p % self.size
            for text, p in zip(texts, positions, strict=True)
        ]
        tokens = [(7 * text + 3 * p) % 32 for text, p in zip(texts, positions, strict=True)]
        ends = np.cumsum([0, *(count for _, _, count in shares)])
        step = StepTensors(
            token_ids=torch.tensor(tokens, dtype=ints),
            positions=torch.tensor(positions, dtype=ints),
            slots=torch.tensor(slots, dtype=ints),
            query_starts=torch.tensor(ends, dtype=ints),
            context_lens=torch.tensor([start + count for _, start, count in shares], dtype=ints),
            block_tables=torch.tensor(
                [[text + 4 * i for i in range(width)] for text, _, _ in shares], dtype=ints
            ),
            sample_rows=torch.tensor(ends[1:] - 1, dtype=ints),
            max_rows=max(count for *_, count in shares),
            max_context=max(start + count for _, start, count in shares),
            first_position=self.first_position,
        )
        return self.model.states(step, self.cache)


def whole(run: Run, lengths: Sequence[int]) -> list[Tensor]:
    states = run.step(*((text, 0, count) for text, count in enumerate(lengths)))
    return list(states.split(list(lengths)))


@pytest.mark.parametrize("block_size", [16, 32, 8, 24])
@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
@torch.inference_mode()
def test_a_layer_is_that_of_torch(
    config: ModelConfig, block_size: int, kernels: CpuKernels
) -> None:
    """Contexts end on a block, a vector or a chunk of 64, and off them."""
    layer = dense_layer(config)
    native_run = Run(native_layer(kernels, layer, config), config, block_size)
    twin = Run(layer, config, block_size)
    lengths = (1, block_size, 63, 7 * 16)
    for found, wanted in zip(whole(native_run, lengths), whole(twin, lengths), strict=True):
        torch.testing.assert_close(found, wanted, rtol=2e-4, atol=2e-4)
    shares = ((0, 1, 1), (1, block_size, 3), (2, 63, 2))
    torch.testing.assert_close(native_run.step(*shares), twin.step(*shares), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
@torch.inference_mode()
def test_a_row_is_the_same_in_any_batch_and_chunking(
    config: ModelConfig, dtype: torch.dtype, kernels: CpuKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, lengths = dense_layer(config), (100, 5, 71, 1)
    together = whole(Run(native_layer(kernels, layer, config), config, 16, dtype=dtype), lengths)
    assert all(states.isfinite().all() for states in together)
    plain = opened("portable", monkeypatch, threads=1)
    alone = Run(native_layer(plain, layer, config), config, 16, dtype=dtype)
    for text, count in enumerate(lengths):
        pieces, start = [], 0
        for size in (1, 30, 2, 33, 4, 100):
            taken = min(size, count - start)
            if taken:
                pieces.append(alone.step((text, start, taken)))
            start += taken
        assert torch.equal(torch.cat(pieces), together[text])
    spoilt = Run(native_layer(kernels, layer, config), config, 16, dtype=dtype)
    whole(spoilt, lengths)
    spoilt.cache[:, 1] = torch.nan  # text 1 has its five tokens there
    mixed = spoilt.step((0, 100, 1), (1, 5, 1), (2, 71, 2))
    assert mixed.isfinite().all(-1).tolist() == [True, False, True, True]


@torch.inference_mode()
def test_layers_without_rotation_and_rows_without_position_0(kernels: CpuKernels) -> None:
    """Some models have layers without rotation, and a draft head has no row 0."""
    config = MODELS["four queries a key"]
    layer = dense_layer(config, rotates=False)
    runs = [
        Run(each, config, 16, first_position=1)
        for each in (native_layer(kernels, layer, config), layer)
    ]
    found, wanted = (torch.cat([run.step((0, 1, 70)), run.step((0, 71, 2))]) for run in runs)
    torch.testing.assert_close(found, wanted, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
@torch.inference_mode()
def test_a_bfloat16_cache_rounds_keys_and_values_and_nothing_else(
    config: ModelConfig, kernels: CpuKernels
) -> None:
    """Now and then a key rounds to the neighbour of torch's."""
    layer, lengths, half = dense_layer(config), (90, 16, 3), torch.bfloat16
    exact = Run(native_layer(kernels, layer, config), config, 16)
    rounded = Run(native_layer(kernels, layer, config), config, 16, dtype=half)
    twin = Run(layer, config, 16, dtype=half)
    plain, found, wanted = (torch.cat(whole(run, lengths)) for run in (exact, rounded, twin))
    torch.testing.assert_close(
        rounded.cache, exact.cache.bfloat16(), rtol=0, atol=0, equal_nan=True
    )
    effect = (found - plain).abs().mean()
    assert effect > 20 * (found - wanted).abs().mean()
    assert (found - wanted).abs().max() < (found - plain).abs().max()


def test_threads_share_work_without_losing_any(kernels: CpuKernels) -> None:
    part, weight = blocks("Q4_1", 640, 64)
    linear = kernels.linear([part])
    assert linear is not None
    x = noise(1, 64, seed=8)
    first = linear(x)
    torch.testing.assert_close(first, x @ weight.T, rtol=1e-4, atol=1e-4)
    for _ in range(3000):
        assert torch.equal(linear(x), first)
