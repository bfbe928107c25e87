"""Weights moved from the device to the host's memory and back, in place.

The tensors stay the objects they are, so nothing that holds one (a tied head, a fused layer) has to
learn about it; only the memory behind them goes and comes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor


class OffloadedWeights:
    """The weights of a model, held on the host while the device's memory is given back."""

    def __init__(self, model: object) -> None:
        self._held: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []
        for storage in _storages(model):
            held = torch.empty(storage.nbytes(), dtype=torch.uint8).untyped_storage()
            held.copy_(storage)
            storage.resize_(0)
            self._held.append((storage, held))

    @property
    def num_bytes(self) -> int:
        """Bytes that the device has back."""
        return sum(held.nbytes() for _, held in self._held)

    def restore(self) -> None:
        """Give every tensor its memory and its values back. Call once."""
        for storage, held in self._held:
            storage.resize_(held.nbytes())
            storage.copy_(held)
        self._held.clear()


def _storages(model: object) -> list[torch.UntypedStorage]:
    """The memory behind every dense tensor of the model, each once however many share it."""
    dense = (tensor for tensor in _tensors(model) if tensor.layout is torch.strided)
    storages = (tensor.untyped_storage() for tensor in dense)
    return list({storage.data_ptr(): storage for storage in storages}.values())


def _tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor in dataclasses, sequences and plain objects, to any depth."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name))
    elif type(value).__module__.startswith("worker."):
        for item in vars(value).values():
            yield from _tensors(item)
