"""Shapes whose sums are equal, bit for bit, whatever is computed beside them: a property of some
CPUs' instructions that was measured, not a promise of any library. Elsewhere only rounding may
differ.
"""

import torch

from worker.ops.linear import fast_dtype

_HAS_AVX512 = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
_ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 1e-2}  # of the largest value


def is_measured(dtype: torch.dtype = torch.float32) -> bool:
    """AVX512_BF16, and nothing keeps torch or oneDNN from using it. AMX sums bfloat16 in another
    order for another number of rows.
    """
    if not _HAS_AVX512 or fast_dtype(torch.device("cpu")) is not torch.bfloat16:
        return False
    return dtype is torch.float32 or not torch.cpu._is_amx_tile_supported()


def assert_alike(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal to the bit where that was measured, else up to rounding."""
    allowed = 0.0
    if not is_measured(expected.dtype):
        allowed = _ROUNDING[expected.dtype] * float(expected.abs().max())
    torch.testing.assert_close(actual, expected, rtol=0, atol=allowed)
