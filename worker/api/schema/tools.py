"""The checks of `tools` and `tool_choice`, and their forms for templates and grammars. Pure."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UnsetType

from worker.api.http.field_errors import Field, FieldError, refused
from worker.api.schema.parse import shown
from worker.api.schema.requests import (
    MAX_TOOLS,
    MAX_TOOLS_BYTES,
    TOOL_CHOICES,
    TOOL_NAME,
    ChatRequest,
    NamedTool,
    Tool,
)
from worker.errors import RequestError

Json = dict[str, Any]
_NO_ARGUMENTS: Json = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The choice of tools; `schemas` describe arguments by function. `named`: the one to call."""

    schemas: Mapping[str, Json]
    choice: str
    named: str | None = None
    parallel: bool = True


def template_tools(tools: Sequence[Tool] | None) -> list[Json] | None:
    if not tools:
        return None
    if len(tools) > MAX_TOOLS:
        raise refused("tools", f"takes at most {MAX_TOOLS} tools, got {len(tools)}")
    names = set()
    for n, tool in enumerate(tools):
        place, name = f"tools[{n}].function.name", tool.function.name
        if tool.type != "function":
            raise refused(f"tools[{n}].type", f"must be 'function', got '{shown(tool.type)}'")
        if not re.fullmatch(TOOL_NAME, name):
            reason = "1 to 128 letters, digits and the signs _ . : / -"
            raise refused(place, f"must be {reason}, got '{shown(name)}'")
        if name in names:
            reason = f": there are two tools named '{name}'"
            raise FieldError(Field(place), reason, param=place)
        names.add(name)
        _check_parameters(tool.function.parameters, f"tools[{n}].function.parameters")
    # The template renders all of it into the prompt.
    encoded = msgspec.json.encode(tools)
    if len(encoded) > MAX_TOOLS_BYTES:
        reason = f"may have at most {MAX_TOOLS_BYTES} bytes as JSON, got {len(encoded)}"
        raise refused("tools", reason)
    rendered: list[Json] = msgspec.to_builtins(tools)
    return rendered


def _check_parameters(schema: Json | UnsetType | None, place: str) -> None:
    """Check that a schema describes an object, because arguments are an object."""
    stated = schema.get("type", "object") if isinstance(schema, dict) else "object"
    if "object" not in (stated if isinstance(stated, list) else [stated]):
        got = msgspec.json.encode(stated).decode()
        reason = f"must describe an object: its `type` must be 'object', got {shown(got)}"
        raise refused(place, reason)


def tool_use(request: ChatRequest) -> ToolUse | None:
    """Check the tools; return the choice among them, None without any. Raises `RequestError`."""
    choice = request.tool_choice
    if not request.tools:
        if choice in (None, "none", "auto"):
            return None
        raise RequestError(
            "When using `tool_choice`, `tools` must be set. (parameter=tool_choice)",
            param="tool_choice",
        )
    schemas = {
        tool.function.name: {**(tool.function.parameters or _NO_ARGUMENTS), "type": "object"}
        for tool in request.tools
    }
    parallel = request.parallel_tool_calls is not False
    if isinstance(choice, NamedTool):
        name = choice.function.name
        if choice.type != "function" or name not in schemas:
            reason = f"tool_choice names '{shown(name)}', which is not the function of any tool"
            raise RequestError(reason, param="tool_choice")
        return ToolUse(schemas, "named", name, parallel)
    if choice not in (None, *TOOL_CHOICES):
        known = ", ".join(TOOL_CHOICES)
        reason = f"tool_choice must be one of {known}, or name a function, got '{shown(choice)}'"
        raise RequestError(reason, param="tool_choice")
    return ToolUse(schemas, choice or "auto", None, parallel)


def answer_schema(use: ToolUse) -> Json | None:
    """Return the schema of an answer that must be calls; None if it need not be."""
    if use.named is not None:
        return dict(use.schemas[use.named])
    if use.choice != "required":
        return None
    definitions: Json = {}
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "enum": [name]},
                "parameters": _embedded(schema, name, definitions),
            },
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for name, schema in use.schemas.items()
    ]
    # An array, as an answer may call several tools at once.
    schema: Json = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if not use.parallel:
        schema["maxItems"] = 1
    if definitions:
        schema["$defs"] = definitions
    return schema


def _embedded(schema: Json, name: str, definitions: Json) -> Json:
    """Return a schema or, if it refers to itself, a reference to it among `definitions`."""
    root = "#/$defs/" + name.replace("/", "~1")
    moved, refers = _moved(schema, root)
    if not refers:
        return schema
    definitions[name] = moved
    return {"$ref": root}


def _moved(value: Any, root: str) -> tuple[Any, bool]:
    if isinstance(value, list):
        parts = [_moved(one, root) for one in value]
        return [part for part, _ in parts], any(refers for _, refers in parts)
    if not isinstance(value, dict):
        return value, False
    copy: Json = {}
    any_refers = False
    for key, inner in value.items():
        if key == "$ref" and isinstance(inner, str) and inner.startswith("#"):
            copy[key], refers = root + inner[1:], True
        else:
            copy[key], refers = _moved(inner, root)
        any_refers |= refers
    return copy, any_refers
