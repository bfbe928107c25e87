"""Saturation detectors that measure themselves: flow control asks them outside of any decision."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from picker.decisions.steps import BoundPlugin
from picker.framework.attributes import Attributes
from picker.framework.flow import DEFAULT_SETTLE_SECONDS, JudgesStaleness, SettlesLate
from picker.framework.interfaces import SaturationDetector
from picker.types import Candidate


class MeasuredDetector:
    """A saturation detector whose calls are timed."""

    def __init__(self, bound: BoundPlugin[SaturationDetector], clock: Callable[[], float]) -> None:
        self.bound = bound
        self._clock = clock

    def saturation(
        self, candidates: Sequence[Candidate], attributes: Attributes, now_seconds: float
    ) -> float:
        """As the plugin says."""
        bound = self.bound
        seen = attributes if bound.scope is None else bound.scoped(attributes)
        return bound.measured(self._clock, bound.plugin.saturation, candidates, seen, now_seconds)

    @property
    def settle_seconds(self) -> float:
        """As the plugin says, where it does."""
        plugin = self.bound.plugin
        return plugin.settle_seconds if isinstance(plugin, SettlesLate) else DEFAULT_SETTLE_SECONDS


class MeasuredStalenessDetector(MeasuredDetector):
    """One that also knows how much of what it says rests on old metrics."""

    def stale(self, candidates: Sequence[Candidate], now_seconds: float) -> int:
        """How many candidates the plugin judges without fresh metrics."""
        plugin = self.bound.plugin
        return plugin.stale(candidates, now_seconds) if isinstance(plugin, JudgesStaleness) else 0


def measured(
    bound: BoundPlugin[SaturationDetector], clock: Callable[[], float]
) -> SaturationDetector:
    """The detector; flow control tells by its kind whether it knows of old metrics."""
    judges = isinstance(bound.plugin, JudgesStaleness)
    return (MeasuredStalenessDetector if judges else MeasuredDetector)(bound, clock)
