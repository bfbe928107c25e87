"""Text that comes in pieces, read by generators as if it were all there.

A parser decides by characters alone, never by where a piece ends, so what it writes is the same
however the text is cut. It yields whenever it needs text that has not come.
"""

import json
import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeAlias, TypeVar

_T = TypeVar("_T")
# Yields when it needs more text.
Parse: TypeAlias = Generator[None, None, _T]
Write: TypeAlias = Callable[[str], None]

MAX_DEPTH = 64  # of a value; as of JSON bodies
_SPACE = re.compile(r"\s*")
_JSON_SPACE = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_WORD = re.compile(r"[-+.0-9A-Za-z]+")
_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
_ESCAPES = frozenset('"\\/bfnrtu')
_HEX = frozenset("0123456789abcdefABCDEF")


class Malformed(Exception):  # noqa: N818 (internal to the parsers)
    """Raised when the text does not continue in the format in which it began."""


class Unfinished(Malformed): ...


def ignore(_: str) -> None: ...


class Scanner:
    """Owns the text that has not been read yet. Once it has `ended`, `complete` means that the
    model ended by itself, `truncated` that it reached a limit; neither: a stop string ended it. A
    call ends before each of the marks `ends`, even if its own end is missing.
    """

    def __init__(self) -> None:
        self.ended = False
        self.complete = False
        self.truncated = False
        self.ends: Sequence[str] = ()
        self._text = ""
        self._at = 0
        self._read: list[str] | None = None  # None: not remembered

    def feed(self, text: str) -> None:
        self._text += text

    def mark(self) -> None:
        self._read = []
        self._text, self._at = self._text[self._at :], 0

    def raw(self) -> str:
        raw = "".join(self._read or ()) + self._text[: self._at]
        self._read = None
        return raw

    def _more(self) -> Parse[bool]:
        if self.ended:
            return False
        if self._read is not None:
            self._read.append(self._text[: self._at])
        self._text, self._at = self._text[self._at :], 0
        yield
        return True

    def peek(self) -> Parse[str]:
        while self._at >= len(self._text):
            if not (yield from self._more()):
                return ""
        return self._text[self._at]

    def next(self) -> Parse[str]:
        character = yield from self.peek()
        if not character:
            raise Unfinished
        self._at += 1
        return character

    def looking_at(self, literal: str) -> Parse[bool]:
        while True:
            there = self._text[self._at : self._at + len(literal)]
            if len(there) == len(literal) or not literal.startswith(there):
                return there == literal
            if not (yield from self._more()):
                return False

    def skip(self, literal: str) -> Parse[bool]:
        found = yield from self.looking_at(literal)
        if found:
            self._at += len(literal)
        return found

    def expect(self, literal: str) -> Parse[None]:
        if not (yield from self.skip(literal)):
            rest = self._text[self._at :]
            raise Unfinished if self.ended and literal.startswith(rest) else Malformed

    def is_over(self) -> Parse[bool]:
        for mark in self.ends:
            if (yield from self.looking_at(mark)):
                return True
        return not (yield from self.peek()) and self.complete

    def close(self, literal: str) -> Parse[None]:
        """Read a literal that closes a part of a call; it may be missing if the call is over."""
        if not (yield from self.skip(literal)) and not (yield from self.is_over()):
            yield from self.expect(literal)

    def run(self, pattern: re.Pattern[str], write: Write = ignore) -> Parse[None]:
        """Read characters while they match the pattern, a repeated class of characters."""
        while True:
            match = pattern.match(self._text, self._at)
            if match is not None and match[0]:
                self._at = match.end()
                write(match[0])
            if self._at < len(self._text) or not (yield from self._more()):
                return

    def blanks(self, write: Write = ignore) -> Parse[None]:
        yield from self.run(_SPACE, write)

    def word(self, pattern: re.Pattern[str]) -> Parse[str]:
        pieces: list[str] = []
        yield from self.run(pattern, pieces.append)
        if not pieces:
            raise Malformed if (yield from self.peek()) else Unfinished
        return "".join(pieces)

    def until(self, literals: Sequence[str], write: Write) -> Parse[str | None]:
        """Read up to the first literal, holding what may begin one; return it, None at the end."""
        # Without literals it must match nowhere; an empty pattern would match at once.
        pattern = re.compile("|".join(map(re.escape, literals)) or r"(?!)")
        longest = max(map(len, literals), default=1) - 1
        while True:
            match = pattern.search(self._text, self._at)
            end = len(self._text) if match is None else match.start()
            if match is None and not self.ended:
                end -= self._num_held(literals, longest)
            if end > self._at:
                write(self._text[self._at : end])
                self._at = end
            if match is not None:
                return match[0]
            if not (yield from self._more()) and self._at == len(self._text):
                return None

    def _num_held(self, literals: Sequence[str], longest: int) -> int:
        most = min(longest, len(self._text) - self._at)
        for number in range(most, 0, -1):
            tail = self._text[-number:]
            if any(literal.startswith(tail) for literal in literals):
                return number
        return 0

    def json_value(self, write: Write, depth: int = 0) -> Parse[None]:
        """Copy one JSON value, with control characters escaped and missing brackets added."""
        first = yield from self.peek()
        if first == '"':
            yield from self.json_string(write)
        elif first in ("{", "["):
            if depth >= MAX_DEPTH:
                raise Malformed
            yield from self._json_container(first, write, depth + 1)
        else:
            pieces: list[str] = []
            yield from self.run(_WORD, pieces.append)
            word = "".join(pieces)
            if not _SCALAR.fullmatch(word):
                raise Malformed if (yield from self.peek()) else Unfinished
            write(word)

    def _json_container(self, first: str, write: Write, depth: int) -> Parse[None]:
        last = "}" if first == "{" else "]"
        yield from self._copy(first, write)
        yield from self.run(_JSON_SPACE, write)
        if (yield from self.peek()) != last and not (yield from self.is_over()):
            while True:
                if first == "{":
                    yield from self.json_string(write)
                    yield from self.run(_JSON_SPACE, write)
                    yield from self._copy(":", write)
                    yield from self.run(_JSON_SPACE, write)
                yield from self.json_value(write, depth)
                yield from self.run(_JSON_SPACE, write)
                if (yield from self.peek()) != ",":
                    break
                yield from self._copy(",", write)
                yield from self.run(_JSON_SPACE, write)
        yield from self.close(last)
        write(last)

    def _copy(self, character: str, write: Write) -> Parse[None]:
        yield from self.expect(character)
        write(character)

    def json_string(self, write: Write) -> Parse[None]:
        yield from self._copy('"', write)
        while True:
            yield from self.run(_PLAIN, write)
            character = yield from self.next()
            if character == '"':
                write(character)
                return
            if character == "\\":
                write(character + (yield from self._escaped()))
            else:
                # A control character, which models write and JSON forbids.
                write(json.dumps(character)[1:-1])

    def _escaped(self) -> Parse[str]:
        kind = yield from self._one_of(_ESCAPES)
        if kind != "u":
            return kind
        for _ in range(4):
            kind += yield from self._one_of(_HEX)
        return kind

    def _one_of(self, characters: frozenset[str]) -> Parse[str]:
        if (yield from self.peek()) not in {"", *characters}:
            raise Malformed
        return (yield from self.next())

    def json_text(self) -> Parse[str]:
        """Read a JSON string and decode it. Raises `Malformed` if it is not valid Unicode."""
        pieces: list[str] = []
        yield from self.json_string(pieces.append)
        text: str = json.loads("".join(pieces))
        if not is_unicode(text):
            raise Malformed
        return text


def is_unicode(text: str) -> bool:
    """Return whether UTF-8 can encode a text: JSON can write halves of surrogate pairs."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
