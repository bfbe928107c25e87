"""The Triton kernels as a backend of the model."""

from dataclasses import dataclass

import torch
from torch import Tensor

from worker.ops.backends import AddTo, Around, Attention, AttentionShape, HeadNorms, composed
from worker.ops.experts import Experts, mix_experts
from worker.ops.linear import DenseLinear, Linear
from worker.ops.rope import RopeTable
from worker.ops.step import StepTensors
from worker.ops.triton import attention, dense, draws, fused
from worker.ops.triton import experts as grouped

# The multiprocessors assumed for the interpreter.
_INTERPRETED_SMS = 4


class TritonBackend:
    """Implements `Backend` on a GPU, and on a CPU in Triton's interpreter."""

    name = "triton"
    draw = staticmethod(draws.draw)
    mask = staticmethod(draws.mask_rows)
    gated = staticmethod(fused.gated_mul)

    def __init__(self, device: torch.device) -> None:
        self._num_sms = _INTERPRETED_SMS
        if device.type == "cuda":
            self._num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        self._arrivals = torch.zeros(dense.PROGRAMS, dtype=torch.int32, device=device)

    def plan(self, step: StepTensors, shape: AttentionShape, rope: RopeTable) -> Attention:
        """Allocate memory for partial results; its size depends on the step's shape alone."""
        planned = attention.plan(step, shape, self._num_sms)
        return _TritonAttention(planned, rope)

    def product(self, linear: Linear, x: Tensor, around: Around, add: AddTo) -> Tensor:
        """Launch one kernel for few rows of a small dense weight without adapters."""
        is_few = add is None and 0 < x.shape[0] <= dense.MAX_ROWS
        if is_few and isinstance(linear, DenseLinear) and linear.weight.numel() <= dense.MAX_SIZE:
            return dense.multiply(x, linear.weight, linear.bias, around, self._arrivals)
        return composed(self, linear, x, around, add)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(x)
        fused.rms_norm(x, weight, eps, out)
        return out

    def mix_experts(self, x: Tensor, experts: Experts) -> Tensor:
        """Run grouped products; without stacks, run torch's loop over experts."""
        if experts.stacks is None:
            return mix_experts(x, experts, self.gated)
        return grouped.mix_experts(x, experts, experts.stacks, self.gated)


@dataclass(frozen=True, slots=True)
class _TritonAttention:
    planned: attention.AttentionPlan
    rope: RopeTable

    def write(
        self,
        qkv: Tensor,
        cache: Tensor,
        norms: HeadNorms | None,
        rotates: bool,
        scales: Tensor | None = None,
    ) -> None:
        rope = self.rope if rotates else None
        fused.rotate_and_write(qkv, cache, self.planned.step, rope, norms, scales)

    def run(
        self,
        queries: Tensor,
        cache: Tensor,
        window: int | None = None,
        scales: Tensor | None = None,
    ) -> Tensor:
        rows, heads, dim = queries.shape
        out = queries.new_empty(rows, heads * dim)
        attention.run(queries, cache, self.planned, out, window, scales)
        return out
