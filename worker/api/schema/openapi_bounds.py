"""What the server checks of a body beyond its types, as JSON schema: the same constants, put into
the document.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from worker.api.schema.params import RANGES
from worker.api.schema.prompts import ROLES, UNSUPPORTED_PARTS
from worker.api.schema.requests import (
    MAX_BAD_WORDS,
    MAX_CACHE_SALT_CHARS,
    MAX_DOCUMENTS,
    MAX_LOGIT_BIASES,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_MESSAGES,
    MAX_REQUEST_ID_CHARS,
    MAX_SEQUENCES,
    MAX_STOP_STRINGS,
    NEUTRAL,
)

Json = dict[str, Any]

# By field: keywords for the numbers, strings or arrays that it may be.
_NUMBERS: dict[str, Json] = {
    **{name: {"minimum": low, "maximum": high} for name, (_, low, high) in RANGES.items()},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "repetition_penalty": {"exclusiveMinimum": 0},
    "n": {"minimum": 1, "maximum": MAX_SEQUENCES},
    "top_k": {"minimum": -1},
    "min_tokens": {"minimum": 0},
    "max_tokens": {"minimum": 0},
    "max_completion_tokens": {"minimum": 1},
    "logprobs": {"minimum": -1},
    "top_logprobs": {"minimum": -1},
    "prompt_logprobs": {"minimum": -1},
    "truncate_prompt_tokens": {"minimum": -1},
    "stream_interval": {"minimum": 1},
}
_TEXTS: dict[str, Json] = {
    "stop": {"minLength": 1},
    "cache_salt": {
        "minLength": 1,
        "maxLength": MAX_CACHE_SALT_CHARS,
        "pattern": r"^[^@/\\\u0000]*$",
    },
    "request_id": {"minLength": 1, "maxLength": MAX_REQUEST_ID_CHARS},
    "role": {"enum": sorted(ROLES)},
}
_ARRAYS: dict[str, Json] = {
    "stop": {"maxItems": MAX_STOP_STRINGS},
    "messages": {"minItems": 1, "maxItems": MAX_MESSAGES},
    "prompt": {"minItems": 1},
    "bad_words": {"maxItems": MAX_BAD_WORDS},
    "allowed_token_ids": {"minItems": 1},
    "logprob_token_ids": {"maxItems": MAX_LOGPROB_TOKEN_IDS},
    "documents": {"maxItems": MAX_DOCUMENTS},
}
_SAID = ("content", "reasoning", "reasoning_content")  # a turn has one of them
_OBJECTS: dict[str, Json] = {"logit_bias": {"maxProperties": MAX_LOGIT_BIASES}}
_PART_VALUES: dict[str, tuple[object, ...]] = dict.fromkeys(UNSUPPORTED_PARTS, ([], {}))
_BY_TYPE = {
    "integer": _NUMBERS,
    "number": _NUMBERS,
    "string": _TEXTS,
    "array": _ARRAYS,
    "object": _OBJECTS,
}
_FLAG = {"type": "boolean"}  # of the render routes, where it may be true
# Arrays of tokens that exist or are refused.
_TOKEN_ARRAYS = frozenset(
    {"stop_token_ids", "allowed_token_ids", "logprob_token_ids", "token_ids", "tokens"}
)


def with_bounds(components: Json, bodies: Collection[str]) -> Json:
    """The components, with bounds in those that describe bodies (by name, and whatever those refer
    to).
    """
    todo, reached = list(bodies), set(bodies)
    while todo:
        for name in _references(components[todo.pop()]):
            if name not in reached:
                reached.add(name)
                todo.append(name)
    return {
        name: _bounded(component) if name in reached else component
        for name, component in components.items()
    }


def _references(value: Any) -> set[str]:
    if isinstance(value, list):
        return {name for item in value for name in _references(item)}
    if not isinstance(value, dict):
        return set()
    own = {value["$ref"].rpartition("/")[2]} if "$ref" in value else set()
    return own.union(*(_references(item) for item in value.values()))


def _bounded(component: Json) -> Json:
    properties = component.get("properties", {})
    # A turn has fields of the same names as a request, and other values for them.
    neutral = _PART_VALUES if "role" in properties else NEUTRAL
    bounded = {name: _bounded_field(name, field, neutral) for name, field in properties.items()}
    content = {"anyOf": [{"required": [name]} for name in _SAID]} if "role" in properties else {}
    return {**component, "properties": bounded, **content}


def _bounded_field(name: str, field: Json, neutral: Mapping[str, tuple[object, ...]]) -> Json:
    if name in neutral and _FLAG not in field.get("anyOf", ()):
        return {"default": None, "enum": [None, *neutral[name]]}
    if "anyOf" in field:
        return {**field, "anyOf": [_bounded_field(name, k, neutral) for k in field["anyOf"]]}
    bounds = _BY_TYPE.get(field.get("type", ""), {}).get(name, {})
    bounded = {**field, **bounds}
    if field.get("type") == "array" and name in _TOKEN_ARRAYS:
        bounded["items"] = {**field["items"], "minimum": 0}
    if field.get("type") == "array" and name == "stop":
        bounded["items"] = {**field["items"], **_TEXTS["stop"]}
    return bounded
