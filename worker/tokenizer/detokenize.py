"""Incremental detokenization: token ids → text, cut exactly at stop strings. Pure.

A decoder holds back an incomplete character. With stop strings, the last `longest - 1` characters
are held back too, because a match may begin there; older ones can never be part of a match.
"""

import codecs
from collections.abc import Callable, Iterable, Sequence, Set

_UTF8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The text of one sequence. Owns the undecoded bytes and the text held back."""

    def __init__(
        self,
        token_bytes: Callable[[int], bytes],
        *,
        skip_ids: Set[int] = frozenset(),
        stop: tuple[str, ...] = (),
        min_tokens: int = 0,
        include_stop: bool = False,
        strip_space: bool = False,
    ) -> None:
        """The first `min_tokens` tokens are not searched for `stop`; `include_stop` leaves the
        match in the text. Tokens in `skip_ids` have no text. `strip_space` removes a space at the
        very beginning.
        """
        self._token_bytes = token_bytes
        self._skip_ids = skip_ids
        self._stop = stop
        self._unchecked_tokens = min_tokens
        self._include_stop = include_stop
        self._hold = max((len(s) for s in stop), default=1) - 1
        self._decoder = _UTF8("replace")
        self._strip_space = strip_space
        self._held = ""
        self.matched: str | None = None
        self.num_consumed = 0  # all tokens but those after a match

    def feed(self, token_ids: Sequence[int]) -> str:
        """Take tokens and return the text that is now certain; empty once `matched` is set."""
        # The fast path of nearly all requests: one join and one decode.
        if not self._stop:
            skip, lookup = self._skip_ids, self._token_bytes
            self.num_consumed += len(token_ids)
            return self._decoded(b"".join([lookup(t) for t in token_ids if t not in skip]))
        released = []
        for token_id in token_ids:
            if self.matched is not None:
                break
            self.num_consumed += 1
            raw = b"" if token_id in self._skip_ids else self._token_bytes(token_id)
            released.append(self._push(self._decoded(raw)))
        return "".join(released)

    def finish(self) -> str:
        """Return the held text, with U+FFFD for an incomplete character. Call once, at the end."""
        if self.matched is not None:
            return ""
        tail = self._decoder.decode(b"", final=True)  # of incomplete bytes, so never a space
        if not self._stop:
            return tail
        # A match cuts the held text short and leaves nothing held.
        released = self._push(tail)
        held, self._held = self._held, ""
        return released + held

    def _decoded(self, raw: bytes) -> str:
        text = self._decoder.decode(raw)
        if self._strip_space and text:
            self._strip_space = False
            return text.removeprefix(" ")
        return text

    def _push(self, text: str) -> str:
        self._held += text
        # A match may begin in unchecked tokens and end later, so their text is held back too.
        if self._unchecked_tokens > 0:
            self._unchecked_tokens -= 1
        elif text and self._cut(len(text)):
            released, self._held = self._held, ""
            return released
        release = len(self._held) - self._hold
        if release <= 0:
            return ""
        released, self._held = self._held[:release], self._held[release:]
        return released

    def _cut(self, num_new: int) -> bool:
        """Cut the held text at the first match that ends in the `num_new` newest characters."""
        best: tuple[int, int, str] | None = None
        for string in self._stop:
            first = len(self._held) - num_new - len(string) + 1
            start = self._held.find(string, max(0, first))
            end = start + len(string)
            if start >= 0 and (best is None or end < best[1]):
                best = (start, end, string)
        if best is None:
            return False
        start, end, self.matched = best
        self._held = self._held[: end if self._include_stop else start]
        return True


def decode(
    token_bytes: Callable[[int], bytes], token_ids: Iterable[int], skip_ids: Set[int] = frozenset()
) -> str:
    """Decode a whole sequence; bytes that are not UTF-8 become U+FFFD."""
    raw = b"".join([token_bytes(t) for t in token_ids if t not in skip_ids])
    return raw.decode("utf-8", "replace")
