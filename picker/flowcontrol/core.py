"""The decisions of flow control: which requests are dispatched, wait, are rejected or evicted.

Everything here is synchronous, with the time as an argument. `run_pass` dispatches from the highest
band down, while the saturation of the pool is below the band's ceiling. A band that is held back
with waiting requests also holds back those below it; so does a band whose last slots are reserved
(`KeepsHeadroom`). `is_open` is called before a request is parsed, and promises that the next one is
dispatched at once; the verdict is cached for that request, so `is_open` and `arrive` agree.
"""

from collections.abc import Iterable, Mapping
from itertools import islice

import msgspec

from picker.errors import DropReason, RefusedError
from picker.flowcontrol import outcomes
from picker.flowcontrol.band import Band
from picker.flowcontrol.capacity import Cap, displaced_by
from picker.flowcontrol.load_estimate import MAX_AGE_SECONDS, LoadEstimate, Pool
from picker.flowcontrol.outcomes import DrainRate, FlowOutcome
from picker.flowcontrol.queue import FlowQueue
from picker.flowcontrol.reclaim import Reclaim
from picker.flowcontrol.reporting import FlowReporter
from picker.flowcontrol.saturation import PoolLoad
from picker.flowcontrol.settings import FlowControlSettings
from picker.flowcontrol.waiting import (
    Deadlines,
    Evict,
    FlowTicket,
    TicketObserver,
    Waiting,
    queued_request,
)
from picker.framework.flow import (
    DEFAULT_SETTLE_SECONDS,
    QueuedRequest,
    SettlesLate,
    UsageLimitPolicy,
)
from picker.types import InferenceRequest, Usage

EPSILON = 1e-9  # absorbs float errors in sums of fractions


class Verdict(msgspec.Struct, frozen=True):
    """The load and the bands' ceilings; only `free_part` of the lowest ceiling is not reserved."""

    load: PoolLoad
    ceilings: Mapping[int, float]
    lowest_ceiling: float
    at_seconds: float
    free_part: float = 1.0

    @property
    def is_open(self) -> bool:
        """True if a request of any band may be dispatched."""
        return self._is_below(self.lowest_ceiling * self.free_part)

    def ceiling(self, priority: int) -> float:
        return self.ceilings.get(priority, self.lowest_ceiling)

    def admits(self, priority: int, headroom: float = 0.0) -> bool:
        """Return whether the band may dispatch and leave `headroom`, a part of its ceiling."""
        part = 1.0 - headroom - EPSILON if headroom else 1.0
        return self._is_below(self.ceiling(priority) * part)

    def _is_below(self, saturation: float) -> bool:
        return self.load.num_endpoints > 0 and self.load.effective < saturation


class VerdictCache:
    """Owns the load estimate and the cached verdict on it.

    A verdict is valid until anything changes or a request has used it: policies count their calls.
    """

    def __init__(self, pool: Pool) -> None:
        self.load = LoadEstimate(pool)
        self._policy: UsageLimitPolicy | None = None
        self.current: Verdict | None = None  # the valid one, if any
        self.ceilings: Mapping[int, float] = {}  # the last ones of the policy

    def use(self, policy: UsageLimitPolicy) -> None:
        self._policy = policy
        self.current, self.ceilings = None, {}

    def valid(self, queue: FlowQueue, now_seconds: float) -> Verdict:
        """Return the cached verdict or a new one; an open verdict is a promise and stays valid."""
        verdict = self.current
        if verdict is not None and (
            verdict.is_open or now_seconds - verdict.at_seconds <= MAX_AGE_SECONDS
        ):
            return verdict
        return self.compute(queue, now_seconds)

    def compute(self, queue: FlowQueue, now_seconds: float) -> Verdict:
        load, priorities = self.load.at(now_seconds), queue.priorities
        if self._policy is not None:
            ceilings = self._policy.ceilings(load.effective, priorities)
            self.ceilings = dict(zip(priorities, ceilings, strict=True))
        lowest = min(self.ceilings.values(), default=1.0)
        reserved = max(band.headroom for band in queue)
        free_part = 1.0 - reserved - EPSILON if reserved else 1.0
        self.current = Verdict(load, self.ceilings, lowest, now_seconds, free_part)
        return self.current


MAX_DISPATCHES_PER_PASS = 8  # then the loop gets a turn: each takes 0.5 ms of decisions
RECHECK_SECONDS = 0.25  # verdicts of detectors and policies may change with time alone


class FlowCore:
    """Owns the queue, the tickets and the load estimate. Times never go back."""

    def __init__(self, pool: Pool, reporter: FlowReporter, observer: TicketObserver) -> None:
        self._reporter = reporter
        self._observer = observer
        self.settings: FlowControlSettings | None = None
        self.queue: FlowQueue | None = None
        self.verdicts = VerdictCache(pool)
        self.rate = DrainRate()
        self.reclaim = Reclaim()
        self.is_shut = False
        self.has_more = False  # the last pass stopped although more requests may go
        self.under_way: dict[int, FlowTicket] = {}  # dispatched and not over, by sequence number
        self._waiting: dict[int, Waiting] = {}
        self._deadlines = Deadlines()
        self._wanted: frozenset[int] = frozenset()
        self._reported_bands: tuple[int, ...] | None = None
        self._last_pass_at = 0.0
        self._sequence = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def next_due_seconds(self) -> float | None:
        due = [self.reclaim.next_due_seconds]
        if self._waiting:
            due += [self._deadlines.next_seconds, self._last_pass_at + RECHECK_SECONDS]
        if self.queue is not None:
            due.append(self.queue.next_idle_seconds)
        return min((one for one in due if one is not None), default=None)

    def use(self, settings: FlowControlSettings | None, now_seconds: float) -> None:
        """Switch to other settings; None dispatches all requests."""
        self.settings = settings
        self._reported_bands = None
        if settings is None:
            self._reporter.use(None)
            self.reclaim.use(None, 0.0, ())
            self._deadlines.use(None, ())
            self.queue = None
            return
        for waiting in self._waiting.values():
            # Under the old labels, which depend on the band and change in `_use`.
            self._reporter.waits(waiting.labels, waiting.item, -1)
        self._reporter.use(settings)
        self._use(settings, now_seconds)
        for waiting in self._waiting.values():
            self._reporter.waits(waiting.labels, waiting.item)

    def want(self, priorities: Iterable[int]) -> None:
        self._wanted = frozenset(priorities)
        if self.queue is not None:
            self.queue.want(self._wanted)
            self._bands_seen(self.queue)

    def pool_changed(self) -> None:
        self.verdicts.current = None
        self.verdicts.load.pool_changed()

    def is_open(self, now_seconds: float) -> bool:
        """Return whether the next request is dispatched at once."""
        if self.is_shut or (self._waiting and self.queue is not None):
            return False
        if self.queue is None:
            return True
        verdict = self.verdicts.current
        if verdict is None or now_seconds - verdict.at_seconds > MAX_AGE_SECONDS:
            verdict = self._seen(self.verdicts.compute(self.queue, now_seconds))
        return verdict.is_open

    def arrive(self, request: InferenceRequest, evict: Evict | None, now_seconds: float) -> Waiting:
        """Process an arriving request: it gets its ticket, is rejected, or waits for a pass."""
        # Read first: a band that is created below voids the verdict, but not the promise.
        promise, queue = self.verdicts.current, self.queue
        if queue is None or self.is_shut:
            return self._without_queue(request, evict, now_seconds)
        band = queue.band_for(request.priority)
        item = self._item(request, now_seconds, band.settings.request_ttl_seconds)
        self._bands_seen(queue)
        labels = self._reporter.labels(item, band.priority)
        waiting = Waiting(item, band.priority, evict, labels)
        excess = queue.excess(item, band)
        if excess:
            cap = next(iter(excess))
            displaced = displaced_by(item, band, queue, excess)
            for victim in [self._waiting[one.sequence] for one in displaced]:
                self._stop_waiting(victim, now_seconds)
                victim.resolve(self._at_capacity(victim, cap, now_seconds))
            if not displaced:
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
        """Remove a waiting request whose client has disconnected; do nothing for any other."""
        if waiting.item.sequence in self._waiting:
            self._stop_waiting(waiting, now_seconds)
            self._end(waiting, FlowOutcome.EVICTED_CONTEXT_CANCELLED, now_seconds)

    def run_pass(self, now_seconds: float) -> None:
        self.has_more = False
        self._last_pass_at = now_seconds
        queue = self.queue
        if queue is None:  # the gate is off: nothing holds requests back
            for waiting in list(islice(self._waiting.values(), MAX_DISPATCHES_PER_PASS)):
                self._admit(waiting, now_seconds)
            self.has_more = bool(self._waiting)
            return
        for _ in range(MAX_DISPATCHES_PER_PASS):
            item = self._next(queue, now_seconds) if self._waiting else None
            if item is None:
                return
            self._admit(self._waiting[item.sequence], now_seconds)
        self.has_more = True

    def tick(self, now_seconds: float) -> None:
        self._reporter.timed_out(self.reclaim.tick(now_seconds))
        if self._waiting and self.queue is not None:
            # Before any deadline is due: all of them move when the pool turns empty or not empty.
            is_empty = not self.verdicts.load.at(now_seconds).num_endpoints
            self._deadlines.pool_seen(is_empty, self._waiting.values(), now_seconds)
        while (waiting := self._deadlines.due(now_seconds)) is not None:
            self._expire(waiting, now_seconds)
        if self.queue is not None:
            self.queue.forget_idle(now_seconds)
            self._bands_seen(self.queue)

    def shut_down(self, now_seconds: float) -> None:
        self.is_shut = True
        for waiting in list(self._waiting.values()):
            self._stop_waiting(waiting, now_seconds)
            self._end(waiting, FlowOutcome.EVICTED_OTHER, now_seconds)
            waiting.resolve(outcomes.shutting_down())

    def left(self, ticket: FlowTicket) -> None:
        self.verdicts.current = None
        self.verdicts.load.left(ticket.item.tokens)
        self.reclaim.entered(ticket)

    def closed(self, ticket: FlowTicket, usage: Usage | None, now_seconds: float) -> None:
        self.verdicts.current = None
        self.verdicts.load.ended(ticket.item.tokens, ticket.has_left)
        del self.under_way[ticket.item.sequence]
        seconds = self.reclaim.closed(ticket, now_seconds)
        if seconds is not None:
            self._reporter.confirmed(seconds)
        if self.queue is not None:
            self.queue.completed(ticket.item, ticket.priority, usage, now_seconds)

    def check_integrity(self) -> None:
        queued = len(self._waiting)  # without a queue these are the remaining ones
        if self.queue is not None:
            self.queue.check_integrity()
            queued = self.queue.num_requests
        if queued != len(self._waiting):
            raise AssertionError(f"{len(self._waiting)} wait, {queued} are queued")
        self._deadlines.check_integrity(self._waiting.values())
        self.verdicts.load.check_integrity()
        unsent = sum(not ticket.has_left for ticket in self.under_way.values())
        if unsent != self.verdicts.load.let_in.requests:
            raise AssertionError(f"{unsent} are not sent, {self.verdicts.load.let_in} are counted")

    def _use(self, settings: FlowControlSettings, now_seconds: float) -> None:
        queue = self.queue
        if queue is None:
            queue = self.queue = FlowQueue(settings, self._reporter.forgotten, self._wanted)
            for waiting in self._waiting.values():  # the gate was off for a moment
                queue.push(waiting.item, queue.band_for(waiting.item.request.priority))
        else:
            queue.use(settings, now_seconds)
        self.verdicts.use(settings.usage_limits)
        self.verdicts.load.use(settings.detector)
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
        self, queue: FlowQueue, promise: Verdict | None, band: Band, now_seconds: float
    ) -> bool:
        """Return whether a request may go while none waits; a promise of `is_open` holds."""
        if promise is not None and promise.is_open:
            return True
        verdict = self._seen(self.verdicts.valid(queue, now_seconds))
        return verdict.admits(band.priority, self._reserved(verdict, band, now_seconds))

    def _reserved(self, verdict: Verdict, band: Band, now_seconds: float) -> float:
        ceiling = verdict.ceiling(band.priority)
        if ceiling <= 0.0:
            return 0.0
        place = self.verdicts.load.place(len(self.under_way), now_seconds)
        return band.keep(place / ceiling, now_seconds)

    def _next(self, queue: FlowQueue, now_seconds: float) -> QueuedRequest | None:
        verdict = self._seen(self.verdicts.valid(queue, now_seconds))
        self.verdicts.current = None  # the next request gets a new verdict
        for band in queue:
            if not band.num_requests:
                continue
            if verdict.admits(band.priority):
                reserved = self._reserved(verdict, band, now_seconds)
                is_tight = not verdict.admits(band.priority, reserved)
                return band.next(now_seconds, is_tight)
            # A band that is held back also holds back those below it, whatever their ceilings.
            self._reclaim(queue, verdict, band.priority, now_seconds)
            return None
        return None

    def _reclaim(
        self, queue: FlowQueue, verdict: Verdict, blocked: int, now_seconds: float
    ) -> None:
        if not verdict.load.num_endpoints:
            return
        demands = (
            (band.priority, verdict.ceilings[band.priority])
            for band in queue
            if band.priority <= blocked and band.num_requests
        )
        num_left = len(self.under_way) - self.verdicts.load.let_in.requests
        saturation = verdict.load.effective
        revocation = self.reclaim.choose(demands, saturation, num_left, now_seconds)
        if revocation is None:
            return
        self._reporter.revoked(revocation)
        for victim in revocation.victims:
            if victim.evict is not None:
                victim.evict(DropReason.EVICTED)

    def _admit(self, waiting: Waiting, now_seconds: float) -> None:
        self._stop_waiting(waiting, now_seconds, is_dispatched=True)
        self._end(waiting, FlowOutcome.DISPATCHED, now_seconds)
        waiting.resolve(self._dispatch(waiting, now_seconds))

    def _dispatch(self, waiting: Waiting, now_seconds: float) -> FlowTicket:
        item = waiting.item
        ticket = FlowTicket(item, waiting.priority, waiting.evict, now_seconds, self._observer)
        self.under_way[item.sequence] = ticket
        self.verdicts.current = None
        self.verdicts.load.entered(item.tokens)
        self.rate.count(now_seconds)
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

    def _at_capacity(self, waiting: Waiting, cap: Cap, now_seconds: float) -> RefusedError:
        queue, item = self.queue, waiting.item
        too_large = None if queue is None else queue.never_fits(item, waiting.priority)
        if too_large is not None:
            self._end(waiting, FlowOutcome.REJECTED_CAPACITY, now_seconds)
            return outcomes.too_large(*too_large)
        if not self.verdicts.load.at(now_seconds).num_endpoints:
            self._end(waiting, FlowOutcome.REJECTED_NO_ENDPOINTS, now_seconds)
            return outcomes.at_capacity_without_endpoints(cap)
        self._end(waiting, FlowOutcome.REJECTED_CAPACITY, now_seconds)
        return outcomes.at_capacity(cap, self._retry_after(waiting, now_seconds))

    def _retry_after(self, waiting: Waiting, now_seconds: float) -> int:
        bands = () if self.queue is None else self.queue
        ahead = sum(band.num_requests for band in bands if band.priority >= waiting.priority)
        return self.rate.retry_after_seconds(ahead + 1, now_seconds)

    def _stop_waiting(
        self, waiting: Waiting, now_seconds: float, is_dispatched: bool = False
    ) -> None:
        item, queue = waiting.item, self.queue
        del self._waiting[item.sequence]
        self._deadlines.remove(waiting)
        if queue is not None:
            queue.remove(item, now_seconds, is_dispatched)
        self._reporter.waits(waiting.labels, item, -1)

    def _end(self, waiting: Waiting, outcome: FlowOutcome, now_seconds: float) -> None:
        waiting.outcome = outcome
        waited = now_seconds - waiting.item.enqueued_at_seconds
        self._reporter.ended(waiting.labels, outcome, waited)

    def _item(
        self, request: InferenceRequest, now_seconds: float, ttl_seconds: float | None = None
    ) -> QueuedRequest:
        self._sequence += 1
        return queued_request(request, self._sequence, now_seconds, ttl_seconds)

    def _seen(self, verdict: Verdict) -> Verdict:
        is_empty = not verdict.load.num_endpoints
        self._deadlines.pool_seen(is_empty, self._waiting.values(), verdict.at_seconds)
        self._reporter.stages(verdict.load.stages)
        return verdict

    def _bands_seen(self, queue: FlowQueue) -> None:
        if queue.priorities is not self._reported_bands:
            self._reported_bands = queue.priorities
            self.verdicts.current = None
            self._reporter.bands(queue)
