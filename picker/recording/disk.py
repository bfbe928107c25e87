"""The disk's side of a recording: opening the file, and the thread that writes to it."""

from __future__ import annotations

import fcntl
import logging
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue

import msgspec

from picker.errors import ConfigError
from picker.metrics.families import RecordingSeries
from picker.recording.lines import Header, decoded

log = logging.getLogger(__name__)

OWNER_ONLY = 0o600
_FIRST_LINE_BYTES = 16 * 2**20  # a configuration is smaller by far


@dataclass(frozen=True, slots=True)
class LineBatch:
    """Lines on their way to the disk. When some cannot be written, later ones of the same epoch are
    dropped.
    """

    epoch: int
    data: bytes
    lines: int


@dataclass(slots=True)
class Progress:
    """What the thread and who gathers lines share; changed under `lock`.

    `waiting_bytes` were handed over and are not written yet, `claimed_bytes` are these and the
    file's. `lost` counts lines that nobody was told of yet.
    """

    claimed_bytes: int = 0
    waiting_bytes: int = 0
    failed_epoch: int = -1
    lost: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


def open_recording(path: Path) -> tuple[int, int]:
    """The open file, for nobody else to read, and its size. A recording is added to as another run.

    Raises `ConfigError` for a file that cannot be opened, is no recording, or is being written by
    another picker.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
    with _told_as_config_error(path):
        fd = os.open(path, flags, OWNER_ONLY)
    try:
        with _told_as_config_error(path):
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise ConfigError(f"--record: {path} is no regular file")
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd, _size_for_another_run(fd, path)
    except BaseException:
        os.close(fd)
        raise


@contextmanager
def _told_as_config_error(path: Path) -> Iterator[None]:
    try:
        yield
    except BlockingIOError:
        raise ConfigError(f"--record: another picker is writing to {path}") from None
    except OSError as error:
        raise ConfigError(f"--record: cannot write to {path}: {error.strerror}") from error


def _size_for_another_run(fd: int, path: Path) -> int:
    size = os.fstat(fd).st_size
    if not size:
        return 0
    first = os.pread(fd, _FIRST_LINE_BYTES, 0).partition(b"\n")[0]
    try:
        is_recording = isinstance(decoded(first), Header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        is_recording = False
    if not is_recording:
        raise ConfigError(f"--record: {path} is there already and is no recording")
    if os.pread(fd, 1, size - 1) != b"\n":  # the end of a picker that was killed
        size += os.pwrite(fd, b"\n", size)
    return size


class DiskWriter(threading.Thread):
    """Writes batches until it is handed None, then closes the file. Owns the file.

    A daemon: a disk that hangs must not keep the picker from ending.
    """

    def __init__(
        self,
        path: Path,
        file: tuple[int, int],
        batches: SimpleQueue[LineBatch | None],
        progress: Progress,
        series: RecordingSeries,
    ) -> None:
        """`file` is what `open_recording` returned."""
        super().__init__(name="recording", daemon=True)
        self._path = path
        self._fd, self._size = file
        self._batches, self._progress, self._series = batches, progress, series
        self._is_failing = False

    def run(self) -> None:
        """The thread's part."""
        try:
            while (batch := self._batches.get()) is not None:
                if batch.epoch <= self._progress.failed_epoch:
                    self._dropped(batch)
                else:
                    self._write(batch)
        finally:
            os.close(self._fd)

    def _write(self, batch: LineBatch) -> None:
        end = self._size
        try:
            view = memoryview(batch.data)
            while view:
                written = os.pwrite(self._fd, view, end)
                end, view = end + written, view[written:]
        except OSError as error:
            self._failed(batch, error)
            return
        self._size = end
        with self._progress.lock:
            self._progress.waiting_bytes -= len(batch.data)
        self._series.bytes_total.inc(len(batch.data))
        if self._is_failing:
            self._is_failing = False
            log.warning("%s: lines are written again", self._path)

    def _failed(self, batch: LineBatch, error: OSError) -> None:
        if not self._is_failing:
            self._is_failing = True
            text = "%s: cannot be written, lines are lost until it can: %s"
            log.warning(text, self._path, error.strerror)
        try:
            os.ftruncate(self._fd, self._size)
        except OSError:
            log.warning("%s: a half-written line stays at byte %d", self._path, self._size)
        with self._progress.lock:
            self._progress.failed_epoch = batch.epoch
        self._dropped(batch)

    def _dropped(self, batch: LineBatch) -> None:
        with self._progress.lock:
            self._progress.waiting_bytes -= len(batch.data)
            self._progress.claimed_bytes -= len(batch.data)
            self._progress.lost += batch.lines
            self._series.lost_lines_total.inc(batch.lines)
