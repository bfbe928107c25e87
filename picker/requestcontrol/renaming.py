"""Restores in a response the model name that the client asked for.

The name is replaced wherever a member `"model"` has it, without decoding the body. The end of a
piece that could begin such a member is held back until the next piece.
"""

import json

_KEY = b'"model"'
_SEPARATORS = (b":", b": ", b" :", b" : ")


class ModelRenamer:
    """Replaces one model name by another in one response. Owns the bytes held back."""

    __slots__ = ("_held", "_longest", "_openings", "_replacement")

    def __init__(self, served: str, asked: str) -> None:
        """`served` is the name that the endpoint uses, `asked` the name for the client."""
        texts = [json.dumps(served), json.dumps(served, ensure_ascii=False)]
        texts += [text.replace("/", "\\/") for text in texts]
        # No regular expression: the name may come from a client, and compiling takes far longer
        # than searching. A spelling ends with its quotation mark, so none begins another one.
        self._openings = tuple(
            (_KEY + separator, _KEY + separator + name)
            for name in sorted({text.encode(errors="surrogatepass") for text in texts})
            for separator in _SEPARATORS
        )
        self._longest = max(len(whole) for _, whole in self._openings)
        self._replacement = json.dumps(asked).encode()
        self._held = b""

    def feed(self, data: bytes, is_last: bool) -> bytes:
        """Take a piece; return the bytes for the client, with the last piece all of them."""
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
        at = data.find(b'"', max(start, len(data) - self._longest + 1))
        while at >= 0:
            if _KEY.startswith(data[at : at + len(_KEY)]):
                rest = data[at:]
                if any(whole.startswith(rest) for _, whole in self._openings):
                    return at
            at = data.find(b'"', at + 1)
        return len(data)
