"""The inputs of a model and its attention for one step."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class StepAdapters(Protocol):
    @property
    def native(self) -> Any:
        """Return the adapters whose products are native, in the form of native layers."""

    def add(self, layer: int, product: str, x: Tensor, y: Tensor) -> None:
        """Add the adapters' part to y [T, out], in place; `product` ("qkv", "output", "gate_up" or
        "down") of a layer computed y from x [T, in].
        """


@dataclass(frozen=True, slots=True)
class StepTensors:
    """One step of S sequences and T rows, one row per token, as contiguous int32 tensors.

    `token_ids`, `positions` and `slots` [T] belong to the rows; the keys and values of a row go to
    slot block · block_size + offset. Rows `query_starts[s]` to `query_starts[s + 1]` - 1 ([S + 1])
    belong to sequence s, which has keys and values at `context_lens[s]` ([S]) positions after this
    step, in the blocks `block_tables[s]` ([S, W]; entries after its last block are undefined).
    `sample_rows` [R] are the rows whose hidden states are returned. No row sees positions below
    `first_position`.

    No sequence has more than `max_rows` rows, or a longer context than `max_context`; both are
    known on the host. `adapters` is None if no row has one.
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
    """Copy values of the host to a device without waiting: a GPU reads them through pinned memory,
    which torch retains until they have arrived.
    """
    there = torch.from_numpy(values)
    if device.type == "cuda":
        there = there.pin_memory()
    return there.to(device, non_blocking=True)


def fetched(values: Tensor) -> Callable[[], npt.NDArray[np.int32]]:
    """Begin to copy int32 values of a device to the host, after all launched work and concurrently
    with later launches; the returned function waits for this copy alone, in any thread.
    """
    if values.device.type != "cuda":
        return values.numpy
    side = torch.cuda.Stream(values.device)  # type: ignore[no-untyped-call]
    here = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    side.wait_stream(torch.cuda.current_stream(values.device))
    with torch.cuda.stream(side):
        here.copy_(values, non_blocking=True)
        done = side.record_event()
    # Otherwise the allocator may reuse the memory while the other stream reads it.
    values.record_stream(side)

    def wait() -> npt.NDArray[np.int32]:
        done.synchronize()
        return here.numpy()

    return wait
