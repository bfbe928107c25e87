"""LoRA adapters of a model runner: read by a thread, held in slots, and planned for each step."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from worker.models.adapters import read_adapter
from worker.models.config import ModelConfig
from worker.ops.lora import AdapterStore, Owners, PlanRows
from worker.ops.parallel import WHOLE, Shard
from worker.ops.step import StepAdapters
from worker.types import Adapter, ScheduledSequence


def owners_of(sequences: Sequence[ScheduledSequence]) -> Owners | None:
    """Return the adapter slot of each sequence (-1: none); None if no sequence has one."""
    slots = [s.adapter_slot for s in sequences]
    if slots.count(None) == len(slots):
        return None
    return np.array([-1 if slot is None else slot for slot in slots], np.int32)


@dataclass(frozen=True, slots=True, weakref_slot=True)
class ReadAdapter:
    """An adapter in the host's memory, as this process puts it into a slot."""

    number: int
    prepared: Any


class DeviceAdapters:
    """Owns the thread that reads adapters, for this shard of a model of this shape, and the slots
    in `store`.
    """

    def __init__(
        self, config: ModelConfig, max_rank: int, store: AdapterStore, shard: Shard = WHOLE
    ) -> None:
        self._how = config, max_rank, shard
        self._store = store
        self._reader = ThreadPoolExecutor(1, "adapters")

    def read(self, adapter: Adapter) -> Future[Any]:
        """Start reading an adapter; see `Executor.read_adapter`."""

        def read() -> ReadAdapter:
            layers = read_adapter(adapter.path, *self._how)
            return ReadAdapter(adapter.number, self._store.prepared(layers))

        return self._reader.submit(read)

    def put(self, adapters: Sequence[tuple[int, Any]]) -> None:
        for slot, read in adapters:
            self._store.put(slot, None if read is None else read.prepared)

    @property
    def plan_rows(self) -> PlanRows | None:
        return self._store.plan_rows

    def plan(self, sequences: Sequence[ScheduledSequence]) -> StepAdapters | None:
        """Plan a step's adapters; None if no sequence has one."""
        owners = owners_of(sequences)
        if owners is None:
            return None
        return self._store.plan(np.repeat(owners, [s.num_tokens for s in sequences]))

    def shutdown(self) -> None:
        self._reader.shutdown(wait=False, cancel_futures=True)
