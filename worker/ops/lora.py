"""The LoRA part of the products of a step: y += (x · downᵀ) · upᵀ, for each row with the adapter of
its sequence (Hu et al., arXiv:2106.09685).

Rows are grouped by adapter, as in SGMV (Chen et al., arXiv:2310.18547), for ordinary products of
the device: a row's result depends neither on its group nor on its batch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from worker.ops.cpu.native import AdapterLayers, BlockLinear, CpuKernels
from worker.ops.linear import Linear, make_linear
from worker.ops.step import StepAdapters, sent

# The adapter slot of each row of a step; -1: none.
Owners = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Product:
    """A product of a layer: the number of its `inputs`, and the `sizes` of the parts it fuses."""

    sizes: tuple[int, ...]
    inputs: int


@dataclass(frozen=True, slots=True)
class Factors:
    """The factors of one adapter for a product: for each part, down [r, inputs] and up [size, r],
    scaled; None for a part without an adapter.
    """

    product: Product
    parts: tuple[tuple[Tensor, Tensor] | None, ...]

    def joined(self) -> tuple[Tensor, Tensor]:
        """Join down and up of all parts: the up matrices along a diagonal, zeros around them."""
        present = [part for part in self.parts if part is not None]
        down = torch.cat([down for down, _ in present])
        up = down.new_zeros(sum(self.product.sizes), len(down))
        row = column = 0
        for size, part in zip(self.product.sizes, self.parts, strict=True):
            if part is not None:
                rank = part[1].shape[1]
                up[row : row + size, column : column + rank] = part[1]
                column += rank
            row += size
        return down, up


AdapterFactors = Sequence[Mapping[str, Factors]]  # of each layer, by product
PlanRows = Callable[[Tensor], StepAdapters]


class AdapterStore(Protocol):
    def prepared(self, layers: AdapterFactors) -> Any:
        """Prepare an adapter for `put`, on the host. May run concurrently with everything else."""

    def put(self, slot: int, prepared: Any) -> None:
        """Replace the adapter of a slot; None empties it. Called between steps."""

    def plan(self, owners: Owners) -> StepAdapters:
        """Plan a step whose rows belong to these owners, at least one of which has an adapter."""

    @property
    def plan_rows(self) -> PlanRows | None:
        """Plans a step by its owners on the device, int32 [T], for what is in the slots when it
        runs: a graph can hold all of it. None if the host has to know the owners.
        """


@dataclass(frozen=True, slots=True)
class _Pair:
    down: Linear
    up: Linear


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A loaded adapter; `native` are its layers for native kernels, if its products are native."""

    layers: Sequence[Mapping[str, _Pair]]
    native: AdapterLayers | None


class LinearAdapters:
    """Adapters as pairs of the device's ordinary products; implements `AdapterStore`."""

    plan_rows = None

    def __init__(
        self,
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
        kernels: CpuKernels | None = None,
    ) -> None:
        self._slots: list[_Loaded | None] = [None] * num_slots
        self._dtype = dtype
        self._device = device
        self._kernels = kernels

    def prepared(self, layers: AdapterFactors) -> Any:
        return self._loaded(layers) if self._device.type == "cpu" else layers

    def put(self, slot: int, prepared: Any) -> None:
        if prepared is not None and self._device.type != "cpu":
            prepared = self._loaded(prepared)
        self._slots[slot] = prepared

    def plan(self, owners: Owners) -> StepAdapters:
        groups = []
        for slot in np.unique(owners[owners >= 0]).tolist():
            loaded = self._slots[slot]
            if loaded is not None:
                rows = np.flatnonzero(owners == slot).astype(np.int32)
                groups.append((loaded, sent(rows, self._device)))
        return _LinearStep(tuple(groups))

    def _loaded(self, layers: AdapterFactors) -> _Loaded:
        pairs = [{name: self._pair(factors) for name, factors in layer.items()} for layer in layers]
        native = None
        if self._kernels is not None:
            native = AdapterLayers([{n: _native(p) for n, p in layer.items()} for layer in pairs])
        return _Loaded(pairs, native)

    def _pair(self, factors: Factors) -> _Pair:
        down, up = (side.to(self._device, self._dtype) for side in factors.joined())
        return _Pair(
            make_linear(down, kernels=self._kernels), make_linear(up, kernels=self._kernels)
        )


def _native(pair: _Pair) -> tuple[BlockLinear, BlockLinear]:
    assert isinstance(pair.down, BlockLinear)  # noqa: S101 (the kernels take all of float32)
    assert isinstance(pair.up, BlockLinear)  # noqa: S101
    return pair.down, pair.up


@dataclass(frozen=True, slots=True)
class _LinearStep:
    """Adapters of a step, each with its rows [n] int32; implements `StepAdapters`."""

    groups: tuple[tuple[_Loaded, Tensor], ...]

    @property
    def native(self) -> Sequence[tuple[AdapterLayers, Tensor]]:
        return [(loaded.native, rows) for loaded, rows in self.groups if loaded.native is not None]

    def add(self, layer: int, product: str, x: Tensor, y: Tensor) -> None:
        for loaded, rows in self.groups:
            pair = loaded.layers[layer].get(product)
            if pair is not None:
                y.index_add_(0, rows, pair.up(pair.down(x.index_select(0, rows))))
