"""Products of few rows with norm, activation and residual against torch; see `test_kernels`."""

from typing import Any

import pytest
import torch
from torch import Tensor

from worker.ops.backends import TORCH, Around, composed
from worker.ops.linear import DenseLinear
from worker.ops.triton import dense
from worker.ops.triton.backend import TritonBackend

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ARRIVALS = torch.zeros(dense.PROGRAMS, dtype=torch.int32, device=DEVICE)
# bfloat16 is cut, not rounded, in the interpreter; float16 is rounded.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return values.to(DEVICE, dtype)


def operands(rows: int, width: int, inner: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return x and a weight, each beside other numbers."""
    x = draw(rows, inner + 8, seed=1, dtype=dtype)[:, 8:]
    return x, (draw(width, inner + 3, seed=2) / inner**0.5).to(dtype)[:, 3:]


def splits(width: int, inner: int, dtype: torch.dtype) -> int:
    """Return the number of programs that share the inputs of a product."""
    launched = []

    class Recorded:
        def __getitem__(self, grid: tuple[int, int]) -> Any:
            launched.append(grid)
            return lambda *_, **__: None

    kernel, dense._product_kernel = dense._product_kernel, Recorded()
    try:
        dense.multiply(*operands(1, width, inner, dtype), None, Around(), ARRIVALS)
    finally:
        dense._product_kernel = kernel
    return launched[0][1]


# What is around a product: norm and its type, bias, activation or residual.
AROUND: list[dict[str, Any]] = [
    {},
    {"bias": True, "residual": True},
    {"norm": torch.float32},
    {"norm": torch.float16, "bias": True, "gate": "silu"},
    {"norm": torch.float32, "gate": "gelu"},
    {"bias": True, "gate": "silu"},
    {"norm": torch.float32, "bias": True, "residual": True},
]
# Rows, outputs, inputs: alone, in whole tiles, with parts of tiles; one split and several.
SIZES = [(1, 2, 1), (16, 64, 32), (2, 70, 40), (3, 130, 576), (1, 66, 1030), (16, 98, 300)]
CASES = [
    (size, around, dtype)
    for i, size in enumerate(SIZES)
    for j, around in enumerate(AROUND)
    for k, dtype in enumerate(TOLERANCES)
    if (i + j + k) % 3 == 0
]


@pytest.mark.parametrize(("size", "around", "dtype"), CASES)
def test_the_torch_twin(
    size: tuple[int, int, int], around: dict[str, Any], dtype: torch.dtype
) -> None:
    rows, width, inner = size
    x, weight = operands(rows, width, inner, dtype)
    bias = draw(width, seed=3, dtype=dtype) if "bias" in around else None
    kind, norm = around.get("norm"), None
    if kind is not None:
        kind = dtype if kind is torch.float16 else kind  # that of the activations, or wider
        norm = 1 + draw(inner, seed=4, dtype=kind)
    residual = draw(rows, width + 5, seed=5, dtype=dtype)[:, 5:] if "residual" in around else None
    parts = Around(norm, 1e-5, around.get("gate"), residual)
    wanted = TORCH.product(DenseLinear(weight, bias), x, parts, None)
    for _ in range(2):  # the counters are left as they were
        found = dense.multiply(x, weight, bias, parts, ARRIVALS)
        assert found.shape == wanted.shape
        assert not ARRIVALS.any()
        allowed = TOLERANCES[dtype] * max(1.0, float(wanted.abs().max()))
        torch.testing.assert_close(found, wanted, rtol=0, atol=allowed)


@pytest.mark.parametrize("gate", [None, "silu"])
def test_numbers_are_rounded_where_separate_kernels_round_them(gate: str | None) -> None:
    """Differences of numbers with norms of one show their last bits, some of which norms of another
    order of sums round otherwise.
    """
    x, eye = draw(16, 64, seed=1, dtype=torch.float16), torch.eye(64, device=DEVICE)
    weight, bias = (eye - eye.roll(1, 1)).half(), draw(64, seed=3, dtype=torch.float16) / 64
    residual = None if gate else draw(16, 64, seed=5, dtype=torch.float16)
    around, backend = Around(1 + draw(64, seed=4), 1e-5, gate, residual), TritonBackend(DEVICE)
    own = (DenseLinear(weight, bias), x, around, None)
    differ = backend.product(*own) != composed(backend, *own)
    assert float(differ.float().mean()) < 0.01


def test_splits_follow_from_the_shape_of_a_weight() -> None:
    shapes = [(40, 100), (40, 300), (960, 576), (5000, 4096), (9000, 4096)]
    assert [splits(*shape, torch.float16) for shape in shapes] == [1, 3, 5, 1, 1]
    assert splits(1024, 4096, torch.float16) == 8
    assert splits(2048, 4096, torch.float16) == 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_row_alone_is_the_row_in_a_batch(dtype: torch.dtype) -> None:
    """To the bit, whatever the other rows are; in the interpreter only from the first row on, since
    BLAS sums the columns of a product in other orders.
    """
    width, inner = 66, 576
    assert splits(width, inner, dtype) > 1
    x, weight = operands(16, width, inner, dtype)
    around = Around(1 + draw(inner, seed=4), 1e-5, "silu")

    def run(x: Tensor) -> Tensor:
        return dense.multiply(x, weight, None, around, ARRIVALS)

    together = run(x)
    for count in (1, 2, 3, 15):
        assert torch.equal(run(x[:count]), together[:count])
    spoilt = x.clone()
    spoilt[1:] = torch.nan
    assert torch.equal(run(spoilt)[0], together[0])
    if DEVICE.type == "cuda":
        for row in range(1, 16):
            assert torch.equal(run(x[row : row + 1])[0], together[row])


@pytest.mark.parametrize(
    ("rows", "size", "is_adapted", "launches"),
    [(17, 1 << 25, False, 0), (16, 800, False, 0), (16, 1 << 25, True, 0), (16, 960, False, 1)],
)
def test_few_rows_of_small_weights_are_multiplied_at_once(
    rows: int, size: int, is_adapted: bool, launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = []
    kernel = dense._product_kernel

    class Counted:
        def __getitem__(self, grid: tuple[int, int]) -> Any:
            launched.append(grid)
            return kernel[grid]

    monkeypatch.setattr(dense, "_product_kernel", Counted())
    monkeypatch.setattr(dense, "MAX_SIZE", size)
    x, weight = operands(rows, 24, 40, torch.float32)
    around = Around(1 + draw(40, seed=4), 1e-5, "silu")

    def add(x: Tensor, y: Tensor) -> None:
        y += x.sum(1, keepdim=True)

    own = (DenseLinear(weight), x, around, add if is_adapted else None)
    wanted = TORCH.product(*own)
    torch.testing.assert_close(TritonBackend(DEVICE).product(*own), wanted, rtol=1e-5, atol=1e-5)
    assert len(launched) == launches
