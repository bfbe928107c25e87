"""Plugins hand over what they gather at their interval, once more at the end, and never stop it."""

from __future__ import annotations

import asyncio

import pytest

from picker.app.flushing import Flushes

PATIENCE_SECONDS = 30.0


class Gatherer:
    """Counts its flushes; the first one fails."""

    def __init__(self, interval_seconds: float = 0.001) -> None:
        self.flush_interval_seconds = interval_seconds
        self.times: list[tuple[float, float]] = []
        self.flushed = asyncio.Event()

    async def flush(self, now_seconds: float, unix_seconds: float) -> None:
        self.times.append((now_seconds, unix_seconds))
        self.flushed.set()
        if len(self.times) == 1:
            raise ValueError("the first one fails")


async def flushed(gatherer: Gatherer) -> None:
    gatherer.flushed.clear()
    await asyncio.wait_for(gatherer.flushed.wait(), PATIENCE_SECONDS)


async def test_each_plugin_is_flushed_again_and_again(caplog: pytest.LogCaptureFixture) -> None:
    """A failure is logged under its name and does not end it."""
    one, other = Gatherer(), Gatherer()
    flushes = Flushes(lambda: 5.0, lambda: 7.0)
    flushes.use({"one": one, "other": other})
    async with asyncio.TaskGroup() as group:
        group.create_task(flushes.run())
        for _ in range(3):
            await flushed(one)
            await flushed(other)
        flushes.stop()
    assert set(one.times) == {(5.0, 7.0)}
    assert any("plugin 'one'" in record.message for record in caplog.records)


async def test_who_is_replaced_or_stopped_hands_over_once_more() -> None:
    """Also when its interval is far from over."""
    first, second, kept = Gatherer(3600), Gatherer(3600), Gatherer(3600)
    flushes = Flushes(lambda: 0.0, lambda: 0.0)
    flushes.use({"a": first, "kept": kept})
    async with asyncio.TaskGroup() as group:
        group.create_task(flushes.run())
        await asyncio.sleep(0)
        flushes.use({"a": second, "kept": kept})
        await flushed(first)
        assert (len(first.times), len(second.times), len(kept.times)) == (1, 0, 0)
        flushes.stop()
    assert (len(first.times), len(second.times), len(kept.times)) == (1, 1, 1)
