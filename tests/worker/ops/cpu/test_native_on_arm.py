"""The kernels for NEON, compiled for aarch64 and run by QEMU, compute what those of this CPU do."""

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from worker.ops.cpu import native
from worker.ops.cpu.native import (
    GGML_TYPES,
    CpuKernels,
    LayerShape,
    NativeDraws,
    NativeLayers,
    Stored,
    open_kernels,
    stored,
)
from worker.ops.noise import Stream
from worker.ops.rope import RopeTable
from worker.ops.sample import DRAWS, DrawState
from worker.ops.step import StepTensors

Array = npt.NDArray[Any]
LINEAR, NORM, LAYERS, SAMPLE = range(4)
EMULATORS = ("qemu-aarch64-static", "qemu-aarch64")
COMPILER = "aarch64-linux-gnu-g++"
BUILDS_SECONDS = 300
CONFIGS = {
    "grouped": (LayerShape(9, 3, 64, 1e-5), 16, False, 0),
    "alone": (LayerShape(4, 4, 16, 1e-5), 24, False, 0),
    "bfloat16": (LayerShape(8, 2, 24, 1e-5), 16, True, 0),
    "window": (LayerShape(8, 1, 80, 1e-5), 8, False, 20),
}

pytestmark = pytest.mark.full


@dataclass(frozen=True)
class Arm:
    """A program of the kernels for aarch64."""

    command: tuple[str, ...]

    def run(self, numbers: Sequence[int], *arrays: Array) -> bytes:
        parts = [np.ascontiguousarray(array).tobytes() for array in arrays]
        head = np.array([len(numbers), len(parts)], np.int64).tobytes()
        sizes = np.array([len(part) for part in parts], np.int64).tobytes()
        given = b"".join((head, np.array(numbers, np.int32).tobytes(), sizes, *parts))
        done = subprocess.run(self.command, input=given, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def arm(tmp_path_factory: pytest.TempPathFactory) -> Arm:
    emulator = next(filter(None, map(shutil.which, EMULATORS)), None)
    if emulator is None or shutil.which(COMPILER) is None:
        pytest.skip(f"{COMPILER} or {EMULATORS[0]} is missing")
    program = tmp_path_factory.mktemp("arm") / "run_cases"
    sources = (
        Path(__file__).with_name("run_cases.cpp"),
        *(native.FOLDER / f"{name}.cpp" for name in ("kernels_portable", "sample")),
    )
    flags = ("-static", "-O1", "-std=c++20", "-ffp-contract=off", "-w", f"-I{native.FOLDER}")
    subprocess.run((COMPILER, *flags, *sources, "-o", program), check=True, timeout=BUILDS_SECONDS)
    return Arm((emulator, "-cpu", "cortex-a57", str(program)))


@pytest.fixture(scope="module")
def here() -> CpuKernels:
    found = open_kernels(2)
    if found is None:
        pytest.skip("the native kernels are not built, or not for this CPU")
    return found


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def blocks(name: str, rows: int, cols: int) -> tuple[Stored, Tensor]:
    """Any codes, and scales of float16."""
    if name in ("F32", "F16", "BF16"):
        kind = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[name]
        weight = noise(rows, cols, seed=1).to(kind)
        return stored(weight), weight.float()
    kind = getattr(gguf.GGMLQuantizationType, name)
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    draw = np.random.default_rng(1)
    raw = draw.integers(0, 256, (rows, cols // elements, size), np.uint8)
    places = {"Q6_K": (208,), "Q4_0": (0,), "Q5_0": (0,), "Q8_0": (0,)}.get(name, (0, 2))
    for place in places:
        scale = draw.standard_normal((rows, cols // elements, 1)).astype(np.float16)
        raw[:, :, place : place + 2] = scale.view(np.uint8)
    raw = raw.reshape(rows, -1)
    return Stored(name, rows, cols, raw.reshape(-1)), torch.from_numpy(
        gguf.quants.dequantize(raw, kind)
    )


@pytest.mark.parametrize("name", GGML_TYPES)
@pytest.mark.usefixtures("here")
def test_products_are_the_same_to_the_bit(name: str, arm: Arm) -> None:
    """Some rows more than a group, for few rows of x and for many, and with int8 activations."""
    rows, cols = 40, 512
    part, weight = blocks(name, rows, cols)
    bias = noise(rows, seed=2)
    for m, int8 in ((1, 0), (3, 0), (13, 0), (5, 1)):
        kernels = open_kernels(2, int8_activations=bool(int8))
        assert kernels is not None
        linear = kernels.linear([part], bias)
        x, residual = noise(m, cols, seed=3), noise(m, rows, seed=4)
        numbers = (LINEAR, GGML_TYPES[name], rows, cols, m, int8)
        out = arm.run(numbers, part.data, x.numpy(), bias.numpy(), residual.numpy())
        weights, y = np.split(np.frombuffer(out, np.float32), [rows * cols])
        assert np.array_equal(weights.reshape(rows, cols), weight.numpy())
        assert linear is not None
        assert np.array_equal(y.reshape(m, rows), linear(x, residual).numpy())
        if not int8:
            exact = (x.double() @ weight.double().T + bias + residual).numpy()
            assert np.abs(y.reshape(m, rows) - exact).max() <= 3e-5 * weight.abs().max()


def test_a_value_that_is_no_number_stays_in_its_row(arm: Arm) -> None:
    part, _ = blocks("Q8_0", 16, 64)
    x = noise(4, 64, seed=5)
    x[2, 5] = torch.nan
    nothing = np.empty(0, np.float32)
    for int8 in (0, 1):
        out = arm.run((LINEAR, 8, 16, 64, 4, int8), part.data, x.numpy(), nothing, nothing)
        y = np.frombuffer(out, np.float32)[16 * 64 :].reshape(4, 16)
        assert np.isfinite(y).all(-1).tolist() == [True, True, False, True]


def test_norms_are_the_same_to_the_bit(arm: Arm, here: CpuKernels) -> None:
    x, weight = noise(5, 71, seed=6), noise(71, seed=7)
    y = np.frombuffer(arm.run((NORM, 5, 71), x.numpy(), weight.numpy()), np.float32)
    assert np.array_equal(y.reshape(5, 71), here.norm(x, weight, 1e-5).numpy())


@pytest.mark.parametrize("case", CONFIGS.values(), ids=CONFIGS)
@torch.inference_mode()
def test_layers_are_the_same_to_the_bit(
    case: tuple[LayerShape, int, bool, int], arm: Arm, here: CpuKernels
) -> None:
    """Two texts from their start, of which one does not end on a chunk of 64 positions."""
    shape, size, half, window = case
    hidden, inner, lengths, width = 64, 80, (75, 16), 16
    attended, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sizes = ((attended + 2 * keys, hidden), (hidden, attended), (2 * inner, hidden))
    weights = [0.2 * noise(*s, seed=i) for i, s in enumerate((*sizes, (hidden, inner)))]
    norms = [1 + 0.2 * noise(n, seed=n) for n in (hidden, hidden, shape.head_dim, shape.head_dim)]
    ints = torch.int32
    tables = torch.arange(2, dtype=ints)[:, None] + 2 * torch.arange(width, dtype=ints)
    positions = torch.cat([torch.arange(n, dtype=ints) for n in lengths])
    texts = torch.repeat_interleave(torch.arange(2), torch.tensor(lengths))
    slots = tables[texts, positions // size] * size + positions % size
    ends = torch.tensor([0, lengths[0], sum(lengths)], dtype=ints)
    step = StepTensors(
        token_ids=positions,
        positions=positions,
        slots=slots,
        query_starts=ends,
        context_lens=torch.tensor(lengths, dtype=ints),
        block_tables=tables,
        sample_rows=ends[1:] - 1,
        max_rows=max(lengths),
        max_context=max(lengths),
    )
    angles = noise(128, shape.head_dim, seed=8)
    rope = RopeTable(angles.cos(), angles.sin())
    cache = torch.zeros(1, 2 * width, 2, shape.kv_heads, size, shape.head_dim)
    cache = cache.to(torch.bfloat16 if half else torch.float32)
    x = noise(sum(lengths), hidden, seed=9)
    numbers = (
        *(LAYERS, hidden, shape.heads, shape.kv_heads, shape.head_dim, inner, size, half, 0),
        *(1, window, sum(lengths), len(lengths), width),
    )
    tensors = (
        *(*norms, *weights, positions, slots, ends, step.context_lens, tables),
        *(rope.cos, rope.sin, cache.view(torch.uint8), x),
    )
    out = arm.run(numbers, *(tensor.numpy() for tensor in tensors))
    linears = [linear for w in weights if (linear := here.linear([stored(w)])) is not None]
    layers = NativeLayers(
        shape, [linears], [(norms[0], norms[1], norms[2], norms[3])], [True], [window or None]
    )
    found = layers.run(x.clone(), rope, cache, step, range(1)).numpy().tobytes()
    assert np.isfinite(np.frombuffer(found, np.float32)).all()
    assert out == found + cache.view(torch.uint8).numpy().tobytes()


def test_draws_are_the_same(arm: Arm, here: CpuKernels) -> None:
    logits = 4 * noise(8, 1003, seed=10)
    draws = np.zeros(64, DRAWS)
    draws["seed"], draws["position"] = np.arange(64), 3
    draws["row"], draws["adjusted"] = np.arange(64) % 8, -1
    draws["temperature"] = np.tile([0, 0.3, 1, 2.5], 16)
    draws["top_k"] = np.repeat([0, 3, 30, 0], 16)
    draws["top_p"], draws["log_min_p"] = np.repeat([1, 0.4], 32), -np.inf
    out = arm.run((SAMPLE, len(draws), logits.shape[1]), draws, logits.numpy())
    NativeDraws(here)(logits, None, draws, Stream())
    found = np.frombuffer(out, DRAWS)
    assert np.array_equal(found["state"], draws["state"])
    assert np.array_equal(found["token"], draws["token"])
    assert (draws["state"] == DrawState.DRAWN).sum() > 48
