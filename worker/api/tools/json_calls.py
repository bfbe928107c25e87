"""Calls written in JSON: `{"name": …, "arguments" or "parameters": {…}}`, as they are or between
marks (Hermes, Llama 3.1; Mistral's V3 lists calls in JSON, its V11 writes `name[ARGS]{…}`).
"""

import re

from worker.api.tools.scanner import Malformed, Parse, Scanner, ignore
from worker.api.tools.writer import AnswerWriter

TOOL_CALL, END_OF_TOOL_CALL = "<tool_call>", "</tool_call>"
TOOL_CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
PYTHON_TAG = "<|python_tag|>"
_ARGUMENTS = ("arguments", "parameters")
_OTHER_KEYS = ("id", "type")
_NAME = re.compile(r"[\w.:/-]+")
_SEPARATORS = re.compile(r"[\s;]+")
_CLOSING = re.compile(r"[\s}\]]+")


def call_object(scanner: Scanner, writer: AnswerWriter, *, is_marked: bool = True) -> Parse[None]:
    """Read one object. Without a mark, it must name a known function and have no other members."""
    call = _ObjectCall(scanner, writer, is_marked)
    yield from scanner.expect("{")
    try:
        yield from call.members()
    except Malformed:
        if not call.is_complete:
            raise
        writer.leftover(scanner.raw())


class _ObjectCall:
    def __init__(self, scanner: Scanner, writer: AnswerWriter, is_marked: bool) -> None:
        self.is_complete = False
        self._scanner = scanner
        self._writer = writer
        self._is_marked = is_marked
        self._name: str | None = None
        self._held: str | None = None  # arguments

    def members(self) -> Parse[None]:
        scanner = self._scanner
        while True:
            yield from scanner.blanks()
            key = yield from scanner.json_text()
            yield from scanner.blanks()
            yield from scanner.expect(":")
            yield from scanner.blanks()
            yield from self._value_of(key)
            yield from scanner.blanks()
            if not (yield from scanner.skip(",")):
                break
        yield from scanner.expect("}")
        if not self.is_complete:
            self._complete("{}")

    def _value_of(self, key: str) -> Parse[None]:
        scanner, writer = self._scanner, self._writer
        if key == "name" and self._name is None:
            name = yield from scanner.json_text()
            if not name or not (self._is_marked or name in writer.known_names):
                raise Malformed
            self._name = name
            if self._held is not None:
                self._complete(self._held)
        elif key in _ARGUMENTS and self._held is None and not self.is_complete:
            if self._name is not None and (yield from scanner.peek()) == "{":
                writer.begin(self._name)
                yield from scanner.json_value(writer.arguments)
                self._end()
                return
            self._held = yield from _whole_arguments(scanner)
            if self._name is not None:
                self._complete(self._held)
        elif self._is_marked or key in _OTHER_KEYS:
            yield from scanner.json_value(ignore)
        else:
            raise Malformed

    def _complete(self, arguments: str) -> None:
        if self._name is None:
            raise Malformed
        self._writer.begin(self._name)
        self._writer.arguments(arguments)
        self._end()

    def _end(self) -> None:
        self.is_complete = True
        self._writer.end()
        self._scanner.mark()


def _whole_arguments(scanner: Scanner) -> Parse[str]:
    first = yield from scanner.peek()
    if first == '"':
        inner = Scanner()
        inner.feed((yield from scanner.json_text()).strip() or "{}")
        inner.ended = True  # nothing may be missing in it
        said = yield from _whole_arguments(inner)
        if (yield from inner.peek()):
            raise Malformed
        return said
    pieces: list[str] = []
    yield from scanner.json_value(pieces.append)
    if first != "{" and pieces != ["null"]:
        raise Malformed
    return "".join(pieces) if first == "{" else "{}"


def marked_object(scanner: Scanner, writer: AnswerWriter) -> Parse[None]:
    """Read `<tool_call>{…}</tool_call>`; there may be several objects, and no end mark."""
    yield from scanner.expect(TOOL_CALL)
    yield from scanner.blanks()
    while True:
        yield from call_object(scanner, writer)
        scanner.mark()
        yield from scanner.run(_CLOSING)
        if (yield from scanner.peek()) != "{":
            break
    if not (yield from scanner.skip(END_OF_TOOL_CALL)):
        writer.leftover(scanner.raw())


def mistral_calls(scanner: Scanner, writer: AnswerWriter) -> Parse[None]:
    """Read `[TOOL_CALLS]` and a list of objects, one object, or a name and its arguments."""
    yield from scanner.expect(TOOL_CALLS)
    yield from scanner.blanks()
    first = yield from scanner.peek()
    if first == "[":
        yield from call_list(scanner, writer)
    elif first == "{":
        yield from call_object(scanner, writer)
    else:
        name = yield from scanner.word(_NAME)
        yield from scanner.blanks()
        if (yield from scanner.skip(CALL_ID)):
            yield from scanner.word(_NAME)
        yield from scanner.skip(ARGS)
        yield from scanner.blanks()
        yield from arguments_of(scanner, writer, name)


def call_list(scanner: Scanner, writer: AnswerWriter, *, is_marked: bool = True) -> Parse[None]:
    """Read `[{…}, {…}]`, at least one object; what follows the last good one is not part of it."""
    yield from scanner.expect("[")
    while True:
        yield from scanner.blanks()
        yield from call_object(scanner, writer, is_marked=is_marked)
        scanner.mark()
        yield from scanner.blanks()
        if not (yield from scanner.skip(",")):
            break
    yield from scanner.expect("]")


def plain_calls(scanner: Scanner, writer: AnswerWriter) -> Parse[None]:
    """Read an answer that is nothing but calls: an object, several of them, or a list."""
    yield from scanner.blanks()
    is_marked = yield from scanner.skip(PYTHON_TAG)
    yield from scanner.blanks()
    if (yield from scanner.peek()) == "[":
        yield from call_list(scanner, writer, is_marked=is_marked)
        return
    while True:
        yield from call_object(scanner, writer, is_marked=is_marked)
        scanner.mark()
        yield from scanner.run(_SEPARATORS)
        yield from scanner.skip(PYTHON_TAG)
        if (yield from scanner.peek()) != "{":
            return


def arguments_of(scanner: Scanner, writer: AnswerWriter, name: str) -> Parse[None]:
    yield from scanner.blanks()
    if (yield from scanner.peek()) == "{":
        writer.begin(name)
        yield from scanner.json_value(writer.arguments)
    else:
        arguments = yield from _whole_arguments(scanner)
        writer.begin(name)
        writer.arguments(arguments)
    writer.end()
