"""Shapes whose sums were measured to be equal, bit for bit, beside any other rows on some CPUs."""

import torch

from worker.ops.linear import fast_dtype

_HAS_AVX512 = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
_ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 1e-2}  # of the largest value


def is_measured(dtype: torch.dtype = torch.float32) -> bool:
    """AMX sums bfloat16 in another order for another number of rows."""
    if not _HAS_AVX512 or fast_dtype(torch.device("cpu")) is not torch.bfloat16:
        return False
    return dtype is torch.float32 or not torch.cpu._is_amx_tile_supported()


def assert_alike(actual: torch.Tensor, expected: torch.Tensor) -> None:
    allowed = 0.0
    if not is_measured(expected.dtype):
        allowed = _ROUNDING[expected.dtype] * float(expected.abs().max())
    torch.testing.assert_close(actual, expected, rtol=0, atol=allowed)
