"""The file that decisions are recorded in: lines are collected here and written by a thread.

`write` appends to a buffer and returns; `run` hands the buffer to the thread. A request never waits
for the disk. Lines build upon those before them, so a loss ends the readable part: when a batch
cannot be written, the file is truncated to the end of the preceding batch, and everything collected
since is dropped too; when the disk is too slow, no more lines are accepted. Either way the file
`is_broken` until the recorder begins anew, with lines that need none before them.

The line that would exceed the size limit is replaced by one which says that the recording has
ended.
"""

import asyncio
import contextlib
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

from picker.errors import ConfigError
from picker.metrics.picker_metrics import RecordingSeries
from picker.recording.lines import UNREADABLE, Header, Stop, decoded, encoded

log = logging.getLogger(__name__)

FLUSH_SECONDS = 0.2
LARGE_BATCH_BYTES = 4 * 2**20
MAX_WAITING_BYTES = 64 * 2**20  # bounds the memory when the disk is slow
CLOSE_SECONDS = 10.0  # for the last writes
STOP_BYTES = 200  # room for the last line
COMPLAINT_SECONDS = 5.0
OWNER_ONLY = 0o600
_FIRST_LINE_BYTES = 16 * 2**20  # a configuration is far smaller


@dataclass(frozen=True, slots=True)
class LineBatch:
    """Lines on their way to the disk. If a batch fails, later ones of its epoch are dropped."""

    epoch: int
    data: bytes
    lines: int


@dataclass(slots=True)
class Progress:
    """State shared by the thread and the event loop; changed under `lock`. `waiting_bytes` were
    handed over and not yet written, `claimed_bytes` are these and the size of the file. `lost`
    counts lines that no `Lost` line reports yet.
    """

    claimed_bytes: int = 0
    waiting_bytes: int = 0
    failed_epoch: int = -1
    lost: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


class RecordingFile:
    """Owns the buffer, and the thread that owns the file. For one event loop."""

    def __init__(self, path: Path, max_bytes: int, series: RecordingSeries) -> None:
        self._path, self._max_bytes, self._series = path, max_bytes, series
        fd, size = open_recording(path)
        self._progress = Progress(claimed_bytes=size)
        self._batches: SimpleQueue[LineBatch | None] = SimpleQueue()
        self._thread = DiskWriter(path, (fd, size), self._batches, self._progress, series)
        self._buffer: list[bytes] = []
        self._buffered_bytes = 0
        self._epoch = 0
        self._is_open, self._is_cut_off = True, False
        self._complained_at: float | None = None
        self._much = asyncio.Event()
        self._thread.start()
        series.active.set(1)

    @property
    def is_open(self) -> bool:
        return self._is_open

    @property
    def is_broken(self) -> bool:
        """True after a loss; no lines are accepted until `begin_anew`."""
        return self._is_cut_off or self._progress.failed_epoch >= self._epoch

    def begin_anew(self) -> int:
        """Accept lines again after a loss; return the number of lines lost since the last call."""
        self._lose(len(self._buffer))  # they build upon the lost ones
        self._clear()
        self._is_cut_off = False
        # Batches of the old epoch that still wait are dropped by the thread.
        with self._progress.lock:
            self._epoch += 1
            lost, self._progress.lost = self._progress.lost, 0
        return lost

    def write(self, line: bytes, now_seconds: float) -> None:
        """Accept a line. It is lost while the file is broken, and ignored after the end."""
        if not self._is_open:
            return
        if self.is_broken:
            self._lose(1)
            return
        claimed = self._progress.claimed_bytes + self._buffered_bytes
        if claimed + len(line) + STOP_BYTES > self._max_bytes:
            text = "%s has reached its size of %d bytes: the recording ends, requests continue"
            log.warning(text, self._path, self._max_bytes)
            self._end("size", now_seconds)
        elif self._progress.waiting_bytes + self._buffered_bytes > MAX_WAITING_BYTES:
            self.lose("the disk is too slow", now_seconds)
        else:
            self._take(line)

    def lose(self, why: str, now_seconds: float) -> None:
        """Count a line that was lost before it was written, and accept no more."""
        if not self._is_open:
            return
        self.hand_over()  # the lines before the loss are still valid
        self._is_cut_off = True
        self._lose(1)
        if self._complained_at is None or now_seconds - self._complained_at > COMPLAINT_SECONDS:
            self._complained_at = now_seconds
            log.warning("%s: lines are lost: %s", self._path, why)

    def hand_over(self) -> None:
        if not self._buffer:
            return
        batch = LineBatch(self._epoch, b"".join(self._buffer), len(self._buffer))
        with self._progress.lock:
            self._progress.waiting_bytes += len(batch.data)
            self._progress.claimed_bytes += len(batch.data)
        self._clear()
        self._batches.put(batch)

    async def run(self) -> None:
        while True:
            self._much.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FLUSH_SECONDS):
                    await self._much.wait()
            self.hand_over()

    async def close(self, now_seconds: float) -> None:
        """End the recording; wait until everything is written, `CLOSE_SECONDS` at most."""
        if self._is_open:
            self._end("ended", now_seconds)
        self._batches.put(None)
        await asyncio.to_thread(self._thread.join, CLOSE_SECONDS)

    def _end(self, reason: str, now_seconds: float) -> None:
        line = encoded(Stop(reason, now_seconds))
        claimed = self._progress.claimed_bytes + self._buffered_bytes
        # There is always room for it, unless the file was full when it was opened.
        if not self.is_broken and claimed + len(line) <= self._max_bytes:
            self._take(line)
        self.hand_over()
        self._is_open = False
        self._series.active.set(0)

    def _take(self, line: bytes) -> None:
        self._buffer.append(line)
        self._buffered_bytes += len(line)
        if self._buffered_bytes >= LARGE_BATCH_BYTES:
            self._much.set()

    def _lose(self, lines: int) -> None:
        if lines:
            with self._progress.lock:
                self._progress.lost += lines
                self._series.lost_lines_total.inc(lines)

    def _clear(self) -> None:
        self._buffer = []
        self._buffered_bytes = 0


def open_recording(path: Path) -> tuple[int, int]:
    """Create the file, readable by its owner only, or open an existing recording for another run.
    Return the descriptor and the size. Raises `ConfigError`.
    """
    # O_NONBLOCK: opening a pipe would wait for its reader.
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
    with _as_config_error(path):
        fd = os.open(path, flags, OWNER_ONLY)
    try:
        with _as_config_error(path):
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise ConfigError(f"--record: {path} is no regular file")
            # The kernel releases the lock when the process dies, so none is ever stale.
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd, _size_for_another_run(fd, path)
    except BaseException:
        os.close(fd)
        raise


@contextmanager
def _as_config_error(path: Path) -> Iterator[None]:
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
    except UNREADABLE:
        is_recording = False
    if not is_recording:
        raise ConfigError(f"--record: {path} exists and is no recording")
    if os.pread(fd, 1, size - 1) != b"\n":  # the picker was killed while it wrote
        size += os.pwrite(fd, b"\n", size)
    return size


class DiskWriter(threading.Thread):
    """Writes batches until None comes. A daemon: a hanging disk must not prevent the exit."""

    def __init__(
        self,
        path: Path,
        file: tuple[int, int],
        batches: SimpleQueue[LineBatch | None],
        progress: Progress,
        series: RecordingSeries,
    ) -> None:
        super().__init__(name="recording", daemon=True)
        self._path = path
        self._fd, self._size = file
        self._batches, self._progress, self._series = batches, progress, series
        self._is_failing = False

    def run(self) -> None:
        try:
            while (batch := self._batches.get()) is not None:
                if batch.epoch <= self._progress.failed_epoch:
                    self._drop(batch)
                else:
                    self._write(batch)
        finally:
            os.close(self._fd)

    def _write(self, batch: LineBatch) -> None:
        end = self._size
        try:
            view = memoryview(batch.data)
            while view:
                # At an offset of our own: after a failure the file ends there again.
                written = os.pwrite(self._fd, view, end)
                end, view = end + written, view[written:]
        except OSError as error:
            self._fail(batch, error)
            return
        self._size = end
        with self._progress.lock:
            self._progress.waiting_bytes -= len(batch.data)
        self._series.bytes_total.inc(len(batch.data))
        if self._is_failing:
            self._is_failing = False
            log.warning("%s: lines are written again", self._path)

    def _fail(self, batch: LineBatch, error: OSError) -> None:
        if not self._is_failing:
            self._is_failing = True
            text = "%s: cannot be written, lines are lost until it can: %s"
            log.warning(text, self._path, error.strerror)
        try:
            os.ftruncate(self._fd, self._size)
        except OSError:
            log.warning("%s: a half-written line remains at byte %d", self._path, self._size)
        with self._progress.lock:
            self._progress.failed_epoch = batch.epoch
        self._drop(batch)

    def _drop(self, batch: LineBatch) -> None:
        with self._progress.lock:
            self._progress.waiting_bytes -= len(batch.data)
            self._progress.claimed_bytes -= len(batch.data)
            self._progress.lost += batch.lines
            self._series.lost_lines_total.inc(batch.lines)
