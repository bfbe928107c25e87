"""What a model and its attention read of one step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class StepAdapters(Protocol):
    """What LoRA adapters add in one step; see `ops.lora`."""

    @property
    def native(self) -> Any:
        """The same as native layers read it, where products are native."""
        ...

    def add(self, layer: int, product: str, x: Tensor, y: Tensor) -> None:
        """Add to y [T, out], which `product` ("qkv", "output", "gate_up" or "down") of a layer made
        of x [T, in], in place.
        """
        ...


@dataclass(frozen=True, slots=True)
class StepTensors:
    """One step of S sequences and T rows, one row a token, as int32 tensors without gaps.

    `token_ids`, `positions` and `slots` [T] are of the rows; the keys and values of a row belong in
    slot block · block_size + offset. Rows `query_starts[s]` to `query_starts[s + 1]` - 1 ([S + 1])
    are those of sequence s, which has keys and values at `context_lens[s]` ([S]) positions after
    this step, in the blocks `block_tables[s]` ([S, W]; what is behind its last one means nothing).
    `sample_rows` [R] are the rows whose hidden states are wanted. No row sees positions below
    `first_position`.

    No sequence has more than `max_rows` rows, or a longer context than `max_context`; both are
    known on the host. `adapters` is None where no row has one.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    query_starts: Tensor
    context_lens: Tensor
    block_tables: Tensor
    sample_rows: Tensor
    max_rows: int
    max_context: int
    first_position: int = 0
    adapters: StepAdapters | None = None


def sent(values: npt.NDArray[np.int32], device: torch.device) -> Tensor:
    """Values of the host on a device. Nobody waits: a GPU gets them through pinned memory, which
    torch keeps until they have arrived.
    """
    there = torch.from_numpy(values)
    if device.type == "cuda":
        there = there.pin_memory()
    return there.to(device, non_blocking=True)


def fetched(values: Tensor) -> Callable[[], npt.NDArray[np.int32]]:
    """Begin to bring int32 values of a device to the host, after all that was launched and beside
    what is launched from now on; what is returned waits for them alone, in any thread.
    """
    if values.device.type != "cuda":
        return values.numpy
    side = torch.cuda.Stream(values.device)  # type: ignore[no-untyped-call]
    here = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    side.wait_stream(torch.cuda.current_stream(values.device))
    with torch.cuda.stream(side):
        here.copy_(values, non_blocking=True)
        done = side.record_event()
    values.record_stream(side)

    def wait() -> npt.NDArray[np.int32]:
        done.synchronize()
        return here.numpy()

    return wait
