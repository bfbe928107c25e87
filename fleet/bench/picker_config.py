"""Configurations for a running picker, written into the file that it follows."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from fleet.errors import FleetError
from fleet.picker_views import NoPickerError
from fleet.policies import policy
from picker.admin.views import ConfigView
from picker.config.build import DEFAULT_CONFIG

PATIENCE_SECONDS = 10.0
POLL_SECONDS = 0.05
Look = Callable[[], ConfigView]
_NEEDS = (
    "--compare needs a picker that follows a file which is here under the same path, as of "
    "`pointsman up --config /a/path.yaml`; --url finds that of a fleet of this machine, --picker "
    "names another by its HTTP port (`pointsman picker --metrics-port`, 9090 by default)"
)


class FollowedConfig:
    """A context manager that restores the file that a picker follows. Raises `FleetError`."""

    def __init__(self, look: Look) -> None:
        self._look = look
        try:
            view = look()
        except NoPickerError as error:
            raise FleetError(f"{error}; {_NEEDS}") from error
        self._path = Path(view.source)
        self._original = self._path.read_bytes() if self._path.is_file() else b""
        # The path may be one of another machine: only what the picker has read is its file.
        if self._original.decode(errors="replace") != view.written or not self._original:
            raise FleetError(f"{_NEEDS}; this one's is {view.source}")

    def __enter__(self) -> FollowedConfig:
        return self

    def __exit__(self, *_: object) -> None:
        self._write(self._original)

    async def use(self, text: bytes, name: str) -> None:
        """Return once the picker uses the configuration. Raises `FleetError` if it rejects it."""
        wanted, before = text.decode(errors="replace"), self._look().last_error
        self._write(text)
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                while (view := self._look()).written != wanted:
                    if view.last_error not in (None, before):  # of this configuration
                        raise FleetError(f"the picker rejects {name}: {view.last_error}")
                    await asyncio.sleep(POLL_SECONDS)
        except TimeoutError as error:
            seconds = f"{PATIENCE_SECONDS:g} s"
            raise FleetError(f"the picker has not taken {name} in {seconds}") from error

    def _write(self, text: bytes) -> None:
        unfinished = self._path.with_name(f".{self._path.name}.bench")
        try:
            unfinished.write_bytes(text)
            os.replace(unfinished, self._path)
        except OSError as error:
            why = error.strerror or error
            raise FleetError(f"cannot write the picker's file {self._path}: {why}") from error


def read_configs(names: Sequence[str]) -> tuple[bytes, ...]:
    """Read configurations by file, or by a name of `simulate --policies`. Raises `UsageError`."""
    every = [policy(name, "--compare")[1] for name in names]
    return tuple(DEFAULT_CONFIG if one is None else one.encode() for one in every)
