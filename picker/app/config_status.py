"""What people are told of the configuration in use."""

from __future__ import annotations

import time
from collections.abc import Callable

from picker.admin.sources import ConfigView
from picker.app.in_use import ConfigInUse
from picker.config.build import Assembly
from picker.config.show import aligned, effective_lines
from picker.config.watch import ConfigWatch


class ConfigStatus:
    """Knows since when a configuration is in use. `problem` says what is wrong with a later one
    that could not be put to use; None: there is none.
    """

    def __init__(
        self,
        config: ConfigInUse,
        problem: Callable[[], str | None],
        unix_time: Callable[[], float] = time.time,
    ) -> None:
        self._config = config
        self._problem = problem
        self._unix_time = unix_time
        self._since = unix_time()
        config.subscribe(self._changed)

    def view(self) -> ConfigView:
        """It, with its defaults and where each line is from."""
        assembly = self._config.assembly
        loaded = assembly.loaded
        return ConfigView(
            source=loaded.source.name,
            written=loaded.content.decode(errors="replace"),
            effective=aligned(effective_lines(loaded, assembly), with_origin=True),
            loaded_unix_seconds=self._since,
            warnings=tuple(str(warning) for warning in assembly.warnings),
            last_error=self._problem(),
        )

    def _changed(self, _assembly: Assembly) -> None:
        self._since = self._unix_time()


def problem_of(watch: ConfigWatch | None) -> Callable[[], str | None]:
    """Asks what follows the configuration's file, if anything does."""
    return lambda: None if watch is None else watch.problem
