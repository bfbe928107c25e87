"""global-strict-fairness-policy: no fairness among flows, the best request of all goes first.

    select = the flow whose head has the least (rank, number of arrival)

A selection takes amortised O(log n) of the flows that wait.
"""

from __future__ import annotations

from picker.framework.flow import QueuedRequest, Rank
from picker.framework.flow_heap import FlowHeap
from picker.framework.registry import Parameters, PluginType, plain
from picker.types import Usage


class GlobalStrictBand:
    """The heads of one band, best first. Owns their order."""

    def __init__(self) -> None:
        self._waiting: FlowHeap[tuple[Rank, int]] = FlowHeap()

    def head_changed(self, flow: str, head: QueuedRequest | None, rank: Rank) -> None:
        """Put the flow where its head belongs."""
        if head is None:
            self._waiting.remove(flow)
        else:
            self._waiting.put(flow, (rank, head.sequence))

    def select(self, now_seconds: float) -> str | None:
        """The flow of the best head."""
        return self._waiting.first()

    def dispatched(self, item: QueuedRequest, now_seconds: float) -> None:
        """Nothing follows from it."""

    def completed(self, item: QueuedRequest, usage: Usage | None, now_seconds: float) -> None:
        """Nothing follows from it."""

    def forget(self, flow: str) -> None:
        """Only what waits is known."""


class GlobalStrictFairnessPolicy:
    """One order for all. Stateless."""

    def for_band(self, priority: int) -> GlobalStrictBand:
        """A band without anything."""
        return GlobalStrictBand()


PLUGIN = PluginType("global-strict-fairness-policy", Parameters, plain(GlobalStrictFairnessPolicy))
