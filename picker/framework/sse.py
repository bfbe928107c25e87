"""Server-sent events, put together from pieces that are cut anywhere.

Source: HTML Living Standard, "Server-sent events". Lines end with LF, CR or CRLF; an empty line
ends an event; only `data` fields matter here.

Theory of operation: what has come since the last empty line is held back; nothing else is kept and
nothing is read twice. Most pieces are whole events without anything of interest, which one search
for the marker finds out. CR is turned into LF on arrival; one that ends a piece waits for the next
piece, as the LF of the same line end may begin it.
"""

from __future__ import annotations

DEFAULT_LIMIT_BYTES = 4 * 2**20


class SseEvents:
    """The events of one stream whose data contain `marker`."""

    __slots__ = ("_limit", "_marker", "_pending", "_return_held")

    def __init__(self, marker: bytes, limit_bytes: int = DEFAULT_LIMIT_BYTES) -> None:
        self._marker = marker
        self._limit = limit_bytes
        self._pending = bytearray()
        self._return_held = False

    def feed(self, data: bytes, is_last: bool) -> list[list[bytes]]:
        """The events complete with `data`, each as the values of its `data` lines.

        The end of the stream ends an event, too. Of an event longer than the limit only the lines
        that come complete beyond it are read.
        """
        if self._return_held or b"\r" in data:
            data = self._with_newlines(data, is_last)
        pending = self._pending
        if not pending and self._marker not in data and (is_last or data.endswith(b"\n\n")):
            return []
        searched = max(0, len(pending) - 1)
        pending += data
        end = len(pending) if is_last else pending.rfind(b"\n\n", searched) + 2
        if end < 2:
            if len(pending) <= self._limit:
                return []
            end = pending.rfind(b"\n") + 1
        complete = bytes(pending[:end])
        # A line that alone is longer than the limit goes, too.
        del pending[: end or None]
        return self._events(complete) if self._marker in complete else []

    def _with_newlines(self, data: bytes, is_last: bool) -> bytes:
        if self._return_held:
            data = b"\r" + data
        self._return_held = data.endswith(b"\r") and not is_last
        if self._return_held:
            data = data[:-1]
        return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")

    def _events(self, complete: bytes) -> list[list[bytes]]:
        return [
            [_value(line) for line in event.split(b"\n") if line.startswith(b"data:")]
            for event in complete.split(b"\n\n")
            if self._marker in event
        ]


def _value(line: bytes) -> bytes:
    return line[6:] if line.startswith(b"data: ") else line[5:]
