"""Triton's compiler takes every launch of the kernels, for GPUs that are not there: the interpreter
accepts more. Fake tensors have shapes and no values, so that to wait for a value is an error.
"""

from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.depth import some
from tests.support.model.block_weights import random_blocks
from worker.models.config import ModelConfig
from worker.ops.linear import DenseLinear
from worker.ops.lora import Product
from worker.ops.rope import RopeTable
from worker.ops.step import StepTensors

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

AMPERE, HOPPER = 80, 90
TYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
}


class Compiler:
    """Replaces a kernel and compiles what is launched, down to the GPU's machine code."""

    def __init__(self, kernel: Any, capability: int, compiled: list[str]) -> None:
        self._kernel = kernel
        self._capability = capability
        self._compiled = compiled

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        assert all(type(extent) is int and extent > 0 for extent in grid)
        return self._launch

    def _launch(self, *args: Any, **named: Any) -> None:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        source = ASTSource(self._kernel, *specialized(self._kernel, args, named))
        binary = triton.compile(source, target=GPUTarget("cuda", self._capability, 32))
        assert binary.asm["cubin"]
        self._compiled.append(self._kernel.__name__)


def specialized(
    kernel: Any, args: tuple[Any, ...], named: dict[str, Any]
) -> tuple[dict[str, str], dict[tuple[int], Any], dict[tuple[int], Any]]:
    """Return what a launch compiles its kernel for: types, constants, and multiples of 16."""
    signature, constants, attributes = {}, {}, {}
    values = dict(zip(kernel.arg_names, args, strict=False)) | named
    for index, parameter in enumerate(kernel.params):
        value = values.get(parameter.name, parameter.default)
        is_number = type(value) is int and not parameter.do_not_specialize
        # A launch takes 1 for a constant, and knows which numbers 16 divides.
        if parameter.is_constexpr or value is None or (is_number and value == 1):
            signature[parameter.name], constants[(index,)] = "constexpr", value
            continue
        signature[parameter.name] = type_name(value)
        is_aligned = isinstance(value, Tensor) and value.storage_offset() % 16 == 0
        if parameter.do_not_specialize_on_alignment:
            is_aligned = False
        if is_aligned or (is_number and value % 16 == 0):
            attributes[(index,)] = [["tt.divisibility", 16]]
    return signature, constants, attributes


class Recorder:
    def __init__(self, kernel: Any, kinds: set[str]) -> None:
        self._kernel, self._kinds = kernel, kinds

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self._launch

    def _launch(self, *args: Any, **named: Any) -> None:
        self._kinds.add(f"{self._kernel.__name__} {specialized(self._kernel, args, named)}")


def type_name(value: Any) -> str:
    if isinstance(value, Tensor):
        return "*" + TYPES[value.dtype]
    return "i32" if type(value) is int else "fp32"


@pytest.fixture
def fake_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    with FakeTensorMode():
        yield


def compiling(
    module: ModuleType, capability: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[str], set[str]]:
    compiled: list[str] = []
    kernels = {name for name in vars(module) if name.endswith("_kernel")}
    for name in kernels:
        monkeypatch.setattr(module, name, Compiler(getattr(module, name), capability, compiled))
    return compiled, kernels


def ints(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def make_step(size: int, rows: int, width: int, max_context: int) -> StepTensors:
    each = ints(rows)
    tensors = (each, each, each, ints(size + 1), ints(size), ints(size, width), each)
    return StepTensors(*tensors, rows // size, max_context)


@pytest.mark.parametrize(
    ("capability", "dtype", "cache_dtype", "sharing", "head_dim", "window"),
    some(
        [
            (HOPPER, torch.bfloat16, torch.float8_e4m3fn, 8, 128, None),
            (HOPPER, torch.bfloat16, torch.bfloat16, 4, 128, None),
            (AMPERE, torch.float16, torch.float16, 3, 80, 4096),
            (AMPERE, torch.float32, torch.float32, 1, 64, None),
        ]
    ),
)
@pytest.mark.usefixtures("fake_tensors")
def test_attention(
    capability: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    sharing: int,
    head_dim: int,
    window: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from worker.ops.triton import attention
    from worker.ops.triton.attention import AttentionShape

    compiled, kernels = compiling(attention, capability, monkeypatch)
    shape = AttentionShape(2 * sharing, 2, head_dim, 16, 0.1, softcap=30.0 if window else 0.0)
    for size, max_rows, max_context in ((8, 1, 1000), (8, 64, 1000), (1, 1, 99)):
        with torch.device("cuda"):
            cache = torch.empty(100, 2, 2, 16, head_dim, dtype=cache_dtype)
            scales = torch.ones(2, 2) if cache_dtype.itemsize == 1 else None
            step = make_step(size, size * max_rows, 64, max_context)
            queries = torch.empty(size * max_rows, 2 * sharing, head_dim, dtype=dtype)
            out = torch.empty(size * max_rows, 2 * sharing * head_dim, dtype=dtype)
        plan = attention.plan(step, shape, 132)
        attention.run(queries, cache, plan, out, window, scales)
    assert set(compiled) == kernels


@pytest.mark.usefixtures("fake_tensors")
def test_no_step_waits_for_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    from worker.ops.backends import HeadNorms
    from worker.ops.sample import DRAW_WORDS, DrawColumns
    from worker.ops.triton import attention, draws, fused

    kinds: set[str] = set()
    for module in (attention, draws, fused):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, Recorder(getattr(module, name), kinds))
    shape = attention.AttentionShape(6, 2, 64, 16, 0.1)
    seen = []
    for size, max_rows, context in ((4, 40, 900), (1, 1, 9), (16, 1, 5000), (7, 16, 300)):
        rows = size * max_rows
        packed = ints(40_000)
        starts, lengths = packed[3 : 4 + size], packed[5 : 5 + size]
        width = -(-context // 16)
        tables = packed[size : size + size * width].view(size, width)
        each = packed[rows : 2 * rows]
        step = StepTensors(each, each, each, starts, lengths, tables, lengths, max_rows, context)
        qkv = torch.empty(rows, 10 * 64, dtype=torch.bfloat16)
        cache = torch.empty(100, 2, 2, 16, 64, dtype=torch.bfloat16)
        norms = HeadNorms(qkv[0], qkv[0], 1e-5)
        fused.rotate_and_write(qkv, cache, step, RopeTable(qkv, qkv), norms)
        queries = qkv[:, : 6 * 64].view(rows, 6, 64)
        out = torch.empty(rows, 6 * 64, dtype=torch.bfloat16)
        attention.run(queries, cache, attention.plan(step, shape, 132), out)
        fused.rms_norm(out, out[0], 1e-5, out)
        columns = DrawColumns.of(packed[: rows * DRAW_WORDS].view(rows, DRAW_WORDS))
        draws.draw(torch.empty(rows, 5000), columns)
        seen.append(set(kinds))
    assert seen[-1] == seen[0], sorted(seen[-1] - seen[0])


@pytest.mark.parametrize(
    ("capability", "dtype"), some([(HOPPER, torch.bfloat16), (AMPERE, torch.float32)])
)
@pytest.mark.usefixtures("fake_tensors")
def test_experts(capability: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sizes are Qwen3-30B-A3B's."""
    from worker.ops.experts import Experts
    from worker.ops.triton import experts

    compiled, kernels = compiling(experts, capability, monkeypatch)
    with torch.device("cuda"):
        x, gated = torch.empty(40, 2048, dtype=dtype), torch.empty(320, 768, dtype=dtype)
        router = DenseLinear(torch.empty(128, 2048, dtype=dtype))
        stacks = (
            torch.empty(128, 1536, 2048, dtype=dtype),
            torch.empty(128, 2048, 768, dtype=dtype),
        )
    mixture = Experts(router, (router,) * 128, (), 8, True)
    experts.mix_experts(x, mixture, stacks, lambda _: gated)
    assert set(compiled) == kernels


@pytest.mark.parametrize(
    ("capability", "dtype"),
    some([(HOPPER, torch.bfloat16), (AMPERE, torch.float16), (AMPERE, torch.float32)]),
)
@pytest.mark.usefixtures("fake_tensors")
def test_quantised_products(
    capability: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from worker.ops.quantized import Encoding, PackedWeight
    from worker.ops.triton import quantized

    compiled, kernels = compiling(quantized, capability, monkeypatch)
    for encoding, group in (
        (Encoding.UINT4, 32),
        (Encoding.UINT8, 128),
        (Encoding.FLOAT8, 128),
        (Encoding.FLOAT8, 4096),
    ):
        with torch.device("cuda"):
            rows = 2048 if encoding is Encoding.UINT4 else 4096
            codes = torch.empty(rows, 1024, dtype=torch.uint8)
            scales = torch.empty(4096 // group, 1024, dtype=torch.float16)
            zeros = None if encoding is Encoding.FLOAT8 else scales.to(torch.uint8)
            weight = PackedWeight(encoding, codes, scales, zeros, group, None)
            for count in (1, 300):
                quantized.multiply(torch.empty(count, 4096, dtype=dtype), weight)
    assert len(compiled) == 8
    assert set(compiled) == kernels


# Decoding an encoding and multiplying in a type are apart: each kind meets one type.
@pytest.mark.parametrize(
    ("kind", "capability", "dtype"),
    some(
        [
            ("Q5_K", HOPPER, torch.bfloat16),
            ("Q6_K", AMPERE, torch.float16),
            ("Q4_1", AMPERE, torch.float32),
            ("Q8_0", HOPPER, torch.bfloat16),
            ("Q5_0", AMPERE, torch.float16),
            ("Q4_0", AMPERE, torch.float32),
            ("Q4_K", HOPPER, torch.bfloat16),
            ("Q5_1", AMPERE, torch.float16),
        ]
    ),
)
def test_packed_products(
    kind: str,
    capability: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """Few outputs, so that there are splits, for rows of each tile, and pairs of eight experts."""
    from worker.ops import planes as layouts
    from worker.ops.triton import experts, planes

    packed = layouts.pack([random_blocks(kind, 8, 4096)], torch.device("cpu"))
    assert packed is not None
    request.getfixturevalue("fake_tensors")
    compiled, kernels = compiling(planes, capability, monkeypatch)

    def fake(plane: Tensor | None) -> Tensor | None:
        if plane is None:
            return None
        sizes = [{8: 1024}.get(size, size) for size in plane.shape]
        return torch.empty(sizes, dtype=plane.dtype)

    weight = packed[0]
    with torch.device("cuda"):
        weight = layouts.PlaneWeight(weight.layout, 4096, *map(fake, weight.planes))
        counts = some((16, 1, 100))
        for count in counts:
            x, y = torch.empty(count, 4096, dtype=dtype), torch.empty(count, 1024, dtype=dtype)
            planes.multiply(x, weight, y)
            pairs, size = torch.empty(8 * count, 128, dtype=dtype), planes.tile(dtype, count)
            tiles = experts.cut(torch.zeros(4 * count, 2, dtype=torch.int64), 8, size[0])
            planes.launch(x, weight, pairs, size, weight.spans, tiles, 2)
        planes.decode(weight, torch.empty(3, 4096, dtype=dtype), ints(3))
        if len(counts) > 1:
            planes.decode(weight, torch.empty(64, 4096, dtype=dtype), first=64)
    assert compiled.count("_product_kernel") == 2 * len(counts)
    assert set(compiled) == kernels


@pytest.mark.parametrize(
    ("capability", "dtype"),
    some([(HOPPER, torch.bfloat16), (AMPERE, torch.float16), (AMPERE, torch.float32)]),
)
@pytest.mark.usefixtures("fake_tensors")
def test_products_of_few_rows(
    capability: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sizes are SmolLM2-135M's; a kernel takes any number of rows."""
    from worker.ops.backends import Around
    from worker.ops.triton import dense

    compiled, kernels = compiling(dense, capability, monkeypatch)
    with torch.device("cuda"):
        weights = [torch.empty(*n, dtype=dtype) for n in ((3072, 576), (576, 1536), (9000, 576))]
        arrivals = ints(dense.PROGRAMS)
        norm, bias = torch.empty(576), torch.empty(3072, dtype=dtype)
        narrow = [torch.empty(count, 576, dtype=dtype) for count in (1, 2, 16)]
        x, wide = narrow[-1], torch.empty(16, 1536, dtype=dtype)
    for run in some((0, 1, 2)):
        if run == 0:
            dense.multiply(x, weights[0], bias, Around(norm, 1e-5, "silu"), arrivals)
        elif run == 1:
            dense.multiply(wide, weights[1], None, Around(residual=x), arrivals)
        else:
            dense.multiply(x, weights[2], None, Around(norm, 1e-5), arrivals)
    assert set(compiled) == kernels
    kinds: set[str] = set()
    monkeypatch.setattr(dense, "_product_kernel", Recorder(dense._product_kernel._kernel, kinds))
    for x in narrow:
        dense.multiply(x, weights[0], bias, Around(norm, 1e-5, "silu"), arrivals)
    assert len(kinds) == 1


class Launches(TorchDispatchMode):
    """Records launches: of torch's operations that are no views, and of kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if not func.is_view and "empty" not in func.__name__ and func.namespace != "prim":
            self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))

    def watch(self, module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            launch = partial(self._launch, name)
            monkeypatch.setattr(module, name, defaultdict(lambda launch=launch: launch))

    def _launch(self, name: str, *_args: Any, **_named: Any) -> None:
        self.names.append(name)


@pytest.mark.usefixtures("fake_tensors")
def test_a_layer_of_few_rows_is_seven_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    from worker.models import llama
    from worker.ops.triton import attention, dense, fused
    from worker.ops.triton.backend import TritonBackend

    config = ModelConfig("", 99, 576, 1536, 1, 9, 3, 64, 999, rms_norm_eps=1e-5, rope_theta=1e4)
    shapes = ((960, 576), (576, 576), (3072, 576), (576, 1536))
    qkv, output, gate_up, down = (DenseLinear(torch.empty(shape)) for shape in shapes)
    norm = torch.empty(576)
    layer = llama.LayerWeights(norm, qkv, output, norm, gate_up, down)
    rope, cache = RopeTable(norm, norm), torch.empty(1, 99, 2, 3, 16, 64)
    backend, launches = TritonBackend(torch.device("cpu")), Launches()
    for module in (attention, dense, fused):
        launches.watch(module, monkeypatch)
    attended = ["_rotate_and_write_kernel", "_split_kernel", "_merge_kernel"]
    few = ["_product_kernel", *attended, *["_product_kernel"] * 3]
    for rows in (1, 16, 17):
        launches.names.clear()
        step, x = make_step(rows, rows, 32, 500), torch.empty(rows, 576)
        with launches:
            list(llama.layer_states(x, [layer], config, rope, cache, step, backend))
        assert (launches.names == few) == (rows <= 16)
    assert len(launches.names) == 12


@pytest.mark.parametrize(
    ("capability", "dtype"), some([(HOPPER, torch.bfloat16), (AMPERE, torch.float32)])
)
@pytest.mark.usefixtures("fake_tensors")
def test_adapters(capability: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    from worker.ops.triton import lora

    compiled, kernels = compiling(lora, capability, monkeypatch)
    with torch.device("cuda"):
        x, y = torch.empty(40, 4096, dtype=dtype), torch.empty(40, 6144, dtype=dtype)
        layers = [{"qkv": Product((4096, 1024, 1024), 4096)}]
        store = lora.StackedAdapters(4, 16, layers, dtype, torch.device("cuda"))
        store.plan_rows(ints(40)).add(0, "qkv", x, y)
    assert set(compiled) == kernels


@pytest.mark.parametrize("capability", some([HOPPER, AMPERE]))
@pytest.mark.usefixtures("fake_tensors")
def test_fused_kernels(capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from worker.ops.triton import fused
    from worker.ops.triton.fused import HeadNorms

    compiled, kernels = compiling(fused, capability, monkeypatch)
    x, out, weight = (torch.empty(*n, dtype=torch.bfloat16) for n in ((4, 576), (4, 576), (576,)))
    fused.rms_norm(x, weight, 1e-5, out)
    fused.gated_mul(torch.empty(4, 3072, dtype=torch.bfloat16), "silu")
    fused.gated_mul(torch.empty(4, 3072, dtype=torch.bfloat16), "gelu")
    step, qkv = make_step(4, 4, 8, 99), torch.empty(4, 15 * 64, dtype=torch.bfloat16)
    table, norms = RopeTable(torch.empty(99, 64), torch.empty(99, 64)), HeadNorms(x, x, 1e-5)
    cache = torch.empty(9, 2, 3, 16, 64, dtype=torch.bfloat16)
    fused.rotate_and_write(qkv, cache, step, None)
    fused.rotate_and_write(qkv, cache, step, table, norms)
    if capability >= HOPPER:
        small = cache.to(torch.float8_e4m3fn)
        fused.rotate_and_write(qkv, small, step, table, None, torch.ones(2, 3))
    assert set(compiled) == kernels


@pytest.mark.usefixtures("fake_tensors")
@pytest.mark.parametrize("capability", some([HOPPER, AMPERE]))
def test_draws(capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from worker.ops.sample import DRAW_WORDS, DrawColumns
    from worker.ops.triton import draws

    compiled, kernels = compiling(draws, capability, monkeypatch)
    columns = DrawColumns.of(ints(4, DRAW_WORDS))
    draws.draw(torch.empty(4, 152_064), columns)
    draws.mask_rows(torch.empty(4, 152_064), ints(3), ints(3, 4752))
    assert set(compiled) == kernels
