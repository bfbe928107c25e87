"""Fairness policies without weights or accounts.

global-strict-fairness-policy: the best request of all flows goes first.

    select = the flow whose head has the least (rank, number of arrival)

A selection takes amortised O(log n) for n waiting flows.

round-robin-fairness-policy: one request of each flow in turn.

A round visits the waiting flows in the order of their ids; then the next round begins with the
first. A flow that comes back during a round has its turn in it unless its place has passed. A new
flow starts with the next round, so that ids which clients invent during a round deprive no flow of
its turn.

A selection takes amortised O(log n) for n waiting flows; a flow waits for at most two turns of each
other flow.
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
        """Do nothing, because dispatches do not change the order of the heads."""

    def completed(self, item: QueuedRequest, usage: Usage | None, now_seconds: float) -> None:
        """Do nothing, because ends of requests do not change the order of the heads."""

    def forget(self, flow: str) -> None:
        """Do nothing, because only waiting flows are known."""


class GlobalStrictFairnessPolicy:
    def for_band(self, priority: int) -> GlobalStrictBand:
        return GlobalStrictBand()


class RoundRobinBand:
    def __init__(self) -> None:
        self._turns: FlowHeap[tuple[int, str]] = FlowHeap()
        self._rounds: dict[str, int] = {}
        self._round = 0
        self._last = ""

    def head_changed(self, flow: str, head: QueuedRequest | None, rank: Rank) -> None:
        if head is None:
            self._turns.remove(flow)
        elif flow not in self._turns:
            # A new flow counts as having had its turn in this round.
            before = self._rounds.setdefault(flow, self._round)
            is_in_time = before < self._round and flow > self._last
            self._turns.put(flow, (self._round + (0 if is_in_time else 1), flow))

    def select(self, now_seconds: float) -> str | None:
        return self._turns.first()

    def dispatched(self, item: QueuedRequest, now_seconds: float) -> None:
        flow = item.flow
        turn = self._turns.key(flow)
        if turn is not None:
            self._round = max(self._round, turn[0])
            self._turns.put(flow, (self._round + 1, flow))
        self._rounds[flow], self._last = self._round, flow

    def completed(self, item: QueuedRequest, usage: Usage | None, now_seconds: float) -> None:
        """Do nothing, because the end of a request changes no turn."""

    def weight(self, flow: str) -> float:
        return 1.0

    def forget(self, flow: str) -> None:
        if flow not in self._turns:
            self._rounds.pop(flow, None)


class RoundRobinFairnessPolicy:
    def for_band(self, priority: int) -> RoundRobinBand:
        return RoundRobinBand()


PLUGINS = (
    PluginType("global-strict-fairness-policy", GlobalStrictFairnessPolicy),
    PluginType("round-robin-fairness-policy", RoundRobinFairnessPolicy),
)
