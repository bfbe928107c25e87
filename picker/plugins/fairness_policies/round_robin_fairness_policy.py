"""round-robin-fairness-policy: one request of each flow in turn.

A round goes through the flows that wait by their ids; after the last one it begins again with the
first. A flow that comes back while a round is under way has its turn in it unless its place is
past. One that was never seen before starts with the next round, so that no flow can be kept from
its turn by ids that are made up as the round goes on.

A selection takes amortised O(log n) of the flows that wait; a flow waits for two turns of each
other flow at most.
"""

from __future__ import annotations

from picker.framework.flow import QueuedRequest, Rank
from picker.framework.flow_heap import FlowHeap
from picker.framework.registry import Parameters, PluginType, plain
from picker.types import Usage


class RoundRobinBand:
    """Whose turn it is in one band.

    Owns, of each flow that it knows, the round in which it came or last had its turn.
    """

    def __init__(self) -> None:
        self._turns: FlowHeap[tuple[int, str]] = FlowHeap()
        self._rounds: dict[str, int] = {}
        self._round = 0
        self._last = ""

    def head_changed(self, flow: str, head: QueuedRequest | None, rank: Rank) -> None:
        """Give the flow a turn if it has none."""
        if head is None:
            self._turns.remove(flow)
        elif flow not in self._turns:
            before = self._rounds.setdefault(flow, self._round)
            is_in_time = before < self._round and flow > self._last
            self._turns.put(flow, (self._round + (0 if is_in_time else 1), flow))

    def select(self, now_seconds: float) -> str | None:
        """The flow whose turn it is."""
        return self._turns.first()

    def dispatched(self, item: QueuedRequest, now_seconds: float) -> None:
        """Its flow had its turn."""
        flow = item.flow
        turn = self._turns.key(flow)
        if turn is not None:
            self._round = max(self._round, turn[0])
            self._turns.put(flow, (self._round + 1, flow))
        self._rounds[flow], self._last = self._round, flow

    def completed(self, item: QueuedRequest, usage: Usage | None, now_seconds: float) -> None:
        """Nothing follows from it."""

    def weight(self, flow: str) -> float:
        """Equal shares of a full queue."""
        return 1.0

    def forget(self, flow: str) -> None:
        """Do not know the flow any more."""
        if flow not in self._turns:
            self._rounds.pop(flow, None)


class RoundRobinFairnessPolicy:
    """Turns by request. Stateless."""

    def for_band(self, priority: int) -> RoundRobinBand:
        """A band in which no flow had a turn."""
        return RoundRobinBand()


PLUGIN = PluginType("round-robin-fairness-policy", Parameters, plain(RoundRobinFairnessPolicy))
