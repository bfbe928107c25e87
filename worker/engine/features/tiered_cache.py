"""The tiers of the prefix cache, attached to the scheduler."""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from typing import Any

from worker.engine.cache.cache_events import CacheEvent
from worker.engine.cache.tiers import Tiers
from worker.engine.features.interface import BackgroundFeature, EngineState
from worker.engine.sequences.planning import StepInFlight
from worker.engine.sequences.sequence import Sequence
from worker.types import ModelOutput


class TieredCache(BackgroundFeature):
    """Puts `tiers` below the device's cache, where `SequenceKv` looks them up. `make` builds them
    from the digest that is the parent of first blocks and the recorder of cache events.
    """

    name = "tiers"

    def __init__(self, make: Callable[[bytes, Callable[[CacheEvent], None]], Tiers]) -> None:
        self._make = make
        self.tiers: Tiers

    def attach(self, state: EngineState) -> None:
        self._live = state.live
        self.tiers = state.kv.tiers = self._make(state.kv.root, state.kv.blocks.record)

    def waits(self, sequence: Sequence) -> bool:
        return sequence.is_awaiting_kv

    def before_step(self) -> None:
        self.tiers.look()

    def after_step(self, step: StepInFlight, result: ModelOutput, now: float) -> None:
        self.tiers.ended(step.step)

    def leave_model(self) -> None:
        self.tiers.leave_disk()

    @property
    def totals(self) -> tuple[int, ...]:
        return self.tiers.totals

    def announce(self) -> Seq[CacheEvent]:
        return self.tiers.announce()

    def stats(self) -> dict[str, Any]:
        return {"tiers": self.tiers.stats(), "pulls": self._live.pulls()}

    def check_integrity(self, in_flight: Iterable[StepInFlight]) -> None:
        self.tiers.check_integrity()

    def close(self) -> None:
        self.tiers.close()
