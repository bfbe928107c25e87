"""What the grammar library takes of a JSON Schema and does not enforce is refused or reworded."""

from __future__ import annotations

import re
from typing import Any

import pytest

from worker.api.schema.json_schemas import enforceable

LOOP = {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"$ref": "#/$defs/a", "$defs": LOOP},
        {"properties": {"x": {"$ref": "#/$defs/a"}}, "$defs": LOOP},
        {"items": {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]}, "$defs": LOOP},
        {"allOf": [{"type": "object"}, {"$ref": "#"}]},
        {"type": "object", "required": ["a"], "properties": {"a": {"$ref": "#"}}},
        {"type": "array", "minItems": 1, "items": {"$ref": "#"}},
        {"type": "array", "minItems": 1, "prefixItems": [{"$ref": "#"}]},
        {"$id": "urn:x:y", "$ref": "urn:x:y"},
        {"$id": "http://h/s", "properties": {"a": {"$ref": "s#/properties/a"}}},
        {"properties": {"a/b": {"$anchor": "q", "$ref": "#/properties/a~1b"}}},
        {"properties": {"a": {"$anchor": "q", "$ref": "#q"}}},
    ],
)
def test_a_reference_that_only_leads_back_to_itself_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="leads back to itself"):
        enforceable(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
        {"type": "object", "properties": {"a": {"$ref": "#"}}},
        {"required": ["a"], "properties": {"a": {"$ref": "#"}}},  # numbers match
        {"type": "array", "items": {"$ref": "#"}},
        {"type": "array", "minItems": 1, "prefixItems": [{}], "items": {"$ref": "#"}},
        {"$ref": "#/$defs/none"},
        {"const": {"$ref": "#"}},
        {"properties": {"$ref": {"type": "string"}}},
    ],
)
def test_a_reference_that_can_end_is_not(schema: dict[str, Any]) -> None:
    """And one to nowhere, or none at all, is left to the library."""
    enforceable(schema)


def test_a_long_chain_of_references_takes_no_time_to_speak_of() -> None:
    """It is looked at once, whichever way it goes."""
    for step in (1, -1):
        names = {f"n{i}": {"$ref": f"#/$defs/n{i + step}"} for i in range(1, 4_000)}
        back = [{"$ref": "#/$defs/n1"} for _ in range(4_000)]
        ends = {"n0": {}, "n4000": {"anyOf": [*back, {}]}}
        enforceable({"$ref": "#/$defs/n1", "$defs": {**names, **ends}})


@pytest.mark.parametrize(
    ("pattern", "is_refused"),
    [
        *(
            (p, True)
            for p in (r"^a\x01b$", "a\x01", r"\u0001", r"\x{1f}", r"\v", r"\x7F", r"[\x00]")
        ),
        *((p, True) for p in (r"\x01-x", r"\U00000001", r"\x0b", "\x7f")),
        *((p, False) for p in (r"[\x00-\x7f]", r"\x41", r"\u00e9", r"\n\t\x0a", "\n", r"\\v")),
        *((p, False) for p in (r"[[:cntrl:]]", r"[\]\x01-\x03]", r"\x{1f600}", r"\u0020", r"\10")),
    ],
)
def test_patterns_with_control_characters_are_refused(pattern: str, is_refused: bool) -> None:
    """Unless they end a range; those with an escape of one letter are none."""
    for schema in ({"pattern": pattern}, {"patternProperties": {pattern: {}}}):
        if is_refused:
            with pytest.raises(ValueError, match="control character"):
                enforceable(schema)
        else:
            enforceable(schema)


@pytest.mark.parametrize("schema", [{"const": "a\x00"}, {"enum": [1, {"b": ["\x1b"]}]}])
def test_values_with_control_characters_are_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="control character"):
        enforceable(schema)


def has_form(form: str, text: str) -> bool:
    [rule] = enforceable({"format": form})["allOf"]
    return re.search(rule["pattern"], text) is not None


def test_dates_are_of_the_calendar() -> None:
    days = ("2021-02-28", "2024-02-29", "2000-02-29", "1999-12-31", "2023-04-30", "0004-02-29")
    none = ("2021-02-29", "1900-02-29", "2023-04-31", "2023-13-01", "2023-00-10", "2024-02-30")
    assert all(has_form("date", day) for day in days)
    assert not any(has_form("date", day) for day in (*none, "0000-01-01", "2023-01-00"))


def test_times_have_no_leap_seconds() -> None:
    assert has_form("time", "23:59:59.5-11:30")
    assert has_form("date-time", "2024-02-29T00:00:00Z")
    for text in ("23:59:60Z", "24:00:00Z", "10:00:00", "10:00:00+24:00"):
        assert not has_form("time", text)


def test_forms_stand_beside_what_else_a_schema_says() -> None:
    """Also within other schemas, but not in data."""
    date = enforceable({"format": "date"})["allOf"]
    inner = {"format": "date", "allOf": [{"minLength": 3}]}
    found = enforceable({"properties": {"format": inner}, "const": inner})
    assert found["properties"]["format"] == {**inner, "allOf": [{"minLength": 3}, *date]}
    assert found["const"] == inner
