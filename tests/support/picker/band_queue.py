"""A band's queue as flow control keeps it, around any fairness policy."""

from collections import deque
from itertools import count

from picker.framework.flow import BandFairness, QueuedRequest, Rank
from picker.types import Api, InferenceRequest, ParsedBody, Usage

BODY = ParsedBody(Api.RAW, "m")


class Queue:
    def __init__(self, fairness: BandFairness) -> None:
        self.fairness = fairness
        self.flows: dict[str, deque[QueuedRequest]] = {}
        self.under_way: list[QueuedRequest] = []
        self.sequences = count(1)
        self.now = 0.0

    @property
    def waiting(self) -> list[QueuedRequest]:
        return [items[0] for items in self.flows.values() if items]

    def push(self, flow: str, tokens: int = 1) -> QueuedRequest:
        request = InferenceRequest("r", {}, BODY, "m", "m", fairness_id=flow)
        item = QueuedRequest(request, next(self.sequences), self.now, tokens=tokens)
        items = self.flows.setdefault(flow, deque())
        items.append(item)
        if len(items) == 1:
            self._report_head(flow)
        return item

    def push_all(self, flows: str, tokens: int = 1) -> None:
        for flow in flows:
            self.push(flow, tokens)

    def cancel(self, flow: str) -> None:
        if self.flows.get(flow):
            self.flows[flow].popleft()
            self._report_head(flow)

    def dispatch(self) -> QueuedRequest | None:
        flow = self.fairness.select(self.now)
        assert flow == self.fairness.select(self.now + 1.0)
        assert (flow is None) == (not self.waiting)
        if flow is None:
            return None
        item = self.flows[flow].popleft()
        self.under_way.append(item)
        self.fairness.dispatched(item, self.now)
        self._report_head(flow)
        return item

    def complete(self, item: QueuedRequest, usage: Usage | None = None) -> None:
        self.under_way.remove(item)
        self.fairness.completed(item, usage, self.now)

    def forget(self, flow: str) -> None:
        if not self.flows.get(flow):
            self.fairness.forget(flow)

    def drain(self) -> str:
        order: list[str] = []
        while (item := self.dispatch()) is not None:
            order.append(item.flow)
        return "".join(order)

    def _report_head(self, flow: str) -> None:
        items = self.flows[flow]
        head = items[0] if items else None
        rank: Rank = () if head is None else (head.enqueued_at_seconds,)
        self.fairness.head_changed(flow, head, rank)
