"""Failures of plugins: counted each, logged with moderation."""

from __future__ import annotations

import logging
from collections.abc import Callable

from picker.requestcontrol.observer import RequestObserver

log = logging.getLogger(__name__)

LOG_INTERVAL_SECONDS = 5.0
# All that a client learns of a failure: what was raised is of the code, and may quote anything.
PLUGIN_FAILED = "a plugin failed; see the endpoint picker's log"


class PluginLog:
    """Counts every failure and logs one per plugin every few seconds.

    A plugin that fails fails with every request; a traceback each would be the next failure. Owns
    the times of the last log lines.
    """

    __slots__ = ("_clock", "_logged", "_observer")

    def __init__(self, observer: RequestObserver, clock: Callable[[], float]) -> None:
        self._observer = observer
        self._clock = clock
        self._logged: dict[str, float] = {}

    def exception(self, plugin: object, error: Exception, consequence: str) -> None:
        """`plugin` raised `error`; `consequence` says what happens to the request."""
        name = plugin_name(plugin)
        self._observer.plugin_failed(name)
        now, last = self._clock(), self._logged.get(name)
        if last is not None and now - last < LOG_INTERVAL_SECONDS:
            return
        self._logged[name] = now
        if isinstance(error, TimeoutError):
            log.warning("%s took too long; %s", name, consequence)
        else:
            log.error("%s failed; %s", name, consequence, exc_info=error)


def plugin_name(plugin: object) -> str:
    """What the configuration calls a plugin, where what measures it (`inner`) knows; its class."""
    while (inner := getattr(plugin, "inner", None)) is not None:
        name = getattr(plugin, "name", None)
        if isinstance(name, str):
            return name
        plugin = inner
    return type(plugin).__name__
