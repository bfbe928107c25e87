"""Root-mean-square normalisation of rows."""

from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute x [T, H] / rms(x) · weight [H], row by row, in float32; return x's dtype."""
    if weight.dtype is not x.dtype:
        return functional.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)
    return functional.rms_norm(x, weight.shape, weight, eps)
