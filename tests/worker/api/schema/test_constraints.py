"""Constraints in each of their forms, and those that are refused, in bounded time."""

import json
import re
from typing import Any

import msgspec
import pytest

from worker.api.generate.answer_plans import constraint_of
from worker.api.schema.constraints import grammar_of
from worker.api.schema.parse import decode_supported
from worker.api.schema.requests import MAX_GRAMMAR_BYTES, ChatRequest, CompletionRequest
from worker.api.schema.tools import tool_use
from worker.errors import RequestError

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
NAMED = {"name": "n", "schema": SCHEMA}
OWN_OPTIONS = {**NAMED, "schema": {"x-guidance": {}}}
TAG = {
    "type": "structural_tag",
    "triggers": ["<f"],
    "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}],
}


def chat(**fields: Any) -> ChatRequest:
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    return decode_supported(json.dumps(body).encode(), ChatRequest)


def grammar(**fields: Any) -> str | None:
    request = chat(**fields)
    constraint = constraint_of(request, tool_use(request))
    return None if constraint is None else grammar_of(constraint)


@pytest.mark.parametrize(
    ("fields", "structured"),
    [
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        ({"response_format": {"type": "json_schema", "json_schema": NAMED}}, {"json": SCHEMA}),
        ({"response_format": TAG}, {"structural_tag": json.dumps(TAG)}),
        ({"guided_json": SCHEMA}, {"json": SCHEMA}),
        ({"guided_json": json.dumps(SCHEMA)}, {"json": SCHEMA}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
        ({"guided_grammar": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
    ],
)
def test_each_form_means_the_same_as_structured_outputs(
    fields: dict[str, Any], structured: dict[str, Any]
) -> None:
    assert grammar(**fields) == grammar(structured_outputs=structured) != None  # noqa: E711


@pytest.mark.parametrize(
    "fields",
    [{}, {"response_format": {"type": "text"}}, {"response_format": None, "guided_json": None}],
)
def test_without_one_an_answer_is_free(fields: dict[str, Any]) -> None:
    assert constraint_of(chat(**fields)) is None


def test_strict_and_the_name_change_nothing() -> None:
    forms = [NAMED, {**NAMED, "strict": True}, {**NAMED, "name": "m", "description": "d"}]
    made = [grammar(response_format={"type": "json_schema", "json_schema": form}) for form in forms]
    assert made == [made[0]] * 3


def test_text_completions_have_them_too() -> None:
    body = {"prompt": "hi", "structured_outputs": {"regex": "a"}}
    request = decode_supported(json.dumps(body).encode(), CompletionRequest)
    constraint = constraint_of(request)
    assert constraint is not None
    assert constraint.field == "structured_outputs.regex"


DEEP: dict[str, Any] = {"type": "integer"}
for _ in range(70):
    DEEP = {"type": "array", "items": DEEP}


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"structured_outputs": {}}, "structured_outputs", "got none"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "json, regex"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs", "got none"),
        (
            {"structured_outputs": {"regex": "a"}, "guided_json": {}},
            "guided_json",
            "`structured_outputs.regex` and `guided_json`",
        ),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"json": {}}},
            "response_format",
            "send one of them",
        ),
        ({"guided_json": {}, "ignore_eos": True}, "ignore_eos", "has an end"),
        (
            {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
            "structured_outputs.whitespace_pattern",
            "about JSON",
        ),
        (
            {"structured_outputs": {"json": {}, "disable_additional_properties": True}},
            "structured_outputs.disable_additional_properties",
            "not supported yet",
        ),
        ({"guided_json": "{"}, "guided_json", "not JSON"),
        ({"guided_json": "[]"}, "guided_json", "must be an object"),
        ({"guided_json": json.dumps(DEEP)}, "guided_json", "nested deeper"),
        ({"guided_json": "x" * (MAX_GRAMMAR_BYTES + 1)}, "guided_json", "bytes"),
        ({"guided_regex": "x" * (MAX_GRAMMAR_BYTES + 1)}, "guided_regex", "bytes"),
        ({"guided_grammar": "x" * (MAX_GRAMMAR_BYTES + 1)}, "guided_grammar", "bytes"),
        ({"guided_grammar": "x ::= y"}, "guided_grammar", "GBNF"),
        ({"guided_choice": []}, "guided_choice", "empty"),
        ({"guided_choice": ["x" * 100] * 1000}, "guided_choice", "bytes"),
        (
            {"response_format": {**TAG, "triggers": ["<g"]}},
            "response_format",
            "must start with a trigger",
        ),
        ({"response_format": {**TAG, "structures": []}}, "response_format", "no structures"),
        (
            {"structured_outputs": {"structural_tag": "{}"}},
            "structured_outputs.structural_tag",
            "Missing required field",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": OWN_OPTIONS}},
            "response_format.json_schema.schema",
            "x-guidance",
        ),
    ],
)  # fmt: skip
def test_a_refusal_names_the_field(fields: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(RequestError, match=re.escape(message)) as caught:
        grammar(**fields)
    assert caught.value.param == param
    assert caught.value.status == 400
    assert len(caught.value.message) < 1000


HOSTILE: dict[str, Any] = {
    "nested groups": {"regex": "(" * 5000 + "a" + ")" * 5000},
    "nested repetition": {"regex": "(((((a{1,99}){1,99}){1,99}){1,99}){1,99}){1,99}"},
    "a huge count": {"regex": "a{1000000000}"},
    "catastrophic backtracking": {"regex": "(a+)+(a|a)*(a*)*b"},
    "exponential states": {"regex": "[ab]*a[ab]{40}"},
    "many alternatives": {"regex": "(a|b|c)*" * 2000},
    "a letter a thousand times": {"regex": r"\p{L}{1,1000}"},
    "doubling references": {
        "json": {
            "$ref": "#/$defs/a0",
            "$defs": {
                **{
                    f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(60)
                },
                "a60": {"type": "string"},
            },
        }
    },
    "multiplying arrays": {
        "json": {
            "$ref": "#/$defs/a0",
            "$defs": {
                **{
                    f"a{i}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/a{i + 1}"}] * 9}
                    for i in range(30)
                },
                "a30": {"type": "string"},
            },
        }
    },
    "multiplying alternatives": {
        "json": {
            "allOf": [
                {"anyOf": [{"properties": {f"k{i}{j}": {}}} for j in range(4)]} for i in range(12)
            ]
        }
    },
    "references to each other": {
        "json": {
            "$ref": "#/$defs/a",
            "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
        }
    },
    "a million items": {"json": {"type": "array", "minItems": 10**6, "items": {"type": "string"}}},
    "long strings": {"json": {"type": "string", "minLength": 10**6, "maxLength": 2 * 10**6}},
    "thousands of properties": {
        "json": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2000)}}
    },
    "thousands of values": {"json": {"enum": [f"v{i}" for i in range(7000)]}},
    "a large prime": {"json": {"type": "integer", "multipleOf": 982451653}},
    "large bounds": {"json": {"type": "integer", "minimum": -(10**300), "maximum": 10**300}},
    "left recursion": {"grammar": 'start: start start | "a" | ""'},
    "doubling rules": {
        "grammar": "start: a0\n"
        + "\n".join(f"a{i}: a{i + 1} a{i + 1}" for i in range(60))
        + '\na60: "b"'
    },
    "a rule that never ends": {"grammar": "start: start"},
    "nested parentheses": {"grammar": "start: " + "(" * 3000 + '"a"' + ")" * 3000},
    "thousands of brackets": {"grammar": "root ::= " + "[" * 60_000},
    "thousands of quotes": {"grammar": 'root ::= "' + '\\"' * 30_000},
    "thousands of slashes": {"grammar": "start: " + "/\\" * 30_000},
    "thousands of texts": {"grammar": 'start: "a' + '\\"' * 30_000},
    "thousands of look-aheads": {"json": {"type": "string", "pattern": "^" + "(?=a)" * 12_000}},
    "a long look-ahead": {"json": {"type": "string", "pattern": f"^(?!{'a' * 60_000})b"}},
    "thousands of decimals": {
        "json": {
            "type": "string",
            "pattern": r"\d{0,9}|(?=[\d.]{1,999}0*$)\d*\.\d*0*$" * 1_200,
        }
    },
    "thousands of classes": {"regex": r"[^\W]" * 12_000},
    "thousands of words": {"choice": [f"word {i}" for i in range(4000)]},
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
async def test_excessive_constraints_are_refused_soon(bench: Any, name: str) -> None:
    [(kind, value)] = HOSTILE[name].items()
    body = {"prompt": "hi", "structured_outputs": {kind: value}}
    answer = await bench.post(TEXT, body, timeout=60)
    assert answer.status_code in (200, 400)
    if answer.status_code == 400:
        error = answer.json()["error"]
        assert error["param"] == f"structured_outputs.{kind}"
        assert len(error["message"]) < 1000


@pytest.mark.parametrize(("size", "status", "param"), [(10, 413, None), (1, 400, "guided_json")])
async def test_a_schema_of_megabytes_is_too_large(
    bench: Any, size: int, status: int, param: str | None
) -> None:
    schema = {"enum": ["x" * 1000] * 1000 * size}
    answer = await bench.post(TEXT, {"prompt": "hi", "guided_json": schema})
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_the_engine_gets_the_grammar(bench: Any, path: str) -> None:
    prompt = {"messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {"prompt": "hi"}
    await bench.answer(path, {**prompt, "guided_json": SCHEMA, "n": 2})
    [request] = bench.engine.requests
    assert request.params.grammar == grammar(guided_json=SCHEMA)
    assert len(request.branch_ids) == 1


async def test_a_rendered_request_keeps_its_constraint(bench: Any) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "response_format": TAG}
    rendered = await bench.answer(f"{CHAT}/render", {**body, "max_tokens": 5})
    tag = rendered["sampling_params"]["structured_outputs"]["structural_tag"]
    assert msgspec.json.decode(tag) == TAG
    await bench.answer("/inference/v1/generate", rendered)
    [request] = bench.engine.requests
    assert request.params.grammar == grammar(response_format=TAG)
