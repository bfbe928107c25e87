"""global-strict-fairness-policy: no fairness among flows, the best request of all goes first.

    select = the flow whose head has the least (rank, number of arrival)

A selection takes amortised O(log n) of the waiting flows.
"""

from picker.framework.flow import QueuedRequest, Rank
from picker.framework.flow_heap import FlowHeap
from picker.framework.registry import PluginType
from picker.types import Usage


class GlobalStrictBand:
    def __init__(self) -> None:
        self._waiting: FlowHeap[tuple[Rank, int]] = FlowHeap()

    def head_changed(self, flow: str, head: QueuedRequest | None, rank: Rank) -> None:
        if head is None:
            self._waiting.remove(flow)
        else:
            self._waiting.put(flow, (rank, head.sequence))

    def select(self, now_seconds: float) -> str | None:
        return self._waiting.first()

    def dispatched(self, item: QueuedRequest, now_seconds: float) -> None:
        """Dispatches change no order among the heads."""

    def completed(self, item: QueuedRequest, usage: Usage | None, now_seconds: float) -> None:
        """Ends change no order among the heads."""

    def forget(self, flow: str) -> None:
        """Nothing to forget: only waiting flows are known."""


class GlobalStrictFairnessPolicy:
    def for_band(self, priority: int) -> GlobalStrictBand:
        return GlobalStrictBand()


PLUGIN = PluginType("global-strict-fairness-policy", GlobalStrictFairnessPolicy)
