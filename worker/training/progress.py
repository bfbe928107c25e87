"""A line of progress: rewritten in a terminal, and repeated every 15 s elsewhere."""

from collections.abc import Callable
from typing import TextIO

_BAR_CELLS = 24
_TERMINAL_SECONDS, _LOG_SECONDS = 0.2, 15.0


class ProgressLine:
    """Reports one stage after the other on a stream. `clock` is in seconds, monotonic."""

    def __init__(self, stream: TextIO, clock: Callable[[], float]) -> None:
        self._stream = stream
        self._clock = clock
        self._stage = ""
        self._began = 0.0
        self._first: float | None = None
        self._last_shown: float | None = None

    def begin(self, stage: str, done: float | None = None) -> None:
        """Begin a stage, of which `done` existed before (None: the number of the first update)."""
        self._stage, self._began, self._first = stage, self._clock(), done
        self._last_shown = None

    def update(self, done: float, total: float, note: str = "") -> None:
        """Report the progress of the stage. Most calls write nothing."""
        now = self._clock()
        if self._first is None:
            self._first, self._began = done, now
        pause = _TERMINAL_SECONDS if self._stream.isatty() else _LOG_SECONDS
        if self._last_shown is not None and now - self._last_shown < pause and done < total:
            return
        self._last_shown = now
        share = min(1.0, done / total) if total else 1.0
        filled = int(share * _BAR_CELLS)
        bar = "█" * filled + "·" * (_BAR_CELLS - filled)
        left = self._left(done - self._first, total - done, now)
        self._write(f"{self._stage} {bar} {share:4.0%}  {note}{left}")

    def say(self, text: str) -> None:
        self._write(text)
        if self._stream.isatty():
            self._stream.write("\n")

    def end(self) -> None:
        if self._stream.isatty():
            self._stream.write("\n")
            self._stream.flush()

    def _left(self, gained: float, missing: float, now: float) -> str:
        spent = now - self._began
        if gained <= 0 or spent <= 0 or missing <= 0:
            return ""
        minutes, seconds = divmod(int(missing / gained * spent), 60)
        return f"  {minutes}:{seconds:02d} left"

    def _write(self, text: str) -> None:
        self._stream.write(f"\r\x1b[2K{text}" if self._stream.isatty() else f"{text}\n")
        self._stream.flush()
