"""The directory of a run: whether it can be written to, and that only one run is at work in it."""

from __future__ import annotations

import contextlib
import fcntl
import tempfile
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from worker.errors import ConfigError

# Below a run's directory: all that is only needed until the head is there.
WORK = "training"


def probe(directory: Path) -> None:
    """Make a directory and write to it; `ConfigError` where that cannot be done."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(b"?")
    except OSError as error:
        raise _unwritable(directory, error) from error


@contextlib.contextmanager
def occupied(directory: Path) -> Iterator[None]:
    """Keep other runs out of `directory` while the block runs. What it fails to read or write there
    is a `ConfigError`, and so is another run that is at work.
    """
    try:
        (directory / WORK).mkdir(parents=True, exist_ok=True)
        with (directory / WORK / ".lock").open("w") as file:
            _lock(file.fileno(), directory)
            yield
    except (OSError, SafetensorError) as error:
        raise _unwritable(directory, error) from error


def _lock(descriptor: int, directory: Path) -> None:
    """Lock until the file is closed, which the end of the process does too."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ConfigError(
            f"another train-draft is at work in {directory}; wait for it, or give another --out"
        ) from error


def _unwritable(directory: Path, error: OSError | SafetensorError) -> ConfigError:
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return ConfigError(
        f"--out {directory}: cannot be used ({reason}); make room there or make it writable, or"
        " give another --out"
    )
