"""Counts ext_proc streams by how they end. Only where that was asked for: each costs a little."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from picker.metrics.picker_metrics import PickerMetrics
from picker.rpc.calls import Method, Read, RpcError, Status, Write

_SPELT_OTHERWISE = {Status.OK: "OK", Status.CANCELLED: "Canceled"}
UNKNOWN = "Unknown"


class StreamMetrics:
    """Feeds the series of streams."""

    def __init__(self, metrics: PickerMetrics, clock: Callable[[], float]) -> None:
        """`clock` is in seconds and never goes back."""
        self._series = metrics.streams
        self._clock = clock

    def counted(self, method: Method) -> Method:
        """`method`, each call of which is counted."""

        async def call(read: Read, write: Write) -> None:
            started, code = self._clock(), UNKNOWN
            self._series.inflight.inc()
            try:
                await method(read, write)
                code = code_name(Status.OK)
            except RpcError as failure:
                code = code_name(failure.status)
                raise
            except asyncio.CancelledError:
                code = code_name(Status.CANCELLED)
                raise
            finally:
                self._series.inflight.dec()
                self._series.duration_seconds.observe(self._clock() - started)
                self._series.total.labels(code).inc()

        return call


def code_name(status: Status) -> str:
    """As Go's gRPC spells a status."""
    camel = "".join(word.capitalize() for word in status.name.split("_"))
    return _SPELT_OTHERWISE.get(status, camel)
