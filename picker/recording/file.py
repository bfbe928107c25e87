"""The file that decisions are recorded in: lines are gathered here and written by a thread.

Theory of operation. `write` appends to a buffer and returns; `run` hands the buffer to the thread
every so often, at the latest when there is much of it. Whoever asks for a decision never waits for
the disk. Lines build upon those before them, so a loss breaks the file off: when a batch cannot be
written, the file is cut back to the end of the batch before it, and what was gathered since is
dropped as well; when the disk is so slow that too much waits, nothing more is taken. Either way the
file `is_broken` until who writes begins anew, with lines that need none before them.

The file never grows beyond its size: the line that would make it so is not taken, a last one says
that the recording has ended, and nothing is taken after that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path
from queue import SimpleQueue

from picker.metrics.families import RecordingSeries
from picker.recording.disk import DiskWriter, LineBatch, Progress, open_recording
from picker.recording.lines import Stop, encoded

log = logging.getLogger(__name__)

FLUSH_SECONDS = 0.2
LARGE_BATCH_BYTES = 4 * 2**20
MAX_WAITING_BYTES = 64 * 2**20
CLOSE_SECONDS = 10.0  # for what is still to be written at the end
STOP_BYTES = 200  # room for the last line
COMPLAINT_SECONDS = 5.0


class RecordingFile:
    """Owns the buffer, and the thread that owns the file. For one event loop."""

    def __init__(self, path: Path, max_bytes: int, series: RecordingSeries) -> None:
        """Opens the file. Raises `ConfigError` for one that cannot be added to."""
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
        """Whether the recording goes on."""
        return self._is_open

    @property
    def is_broken(self) -> bool:
        """Whether lines were lost; none are taken until `begin_anew`."""
        return self._is_cut_off or self._progress.failed_epoch >= self._epoch

    def begin_anew(self) -> int:
        """Take lines again after a loss; the next must need none before them. How many were
        lost since it was last asked.
        """
        self._lose(len(self._buffer))
        self._clear()
        self._is_cut_off = False
        with self._progress.lock:
            self._epoch += 1
            lost, self._progress.lost = self._progress.lost, 0
        return lost

    def write(self, line: bytes, now_seconds: float) -> None:
        """Take a line. It is lost while the file is broken; nothing happens after the end."""
        if not self._is_open:
            return
        if self.is_broken:
            self._lose(1)
            return
        claimed = self._progress.claimed_bytes + self._buffered_bytes
        if claimed + len(line) + STOP_BYTES > self._max_bytes:
            text = "%s has reached its size of %d bytes: the recording ends, requests go on"
            log.warning(text, self._path, self._max_bytes)
            self._end("size", now_seconds)
        elif self._progress.waiting_bytes + self._buffered_bytes > MAX_WAITING_BYTES:
            self.lose("the disk is too slow", now_seconds)
        else:
            self._take(line)

    def lose(self, why: str, now_seconds: float) -> None:
        """A line is lost before it was written: break the file off after those before it."""
        if not self._is_open:
            return
        self.hand_over()
        self._is_cut_off = True
        self._lose(1)
        if self._complained_at is None or now_seconds - self._complained_at > COMPLAINT_SECONDS:
            self._complained_at = now_seconds
            log.warning("%s: lines are lost: %s", self._path, why)

    def hand_over(self) -> None:
        """Let the thread write what was gathered."""
        if not self._buffer:
            return
        batch = LineBatch(self._epoch, b"".join(self._buffer), len(self._buffer))
        with self._progress.lock:
            self._progress.waiting_bytes += len(batch.data)
            self._progress.claimed_bytes += len(batch.data)
        self._clear()
        self._batches.put(batch)

    async def run(self) -> None:
        """Hand over what is gathered, until cancelled."""
        while True:
            self._much.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FLUSH_SECONDS):
                    await self._much.wait()
            self.hand_over()

    async def close(self, now_seconds: float) -> None:
        """End the recording, unless it has ended; returns when all is written, or too slowly."""
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
