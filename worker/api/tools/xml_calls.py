# Apart: a language of its own, whose values need the schemas.
"""Calls written in tags, as Qwen3-Coder does:
`<tool_call><function=NAME><parameter=KEY>VALUE</parameter>…</function></tool_call>`.

Values are bare text. What they mean is in the function's JSON schema: the value of a string is
passed on as it comes, others when they are complete.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from worker.api.tools.json_calls import END_OF_TOOL_CALL, TOOL_CALL
from worker.api.tools.python_calls import literal_as_json
from worker.api.tools.scanner import Malformed, Parse, Scanner
from worker.api.tools.writer import AnswerWriter

FUNCTION, END_OF_FUNCTION = "<function=", "</function>"
_PARAMETER, _END_OF_PARAMETER = "<parameter=", "</parameter>"
_NAME = re.compile(r"[^<>\n]+")
_PYTHON_KINDS = frozenset(("object", "array", "boolean"))


def tagged_call(
    scanner: Scanner, writer: AnswerWriter, schemas: Mapping[str, Mapping[str, Any]]
) -> Parse[None]:
    """One call; the outer marks may be missing. `schemas` are those of the functions' arguments."""
    yield from scanner.skip(TOOL_CALL)
    yield from scanner.blanks()
    yield from scanner.expect(FUNCTION)
    name = yield from scanner.word(_NAME)
    yield from scanner.expect(">")
    properties = schemas.get(name, {}).get("properties")
    writer.begin(name)
    writer.arguments("{")
    keys: set[str] = set()
    while True:
        yield from scanner.blanks()
        if (yield from scanner.skip(END_OF_FUNCTION)):
            break
        if (yield from scanner.looking_at(END_OF_TOOL_CALL)):
            break
        yield from scanner.expect(_PARAMETER)
        key = yield from scanner.word(_NAME)
        yield from scanner.expect(">")
        if key in keys:
            raise Malformed
        writer.arguments(f"{', ' if keys else ''}{json.dumps(key, ensure_ascii=False)}: ")
        keys.add(key)
        schema = properties.get(key) if isinstance(properties, Mapping) else None
        yield from _value(scanner, writer, schema if isinstance(schema, Mapping) else {})
    writer.arguments("}")
    writer.end()
    scanner.mark()
    yield from scanner.blanks()
    yield from scanner.skip(END_OF_TOOL_CALL)


def _value(scanner: Scanner, writer: AnswerWriter, schema: Mapping[str, Any]) -> Parse[None]:
    """A value without the line breaks between it and its tags."""
    yield from scanner.skip("\n")
    ends = ("\n" + _END_OF_PARAMETER, _END_OF_PARAMETER)
    if schema.get("type", "string") == "string" and not schema.keys() & {"anyOf", "oneOf", "$ref"}:
        writer.arguments('"')
        end = yield from scanner.until(ends, lambda text: writer.arguments(_escaped(text)))
        writer.arguments('"' if end else "")
    else:
        pieces: list[str] = []
        end = yield from scanner.until(ends, pieces.append)
        if end:
            writer.arguments(_typed("".join(pieces), schema))
    yield from scanner.expect(end or _END_OF_PARAMETER)


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _typed(text: str, schema: Mapping[str, Any]) -> str:
    """The JSON value that the text stands for; a string where it stands for none other."""
    given = schema.get("type")
    given = given if isinstance(given, list) else [given]
    kinds = {kind for kind in given if isinstance(kind, str)}
    bare = text.strip()
    if "string" in kinds and not ("null" in kinds and bare == "null"):
        return json.dumps(text, ensure_ascii=False)
    try:
        msgspec.json.decode(bare)
    except (msgspec.DecodeError, RecursionError):
        value = literal_as_json(bare) if kinds & _PYTHON_KINDS else None
        return json.dumps(text, ensure_ascii=False) if value is None else value
    return bare
