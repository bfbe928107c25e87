"""Writes constraints of answers as grammars; what the library would not enforce is refused."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from json import JSONDecoder
from typing import Any

import msgspec
from llguidance import LLMatcher, StructTag, grammar_from

from worker.api.http.field_errors import quoted
from worker.api.http.limits import check_json
from worker.api.schema.json_schemas import ascii_classes, enforceable
from worker.api.schema.params import invalid
from worker.api.schema.parse import decode
from worker.api.schema.requests import MAX_GRAMMAR_BYTES, StructuralTagFormat, StructuredOutputs
from worker.api.tools.answer import END_OF_THINK, THINK
from worker.errors import RequestError

# GBNF begins with a rule, behind comments; Lark has another sign in it.
_BEGINS_AS_GBNF = re.compile(r"(?:\s|(?:#|//)[^\n]*\n)*<?[\w-]+>?\s*::=")
# An unclosed part extends to the end, so that each of these reads a text once.
_PART_OF_GBNF = re.compile(r"""(?s:"(?:\\.|[^"\\])*"?|\[(?:\\.|[^\]\\])*\]?|\#[^\n]*|[\w-]+)""")
_ESCAPE_OF_GBNF = re.compile(r"(?s:\\u([0-9a-fA-F]{4})|\\U([0-9a-fA-F]{8})|\\.)")
# Texts and comments are skipped; the text behind the sign of a schema is read as JSON.
_PART_OF_LARK = re.compile(
    r'"(?:\\.|[^"\\\n])*"?|(?://|\#)[^\n]*'
    r"|(?P<regex>(?s:/(?:\\.|[^/\\])+/?))|(?P<json>%json\s*(?={))"
)


@dataclass(frozen=True, slots=True)
class Constraint:
    """A constraint of an answer, and the field that asks for it (`CALLS`: the choice of tools)."""

    outputs: StructuredOutputs
    field: str


# The field of a constraint to tool calls.
CALLS = "tool_choice"


def grammar_of(constraint: Constraint) -> str:
    """Return the grammar's text. Raises `RequestError` naming the field."""
    outputs, field = constraint.outputs, constraint.field
    try:
        if outputs.json_object:
            text = _of_schema({"type": "object"}, outputs, field)
        elif outputs.json is not None:
            text = _of_schema(outputs.json, outputs, field)
        elif outputs.regex is not None:
            text = LLMatcher.grammar_from_regex(ascii_classes(outputs.regex))
        elif outputs.choice is not None:
            text = _of_choice(outputs.choice, field)
        elif outputs.grammar is not None:
            _check_size(outputs.grammar, field)
            text = _of_grammar(outputs.grammar, field)
        else:
            text = _of_tag(outputs.structural_tag or "", field)
    except (ValueError, RecursionError) as error:
        raise unenforceable(field, str(error)) from error
    _check_size(text, field)
    return text


def after_reasoning(grammar: str, marks: Mapping[str, int], *, is_certain: bool) -> str:
    """Return the grammar of an answer that reasons up to `</think>` and then matches `grammar`;
    unless that `is_certain`, it reasons only if it begins with `<think>`. `marks` has the ids of
    the marks that are control tokens.
    """
    begin, end = (
        f"<[{marks[mark]}]>" if mark in marks else f'"{mark}"' for mark in (THINK, END_OF_THINK)
    )
    whole = msgspec.json.decode(grammar)["grammars"] if grammar.startswith("{") else []
    answer = whole[0] if whole else {"lark_grammar": grammar}
    until = r"/(.|\n)*<\/think>/"
    if END_OF_THINK in marks:
        thought = f"thought: THOUGHT {end}\nTHOUGHT: /(.|\\n)*/ & ~({until} /(.|\\n)*/)"
    else:
        thought = f"thought[lazy]: {until}"
    first = f"{begin}? thought BLANKS" if is_certain else f"({begin} thought BLANKS)?"
    lark = f"start: {first} @answer\n{thought}\nBLANKS: /[ \\n]{{0,4}}/\n"
    parts = [{"lark_grammar": lark}, {**answer, "name": "answer"}]
    return msgspec.json.encode({"grammars": parts}).decode()


def unenforceable(field: str, reason: str) -> RequestError:
    return quoted(field, f"cannot be enforced: {reason}")


def _check_size(text: str, field: str) -> None:
    if len(text.encode("utf-8", "replace")) > MAX_GRAMMAR_BYTES:
        raise unenforceable(field, f"it has more than {MAX_GRAMMAR_BYTES} bytes")


def _of_schema(schema: dict[str, Any] | str, outputs: StructuredOutputs, field: str) -> str:
    parsed = _parsed(schema, field) if isinstance(schema, str) else schema
    options: dict[str, Any] = {}
    if outputs.disable_any_whitespace:
        options = {"whitespace_flexible": False, "whitespace_pattern": None}
    elif outputs.whitespace_pattern is not None:
        options["whitespace_pattern"] = outputs.whitespace_pattern
    # As text: the library follows Python's recursion less far than the text's.
    text = msgspec.json.encode(enforceable(parsed, options)).decode()
    return LLMatcher.grammar_from_json_schema(text)


def _parsed(text: str, field: str) -> dict[str, Any]:
    _check_size(text, field)
    body = text.encode("utf-8", "replace")
    try:
        check_json(body)
        schema = msgspec.json.decode(body)
    except (RequestError, msgspec.DecodeError, RecursionError) as error:
        raise unenforceable(field, f"it is not JSON: {error}") from error
    if not isinstance(schema, dict):
        raise unenforceable(field, "a JSON schema must be an object")
    return schema


def _of_grammar(text: str, field: str) -> str:
    """Return the grammar for a text in GBNF, or else in Lark; GBNF too may have a rule `start:`."""
    if _BEGINS_AS_GBNF.match(text):
        return grammar_from("gbnf", _PART_OF_GBNF.sub(_plain_gbnf, text))
    parts: list[str] = []
    end = 0
    for match in _PART_OF_LARK.finditer(text):
        if match.start() < end:  # it is within a schema
            continue
        if match["json"]:
            parts.append(text[end : match.end()])
            _, end = JSONDecoder().raw_decode(text, match.end())
            schema = enforceable(_parsed(text[match.end() : end], field))
            parts.append(msgspec.json.encode(schema).decode())
        elif match["regex"]:
            parts += (text[end : match.start()], ascii_classes(match["regex"]))
            end = match.end()
    return LLMatcher.grammar_from_lark("".join(parts) + text[end:])


def _plain_gbnf(part: re.Match[str]) -> str:
    r"""Replace escapes (the library misreads `\u00e9`) and the rule name `start`, which it uses."""
    if part[0][0] in '"[':
        return _ESCAPE_OF_GBNF.sub(_unescaped, part[0])
    return "start-of-gbnf" if part[0] == "start" else part[0]


def _unescaped(escape: re.Match[str]) -> str:
    code = int(escape[1] or escape[2] or "0", 16)
    if not code or code > 0x10FFFF or 0xD800 <= code < 0xE000:
        return escape[0]
    return f"\\x{code:02x}" if code < 0x80 else chr(code)  # signs have a meaning


def _of_choice(choices: list[str], field: str) -> str:
    if not choices:
        raise unenforceable(field, "it is empty")
    # Lark's strings are JSON's, but for this character.
    words = (msgspec.json.encode(c).decode().replace("\x7f", "\\u007f") for c in choices)
    return LLMatcher.grammar_from_lark("start: " + " | ".join(words))


def _of_tag(text: str, field: str) -> str:
    _check_size(text, field)
    try:
        form = decode(text.encode("utf-8", "replace"), StructuralTagFormat)
    except RequestError as error:
        raise unenforceable(field, error.message) from error
    tags = []
    for structure in form.structures:
        trigger = next((t for t in form.triggers if t and structure.begin.startswith(t)), None)
        if trigger is None:
            raise invalid(field, structure.begin, "Every `begin` must start with a trigger.")
        tags.append(
            StructTag(
                trigger=trigger,
                begin=structure.begin,
                grammar=enforceable(structure.schema),
                end=structure.end,
            )
        )
    if not tags:
        raise unenforceable(field, "it has no structures")
    return StructTag.to_grammar(tags, assume_special=False)
