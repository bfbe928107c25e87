"""Calls written in JSON: `{"name": …, "arguments" or "parameters": {…}}`, as they are or between
marks. Public definitions: Hermes function calling (NousResearch), Meta's Llama 3.1 prompt format,
Mistral's instruct tokenizers (V3 lists calls in JSON, V11 writes `name[ARGS]{…}`).
"""

from __future__ import annotations

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


def call_object(scanner: Scanner, writer: AnswerWriter, *, is_marked: bool = True) -> Parse[None]:
    """One call, as an object. Without a mark it is one only if the function is known and it has
    nothing else in it. Once the arguments are complete, so is the call, whatever follows.
    """
    name: str | None = None
    held: list[str] | None = None  # arguments that came before the name
    has_arguments = False
    yield from scanner.expect("{")
    try:
        while True:
            yield from scanner.blanks()
            key = yield from scanner.json_text()
            yield from scanner.blanks()
            yield from scanner.expect(":")
            yield from scanner.blanks()
            if key == "name" and name is None:
                name = yield from _name(scanner, writer, is_marked=is_marked)
                if held is not None:
                    writer.begin(name)
                    writer.arguments("".join(held))
                    has_arguments = True
                    scanner.mark()
            elif key in _ARGUMENTS and held is None and not has_arguments:
                if name is None:
                    held = yield from _held_arguments(scanner)
                else:
                    writer.begin(name)
                    yield from _arguments(scanner, writer)
                    has_arguments = True
                    scanner.mark()
            elif is_marked or key in _OTHER_KEYS:
                yield from scanner.json_value(ignore)
            else:
                raise Malformed
            yield from scanner.blanks()
            if not (yield from scanner.skip(",")):
                yield from scanner.expect("}")
                break
    except Malformed:
        if not has_arguments:
            raise
        writer.end()
        writer.content(scanner.raw())
        return
    if name is None:
        raise Malformed
    if not has_arguments:
        writer.begin(name)
        writer.arguments("{}")
    writer.end()


def _name(scanner: Scanner, writer: AnswerWriter, *, is_marked: bool) -> Parse[str]:
    name = yield from scanner.json_text()
    if not name or not (is_marked or name in writer.known_names):
        raise Malformed
    return name


def _held_arguments(scanner: Scanner) -> Parse[list[str]]:
    pieces: list[str] = []
    first = yield from scanner.peek()
    yield from scanner.json_value(pieces.append)
    if first == "{":
        return pieces
    if pieces != ["null"]:
        raise Malformed
    return ["{}"]


def _arguments(scanner: Scanner, writer: AnswerWriter) -> Parse[None]:
    """The value of the arguments, as it comes."""
    if (yield from scanner.peek()) == "{":
        yield from scanner.json_value(writer.arguments)
    else:
        writer.arguments("".join((yield from _held_arguments(scanner))))


def marked_object(scanner: Scanner, writer: AnswerWriter) -> Parse[None]:
    """`<tool_call>{…}</tool_call>`; the end mark may be missing."""
    yield from scanner.expect(TOOL_CALL)
    yield from scanner.blanks()
    yield from call_object(scanner, writer)
    yield from scanner.blanks()
    yield from scanner.skip(END_OF_TOOL_CALL)


def mistral_calls(scanner: Scanner, writer: AnswerWriter) -> Parse[None]:
    """`[TOOL_CALLS]` and a list of objects, one object, or a name and its arguments."""
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
    """`[{…}, {…}]`, at least one; what follows the last good one is not part of it."""
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
    """An answer that is nothing but calls: an object, several of them, or a list."""
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
    """An object that is the arguments of a function that is known already."""
    yield from scanner.blanks()
    if (yield from scanner.peek()) != "{":
        raise Malformed
    writer.begin(name)
    yield from scanner.json_value(writer.arguments)
    writer.end()
