"""Streams are counted by how they end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from picker.extproc.stream_metrics import StreamMetrics, code_name
from picker.metrics.picker_metrics import PickerMetrics
from picker.rpc.calls import Read, RpcError, Status, Write


async def read() -> bytes | None:
    """Nothing comes."""
    return None


async def write(message: bytes) -> None:
    """Nobody listens."""


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        (None, "OK"),
        (RpcError(Status.INVALID_ARGUMENT, "no"), "InvalidArgument"),
        (RpcError(Status.UNAVAILABLE, "no"), "Unavailable"),
        (asyncio.CancelledError(), "Canceled"),
        (ZeroDivisionError(), "Unknown"),
    ],
)
async def test_a_stream_is_counted_once_whatever_ends_it(
    ending: BaseException | None, code: str
) -> None:
    """It is open while it lasts, and how long that was is told."""
    metrics, seconds = PickerMetrics(), iter((1.0, 3.5))

    def value(name: str, /, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(f"llm_d_epp_extproc_{name}", labels)

    async def method(_: Read, __: Write) -> None:
        assert value("streams_inflight") == 1
        if ending is not None:
            raise ending

    counted = StreamMetrics(metrics, lambda: next(seconds)).counted(method)
    if ending is None:
        await counted(read, write)
    else:
        with pytest.raises(type(ending)):
            await counted(read, write)
    assert value("streams_inflight") == 0
    assert value("streams_total", code=code) == 1
    assert value("stream_duration_seconds_sum") == 2.5


@pytest.mark.parametrize(
    ("status", "name"),
    [
        (Status.OK, "OK"),
        (Status.CANCELLED, "Canceled"),
        (Status.DEADLINE_EXCEEDED, "DeadlineExceeded"),
    ],
)
def test_codes_are_spelt_as_in_go(status: Status, name: str) -> None:
    """Dashboards select by them."""
    spell: Callable[[Status], str] = code_name
    assert spell(status) == name
