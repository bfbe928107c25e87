"""The product with a constant weight: right, and blind to the rest of the batch."""

import logging
import os
import subprocess
import sys

import pytest
import torch

from tests.support.model.measured_sums import assert_alike
from worker.ops.linear import DenseLinear, make_linear, make_rounded_linear, supported_dtype

CPU = torch.device("cpu")
FLOATS = [torch.float32, torch.bfloat16]
# oneDNN as it is on a CPU without AVX-512.
AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
ON_AVX2 = """
import torch
from worker.ops.linear import DenseLinear, RoundedLinear, can_pack, fast_dtype, make_linear
from worker.ops.linear import make_rounded_linear
half, full, x = torch.ones(8, 8).bfloat16(), torch.ones(8, 8), torch.ones(3, 8)
print(can_pack(torch.float32), can_pack(torch.bfloat16), fast_dtype(torch.device("cpu")))
print(type(make_linear(half)).__name__, type(make_rounded_linear(full)).__name__)
print(make_linear(half)(x.bfloat16()).unique().tolist(), make_rounded_linear(full)(x).sum().item())
"""


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float16])
@pytest.mark.parametrize("rows", [1, 2, 33])
@pytest.mark.parametrize("inputs", [48, 1536])
@pytest.mark.parametrize("extras", [False, True])
def test_computes_the_product(dtype: torch.dtype, rows: int, inputs: int, extras: bool) -> None:
    weight, x = draw(40, inputs, dtype=dtype), draw(rows, inputs, dtype=dtype, seed=1)
    bias = draw(40, dtype=dtype, seed=2) if extras else None
    residual = draw(rows, 40, dtype=dtype, seed=3) if extras else None
    expected = x.double() @ weight.double().T
    if bias is not None and residual is not None:
        expected = expected + bias.double() + residual.double()
    with torch.inference_mode():
        result = make_linear(weight, bias)(x, residual)
    tolerance = 1e-4 if dtype == torch.float32 else 1.0 if dtype == torch.bfloat16 else 0.2
    torch.testing.assert_close(result.double(), expected, rtol=1e-2, atol=tolerance)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float16])
@pytest.mark.parametrize("rows", [1, 33])
def test_a_rounded_product_is_near_and_of_the_same_dtype(dtype: torch.dtype, rows: int) -> None:
    weight, x = draw(40, 576, dtype=dtype), draw(rows, 576, dtype=dtype, seed=1)
    residual = draw(rows, 40, dtype=dtype, seed=3)
    expected = x.double() @ weight.double().T + residual.double()
    with torch.inference_mode():
        linear = make_rounded_linear(weight)
        result = linear(x, residual.clone())
        some = linear.rows(torch.tensor([3, 0]))
    assert result.dtype == some.dtype == dtype
    torch.testing.assert_close(result.double(), expected, rtol=1e-2, atol=1.0)
    torch.testing.assert_close(some, weight[[3, 0]], rtol=1e-2, atol=1e-2)


def test_other_dtypes_are_computed_by_torch() -> None:
    """oneDNN has no packed products of this dtype."""
    assert isinstance(make_linear(draw(4, 4, dtype=torch.float16)), DenseLinear)


def test_a_cpu_without_bfloat16_products_does_without() -> None:
    """Weights in bfloat16 still work there, and nothing is rounded to it for speed."""
    environment = {**os.environ, **AVX2}
    command = [sys.executable, "-c", ON_AVX2]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "True False torch.float32",
        "DenseLinear PackedLinear",
        "[8.0] 192.0",
    ]


@pytest.mark.parametrize("packs", [True, False])
def test_bfloat16_becomes_float32_where_it_is_slow(
    packs: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        found = supported_dtype(torch.bfloat16, CPU, packs)
        assert supported_dtype(torch.float16, CPU, packs) is torch.float16
        assert supported_dtype(torch.bfloat16, torch.device("cuda"), packs) is torch.bfloat16
    assert found is (torch.bfloat16 if packs else torch.float32)
    line = "this CPU has no fast bfloat16 products: --dtype bfloat16 runs in float32"
    assert caplog.messages == ([] if packs else [line])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("inputs", [576, 1536])
def test_a_row_is_the_same_in_any_batch(dtype: torch.dtype, inputs: int) -> None:
    x, residual = draw(300, inputs, dtype=dtype), draw(300, 576, dtype=dtype, seed=1)
    with torch.inference_mode():
        linear = make_linear(draw(576, inputs, dtype=dtype, seed=2))
        together = linear(x, residual)
        for start, count in [
            (0, 1),
            (7, 1),
            (0, 2),
            (5, 3),
            (0, 16),
            (31, 17),
            (100, 64),
            (2, 255),
            *((n, n) for n in range(2, 40)),
        ]:
            part = slice(start, start + count)
            assert_alike(linear(x[part], residual[part]), together[part])
