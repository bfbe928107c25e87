"""Products whose weight is spread over the ranks of tensor parallelism (Shoeybi et al.,
arXiv:1909.08053), each a process with one shard of it. Collectives use torch.distributed's default
group; all ranks call the same products in the same order with the same inputs.

A product spread by its outputs alone (queries, keys, values; gate and up) is an ordinary one. Of a
mixture every rank has the router and a part of each expert's inner features: the ranks have equal
work whichever experts a batch takes, and one sum over the ranks completes a whole layer.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, distributed
from torch.nn import functional

from worker.ops.linear import Linear


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a model that a process has: number `rank` of `size` equal parts."""

    rank: int = 0
    size: int = 1


WHOLE = Shard()


def summed_over_ranks(y: Tensor) -> Tensor:
    """Add up every rank's y in place, by one all-reduce; return it."""
    distributed.all_reduce(y)
    return y


class ColumnParallelLinear:
    """A product spread by its outputs: x [T, in] → the rank's own outputs. `owned` [own outputs]
    int64 are their numbers in the whole weight; one that several ranks have is -1 on all but one.
    """

    def __init__(self, inner: Linear, owned: Tensor) -> None:
        self.inner = inner
        self._owned = owned

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return self.inner(x, residual)

    def rows(self, indices: Tensor) -> Tensor:
        """Return rows of the whole weight, by one all-reduce, as the classes below do."""
        found = indices[:, None] == self._owned
        rows = self.inner.rows(found.int().argmax(1))
        return summed_over_ranks(torch.where(found.any(1, keepdim=True), rows, 0))


class RowParallelLinear:
    """A product spread by its inputs: x [T, in / size] → the whole [T, out] on every rank, by one
    all-reduce unless `is_mixed`: then the caller adds up what it makes of the ranks' parts. `inner`
    has the rank's columns of the weight, and the bias on one rank only.
    """

    def __init__(self, inner: Linear, shard: Shard, is_mixed: bool = False) -> None:
        self.inner = inner
        self._shard = shard
        self._is_mixed = is_mixed

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        add: Callable[[Tensor, Tensor], None] | None = None,
    ) -> Tensor:
        """Compute the product; `add` adds the rank's part of another sum to its own, in place."""
        y = self.inner(x)
        if add is not None:
            add(x, y)
        if not self._is_mixed:
            summed_over_ranks(y)
        # After the all-reduce, which would add the residual of every rank.
        return y if residual is None else y.add_(residual)

    def rows(self, indices: Tensor) -> Tensor:
        own = self.inner.rows(indices)
        rows = own.new_zeros(len(own), own.shape[1] * self._shard.size)
        rows[:, self._shard.rank * own.shape[1] :][:, : own.shape[1]] = own
        return summed_over_ranks(rows)


class VocabParallelLinear:
    """A product spread by its outputs whose results every rank needs: x [T, in] → [T, num_outputs]
    by one all-gather of `num_rows` of each rank. Results beyond `num_outputs`, on the last ranks,
    are padding, and `inner` may lack them.
    """

    def __init__(self, inner: Linear, num_rows: int, num_outputs: int, shard: Shard) -> None:
        self.inner = inner
        self._num_rows = num_rows
        self._num_outputs = num_outputs
        self._shard = shard

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        own = self.inner(x)
        own = functional.pad(own, (0, self._num_rows - own.shape[1]))
        parts = [torch.empty_like(own) for _ in range(self._shard.size)]
        distributed.all_gather(parts, own)
        y = torch.cat(parts, dim=1)[:, : self._num_outputs].contiguous()
        return y if residual is None else y.add_(residual)

    def rows(self, indices: Tensor) -> Tensor:
        places = indices - self._shard.rank * self._num_rows
        is_own = (places >= 0) & (places < self._num_rows)
        rows = self.inner.rows(torch.where(is_own, places, 0))
        return summed_over_ranks(torch.where(is_own[:, None], rows, 0))
