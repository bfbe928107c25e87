"""Follows the configuration file: a change is applied as a whole, or changes nothing."""

import logging
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path

from picker.config.findings import Finding
from picker.config.load import MAX_CONFIG_BYTES, LoadedConfig, load_config
from picker.errors import ConfigError
from picker.file_changes import moments_to_look
from picker.metrics.picker_metrics import PickerMetrics

log = logging.getLogger(__name__)

Apply = Callable[[LoadedConfig], tuple[Finding, ...]]


def read_config_file(path: Path, flag: str) -> bytes:
    """Read the file, at most one byte more than allowed. Raises `ConfigError`."""
    try:
        with path.open("rb") as file:
            # One byte more, so that the loader refuses a file that is too large.
            return file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{flag}: cannot read {path}: {error.strerror or error}") from error


class ConfigWatch:
    """Follows the file; `apply` returns warnings, or raises `ConfigError` without any effect."""

    def __init__(
        self,
        path: Path,
        content: bytes,
        apply: Apply,
        metrics: PickerMetrics,
        unix_time: Callable[[], float],
    ) -> None:
        self._path = path
        self._seen: bytes | None = content
        self._problem = ""
        self._apply = apply
        self._metrics = metrics
        self._unix_time = unix_time
        for result in ("success", "failure"):
            metrics.config_reloads_total.labels(result)
        self._succeeded()

    @property
    def problem(self) -> str | None:
        return self._problem or None

    async def run(self) -> None:
        folder, name = self._path.parent.absolute(), self._path.name
        async with aclosing(moments_to_look(folder, name)) as moments:
            async for _ in moments:
                self.check()

    def check(self) -> None:
        try:
            content = read_config_file(self._path, "--config-file")
        except ConfigError as error:
            # Once the file can be read again, even the same content has to end the problem.
            self._seen = None
            if str(error) != self._problem:
                self._failed(error)
            return
        # A touched file, or one of several events of one replacement.
        if content == self._seen:
            return
        self._seen = content
        try:
            warnings = self._apply(load_config(content, str(self._path)))
        except ConfigError as error:
            self._failed(error)
            return
        except Exception as error:  # our bug, which must not end the picker
            log.exception("%s: a bug of the picker, please report it", self._path)
            self._failed(error)
            return
        self._metrics.config_reloads_total.labels("success").inc()
        self._succeeded()
        for warning in warnings:
            log.warning("configuration: %s", warning)
        log.info("%s: the changed configuration is in use", self._path)

    def _succeeded(self) -> None:
        self._problem = ""
        self._metrics.config_last_reload_successful.set(1)
        self._metrics.config_last_reload_success_timestamp_seconds.set(self._unix_time())

    def _failed(self, error: Exception) -> None:
        self._problem = str(error)
        self._metrics.config_reloads_total.labels("failure").inc()
        self._metrics.config_last_reload_successful.set(0)
        for line in str(error).splitlines():
            log.error("%s", line)
        log.error("%s: cannot be used; the previous configuration remains in use", self._path)
