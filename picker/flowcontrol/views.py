"""Flow control at one moment, as the API and the page show it."""

from collections.abc import Mapping

import msgspec


class FlowView(msgspec.Struct, frozen=True):
    fairness_id: str
    queued_requests: int
    queued_bytes: int
    oldest_wait_seconds: float


class BandView(msgspec.Struct, frozen=True):
    """One priority band. It is held back while the pool's saturation is at least `ceiling`."""

    priority: int
    queued_requests: int
    queued_bytes: int
    max_requests: int
    max_bytes: int
    ceiling: float
    flows: tuple[FlowView, ...] = ()


class QueuesView(msgspec.Struct, frozen=True):
    """Flow control at one moment; without flow control `is_on` is false and the rest is empty.

    Bytes are those of bodies, memory is all that waiting requests take. `outcomes` counts requests
    by how their time in the queue ended. `bands` are sorted, the highest first.
    """

    is_on: bool = False
    detector: str = ""
    saturation: float = 0.0
    stale_endpoints: int = 0
    queued_requests: int = 0
    queued_bytes: int = 0
    queued_memory_bytes: int = 0
    under_way: int = 0
    max_requests: int | None = None
    max_bytes: int | None = None
    max_memory_bytes: int | None = None
    dispatched_per_second: float = 0.0
    outcomes: Mapping[str, int] = {}
    bands: tuple[BandView, ...] = ()
