"""Calls in tags, as Qwen3-Coder writes them:
`<tool_call><function=NAME><parameter=KEY>VALUE</parameter>…</function></tool_call>`.

A value ends at the next mark of any kind. Strings are passed on as they come, others when complete.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from worker.api.tools.json_calls import END_OF_TOOL_CALL, TOOL_CALL
from worker.api.tools.python_calls import literal_as_json
from worker.api.tools.scanner import Malformed, Parse, Scanner, Unfinished
from worker.api.tools.writer import AnswerWriter

FUNCTION, END_OF_FUNCTION = "<function=", "</function>"
_PARAMETER, _END_OF_PARAMETER = "<parameter=", "</parameter>"
_MARKS = (_END_OF_PARAMETER, _PARAMETER, END_OF_FUNCTION, FUNCTION, END_OF_TOOL_CALL, TOOL_CALL)
_NAME = re.compile(r"[^<>\n]+")
_OTHER_KINDS = frozenset(("anyOf", "oneOf", "$ref"))
_PYTHON_KINDS = frozenset(("object", "array", "boolean"))


def tagged_call(
    scanner: Scanner, writer: AnswerWriter, schemas: Mapping[str, Mapping[str, Any]]
) -> Parse[None]:
    """Read one call; the outer marks and the marks at the end may be missing."""
    yield from scanner.skip(TOOL_CALL)
    yield from scanner.blanks()
    yield from scanner.expect(FUNCTION)
    name = yield from scanner.word(_NAME)
    yield from scanner.expect(">")
    properties = schemas.get(name, {}).get("properties")
    keys: set[str] = set()
    while True:
        yield from scanner.blanks()
        if (yield from scanner.skip(END_OF_FUNCTION)) or (yield from scanner.is_over()):
            break
        yield from scanner.expect(_PARAMETER)
        key = yield from scanner.word(_NAME)
        yield from scanner.expect(">")
        if key in keys:
            raise Malformed
        if not keys:
            writer.begin(name)
        writer.arguments(f"{', ' if keys else '{'}{json.dumps(key, ensure_ascii=False)}: ")
        keys.add(key)
        schema = properties.get(key) if isinstance(properties, Mapping) else None
        yield from _value(scanner, writer, schema if isinstance(schema, Mapping) else {})
    if not keys:
        writer.begin(name)
    writer.arguments("}" if keys else "{}")
    writer.end()
    scanner.mark()
    yield from scanner.blanks()
    yield from scanner.skip(END_OF_TOOL_CALL)


def _value(scanner: Scanner, writer: AnswerWriter, schema: Mapping[str, Any]) -> Parse[None]:
    """Read a value, without the line breaks between it and its tags."""
    is_text = schema.get("type", "string") == "string" and not schema.keys() & _OTHER_KINDS
    pieces: list[str] = []
    line_break = ""  # the last one, which is no part of the value if nothing follows

    def write(text: str) -> None:
        nonlocal line_break
        shown = (line_break + text).removesuffix("\n")
        line_break = "\n" if text.endswith("\n") else ""
        if is_text:
            writer.arguments(_escaped(shown))
        else:
            pieces.append(shown)

    yield from scanner.skip("\n")
    if is_text:
        writer.arguments('"')
    end = yield from scanner.until(_MARKS, write)
    if end is None and not scanner.complete:
        raise Unfinished
    writer.arguments('"' if is_text else _typed("".join(pieces), schema))
    yield from scanner.skip(_END_OF_PARAMETER)


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _typed(text: str, schema: Mapping[str, Any]) -> str:
    given = schema.get("type")
    given = given if isinstance(given, list) else [given]
    kinds = {kind for kind in given if isinstance(kind, str)}
    stripped = text.strip()
    if "string" in kinds and not ("null" in kinds and stripped == "null"):
        return json.dumps(text, ensure_ascii=False)
    try:
        msgspec.json.decode(stripped)
    except (msgspec.DecodeError, RecursionError):
        value = literal_as_json(stripped) if kinds & _PYTHON_KINDS else None
        return json.dumps(text, ensure_ascii=False) if value is None else value
    return stripped
