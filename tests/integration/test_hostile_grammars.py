"""Hostile schemas, expressions, grammars and tools: each gets a 4xx that names its field."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.worker.sim_worker import SimWorker, post, sim_worker

pytestmark = pytest.mark.full

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
MIB = 1 << 20
LOOP = {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}
REF = {"$ref": "#/$defs/a"}


def nested(depth: int, key: str) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {key: [schema] if key in ("anyOf", "allOf", "prefixItems") else schema}
    return schema


SCHEMAS: list[dict[str, Any]] = [
    # References that lead nowhere, elsewhere, or back.
    {**REF, "$defs": LOOP},
    {"$ref": "#/$defs/none"},
    {"$ref": "https://example.com/schema.json"},
    {"$ref": "file:///etc/passwd"},
    {"$ref": "http://[::1"},
    {"$id": "http://[", "type": "integer"},
    {**REF, "$defs": {"a": {"anyOf": [REF] * 2000}}},
    {**REF, "$defs": {f"{chr(97 + n)}": {"allOf": [REF] * 40} for n in range(20)}},
    # Too deep, too long, too much.
    nested(40, "anyOf"),
    nested(500, "not"),
    {"enum": [f"value {n}" for n in range(20_000)]},
    {"type": "object", "properties": {f"p{n}": {"type": "integer"} for n in range(5000)}},
    {"description": "x" * 100_000},
    {"const": "x" * 70_000},
    {"type": "string", "pattern": "a" * 70_000},
    {"type": "string", "pattern": "(" * 1000 + "a" + ")" * 1000},
    # Expressions that are none, or cannot be matched.
    *(
        {"type": "string", "pattern": p}
        for p in ("(", "[", "a{2,1}", "*", r"\q", "(?P<n", r"(a)\1")
    ),
    *({"type": "string", "pattern": p} for p in (r"a(?=b)", r"(?<!a)b", "a\x00b", r"^\x01$")),
    {"patternProperties": {"[": {}}},
    {"patternProperties": {"^a": {"type": "null"}, "a$": {"type": "integer"}}},
    # Keywords that are not enforced, and values that these cannot have.
    *({key: {}} for key in ("not", "contains")),
    *({key: {"a": {}}} for key in ("propertyNames", "dependentSchemas")),
    {"if": {}, "then": {}},
    {"unevaluatedProperties": False},
    {"type": "array", "uniqueItems": True},
    {"type": "object", "minProperties": 2},
    {"x-guidance": {"lenient": True}, "not": {}},
    {"oneOf": [{"type": "number"}, {"type": "integer"}]},
    *({"type": kind} for kind in ("text", 7, None, {}, ["integer", "text"])),
    *({"type": "object", "properties": p} for p in ([], "x", 1, {"a": 3}, {"a": "x"})),
    *({"type": "object", "required": r} for r in ("a", 1, {}, [1])),
    *({"type": "string", "minLength": n} for n in (-1, "1", 1.5)),
    {"type": "string", "minLength": 3, "maxLength": 1},
    {"type": "integer", "minimum": 3, "maximum": 1},
    {"type": "integer", "minimum": "3"},
    {"type": "array", "minItems": 3, "maxItems": 1},
    {"type": "array", "items": 4},
    {"anyOf": {}},
    {"allOf": 1},
    {"enum": []},
    {"type": "number", "multipleOf": 0},
    {"type": "string", "format": "json-pointer"},
    {"allOf": [{"type": "string"}, {"type": "integer"}]},
    {"anyOf": [{"const": 1}], "type": "string"},
]
# Large when they are unrolled, which the library does not do: answered, in little memory.
BOMBS = ["((a{1,1000}){1,1000}){1,1000}", "(a|b|ab)*c{1,99999}", r"\p{L}{1000}" * 500]
EXPRESSIONS = [
    *("(", ")", "[", "[z-a]", "a{2,1}", "*", "+a", r"\q", r"(a)\1", r"(?=a)", r"(?<!a)b", "(?P<n"),
    *("(" * 1000 + "a" + ")" * 1000, r"\p{Nope}", "[^\\x00-\\U0010FFFF]"),
    *("a" * 70_000, r"\b", "a{99999999999}"),
]
GRAMMARS = [
    *("", "start: nothing", "root ::= missing", "start: /(/", "start: /[/"),
    *("start: start", "root ::= root", "start: a\na: b\nb: a", 'start: "a', "start: <nope>", "{}"),
    *("start: %json {", 'start: %json {"not": {}}', 'start: %json {"$ref": "#"}', "\x00"),
    *('start: "a"' + ' "b"' * 30_000, "start: " + "(" * 500 + '"a"' + ")" * 500),
    *("start: @other", "%import nothing"),
]


def schema_forms(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    tag = {"type": "structural_tag", "triggers": ["<f"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    named = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    yield TEXT, {"guided_json": schema}
    yield TEXT, {"structured_outputs": {"json": json.dumps(schema)}}
    yield CHAT, {"response_format": named}
    yield (
        CHAT,
        {"response_format": {**tag, "structures": [{"begin": "<f", "schema": schema, "end": ">"}]}},
    )
    yield CHAT, {"tools": [tool], "tool_choice": "required"}


def corpus() -> Iterator[tuple[str, dict[str, Any]]]:
    for schema in SCHEMAS:
        yield from schema_forms(schema)
    for text in EXPRESSIONS:
        yield TEXT, {"guided_regex": text}
    for text in GRAMMARS:
        yield CHAT, {"guided_grammar": text}
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    yield CHAT, {"tools": [tool] * 1000, "tool_choice": "required"}
    yield CHAT, {"tools": [tool] * 2, "tool_choice": "required"}
    yield TEXT, {"guided_choice": ["x" * 70_000]}
    yield TEXT, {"guided_choice": []}
    yield TEXT, {"guided_json": {"description": "x" * (10 * MIB)}}
    yield CHAT, {"tools": [{**tool, "x": "y" * (10 * MIB)}]}


@pytest.fixture(scope="module")
def worker() -> Iterator[SimWorker]:
    with sim_worker() as running:
        yield running


def ask(worker: SimWorker, path: str, fields: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    asked = {"prompt": "a"} if path == TEXT else {"messages": [{"role": "user", "content": "a"}]}
    body = json.dumps({**asked, "max_tokens": 1, **fields}).encode()
    status, answer = worker.ask(post(path, body))
    return status, json.loads(answer)


def test_the_corpus_is_refused(worker: SimWorker) -> None:
    good = {"guided_json": {"type": "integer"}}
    assert ask(worker, TEXT, good)[0] == 200
    before, wrong, num_asked = worker.rss_bytes(), [], 0
    for text in BOMBS:
        assert ask(worker, TEXT, {"guided_regex": text})[0] == 200
        assert ask(worker, TEXT, {"guided_json": {"type": "string", "pattern": text}})[0] == 200
    for path, fields in corpus():
        num_asked += 1
        status, answer = ask(worker, path, fields)
        message = answer.get("error", {}).get("message", "")
        if status not in (400, 413) or not message or len(message) > 1000:
            wrong.append((path, json.dumps(fields)[:150], status, message[:200]))
    assert not wrong, "\n".join(map(str, wrong))
    assert num_asked > 300
    assert ask(worker, TEXT, good)[0] == 200
    assert worker.rss_bytes() - before < 128 * MIB
