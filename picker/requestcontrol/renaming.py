"""Gives a response back the model name that the client asked with.

Theory of operation: a JSON response names its model in a member `"model"`; in a stream of events
every event does. The bytes of that member are replaced wherever they stand, without decoding
anything. The body comes in pieces cut anywhere, so the end of a piece that could be the beginning
of such a member is held back until the next piece tells; it is never longer than the member itself.
Pieces as servers send them end after an event, and nothing is held back then.
"""

from __future__ import annotations

import json
import re

_SEPARATORS = (":", ": ", " :", " : ")


class ModelRenamer:
    """Replaces one model name by another in one response. Owns what is held back."""

    __slots__ = ("_held", "_member", "_openings", "_replacement")

    def __init__(self, served: str, asked: str) -> None:
        """`served` is the name that the endpoint knows, `asked` what the client is told."""
        texts = [json.dumps(served), json.dumps(served, ensure_ascii=False)]
        texts += [text.replace("/", "\\/") for text in texts]
        spellings = {text.encode(errors="surrogatepass") for text in texts}
        names = b"|".join(re.escape(name) for name in sorted(spellings))
        self._member = re.compile(rb'("model" ?: ?)(?:' + names + rb")")
        self._openings = tuple(
            b'"model"' + separator.encode() + name
            for separator in _SEPARATORS
            for name in spellings
        )
        self._replacement = json.dumps(asked).encode()
        self._held = b""

    def feed(self, data: bytes, is_last: bool) -> bytes:
        """What can go on to the client of everything fed so far; all of it with the last piece."""
        if self._held:
            data = self._held + data
            self._held = b""
        pieces: list[bytes] = []
        start = 0
        for found in self._member.finditer(data):
            pieces += (data[start : found.end(1)], self._replacement)
            start = found.end()
        end = len(data) if is_last else self._settled(data, start)
        self._held = data[end:]
        if not pieces and end == len(data):
            return data
        pieces.append(data[start:end])
        return b"".join(pieces)

    def _settled(self, data: bytes, start: int) -> int:
        """Where in `data`, from `start` on, a member may begin that is not complete yet."""
        longest = max(map(len, self._openings))
        at = data.find(b'"', max(start, len(data) - longest + 1))
        while at >= 0:
            rest = data[at:]
            if any(opening.startswith(rest) for opening in self._openings):
                return at
            at = data.find(b'"', at + 1)
        return len(data)
