"""What people are shown of flow control at one moment."""

from __future__ import annotations

from picker.flowcontrol.band import Band, Flow
from picker.flowcontrol.core import FlowCore
from picker.flowcontrol.telling import FlowTelling
from picker.flowcontrol.views import BandView, FlowView, QueuesView

MOST_FLOWS = 100  # shown of a band, those with the most requests


def queues_view(
    core: FlowCore, telling: FlowTelling, num_stale: int, now_seconds: float
) -> QueuesView:
    """Everything about the queues now."""
    outcomes = {outcome.value: count for outcome, count in telling.outcomes.items()}
    settings, queue = core.settings, core.queue
    if settings is None or queue is None:
        return QueuesView(under_way=len(core.under_way), outcomes=outcomes)
    ceilings = core.judge.ceilings
    return QueuesView(
        is_on=True,
        detector=settings.detector_name,
        saturation=core.judge.load.at(now_seconds).effective,
        stale_endpoints=num_stale,
        queued_requests=queue.num_requests,
        queued_bytes=queue.num_bytes,
        queued_memory_bytes=queue.held_bytes,
        under_way=len(core.under_way),
        max_requests=settings.max_requests,
        max_bytes=settings.max_bytes,
        max_memory_bytes=settings.max_memory_bytes,
        dispatched_per_second=core.rate.per_second(now_seconds),
        outcomes=outcomes,
        bands=tuple(_band(band, ceilings.get(band.priority, 1.0), now_seconds) for band in queue),
    )


def _band(band: Band, ceiling: float, now_seconds: float) -> BandView:
    longest = sorted(band.flows.values(), key=lambda flow: -len(flow.heap))[:MOST_FLOWS]
    return BandView(
        priority=band.priority,
        queued_requests=band.num_requests,
        queued_bytes=band.num_bytes,
        max_requests=band.settings.max_requests,
        max_bytes=band.settings.max_bytes,
        ceiling=ceiling,
        flows=tuple(_flow(flow, now_seconds) for flow in longest),
    )


def _flow(flow: Flow, now_seconds: float) -> FlowView:
    oldest = min(item.enqueued_at_seconds for item in flow.heap)
    return FlowView(flow.name, len(flow.heap), flow.num_bytes, now_seconds - oldest)
