"""The gate of flow control: `core` decides, this module waits.

A pass over the queues follows each event that can make room, and simultaneous events share one. A
pool of hundreds of endpoints changes thousands of times a second; its changes accumulate first.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence

from picker.errors import DropReason
from picker.flowcontrol.band import Band
from picker.flowcontrol.core import FlowCore
from picker.flowcontrol.reporting import FlowReporter
from picker.flowcontrol.saturation import PoolLoad
from picker.flowcontrol.settings import FlowControlSettings
from picker.flowcontrol.views import BandView, FlowView, QueuesView
from picker.flowcontrol.waiting import FlowTicket, Waiting
from picker.framework.flow import JudgesStaleness
from picker.metrics.picker_metrics import PickerMetrics
from picker.types import Candidate, FinishCause, InferenceRequest, Usage

_MIN_DELAY_SECONDS = 0.001  # the loop counts in milliseconds, and would be called again and again


class FlowController:
    """The gate, for the life of the picker; a reload changes its settings. Event-loop thread only.

    `pool` returns all endpoints with their in-flight requests; `clock` may differ from the loop's.
    """

    def __init__(
        self,
        settings: FlowControlSettings | None,
        pool: Callable[[], Sequence[Candidate]],
        clock: Callable[[], float],
        metrics: PickerMetrics,
        pool_name: str = "default",
    ) -> None:
        self._pool = pool
        self._clock = clock
        self._reporter = FlowReporter(metrics, pool_name, self)
        self._core = FlowCore(pool, self._reporter, self)
        self._loop: asyncio.AbstractEventLoop | None = None  # set by the first request
        self._scheduled: asyncio.TimerHandle | asyncio.Handle | None = None  # a scheduled pass
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._core.use(settings, clock())

    @property
    def is_open(self) -> bool:
        return self._core.is_open(self._clock())

    @property
    def num_waiting(self) -> int:
        return self._core.num_waiting

    @property
    def num_under_way(self) -> int:
        return len(self._core.under_way)

    async def admit(
        self, request: InferenceRequest, evict: Callable[[DropReason], None] | None
    ) -> FlowTicket:
        began = self._clock()
        waiting = self._core.arrive(request, evict, began)
        self._reporter.enqueued(waiting.labels, waiting.outcome, self._clock() - began)
        if not waiting.is_resolved:
            await self._wait(waiting, began)
        elif self._timer is None:  # for what is to be forgotten some day
            self._loop = asyncio.get_running_loop()
            self._set_timer()
        if waiting.refusal is not None:
            raise waiting.refusal
        if waiting.ticket is None:
            raise AssertionError("a request came back from the gate without an answer")
        return waiting.ticket

    def use(self, settings: FlowControlSettings | None) -> None:
        """Switch to other settings; None dispatches all requests. Waiting ones keep their place."""
        self._core.use(settings, self._clock())
        self._schedule()

    def set_priorities(self, priorities: Iterable[int]) -> None:
        self._core.want(priorities)
        self._schedule()

    def pool_changed(self) -> None:
        self._core.pool_changed()
        self._schedule(self._core.verdicts.load.settle_seconds)

    def shut_down(self) -> None:
        self._core.shut_down(self._clock())
        for handle in (self._scheduled, self._timer):
            if handle is not None:
                handle.cancel()
        self._scheduled = self._timer = None

    def queues(self) -> QueuesView:
        core, now_seconds = self._core, self._clock()
        outcomes = {outcome.value: count for outcome, count in self._reporter.outcomes.items()}
        settings, queue = core.settings, core.queue
        if settings is None or queue is None:
            return QueuesView(under_way=len(core.under_way), outcomes=outcomes)
        ceilings = core.verdicts.ceilings
        return QueuesView(
            is_on=True,
            detector=settings.detector_name,
            saturation=core.verdicts.load.at(now_seconds).effective,
            stale_endpoints=self.num_stale(),
            queued_requests=queue.num_requests,
            queued_bytes=queue.num_bytes,
            queued_memory_bytes=queue.held_bytes,
            under_way=len(core.under_way),
            max_requests=settings.max_requests,
            max_bytes=settings.max_bytes,
            max_memory_bytes=settings.max_memory_bytes,
            dispatched_per_second=core.rate.per_second(now_seconds),
            outcomes=outcomes,
            bands=tuple(
                _band(band, ceilings.get(band.priority, 1.0), now_seconds) for band in queue
            ),
        )

    def check_integrity(self) -> None:
        self._core.check_integrity()

    # Called by tickets

    def ticket_left(self, ticket: FlowTicket) -> None:
        self._core.left(ticket)
        self._schedule()

    def ticket_closed(self, ticket: FlowTicket, usage: Usage | None) -> None:
        self._core.closed(ticket, usage, self._clock())
        self._schedule()

    # Read by gauges

    def pool_load(self) -> PoolLoad:
        return self._core.verdicts.load.at(self._clock())

    def num_stale(self) -> int:
        settings = self._core.settings
        if settings is None or not isinstance(settings.detector, JudgesStaleness):
            return 0
        return settings.detector.stale(self._pool(), self._clock())

    def queued(self) -> tuple[int, int]:
        queue = self._core.queue
        return (0, 0) if queue is None else (queue.num_requests, queue.num_bytes)

    def pending_reclaim(self) -> float:
        return self._core.reclaim.pending

    async def _wait(self, waiting: Waiting, now_seconds: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._look(now_seconds)  # a request that is dispatched at once has not waited
        if waiting.is_resolved:
            return
        done = self._loop.create_future()
        # A client that disconnects cancels the future before the request leaves the queue.
        waiting.wake = lambda: None if done.done() else done.set_result(None)
        try:
            await done
        except asyncio.CancelledError:
            if waiting.ticket is not None:
                # Dispatched in the turn that cancelled it: no other code has the ticket.
                waiting.ticket.closed(FinishCause.CLIENT_GONE, None)
            else:
                self._core.withdraw(waiting, self._clock())
                self._schedule()
            raise

    def _schedule(self, delay_seconds: float = 0.0) -> None:
        loop = self._loop
        if loop is None or not self._core.num_waiting:
            return
        if self._scheduled is not None:
            # A pass at once replaces one that gathers changes, never the other way round.
            if delay_seconds or not isinstance(self._scheduled, asyncio.TimerHandle):
                return
            self._scheduled.cancel()
        if delay_seconds:
            self._scheduled = loop.call_later(delay_seconds, self._look)
        else:
            self._scheduled = loop.call_soon(self._look)

    def _look(self, now_seconds: float | None = None) -> None:
        if self._scheduled is not None:
            self._scheduled.cancel()
            self._scheduled = None
        began = self._clock()
        try:
            self._core.run_pass(began if now_seconds is None else now_seconds)
        finally:
            self._reporter.cycled(self._clock() - began)
            load = self._core.verdicts.load
            if self._core.has_more or load.is_behind:
                self._schedule(0.0 if self._core.has_more else load.settle_seconds)
            self._set_timer()

    def _set_timer(self) -> None:
        due, loop = self._core.next_due_seconds(), self._loop
        if loop is None or due is None:
            return
        if self._timer is not None:
            # `_tick` sets the timer again, so an earlier one suffices.
            if self._timer_at <= due:
                return
            self._timer.cancel()
        self._timer_at = due
        delay_seconds = max(_MIN_DELAY_SECONDS, due - self._clock())
        self._timer = loop.call_later(delay_seconds, self._tick)

    def _tick(self) -> None:
        self._timer = None
        try:
            self._core.tick(self._clock())
        finally:
            self._look()


MAX_FLOWS = 100  # shown per band, those with the most requests


def _band(band: Band, ceiling: float, now_seconds: float) -> BandView:
    longest = sorted(band.flows.values(), key=lambda flow: -len(flow.heap))[:MAX_FLOWS]
    return BandView(
        priority=band.priority,
        queued_requests=band.num_requests,
        queued_bytes=band.num_bytes,
        max_requests=band.settings.max_requests,
        max_bytes=band.settings.max_bytes,
        ceiling=ceiling,
        flows=tuple(
            FlowView(
                flow.name,
                len(flow.heap),
                flow.num_bytes,
                now_seconds - min(item.enqueued_at_seconds for item in flow.heap),
            )
            for flow in longest
        ),
    )
