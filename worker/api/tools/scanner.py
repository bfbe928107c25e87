"""Text that comes in pieces, read by generators as if it were all there.

Theory of operation. A parser is a generator that reads a `Scanner` and yields whenever it needs
text that has not come. It decides by characters alone, never by where a piece ends, so what it
writes, all together, is the same however the text is cut. A `Malformed` text leaves the scanner
before the first character that does not fit; `raw` then gives back what was read since `mark`.
"""

from __future__ import annotations

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


class Malformed(Exception):  # noqa: N818 (a turn of a parser, seen by nobody else)
    """The text is not what it began like."""


class Unfinished(Malformed):
    """The text ends too early."""


def ignore(_: str) -> None:
    """A `Write` for what nobody wants."""


class Scanner:
    """Sole owner of the text that was fed and not yet read. Once it has `ended`: `complete` says
    that the model had said all, `truncated` that it had reached a limit; a stop string is neither.
    `ends` are marks before which a call ends even if what closes it is missing.
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
        """More text has come."""
        self._text += text

    def mark(self) -> None:
        """From here on `raw` remembers."""
        self._read = []
        self._text, self._at = self._text[self._at :], 0

    def raw(self) -> str:
        """What was read since the mark, which is forgotten."""
        raw = "".join(self._read or ()) + self._text[: self._at]
        self._read = None
        return raw

    def _more(self) -> Parse[bool]:
        """Wait for text behind what there is; False when there is none."""
        if self.ended:
            return False
        if self._read is not None:
            self._read.append(self._text[: self._at])
        self._text, self._at = self._text[self._at :], 0
        yield
        return True

    def peek(self) -> Parse[str]:
        """The next character; empty at the end."""
        while self._at >= len(self._text):
            if not (yield from self._more()):
                return ""
        return self._text[self._at]

    def next(self) -> Parse[str]:
        """Read one character. Raises `Unfinished`."""
        character = yield from self.peek()
        if not character:
            raise Unfinished
        self._at += 1
        return character

    def looking_at(self, literal: str) -> Parse[bool]:
        """Whether the text goes on so; reads nothing."""
        while True:
            there = self._text[self._at : self._at + len(literal)]
            if len(there) == len(literal) or not literal.startswith(there):
                return there == literal
            if not (yield from self._more()):
                return False

    def skip(self, literal: str) -> Parse[bool]:
        """Read it if it is there."""
        found = yield from self.looking_at(literal)
        if found:
            self._at += len(literal)
        return found

    def expect(self, literal: str) -> Parse[None]:
        """Read it; raise `Malformed` where the text goes on otherwise."""
        if not (yield from self.skip(literal)):
            rest = self._text[self._at :]
            raise Unfinished if self.ended and literal.startswith(rest) else Malformed

    def is_over(self) -> Parse[bool]:
        """True if the call is over: a mark follows, or the model has ended."""
        for mark in self.ends:
            if (yield from self.looking_at(mark)):
                return True
        return not (yield from self.peek()) and self.complete

    def close(self, literal: str) -> Parse[None]:
        """Read what closes a part of a call; it may be missing where the call is over."""
        if not (yield from self.skip(literal)) and not (yield from self.is_over()):
            yield from self.expect(literal)

    def run(self, pattern: re.Pattern[str], write: Write = ignore) -> Parse[None]:
        """Read as long as characters fit; the pattern is a class of characters, repeated."""
        while True:
            match = pattern.match(self._text, self._at)
            if match is not None and match[0]:
                self._at = match.end()
                write(match[0])
            if self._at < len(self._text) or not (yield from self._more()):
                return

    def blanks(self, write: Write = ignore) -> Parse[None]:
        """Read white space."""
        yield from self.run(_SPACE, write)

    def word(self, pattern: re.Pattern[str]) -> Parse[str]:
        """What `run` reads, as one text; at least one character, or it raises `Malformed`."""
        pieces: list[str] = []
        yield from self.run(pattern, pieces.append)
        if not pieces:
            raise Malformed if (yield from self.peek()) else Unfinished
        return "".join(pieces)

    def until(self, literals: Sequence[str], write: Write) -> Parse[str | None]:
        """Read up to the first of the literals, which comes first in the text, and leave it there;
        None at the end. What may be the beginning of one is held until it is known.
        """
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
        """How many of the last characters may begin a literal."""
        most = min(longest, len(self._text) - self._at)
        for number in range(most, 0, -1):
            tail = self._text[-number:]
            if any(literal.startswith(tail) for literal in literals):
                return number
        return 0

    def json_value(self, write: Write, depth: int = 0) -> Parse[None]:
        """Read one JSON value and copy it as it stands, but for control characters in strings: a
        line break that should have been written `\\n` becomes that. Brackets that are missing at
        the end of a call are added.
        """
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
        """The same of a string, which must come next."""
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
        """Read a JSON string and decode it. Raises `Malformed` where it is no Unicode text."""
        pieces: list[str] = []
        yield from self.json_string(pieces.append)
        text: str = json.loads("".join(pieces))
        if not is_unicode(text):
            raise Malformed
        return text


def is_unicode(text: str) -> bool:
    """Whether it has no halves of surrogate pairs, which JSON can write and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
