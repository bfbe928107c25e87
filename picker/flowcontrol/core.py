"""The decisions of flow control: which requests are dispatched, wait, are rejected or evicted.

Theory of operation. Everything here happens at once and at a time that is given; the shell
(`shell.controller`) delivers the events and waits. After each event that can make room, and while
requests wait, `look` dispatches as many as may go: from the highest band down, while the pool's
saturation is below a band's ceiling, the head of the flow that the fairness policy names. A band
with waiting requests that is held back holds back those below it too, whatever their ceilings are.
So does one whose last places in the pool are reserved for other flows (`KeepsHeadroom`).
The saturation is computed anew between two dispatches: the first counts as let in until it has left
for its endpoint, where the pool counts it from then on.

`is_open` is called before a request is parsed, and promises that the next one is dispatched at
once; the judgement behind it holds for that request, so the two cannot disagree.

An arriving request for which there is no room may displace one that waits (`capacity`).

A request may wait for its time to live, or while the pool is empty for another time, from when it
came or when that began; `next_due_seconds` is exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice

import msgspec

from picker.errors import DropReason, RefusedError
from picker.flowcontrol import outcomes
from picker.flowcontrol.band import Band
from picker.flowcontrol.capacity import Cap
from picker.flowcontrol.load_estimate import MAX_AGE_SECONDS, LoadEstimate, Pool
from picker.flowcontrol.outcomes import DrainRate, FlowOutcome
from picker.flowcontrol.queue import FlowQueue
from picker.flowcontrol.reclaim import Demand, Reclaim
from picker.flowcontrol.reporting import FlowReporter
from picker.flowcontrol.saturation import PoolLoad
from picker.flowcontrol.settings import FlowControlSettings
from picker.flowcontrol.tickets import Evict, FlowTicket, TicketOffice
from picker.flowcontrol.waiting import Deadlines, Waiting, queued_request
from picker.framework.flow import (
    DEFAULT_SETTLE_SECONDS,
    QueuedRequest,
    SettlesLate,
    UsageLimitPolicy,
)
from picker.types import InferenceRequest, Usage

EXACT = 1e-9  # places are counted; sums of parts are not quite what they come to


class Judgement(msgspec.Struct, frozen=True):
    """How full the pool is, at what saturation each band is held back, and below which part of
    that none is.
    """

    load: PoolLoad
    ceilings: Mapping[int, float]
    lowest_ceiling: float
    at_seconds: float
    free_part: float = 1.0

    @property
    def is_open(self) -> bool:
        """True if every request of every band may go."""
        return self._is_below(self.lowest_ceiling * self.free_part)

    def ceiling(self, priority: int) -> float:
        """At which the band `priority` is held back."""
        return self.ceilings.get(priority, self.lowest_ceiling)

    def lets_in(self, priority: int, headroom: float = 0.0) -> bool:
        """True if the band `priority` may go, with so much of its ceiling to spare. Nothing is
        dispatched to an empty pool.
        """
        part = 1.0 - headroom - EXACT if headroom else 1.0
        return self._is_below(self.ceiling(priority) * part)

    def _is_below(self, saturation: float) -> bool:
        return self.load.num_endpoints > 0 and self.load.effective < saturation


class Judge:
    """Owns what is known of the load, and the judgement on it.

    A judgement holds until anything changes or a request was judged by it: a policy is asked for
    its ceilings once for each request that is dispatched or held back.
    """

    def __init__(self, pool: Pool) -> None:
        self.load = LoadEstimate(pool)
        self._policy: UsageLimitPolicy | None = None
        self.judgement: Judgement | None = None  # the one that holds, if any does
        self.ceilings: Mapping[int, float] = {}  # as the policy said last

    def use(self, policy: UsageLimitPolicy) -> None:
        """Ask another policy from now on."""
        self._policy = policy
        self.judgement, self.ceilings = None, {}

    def changed(self) -> None:
        """Nothing that was said holds any more."""
        self.judgement = None

    def ask(self, queue: FlowQueue, now_seconds: float) -> Judgement:
        """The judgement that holds, or a new one; an open one keeps its promise."""
        judgement = self.judgement
        if judgement is not None and (
            judgement.is_open or now_seconds - judgement.at_seconds <= MAX_AGE_SECONDS
        ):
            return judgement
        return self.ask_anew(queue, now_seconds)

    def ask_anew(self, queue: FlowQueue, now_seconds: float) -> Judgement:
        """A new judgement, on the bands of `queue`."""
        load, priorities = self.load.at(now_seconds), queue.priorities
        if self._policy is not None:
            ceilings = self._policy.ceilings(load.effective, priorities)
            self.ceilings = dict(zip(priorities, ceilings, strict=True))
        lowest = min(self.ceilings.values(), default=1.0)
        reserved = max(band.headroom for band in queue)
        free_part = 1.0 - reserved - EXACT if reserved else 1.0
        self.judgement = Judgement(load, self.ceilings, lowest, now_seconds, free_part)
        return self.judgement


MOST_PER_LOOK = 8  # before others have their turn: the decisions that follow take 0.5 ms each
LOOK_AGAIN_SECONDS = 0.25  # detectors and policies may change with time alone


class FlowCore:
    """Owns the queue, the tickets, and what is known of the load. Times never go back."""

    def __init__(self, pool: Pool, reporter: FlowReporter, office: TicketOffice) -> None:
        self._reporter = reporter
        self._office = office
        self.settings: FlowControlSettings | None = None
        self.queue: FlowQueue | None = None
        self.judge = Judge(pool)
        self.rate = DrainRate()
        self.reclaim = Reclaim()
        self.is_shut = False
        self.has_more = False  # whether `look` stopped although others may go
        self.under_way: dict[int, FlowTicket] = {}  # let in and not over, by sequence number
        self._waiting: dict[int, Waiting] = {}
        self._deadlines = Deadlines()
        self._wanted: frozenset[int] = frozenset()
        self._reported_bands: tuple[int, ...] | None = None
        self._looked_at = 0.0
        self._sequence = 0

    @property
    def num_waiting(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    def next_due_seconds(self) -> float | None:
        """When `tick` or `look` has something to do."""
        due = [self.reclaim.next_due_seconds]
        if self._waiting:
            due += [self._deadlines.next_seconds, self._looked_at + LOOK_AGAIN_SECONDS]
        if self.queue is not None:
            due.append(self.queue.next_idle_seconds)
        return min((one for one in due if one is not None), default=None)

    def use(self, settings: FlowControlSettings | None, now_seconds: float) -> None:
        """Switch to other settings. None dispatches every arriving request at once, and those that
        wait, some in each `look`.

        Waiting requests keep their time to live.
        """
        self.settings = settings
        self._reported_bands = None
        if settings is None:
            self._turn_off()
            return
        for waiting in self._waiting.values():
            self._reporter.stopped_waiting(waiting.labels, waiting.item)
        self._reporter.use(settings)
        self._use(settings, now_seconds)
        for waiting in self._waiting.values():
            self._reporter.waits(waiting.labels, waiting.item)

    def want(self, priorities: Iterable[int]) -> None:
        """Give each of these priorities a band of its own."""
        self._wanted = frozenset(priorities)
        if self.queue is not None:
            self.queue.want(self._wanted)
            self._bands_seen(self.queue)

    def pool_changed(self) -> None:
        """Endpoints or their load have changed."""
        self.judge.changed()
        self.judge.load.pool_changed()

    def is_open(self, now_seconds: float) -> bool:
        """True if the next request is dispatched at once."""
        if self.is_shut or (self._waiting and self.queue is not None):
            return False
        if self.queue is None:
            return True
        judgement = self.judge.judgement
        if judgement is None or now_seconds - judgement.at_seconds > MAX_AGE_SECONDS:
            judgement = self._seen(self.judge.ask_anew(self.queue, now_seconds))
        return judgement.is_open

    def arrive(self, request: InferenceRequest, evict: Evict | None, now_seconds: float) -> Waiting:
        """A request arrives: it gets its ticket, is rejected, or waits for a `look`."""
        promise, queue = self.judge.judgement, self.queue
        if queue is None or self.is_shut:
            return self._without_queue(request, evict, now_seconds)
        band = queue.band_for(request.priority)
        item = self._item(request, now_seconds, band.settings.request_ttl_seconds)
        self._bands_seen(queue)
        labels = self._reporter.labels(item, band.priority)
        waiting = Waiting(item, band.priority, evict, labels)
        cap = queue.cap_exceeded(item, band)
        if cap is not None and not self._displace(item, band, cap, now_seconds):
            waiting.refusal = self._at_capacity(waiting, cap, now_seconds)
            return waiting
        if not self._waiting and self._may_pass(queue, promise, band, now_seconds):
            queue.pass_by(item, band, now_seconds)
            self._end(waiting, FlowOutcome.DISPATCHED, now_seconds)
            waiting.ticket = self._dispatch(waiting, now_seconds)
            if promise is not None:
                self._reserved(promise, band, now_seconds)
            return waiting
        queue.push(item, band)
        self._waiting[item.sequence] = waiting
        self._deadlines.add(waiting)
        self._reporter.waits(labels, item)
        return waiting

    def withdraw(self, waiting: Waiting, now_seconds: float) -> None:
        """The client of a waiting request has gone; no effect once it waits no more."""
        if waiting.item.sequence in self._waiting:
            self._stop_waiting(waiting, now_seconds)
            self._end(waiting, FlowOutcome.EVICTED_CONTEXT_CANCELLED, now_seconds)

    def look(self, now_seconds: float) -> None:
        """Dispatch the requests that may go."""
        self.has_more = False
        self._looked_at = now_seconds
        queue = self.queue
        if queue is None:  # the gate is off: nothing holds requests back
            for waiting in list(islice(self._waiting.values(), MOST_PER_LOOK)):
                self._let_in(waiting, now_seconds)
            self.has_more = bool(self._waiting)
            return
        for _ in range(MOST_PER_LOOK):
            item = self._next(queue, now_seconds) if self._waiting else None
            if item is None:
                return
            self._let_in(self._waiting[item.sequence], now_seconds)
        self.has_more = True

    def tick(self, now_seconds: float) -> None:
        """Reject requests whose time to live is over, and forget flows that were idle for long."""
        self._reporter.timed_out(self.reclaim.tick(now_seconds))
        if self._waiting and self.queue is not None:
            self._pool_seen(self.judge.load.at(now_seconds).num_endpoints, now_seconds)
        while (waiting := self._deadlines.due(now_seconds)) is not None:
            self._expire(waiting, now_seconds)
        if self.queue is not None:
            self.queue.forget_idle(now_seconds)
            self._bands_seen(self.queue)

    def shut_down(self, now_seconds: float) -> None:
        """Reject all waiting requests, and every one that arrives from now on."""
        self.is_shut = True
        for waiting in list(self._waiting.values()):
            self._stop_waiting(waiting, now_seconds)
            self._end(waiting, FlowOutcome.EVICTED_OTHER, now_seconds)
            waiting.resolve(outcomes.shutting_down())

    def left(self, ticket: FlowTicket) -> None:
        """A dispatched request has left for its endpoint."""
        self.judge.changed()
        self.judge.load.left(ticket.item.tokens)
        self.reclaim.entered(ticket)

    def closed(self, ticket: FlowTicket, usage: Usage | None, now_seconds: float) -> None:
        """A dispatched request is over."""
        self.judge.changed()
        self.judge.load.ended(ticket.item.tokens, ticket.has_left)
        del self.under_way[ticket.item.sequence]
        seconds = self.reclaim.closed(ticket, now_seconds)
        if seconds is not None:
            self._reporter.confirmed(seconds)
        if self.queue is not None:
            self.queue.completed(ticket.item, ticket.priority, usage, now_seconds)

    def check_integrity(self) -> None:
        """Raise `AssertionError` when the counts do not agree."""
        queued = len(self._waiting)  # of which the last may be on their way out of a queue
        if self.queue is not None:
            self.queue.check_integrity()
            queued = self.queue.num_requests
        if queued != len(self._waiting):
            raise AssertionError(f"{len(self._waiting)} wait, {queued} are queued")
        self._deadlines.check_integrity(self._waiting.values())
        self.judge.load.check_integrity()
        held = sum(not ticket.has_left for ticket in self.under_way.values())
        if held != self.judge.load.let_in.requests:
            raise AssertionError(f"{held} have not left, {self.judge.load.let_in} are counted")

    def _use(self, settings: FlowControlSettings, now_seconds: float) -> None:
        queue = self.queue
        if queue is None:
            queue = self.queue = FlowQueue(settings, self._reporter.forgotten, self._wanted)
            for waiting in self._waiting.values():  # the gate was off for a moment
                queue.push(waiting.item, queue.band_for(waiting.item.request.priority))
        else:
            queue.use(settings, now_seconds)
        self.judge.use(settings.usage_limits)
        self.judge.load.use(settings.detector)
        detector: object = settings.detector
        settle_seconds = DEFAULT_SETTLE_SECONDS
        if isinstance(detector, SettlesLate):
            settle_seconds = detector.settle_seconds
        left = [ticket for ticket in self.under_way.values() if ticket.has_left]
        self.reclaim.use(settings.eviction, settle_seconds, left)
        self._deadlines.use(settings.no_endpoint_ttl_seconds, self._waiting.values())
        for waiting in self._waiting.values():
            waiting.priority = queue.band_for(waiting.item.request.priority).priority
            waiting.labels = self._reporter.labels(waiting.item, waiting.priority)
        self._bands_seen(queue)

    def _turn_off(self) -> None:
        self._reporter.use(None)
        self.reclaim.use(None, 0.0, ())
        self._deadlines.use(None, ())
        self.queue = None

    def _without_queue(
        self, request: InferenceRequest, evict: Evict | None, now_seconds: float
    ) -> Waiting:
        item = self._item(request, now_seconds)
        labels = self._reporter.labels(item, request.priority)
        waiting = Waiting(item, request.priority, evict, labels)
        if self.is_shut:
            self._end(waiting, FlowOutcome.REJECTED_OTHER, now_seconds)
            waiting.refusal = outcomes.shutting_down()
            return waiting
        self._end(waiting, FlowOutcome.DISPATCHED, now_seconds)
        waiting.ticket = self._dispatch(waiting, now_seconds)
        return waiting

    def _may_pass(
        self, queue: FlowQueue, promise: Judgement | None, band: Band, now_seconds: float
    ) -> bool:
        """True if a request may go while none waits; a promise of `is_open` is honoured."""
        if promise is not None and promise.is_open:
            return True
        judgement = self._seen(self.judge.ask(queue, now_seconds))
        return judgement.lets_in(band.priority, self._reserved(judgement, band, now_seconds))

    def _reserved(self, judgement: Judgement, band: Band, now_seconds: float) -> float:
        """The part of the band's ceiling that is reserved."""
        ceiling = judgement.ceiling(band.priority)
        if ceiling <= 0.0:
            return 0.0
        place = self.judge.load.place(len(self.under_way), now_seconds)
        return band.keep(place / ceiling, now_seconds)

    def _next(self, queue: FlowQueue, now_seconds: float) -> QueuedRequest | None:
        judgement = self._seen(self.judge.ask(queue, now_seconds))
        self.judge.changed()  # the next request is judged anew
        for band in queue:
            if not band.num_requests:
                continue
            if judgement.lets_in(band.priority):
                reserved = self._reserved(judgement, band, now_seconds)
                is_tight = not judgement.lets_in(band.priority, reserved)
                return band.next(now_seconds, is_tight)
            self._reclaim(queue, judgement, band.priority, now_seconds)
            return None
        return None

    def _reclaim(
        self, queue: FlowQueue, judgement: Judgement, blocked: int, now_seconds: float
    ) -> None:
        if not judgement.load.num_endpoints:
            return
        demands = (
            Demand(band.priority, judgement.ceilings[band.priority])
            for band in queue
            if band.priority <= blocked and band.num_requests
        )
        num_left = len(self.under_way) - self.judge.load.let_in.requests
        saturation = judgement.load.effective
        revocation = self.reclaim.choose(demands, saturation, num_left, now_seconds)
        if revocation is None:
            return
        self._reporter.revoked(revocation)
        for victim in revocation.victims:
            if victim.evict is not None:
                victim.evict(DropReason.EVICTED)

    def _let_in(self, waiting: Waiting, now_seconds: float) -> None:
        self._stop_waiting(waiting, now_seconds, is_let_in=True)
        self._end(waiting, FlowOutcome.DISPATCHED, now_seconds)
        waiting.resolve(self._dispatch(waiting, now_seconds))

    def _dispatch(self, waiting: Waiting, now_seconds: float) -> FlowTicket:
        item = waiting.item
        ticket = FlowTicket(item, waiting.priority, waiting.evict, now_seconds, self._office)
        self.under_way[item.sequence] = ticket
        self.judge.changed()
        self.judge.load.entered(item.tokens)
        self.rate.let_in(now_seconds)
        return ticket

    def _expire(self, waiting: Waiting, now_seconds: float) -> None:
        waited = now_seconds - waiting.item.enqueued_at_seconds
        self._stop_waiting(waiting, now_seconds)
        if self._deadlines.pool_is_empty:
            self._end(waiting, FlowOutcome.EVICTED_NO_ENDPOINTS, now_seconds)
            waiting.resolve(outcomes.timed_out_without_endpoints(waited))
            return
        self._end(waiting, FlowOutcome.EVICTED_TTL, now_seconds)
        waiting.resolve(outcomes.timed_out(waited, self._retry_after(waiting, now_seconds)))

    def _displace(self, item: QueuedRequest, band: Band, cap: Cap, now_seconds: float) -> bool:
        """Evict waiting requests to make room for `item`; returns whether there is room now."""
        displaced = () if self.queue is None else self.queue.displaced_by(item, band)
        for waiting in [self._waiting[victim.sequence] for victim in displaced]:
            self._stop_waiting(waiting, now_seconds)
            waiting.resolve(self._at_capacity(waiting, cap, now_seconds))
        return bool(displaced)

    def _at_capacity(self, waiting: Waiting, cap: Cap, now_seconds: float) -> RefusedError:
        queue, item = self.queue, waiting.item
        too_large = None if queue is None else queue.never_fits(item, waiting.priority)
        if too_large is not None:
            self._end(waiting, FlowOutcome.REJECTED_CAPACITY, now_seconds)
            return outcomes.too_large(*too_large)
        if not self.judge.load.at(now_seconds).num_endpoints:
            self._end(waiting, FlowOutcome.REJECTED_NO_ENDPOINTS, now_seconds)
            return outcomes.at_capacity_without_endpoints(cap)
        self._end(waiting, FlowOutcome.REJECTED_CAPACITY, now_seconds)
        return outcomes.at_capacity(cap, self._retry_after(waiting, now_seconds))

    def _retry_after(self, waiting: Waiting, now_seconds: float) -> int:
        ahead = self.queue.ahead_of(waiting.priority) if self.queue is not None else 0
        return self.rate.retry_after_seconds(ahead + 1, now_seconds)

    def _stop_waiting(self, waiting: Waiting, now_seconds: float, is_let_in: bool = False) -> None:
        item, queue = waiting.item, self.queue
        del self._waiting[item.sequence]
        self._deadlines.remove(waiting)
        if queue is not None:
            (queue.take if is_let_in else queue.remove)(item, now_seconds)
        self._reporter.stopped_waiting(waiting.labels, item)

    def _end(self, waiting: Waiting, outcome: FlowOutcome, now_seconds: float) -> None:
        waiting.outcome = outcome
        waited = now_seconds - waiting.item.enqueued_at_seconds
        self._reporter.ended(waiting.labels, outcome, waited)

    def _item(
        self, request: InferenceRequest, now_seconds: float, ttl_seconds: float | None = None
    ) -> QueuedRequest:
        self._sequence += 1
        return queued_request(request, self._sequence, now_seconds, ttl_seconds)

    def _seen(self, judgement: Judgement) -> Judgement:
        self._pool_seen(judgement.load.num_endpoints, judgement.at_seconds)
        self._reporter.stages(judgement.load.stages)
        return judgement

    def _pool_seen(self, num_endpoints: int, now_seconds: float) -> None:
        self._deadlines.pool_seen(num_endpoints == 0, self._waiting.values(), now_seconds)

    def _bands_seen(self, queue: FlowQueue) -> None:
        if queue.priorities is not self._reported_bands:
            self._reported_bands = queue.priorities
            self.judge.changed()
            self._reporter.bands(queue)
