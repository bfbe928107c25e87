"""Failures of plugins: each is counted, few are logged."""

import logging
from collections.abc import Callable

import msgspec

from picker.decisions.decision import Watchers

log = logging.getLogger(__name__)

LOG_INTERVAL_SECONDS = 5.0
# The only text for clients: an exception concerns the code, and may quote confidential values.
PLUGIN_FAILED = "a plugin failed; see the endpoint picker's log"


class PluginLog(msgspec.Struct, eq=False):
    """Counts every failure, and logs one per plugin every few seconds.

    A broken plugin fails with every request; a traceback for each would fill the disk.
    """

    _watchers: Watchers
    _clock: Callable[[], float]
    _logged: dict[str, float] = {}  # when each plugin was logged last

    def exception(self, name: str, error: Exception, consequence: str) -> None:
        for watch in self._watchers.plugin_failed:
            watch(name)
        now, last = self._clock(), self._logged.get(name)
        if last is not None and now - last < LOG_INTERVAL_SECONDS:
            return
        self._logged[name] = now
        if isinstance(error, TimeoutError):
            log.warning("%s took too long; %s", name, consequence)
        else:
            log.error("%s failed; %s", name, consequence, exc_info=error)
