"""Lets plugins hear the engines' KV events, for as long as a configuration has them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from picker.errors import PickerError
from picker.framework.interfaces import KvEventConsumer
from picker.kvevents.listener import KvEventListener
from picker.metrics.families import KvSeries
from picker.pool.datastore import Datastore

log = logging.getLogger(__name__)

RETRY_SECONDS = 5.0  # after an address could not be listened at


class KvListening:
    """Owns one listener, in a task, for each plugin that wants KV events."""

    def __init__(self, datastore: Datastore, series: KvSeries | None = None) -> None:
        self._datastore, self._series = datastore, series
        self._wanted: Mapping[str, KvEventConsumer] = {}
        self._running: dict[str, tuple[KvEventConsumer, asyncio.Task[None]]] = {}
        self._changed = asyncio.Event()

    def use(self, plugins: Mapping[str, object]) -> None:
        """Feed those of `plugins`, by name, that want KV events; no others from now on."""
        self._wanted = {
            name: plugin for name, plugin in plugins.items() if isinstance(plugin, KvEventConsumer)
        }
        self._changed.set()

    async def run(self) -> None:
        """Listen until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                self._changed.clear()
                gone = [
                    name
                    for name, (consumer, _) in self._running.items()
                    if self._wanted.get(name) is not consumer
                ]
                tasks = [self._running.pop(name)[1] for name in gone]
                for task in tasks:
                    task.cancel()
                if tasks:
                    await asyncio.wait(tasks)  # so that their addresses are free again
                for name, consumer in self._wanted.items():
                    if name not in self._running:
                        task = group.create_task(self._listen(name, consumer), name=f"kv {name}")
                        self._running[name] = (consumer, task)
                await self._changed.wait()

    async def _listen(self, name: str, consumer: KvEventConsumer) -> None:
        while True:
            try:
                await KvEventListener(consumer, self._datastore, series=self._series).run()
            except PickerError as error:
                log.error("plugin '%s': %s", name, error)
            await asyncio.sleep(RETRY_SECONDS)
