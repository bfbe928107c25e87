"""Background tasks of plugins; each runs as long as a configuration has its plugin."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Generic, TypeAlias, TypeVar

from picker.errors import PickerError
from picker.framework.interfaces import BackgroundFlush, KvEventConsumer
from picker.kvevents.listener import KvEventListener
from picker.metrics.picker_metrics import KvSeries
from picker.pool.datastore import Datastore

log = logging.getLogger(__name__)

RETRY_SECONDS = 5.0  # after a failure to listen
END_SECONDS = 2.0  # for the last flush of plugins

P = TypeVar("P")
# Runs for the plugin of this name until the event is set.
Work: TypeAlias = Callable[[str, P, asyncio.Event], Coroutine[Any, Any, None]]


class PluginTasks(Generic[P]):
    """Owns a task for each plugin; new tasks begin once old ones have freed their addresses."""

    def __init__(self, work: Work[P]) -> None:
        self._work = work
        self._wanted: Mapping[str, P] = {}
        self._running: dict[str, tuple[P, asyncio.Event, asyncio.Task[None]]] = {}
        self._changed = asyncio.Event()
        self._is_over = False

    def use(self, plugins: Mapping[str, P]) -> None:
        self._wanted = plugins
        self._changed.set()

    async def end(self, running: asyncio.Task[None]) -> None:
        self._is_over = True
        self.use({})
        await asyncio.wait([running], timeout=END_SECONDS)
        running.cancel()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            while True:
                self._changed.clear()
                ending = []
                for name, (plugin, over, task) in tuple(self._running.items()):
                    if self._wanted.get(name) is not plugin:
                        del self._running[name]
                        over.set()
                        ending.append(task)
                # Old tasks hold addresses that new ones may need.
                if ending:
                    await asyncio.wait(ending)
                for name, plugin in self._wanted.items():
                    if name not in self._running:
                        over = asyncio.Event()
                        work = self._work(name, plugin, over)
                        task = group.create_task(work, name=f"plugin {name}")
                        self._running[name] = (plugin, over, task)
                if self._is_over:
                    return
                await self._changed.wait()


async def flush(name: str, plugin: BackgroundFlush, over: asyncio.Event) -> None:
    while not over.is_set():
        try:
            async with asyncio.timeout(plugin.flush_interval_seconds):
                await over.wait()
        except TimeoutError:
            pass
        try:
            await plugin.flush(time.monotonic(), time.time())
        except Exception:
            log.exception("plugin '%s' could not flush", name)


async def listen_to_engines(
    datastore: Datastore,
    series: KvSeries,
    name: str,
    consumer: KvEventConsumer,
    over: asyncio.Event,
) -> None:
    # Cancelled from here, since a listener waits for its sockets and not for the event.
    listening = asyncio.ensure_future(_listen(datastore, series, name, consumer))
    try:
        await over.wait()
    finally:
        listening.cancel()
        await asyncio.wait([listening])


async def _listen(
    datastore: Datastore, series: KvSeries, name: str, consumer: KvEventConsumer
) -> None:
    while True:
        try:
            await KvEventListener(consumer, datastore, series=series).run()
        except PickerError as error:
            log.error("plugin '%s': %s", name, error)
        await asyncio.sleep(RETRY_SECONDS)
