"""Gives a response back the model name that the client asked with.

Theory of operation: a JSON response names its model in a member `"model"`; in a stream of events
every event does. The bytes of that member are replaced wherever they stand, without decoding
anything. The body comes in pieces cut anywhere, so the end of a piece that could be the beginning
of such a member is held back until the next piece tells; it is never longer than the member itself.
Pieces as servers send them end after an event, and nothing is held back then.
"""

from __future__ import annotations

import json

_KEY = b'"model"'
_SEPARATORS = (b":", b": ", b" :", b" : ")


class ModelRenamer:
    """Replaces one model name by another in one response. Owns what is held back."""

    __slots__ = ("_held", "_longest", "_openings", "_replacement")

    def __init__(self, served: str, asked: str) -> None:
        """`served` is the name that the endpoint knows, `asked` what the client is told."""
        texts = [json.dumps(served), json.dumps(served, ensure_ascii=False)]
        texts += [text.replace("/", "\\/") for text in texts]
        # No regular expression: the name may come from a client, and to compile it takes far longer
        # than to look for it. A spelling ends with its quotation mark, so none begins another one.
        self._openings = tuple(
            (_KEY + separator, _KEY + separator + name)
            for name in sorted({text.encode(errors="surrogatepass") for text in texts})
            for separator in _SEPARATORS
        )
        self._longest = max(len(whole) for _, whole in self._openings)
        self._replacement = json.dumps(asked).encode()
        self._held = b""

    def feed(self, data: bytes, is_last: bool) -> bytes:
        """What can go on to the client of everything fed so far; all of it with the last piece."""
        if self._held:
            data = self._held + data
            self._held = b""
        pieces: list[bytes] = []
        start, at = 0, data.find(_KEY)
        while at >= 0:
            for before, whole in self._openings:
                if data.startswith(whole, at):
                    pieces += (data[start:at], before, self._replacement)
                    start = at + len(whole)
                    break
            at = data.find(_KEY, max(start, at + 1))
        end = len(data) if is_last else self._settled(data, start)
        self._held = data[end:]
        if not pieces and end == len(data):
            return data
        pieces.append(data[start:end])
        return b"".join(pieces)

    def _settled(self, data: bytes, start: int) -> int:
        """Where in `data`, from `start` on, a member may begin that is not complete yet."""
        at = data.find(b'"', max(start, len(data) - self._longest + 1))
        while at >= 0:
            if _KEY.startswith(data[at : at + len(_KEY)]):
                rest = data[at:]
                if any(whole.startswith(rest) for _, whole in self._openings):
                    return at
            at = data.find(b'"', at + 1)
        return len(data)
