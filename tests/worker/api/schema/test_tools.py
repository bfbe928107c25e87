"""Tools and the choice among them: checks, and the schemas of answers that must be calls."""

import json
from typing import Any

import jsonschema
import msgspec
import pytest

from worker.api.schema.requests import ChatRequest
from worker.api.schema.tools import answer_schema, template_tools, tool_use
from worker.errors import RequestError

TREE = {
    "type": "object",
    "properties": {"root": {"$ref": "#/$defs/node"}, "self": {"$ref": "#"}},
    "required": ["root"],
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"$ref": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}},
            "additionalProperties": False,
        }
    },
}
SUM = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def tool(name: str, parameters: object = None) -> dict[str, Any]:
    function = {"name": name} | ({} if parameters is None else {"parameters": parameters})
    return {"type": "function", "function": function}


def request(**fields: Any) -> ChatRequest:
    return msgspec.convert({"messages": [], **fields}, ChatRequest)


def test_tools_reach_the_template_as_they_came() -> None:
    sent = [tool("f"), tool("mcp.server:f/g-h_1", SUM)]
    assert template_tools(request(tools=sent).tools) == sent
    assert template_tools(request(tools=[]).tools) is None
    assert template_tools(None) is None
    assert template_tools(request(tools=[{"function": {"name": "f"}}]).tools) == [tool("f")]


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([tool("")], "tools[0].function.name"),
        ([tool("f"), tool("a b")], "tools[1].function.name"),
        ([tool("f\n")], "tools[0].function.name"),
        ([tool("x" * 129)], "tools[0].function.name"),
        ([tool("f"), tool("f")], "tools[1].function.name"),
        ([{**tool("f"), "type": "retrieval"}], "tools[0].type"),
        ([tool(f"f{n}") for n in range(513)], "tools"),
        ([tool("f", {"description": "x" * (1 << 20)})], "tools"),
    ],
)
def test_tools_are_bounded(tools: list[Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        template_tools(request(tools=tools).tools)
    assert (caught.value.param, caught.value.status) == (param, 400)


def test_the_choice_is_auto_where_there_are_tools() -> None:
    use = tool_use(request(tools=[tool("f")]))
    assert use is not None
    assert (use.choice, use.named, use.parallel, answer_schema(use)) == ("auto", None, True, None)
    for choice in (None, "auto", "none"):
        assert tool_use(request(tool_choice=choice)) is None


def schema_of(**fields: Any) -> dict[str, Any]:
    use = tool_use(request(**fields))
    assert use is not None
    schema = answer_schema(use)
    assert schema is not None
    jsonschema.Draft202012Validator.check_schema(schema)
    return schema


def test_a_named_function_is_answered_with_its_arguments() -> None:
    named = {"type": "function", "function": {"name": "sum"}}
    assert schema_of(tools=[tool("sum", SUM), tool("g")], tool_choice=named) == SUM
    for absent in (tool("sum"), tool("sum", {}), {"function": {"name": "sum", "parameters": None}}):
        schema = schema_of(tools=[absent], tool_choice=named)
        validator = jsonschema.Draft202012Validator(schema)
        assert [validator.is_valid(answer) for answer in ({}, {"a": 1}, None)] == [1, 0, 0]


@pytest.mark.parametrize(
    "stated", ["string", "null", None, 7, [], ["string", "null"], {"type": "object"}]
)
def test_arguments_that_are_no_object_are_refused(stated: object) -> None:
    tools = [tool("f", SUM), tool("g", {"type": stated, "properties": {}})]
    with pytest.raises(RequestError, match=r"must be 'object', got ") as caught:
        template_tools(request(tools=tools, tool_choice="none").tools)
    assert (caught.value.param, caught.value.status) == ("tools[1].function.parameters", 400)


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {}}, "required": ["a"]},
        {"type": ["object", "null"], "required": ["a"]},
        {"$ref": "#/$defs/x", "$defs": {"x": {"required": ["a"]}}},
        {"anyOf": [{"type": "integer"}, {"required": ["a"]}]},
    ],
)
def test_arguments_are_an_object_whatever_else_a_schema_allows(schema: dict[str, Any]) -> None:
    named = {"type": "function", "function": {"name": "f"}}
    assert template_tools(request(tools=[tool("f", schema)]).tools) == [tool("f", schema)]
    one = jsonschema.Draft202012Validator(schema_of(tools=[tool("f", schema)], tool_choice=named))
    assert [one.is_valid(answer) for answer in ({"a": 1}, {}, None, 3, "x")] == [1, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ([{"name": "sum", "parameters": {"a": 1}}], True),
        ([{"name": "sum", "parameters": {"a": 1}}, {"name": "other", "parameters": {}}], True),
        ([{"name": "tree/1", "parameters": {"root": {"next": {"next": {}}}}}], True),
        ([{"name": "tree/1", "parameters": {"root": {}, "self": {"root": {"$ref": 5}}}}], True),
        ([{"name": "tree/1", "parameters": {"root": {}, "self": {}}}], False),
        ([{"name": "tree/1", "parameters": {"root": {"next": {"a": {}}}}}], False),
        ([{"name": "sum", "parameters": {"a": "1"}}], False),
        ([{"name": "sum"}], False),
        ([{"name": "nope", "parameters": {}}], False),
        ([], False),
        ({"name": "other", "parameters": {}}, False),
    ],
)
def test_required_calls_are_an_array(answer: object, right: bool) -> None:
    tools = [tool("sum", SUM), tool("tree/1", TREE), tool("other")]
    schema = schema_of(tools=tools, tool_choice="required")
    assert jsonschema.Draft202012Validator(schema).is_valid(answer) is right
    assert json.dumps(TREE["properties"]) == json.dumps(
        {"root": {"$ref": "#/$defs/node"}, "self": {"$ref": "#"}}
    )


def test_parallel_tool_calls_can_be_switched_off() -> None:
    fields = {"tools": [tool("f")], "tool_choice": "required", "parallel_tool_calls": False}
    call = {"name": "f", "parameters": {}}
    validator = jsonschema.Draft202012Validator(schema_of(**fields))
    assert (validator.is_valid([call]), validator.is_valid([call, call])) == (True, False)
