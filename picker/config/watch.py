"""Follow the configuration file: a change is applied as a whole, or the configuration of before
stays in use, with a log line and a metric that say so.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from watchfiles import Change, awatch

from picker.config.findings import Finding
from picker.config.load import MAX_CONFIG_BYTES, LoadedConfig, load_config
from picker.errors import ConfigError
from picker.metrics import PickerMetrics

log = logging.getLogger(__name__)

WATCH_STEP_MS = 50
WATCH_DEBOUNCE_MS = 100
RECHECK_MS = 1000  # finds what a file system without change events, or a race at start, hides

Apply = Callable[[LoadedConfig], Awaitable[tuple[Finding, ...]]]


def read_config_file(path: Path, flag: str) -> bytes:
    """What the file holds, or enough of it to see that it is too much. Raises `ConfigError`."""
    try:
        with path.open("rb") as file:
            return file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{flag}: cannot read {path}: {error.strerror or error}") from error


class ConfigWatch:
    """Owns what the file held when it was last looked at, and the metrics of reloads.

    `apply` builds a configuration and puts it to use, returning its warnings; it raises
    `ConfigError` and has then changed nothing. `unix_time` is the time of day, in seconds.
    """

    def __init__(
        self,
        path: Path,
        content: bytes,
        apply: Apply,
        metrics: PickerMetrics,
        unix_time: Callable[[], float],
    ) -> None:
        """`content` is the file's, as it is in use now."""
        self._path = path
        self._seen: bytes | None = content
        self._problem = ""
        self._apply = apply
        self._metrics = metrics
        self._unix_time = unix_time
        for result in ("success", "failure"):
            metrics.config_reloads_total.labels(result)
        self._succeeded()

    async def run(self) -> None:
        """Follow the file until cancelled.

        The directory is watched, not the file: editors and Kubernetes replace files by renaming.
        """
        stop = asyncio.Event()
        try:
            async for _ in awatch(
                self._path.parent.absolute(),
                step=WATCH_STEP_MS,
                debounce=WATCH_DEBOUNCE_MS,
                rust_timeout=RECHECK_MS,
                yield_on_timeout=True,
                stop_event=stop,
                recursive=False,
                watch_filter=self._concerns,
            ):
                await self.check()
        finally:
            stop.set()

    async def check(self) -> None:
        """Look at the file now; nothing happens while it holds what it held before."""
        try:
            content = read_config_file(self._path, "--config-file")
        except ConfigError as error:
            self._seen = None
            if str(error) != self._problem:
                self._failed(error)
            return
        if content == self._seen:
            return
        self._seen = content
        try:
            warnings = await self._apply(load_config(content, str(self._path)))
        except ConfigError as error:
            self._failed(error)
            return
        self._metrics.config_reloads_total.labels("success").inc()
        self._succeeded()
        for warning in warnings:
            log.warning("configuration: %s", warning)
        log.info("%s: the changed configuration is in use", self._path)

    def _concerns(self, _change: Change, path: str) -> bool:
        """The file itself, or the `..data` link that Kubernetes turns when a volume changes."""
        name = Path(path).name
        return name == self._path.name or name.startswith("..")

    def _succeeded(self) -> None:
        self._problem = ""
        self._metrics.config_last_reload_successful.set(1)
        self._metrics.config_last_reload_success_timestamp_seconds.set(self._unix_time())

    def _failed(self, error: ConfigError) -> None:
        self._problem = str(error)
        self._metrics.config_reloads_total.labels("failure").inc()
        self._metrics.config_last_reload_successful.set(0)
        for line in str(error).splitlines():
            log.error("%s", line)
        log.error("%s: cannot be used; the configuration of before stays in use", self._path)
