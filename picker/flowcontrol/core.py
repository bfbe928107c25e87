"""What flow control decides: who is let in, who waits, who is refused, who is stopped.

Theory of operation. Everything here happens at once and at a time that is given; the shell
(`controller`) brings the events and waits. After each event that can make room, and while somebody
waits, `look` lets in as many as may go: for the bands from the highest down, while the pool's
saturation is below a band's ceiling, whom the fairness policy names. A band in which somebody waits
and that is held back holds back those below it too, whatever their ceilings are. So
does one whose last places in the pool are kept for others than those who wait (`KeepsHeadroom`).
Between two that are let in the saturation is asked anew: the first counts as let in until it has
left for its endpoint, where the pool counts it from then on.

`is_open` is asked before a request is understood, and says that whoever comes next goes at once;
what it saw is kept for that request, so the two cannot disagree.

A newcomer for whom there is no room to wait may take the place of somebody who waits (`capacity`).

A request may wait for its time to live, or while the pool is empty for another time, from when it
came or when that began; `next_due_seconds` is exact.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from picker.errors import DropReason, RefusedError
from picker.flowcontrol import outcomes
from picker.flowcontrol.band import Band
from picker.flowcontrol.capacity import Cap
from picker.flowcontrol.drain_rate import DrainRate
from picker.flowcontrol.judge import Judge, Verdict
from picker.flowcontrol.load_estimate import MAX_AGE_SECONDS, Pool
from picker.flowcontrol.outcomes import FlowOutcome
from picker.flowcontrol.queue import FlowQueue
from picker.flowcontrol.reclaim import Demand, Reclaim
from picker.flowcontrol.settings import FlowControlSettings
from picker.flowcontrol.shell.waiting import Deadlines, Waiting, queued_request
from picker.flowcontrol.telling import FlowTelling
from picker.flowcontrol.tickets import Evict, FlowTicket, TicketOffice
from picker.framework.flow import DEFAULT_SETTLE_SECONDS, QueuedRequest, SettlesLate
from picker.types import InferenceRequest, Usage

MOST_PER_LOOK = 8  # before others have their turn: the decisions that follow take 0.5 ms each
LOOK_AGAIN_SECONDS = 0.25  # detectors and policies know of time; else nobody would ask them


class FlowCore:
    """Owns the queue, the tickets, and what is known of the load. Times never go back."""

    def __init__(self, pool: Pool, telling: FlowTelling, office: TicketOffice) -> None:
        self._telling = telling
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
        self._told_bands: tuple[int, ...] | None = None
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
        """Go on by other settings; None: let in whoever comes, and all who
        wait: some in each `look`.

        Who waits keeps the time that it may wait.
        """
        self.settings = settings
        self._told_bands = None
        if settings is None:
            self._turn_off()
            return
        for waiting in self._waiting.values():
            self._telling.waits_no_more(waiting.labels, waiting.item)
        self._telling.use(settings)
        self._use(settings, now_seconds)
        for waiting in self._waiting.values():
            self._telling.waits(waiting.labels, waiting.item)

    def want(self, priorities: Iterable[int]) -> None:
        """These have a band of their own."""
        self._wanted = frozenset(priorities)
        if self.queue is not None:
            self.queue.want(self._wanted)
            self._bands_seen(self.queue)

    def pool_changed(self) -> None:
        """Endpoints or their load have changed."""
        self.judge.changed()
        self.judge.load.pool_changed()

    def is_open(self, now_seconds: float) -> bool:
        """Whether whoever comes next is let in at once."""
        if self.is_shut or (self._waiting and self.queue is not None):
            return False
        if self.queue is None:
            return True
        verdict = self.judge.verdict
        if verdict is None or now_seconds - verdict.at_seconds > MAX_AGE_SECONDS:
            verdict = self._seen(self.judge.ask_anew(self.queue, now_seconds))
        return verdict.is_open

    def arrive(self, request: InferenceRequest, evict: Evict | None, now_seconds: float) -> Waiting:
        """A request comes: it has its ticket, or was refused, or waits, and then `look` is next."""
        promise, queue = self.judge.verdict, self.queue
        if queue is None or self.is_shut:
            return self._without_queue(request, evict, now_seconds)
        band = queue.band_for(request.priority)
        item = self._item(request, now_seconds, band.settings.request_ttl_seconds)
        self._bands_seen(queue)
        labels = self._telling.labels(item, band.priority)
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
                self._kept(promise, band, now_seconds)
            return waiting
        queue.push(item, band)
        self._waiting[item.sequence] = waiting
        self._deadlines.add(waiting)
        self._telling.waits(labels, item)
        return waiting

    def withdraw(self, waiting: Waiting, now_seconds: float) -> None:
        """Whoever waits has gone; nothing happens when it waits no more."""
        if waiting.item.sequence in self._waiting:
            self._stop_waiting(waiting, now_seconds)
            self._end(waiting, FlowOutcome.EVICTED_CONTEXT_CANCELLED, now_seconds)

    def look(self, now_seconds: float) -> None:
        """Let in whoever may go."""
        self.has_more = False
        self._looked_at = now_seconds
        queue = self.queue
        if queue is None:  # nobody waits for anything any more
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
        """Refuse those whose time is over, and forget what was not seen for long."""
        self._telling.timed_out(self.reclaim.tick(now_seconds))
        if self._waiting and self.queue is not None:
            self._pool_seen(self.judge.load.at(now_seconds).num_endpoints, now_seconds)
        while (waiting := self._deadlines.due(now_seconds)) is not None:
            self._expire(waiting, now_seconds)
        if self.queue is not None:
            self.queue.forget_idle(now_seconds)
            self._bands_seen(self.queue)

    def shut_down(self, now_seconds: float) -> None:
        """Nobody is let in any more; all who wait are refused."""
        self.is_shut = True
        for waiting in list(self._waiting.values()):
            self._stop_waiting(waiting, now_seconds)
            self._end(waiting, FlowOutcome.EVICTED_OTHER, now_seconds)
            waiting.settle(outcomes.shutting_down())

    def left(self, ticket: FlowTicket) -> None:
        """A request that was let in has left."""
        self.judge.changed()
        self.judge.load.left(ticket.item.tokens)
        self.reclaim.entered(ticket)

    def closed(self, ticket: FlowTicket, usage: Usage | None, now_seconds: float) -> None:
        """A request that was let in is over."""
        self.judge.changed()
        self.judge.load.ended(ticket.item.tokens, ticket.has_left)
        del self.under_way[ticket.item.sequence]
        seconds = self.reclaim.closed(ticket, now_seconds)
        if seconds is not None:
            self._telling.confirmed(seconds)
        if self.queue is not None:
            self.queue.completed(ticket.item, ticket.priority, usage, now_seconds)

    def check_integrity(self) -> None:
        """Raise `AssertionError` when the books do not agree."""
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
            queue = self.queue = FlowQueue(settings, self._telling.forgotten, self._wanted)
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
            waiting.labels = self._telling.labels(waiting.item, waiting.priority)
        self._bands_seen(queue)

    def _turn_off(self) -> None:
        self._telling.use(None)
        self.reclaim.use(None, 0.0, ())
        self._deadlines.use(None, ())
        self.queue = None

    def _without_queue(
        self, request: InferenceRequest, evict: Evict | None, now_seconds: float
    ) -> Waiting:
        item = self._item(request, now_seconds)
        labels = self._telling.labels(item, request.priority)
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
        """Whether one goes before whom nobody waits; whoever was promised that goes."""
        if promise is not None and promise.is_open:
            return True
        verdict = self._seen(self.judge.ask(queue, now_seconds))
        return verdict.lets_in(band.priority, self._kept(verdict, band, now_seconds))

    def _kept(self, verdict: Verdict, band: Band, now_seconds: float) -> float:
        """The part of the band's ceiling that is not for everybody."""
        ceiling = verdict.ceiling(band.priority)
        if ceiling <= 0.0:
            return 0.0
        place = self.judge.load.place(len(self.under_way), now_seconds)
        return band.keep(place / ceiling, now_seconds)

    def _next(self, queue: FlowQueue, now_seconds: float) -> QueuedRequest | None:
        verdict = self._seen(self.judge.ask(queue, now_seconds))
        self.judge.changed()  # told to whoever is next, or to those who are held back
        for band in queue:
            if not band.num_requests:
                continue
            if verdict.lets_in(band.priority):
                kept = self._kept(verdict, band, now_seconds)
                is_tight = not verdict.lets_in(band.priority, kept)
                return band.next(now_seconds, is_tight)
            self._reclaim(queue, verdict, band.priority, now_seconds)
            return None
        return None

    def _reclaim(
        self, queue: FlowQueue, verdict: Verdict, blocked: int, now_seconds: float
    ) -> None:
        if not verdict.load.num_endpoints:
            return
        demands = (
            Demand(band.priority, verdict.ceilings[band.priority])
            for band in queue
            if band.priority <= blocked and band.num_requests
        )
        num_left = len(self.under_way) - self.judge.load.let_in.requests
        saturation = verdict.load.effective
        revocation = self.reclaim.choose(demands, saturation, num_left, now_seconds)
        if revocation is None:
            return
        self._telling.revoked(revocation)
        for victim in revocation.victims:
            if victim.evict is not None:
                victim.evict(DropReason.EVICTED)

    def _let_in(self, waiting: Waiting, now_seconds: float) -> None:
        self._stop_waiting(waiting, now_seconds, is_let_in=True)
        self._end(waiting, FlowOutcome.DISPATCHED, now_seconds)
        waiting.settle(self._dispatch(waiting, now_seconds))

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
            waiting.settle(outcomes.timed_out_without_endpoints(waited))
            return
        self._end(waiting, FlowOutcome.EVICTED_TTL, now_seconds)
        waiting.settle(outcomes.timed_out(waited, self._retry_after(waiting, now_seconds)))

    def _displace(self, item: QueuedRequest, band: Band, cap: Cap, now_seconds: float) -> bool:
        """Whether there is room for `item` now: whoever waits in its place is refused."""
        displaced = () if self.queue is None else self.queue.displaced_by(item, band)
        for waiting in [self._waiting[victim.sequence] for victim in displaced]:
            self._stop_waiting(waiting, now_seconds)
            waiting.settle(self._at_capacity(waiting, cap, now_seconds))
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
        self._telling.waits_no_more(waiting.labels, item)

    def _end(self, waiting: Waiting, outcome: FlowOutcome, now_seconds: float) -> None:
        waiting.outcome = outcome
        waited = now_seconds - waiting.item.enqueued_at_seconds
        self._telling.ended(waiting.labels, outcome, waited)

    def _item(
        self, request: InferenceRequest, now_seconds: float, ttl_seconds: float | None = None
    ) -> QueuedRequest:
        self._sequence += 1
        return queued_request(request, self._sequence, now_seconds, ttl_seconds)

    def _seen(self, verdict: Verdict) -> Verdict:
        self._pool_seen(verdict.load.num_endpoints, verdict.at_seconds)
        self._telling.stages(verdict.load.stages)
        return verdict

    def _pool_seen(self, num_endpoints: int, now_seconds: float) -> None:
        self._deadlines.pool_seen(num_endpoints == 0, self._waiting.values(), now_seconds)

    def _bands_seen(self, queue: FlowQueue) -> None:
        if queue.priorities is not self._told_bands:
            self._told_bands = queue.priorities
            self.judge.changed()
            self._telling.bands(queue)
