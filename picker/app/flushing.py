"""Lets plugins hand over what they gather, each at its interval."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from picker.framework.interfaces import BackgroundFlush

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Flushing:
    """A plugin that is flushed, and how to end that."""

    name: str
    plugin: BackgroundFlush
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class Flushes:
    """Owns one task for each plugin that gathers.

    `clock` is that of the hooks, `unix_time` the time of day, both in seconds.
    """

    def __init__(self, clock: Callable[[], float], unix_time: Callable[[], float]) -> None:
        self._clock = clock
        self._unix_time = unix_time
        self._wanted: Mapping[str, BackgroundFlush] = {}
        self._running: dict[str, _Flushing] = {}
        self._changed = asyncio.Event()
        self._is_over = False

    def use(self, plugins: Mapping[str, BackgroundFlush]) -> None:
        """Flush these, by name, from now on; others hand over what they have once more."""
        self._wanted = plugins
        self._changed.set()

    def stop(self) -> None:
        """Let all hand over what they have; `run` then returns."""
        self._is_over = True
        self.use({})

    async def run(self) -> None:
        """Flush until `stop`."""
        async with asyncio.TaskGroup() as group:
            while True:
                self._changed.clear()
                for name, flushing in list(self._running.items()):
                    if self._wanted.get(name) is not flushing.plugin:
                        flushing.ended.set()
                        del self._running[name]
                for name, plugin in self._wanted.items():
                    if name not in self._running:
                        self._running[name] = _Flushing(name, plugin)
                        group.create_task(self._flush(self._running[name]), name=f"flush {name}")
                if self._is_over:
                    return
                await self._changed.wait()

    async def _flush(self, flushing: _Flushing) -> None:
        plugin, ended = flushing.plugin, flushing.ended
        while not ended.is_set():
            try:
                async with asyncio.timeout(plugin.flush_interval_seconds):
                    await ended.wait()
            except TimeoutError:
                pass
            try:
                await plugin.flush(self._clock(), self._unix_time())
            except Exception:
                log.exception("plugin '%s' could not hand over what it gathered", flushing.name)
