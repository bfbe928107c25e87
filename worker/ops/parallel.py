"""Products whose weight is spread over the ranks of tensor parallelism (Shoeybi et al.,
arXiv:1909.08053), each a process with one shard of it. Collectives use torch.distributed's default
group; all ranks call the same products in the same order with the same inputs.

A product spread by its outputs alone (queries, keys, values; gate and up) is an ordinary one.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, distributed

from worker.ops.linear import Linear


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a model that a process has: number `rank` of `size` equal parts."""

    rank: int = 0
    size: int = 1


WHOLE = Shard()


class RowParallelLinear:
    """A product spread by its inputs: x [T, in / size] → the whole [T, out] on every rank, by one
    all-reduce. `inner` has the rank's columns of the weight, and the bias on one rank only.
    """

    def __init__(self, inner: Linear) -> None:
        self._inner = inner

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        add: Callable[[Tensor, Tensor], None] | None = None,
    ) -> Tensor:
        """Compute the product; `add` adds the rank's part of another sum to its own, in place."""
        y = self._inner(x)
        if add is not None:
            add(x, y)
        distributed.all_reduce(y)
        # After the all-reduce, which would add the residual of every rank.
        return y if residual is None else y.add_(residual)

    def rows(self, indices: Tensor) -> Tensor:
        return self._inner.rows(indices)


class VocabParallelLinear:
    """A product spread by its outputs whose results every rank needs: x [T, in] → [T, num_outputs]
    by one all-gather. `inner` has the same number of rows on every rank; rows beyond `num_outputs`,
    on the last ranks, are padding.
    """

    def __init__(self, inner: Linear, num_outputs: int, shard: Shard) -> None:
        self._inner = inner
        self._num_outputs = num_outputs
        self._size = shard.size

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        own = self._inner(x)
        parts = [torch.empty_like(own) for _ in range(self._size)]
        distributed.all_gather(parts, own)
        y = torch.cat(parts, dim=1)[:, : self._num_outputs].contiguous()
        return y if residual is None else y.add_(residual)

    def rows(self, indices: Tensor) -> Tensor:
        return self._inner.rows(indices)
