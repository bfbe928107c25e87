"""The parts of a layer: products with norms and activation, rotation, attention over the KV cache.

A backend plans the work that all layers share once per step. Native layers need no backend.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from torch.nn import functional

from worker.ops.experts import Experts, mix_experts
from worker.ops.linear import Linear
from worker.ops.paged_attention import paged_attention, write_kv
from worker.ops.parallel import RowParallelLinear
from worker.ops.rope import RopeTable, apply_rope_
from worker.ops.sample import DeviceDraw, DeviceMask, draw_columns, mask_rows
from worker.ops.step import StepTensors


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The heads of a layer, and the tokens in a block of its cache. Scores are multiplied by
    `scale`; a `softcap` c > 0 then turns them into c · tanh(score / c).
    """

    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    scale: float
    softcap: float = 0.0


@dataclass(frozen=True, slots=True)
class Around:
    """The parts of a layer around a product: the weight [in] of the `norm` of its inputs; then the
    activation, for a `gate` of "silu" or "gelu", or the `residual` [T, out] that is added.
    """

    norm: Tensor | None = None
    eps: float = 0.0
    gate: str | None = None
    residual: Tensor | None = None


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Weights [head_dim] of the norms of each query and each key, applied before their rotation."""

    query: Tensor
    key: Tensor
    eps: float


# Adds the adapters' part of a product, if any: from the input x, to the output y, in place.
AddTo = Callable[[Tensor, Tensor], None] | None


class Attention(Protocol):
    """The planned attention of one step; the layers' caches are [num_blocks, 2, kv_heads,
    block_size, head_dim]. A cache of eight bits stores keys and values divided by `scales` [2,
    kv_heads] float32, if the layer has scales.
    """

    def write(
        self,
        qkv: Tensor,
        cache: Tensor,
        norms: HeadNorms | None,
        rotates: bool,
        scales: Tensor | None = None,
    ) -> None:
        """Normalise (with `norms`) and rotate (if the layer `rotates`) the queries and keys of qkv
        [T, (heads + 2 · kv_heads) · head_dim], the queries in place, and write the keys and the
        values into the cache. The keys in qkv are undefined afterwards.
        """

    def run(
        self,
        queries: Tensor,
        cache: Tensor,
        window: int | None = None,
        scales: Tensor | None = None,
    ) -> Tensor:
        """Compute attention of queries [T, heads, head_dim] over a cache that holds the step's own
        keys and values; return [T, heads · head_dim]. A row sees at most `window` positions, its
        own included.
        """


class Backend(Protocol):
    """Implements the parts of a layer for one kind of device."""

    @property
    def name(self) -> str:
        """The backend's name in `--attention-backend`."""

    def plan(self, step: StepTensors, shape: AttentionShape, rope: RopeTable) -> Attention:
        """Plan attention of a step; `rope` is the table of all positions. Waits for no device."""

    def product(self, linear: Linear, x: Tensor, around: Around, add: AddTo) -> Tensor:
        """Compute y [T, out] of norm(x) [T, in], and let `add` add to it. Return y, y + residual,
        or what `gated` makes of y.
        """

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Compute x [T, H] / rms(x) · weight [H], in x's dtype."""

    def gated(self, gate_up: Tensor, gate: str = "silu") -> Tensor:
        """Compute silu(gate) · up [T, I] of gate_up [T, 2 · I] (Shazeer, arXiv:2002.05202); for a
        `gate` of "gelu", with the GELU by tanh.
        """

    def mix_experts(self, x: Tensor, experts: Experts) -> Tensor:
        """Compute the weighted sum of the chosen experts' results for rows x [T, H]."""

    @property
    def mask(self) -> DeviceMask:
        """Masks the tokens that grammars forbid."""

    @property
    def draw(self) -> DeviceDraw:
        """Draws tokens on devices other than the CPU."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute x [T, H] / rms(x) · weight [H], row by row, in float32; return x's dtype."""
    if weight.dtype is not x.dtype:
        return functional.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)
    return functional.rms_norm(x, weight.shape, weight, eps)


def composed(backend: Backend, linear: Linear, x: Tensor, around: Around, add: AddTo) -> Tensor:
    """Compute `Backend.product` one part after the other."""
    if around.norm is not None:
        x = backend.rms_norm(x, around.norm, around.eps)
    if isinstance(linear, RowParallelLinear):  # each rank has a part of the adapters' sum, too
        return linear(x, around.residual, add)
    y = linear(x, residual=around.residual)
    if add is not None:
        add(x, y)
    return y if around.gate is None else backend.gated(y, around.gate)


class TorchBackend:
    """The reference, for any device; implements `Backend`."""

    name = "torch"
    draw = staticmethod(draw_columns)
    mask = staticmethod(mask_rows)
    product = composed

    def plan(self, step: StepTensors, shape: AttentionShape, rope: RopeTable) -> Attention:
        return _TorchAttention(step, shape, rope.rows(step.positions))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    def gated(self, gate_up: Tensor, gate: str = "silu") -> Tensor:
        x, up = gate_up.chunk(2, dim=-1)
        active = functional.silu(x) if gate == "silu" else functional.gelu(x, approximate="tanh")
        return active.mul_(up)

    def mix_experts(self, x: Tensor, experts: Experts) -> Tensor:
        """Run one expert after the other, and wait for the choice of experts."""
        return mix_experts(x, experts, self.gated)


TORCH = TorchBackend()


@dataclass(frozen=True, slots=True)
class _TorchAttention:
    step: StepTensors
    shape: AttentionShape
    rope: RopeTable

    def write(
        self,
        qkv: Tensor,
        cache: Tensor,
        norms: HeadNorms | None,
        rotates: bool,
        scales: Tensor | None = None,
    ) -> None:
        heads, kv_heads = self.shape.heads, self.shape.kv_heads
        keys_end = (heads + kv_heads) * self.shape.head_dim
        rotated = qkv[:, :keys_end].view(-1, heads + kv_heads, self.shape.head_dim)
        if norms is not None:
            for part, weight in (
                (rotated[:, :heads], norms.query),
                (rotated[:, heads:], norms.key),
            ):
                part.copy_(rms_norm(part, weight, norms.eps))
        if rotates:
            apply_rope_(rotated, self.rope)
        write_kv(cache, qkv[:, heads * self.shape.head_dim :], self.step.slots, scales)

    def run(
        self,
        queries: Tensor,
        cache: Tensor,
        window: int | None = None,
        scales: Tensor | None = None,
    ) -> Tensor:
        shape = self.shape
        return paged_attention(
            queries, cache, self.step, window, shape.scale, shape.softcap, scales
        )
