"""Saturation detectors with timed calls, because flow control calls them outside of decisions."""

from collections.abc import Callable, Sequence

from picker.decisions.steps import BoundPlugin
from picker.framework.attributes import Attributes
from picker.framework.flow import DEFAULT_SETTLE_SECONDS, JudgesStaleness, SettlesLate
from picker.framework.interfaces import SaturationDetector
from picker.types import Candidate


class MeasuredDetector:
    def __init__(self, bound: BoundPlugin[SaturationDetector], clock: Callable[[], float]) -> None:
        self.bound = bound
        self._clock = clock

    def saturation(
        self, candidates: Sequence[Candidate], attributes: Attributes, now_seconds: float
    ) -> float:
        bound = self.bound
        seen = attributes if bound.scope is None else bound.scoped(attributes)
        return bound.measured(self._clock, bound.plugin.saturation, candidates, seen, now_seconds)

    @property
    def settle_seconds(self) -> float:
        plugin = self.bound.plugin
        return plugin.settle_seconds if isinstance(plugin, SettlesLate) else DEFAULT_SETTLE_SECONDS


class MeasuredStalenessDetector(MeasuredDetector):
    def stale(self, candidates: Sequence[Candidate], now_seconds: float) -> int:
        plugin = self.bound.plugin
        return plugin.stale(candidates, now_seconds) if isinstance(plugin, JudgesStaleness) else 0


def measured(
    bound: BoundPlugin[SaturationDetector], clock: Callable[[], float]
) -> SaturationDetector:
    """Wrap a detector; by the wrapper's type flow control sees if it counts stale inputs."""
    judges = isinstance(bound.plugin, JudgesStaleness)
    return (MeasuredStalenessDetector if judges else MeasuredDetector)(bound, clock)
