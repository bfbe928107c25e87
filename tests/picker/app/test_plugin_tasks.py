"""Tasks of plugins: flushes at their interval, and KV events."""

import asyncio
import time
from functools import partial
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from picker.app.plugin_tasks import PluginTasks, flush, listen_to_engines
from picker.framework.interfaces import KvEventFeed
from picker.metrics.picker_metrics import PickerMetrics
from picker.pool.datastore import Datastore
from picker.types import Endpoint
from tests.support.picker.kv_scene import Notebook


def _has(book: Notebook, payload: str) -> bool:
    return any(what[-1] == payload for what in book.received)


async def test_a_plugin_of_a_new_configuration_takes_over_the_address(tmp_path: Path) -> None:
    feed = KvEventFeed(f"ipc://{tmp_path}/kv", "kv@")
    datastore = Datastore()
    datastore.set_endpoints([Endpoint("a", "10.0.0.1", 8000)])
    listening = PluginTasks(partial(listen_to_engines, datastore, PickerMetrics().kv))
    task = asyncio.create_task(listening.run())
    with zmq.asyncio.Context() as context:
        engine = context.socket(zmq.XPUB)
        engine.setsockopt(zmq.XPUB_VERBOSE, 1)
        engine.setsockopt(zmq.RECONNECT_IVL, 10)
        engine.connect(feed.bind_address)
        number = 0
        try:
            async with asyncio.timeout(60):
                for consumer in (Notebook(feed=feed), Notebook(feed=feed)):
                    listening.use({"p": consumer})
                    while await engine.recv() != b"\x01kv@":  # the previous consumer unsubscribes
                        continue
                    for _ in range(2):
                        frames = (b"kv@10.0.0.1:8000@m", number.to_bytes(8, "big"), b"%d" % number)
                        await engine.send_multipart(frames)
                        await consumer.until(partial(_has, consumer, f"{number}"))
                        listening.use({"p": consumer})
                        number += 1
        finally:
            engine.close(linger=0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


PATIENCE_SECONDS = 120.0


class Flushed:
    def __init__(self, interval_seconds: float = 0.001) -> None:
        self.flush_interval_seconds = interval_seconds
        self.times: list[tuple[float, float]] = []
        self.flushed = asyncio.Event()

    async def flush(self, now_seconds: float, unix_seconds: float) -> None:
        self.times.append((now_seconds, unix_seconds))
        self.flushed.set()
        if len(self.times) == 1:
            raise ValueError("the first one fails")


async def flushed(plugin: Flushed) -> None:
    plugin.flushed.clear()
    await asyncio.wait_for(plugin.flushed.wait(), PATIENCE_SECONDS)


async def test_each_plugin_is_flushed_repeatedly(caplog: pytest.LogCaptureFixture) -> None:
    one, other = Flushed(), Flushed()
    flushes = PluginTasks(flush)
    flushes.use({"one": one, "other": other})
    async with asyncio.TaskGroup() as group:
        running = group.create_task(flushes.run())
        for _ in range(3):
            await flushed(one)
            await flushed(other)
        await flushes.end(running)
    monotonic, unix = one.times[-1]
    assert 0 <= time.monotonic() - monotonic < unix <= time.time()
    assert any("plugin 'one'" in record.message for record in caplog.records)


@pytest.mark.looptime
async def test_a_replaced_or_stopped_plugin_is_flushed_once_more() -> None:
    first, second, same = Flushed(3600), Flushed(3600), Flushed(3600)
    flushes = PluginTasks(flush)
    flushes.use({"a": first, "same": same})
    async with asyncio.TaskGroup() as group:
        running = group.create_task(flushes.run())
        await asyncio.sleep(0)
        flushes.use({"a": second, "same": same})
        await flushed(first)
        assert (len(first.times), len(second.times), len(same.times)) == (1, 0, 0)
        await asyncio.sleep(0.01)  # until the second task has begun
        await flushes.end(running)
    assert (len(first.times), len(second.times), len(same.times)) == (1, 1, 1)
