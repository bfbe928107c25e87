"""Schemas are rewritten so that the library enforces them, or refused."""

import re
from itertools import product
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
    enforceable(schema)


def test_a_long_chain_of_references_takes_no_time_to_speak_of() -> None:
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


def test_formats_are_combined_with_other_keywords() -> None:
    date = enforceable({"format": "date"})["allOf"]
    inner = {"format": "date", "allOf": [{"minLength": 3}]}
    found = enforceable({"properties": {"format": inner}, "const": inner})
    assert found["properties"]["format"] == {**inner, "allOf": [{"minLength": 3}, *date]}
    assert found["const"] == inner


def patterns_of(pattern: str) -> list[str]:
    schema = enforceable({"pattern": pattern})
    return [schema["pattern"], *(rule["pattern"] for rule in schema.get("allOf", ()))]


# What pydantic 2.12 wrote for `Decimal`, without bounds and with `max_digits`, `decimal_places`.
NO_NUMBER = r"^(?!^[-+.]*$)[+-]?0*"
DECIMALS = (
    NO_NUMBER + r"\d*\.?\d*$",
    NO_NUMBER + r"\d*\.?\d{0,3}0*$",
    NO_NUMBER + r"(?:\d{0,4}|(?=[\d.]{1,5}0*$)\d*\.\d*0*$)",
    NO_NUMBER + r"(?:\d{0,2}|(?=[\d.]{1,6}0*$)\d{0,2}\.\d{0,3}0*$)",
)
NUMBERS = ("7", "-7", "+07.5", ".25", "3.", "0.0", "99.125", "099.1250", "1234", "1.234", "12345.6")


@pytest.mark.parametrize("pattern", DECIMALS)
def test_a_decimal_is_one_with_or_without_its_look_ahead(pattern: str) -> None:
    found = patterns_of(pattern)
    for text in (*NUMBERS, "", "-", "+", ".", "-.", "a", "7a", "1.2.3", "1e5", "99.12345", "6 "):
        is_allowed = all(re.search(each, text) for each in found)
        assert is_allowed == bool(re.fullmatch(pattern.removesuffix("$"), text)), text


@pytest.mark.parametrize(
    "pattern",
    [
        r"^(?=.*[a-c])(?=.*\d)\w{3,}$",
        r"^(?=.{2,4}$)(?!0)[0-9a-f]+$",
        r"^(?!ab)[a-f]*$",
        r"^(?!ab$)[a-f]*$",
        r"^(?!^[a-c]+$)[a-f]*$",
        r"^(?![^a]*$)[^.]+$",
        r"^(?!.*-)[-a-f]*$",
        r"^(?!\.)(?!.*\.\.)[ab.]+$",
        r"^(?!.*[ab][ab][ab])[ab1]+$",
        r"^(?!a.\.)[a-c.]+$",
        r"^(?=a|(b\)|[)]))[^x]",
    ],
)
def test_look_aheads_at_the_beginning_are_patterns_of_their_own(pattern: str) -> None:
    found = patterns_of(pattern)
    assert len(found) > 1
    assert not any("(?=" in each or "(?!" in each for each in found)
    texts = map("".join, product("ab1-.)", repeat=4))
    for text in (*texts, "", "a", "b", "ab", "a-", "abc", "fed1a", "aba"):
        assert all(re.search(each, text) for each in found) == bool(re.search(pattern, text)), text


@pytest.mark.parametrize(
    "pattern", [r"^a(?=b)", r"^(?!a|b)c", r"(?<=a)b", r"^(?!a", r"^(?!(a)\1)b"]
)
def test_other_look_arounds_stay_as_they_are(pattern: str) -> None:
    assert patterns_of(pattern) == [pattern]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (r"\d\w\s", r"[0-9][0-9A-Za-z_][\t-\r\x20]"),
        (r"\D\S", r"[^\p{Nd}][^\s\x{FEFF}]"),
        (r"[\d-]\\d\.", r"[[0-9]-]\\d\."),
        (r"[x\s][^\d][^\s]", r"[x[\t-\r\x20]][^[\p{Nd}]][^[\s\x{FEFF}]]"),
        (r"[^\S\n][^\D]\]\s", r"[^[^\t-\r\x20]\n][^[^0-9]]\][\t-\r\x20]"),
    ],
)
def test_classes_match_ascii_only(pattern: str, expected: str) -> None:
    assert patterns_of(pattern) == [expected]
    assert enforceable({"patternProperties": {pattern: {}}})["patternProperties"] == {expected: {}}


def test_two_patterns_of_names_that_mean_the_same_are_refused() -> None:
    with pytest.raises(ValueError, match="two patterns that mean the same"):
        enforceable({"patternProperties": {r"^\d": {"type": "null"}, "^[0-9]": {}}})


@pytest.mark.parametrize(
    "idle",
    [
        {"uniqueItems": False},
        {"format": "binary"},
        {"format": "password", "writeOnly": True},
        {"propertyNames": {}, "unevaluatedProperties": True},
        {"propertyNames": {"type": "string"}},
        {"dependentRequired": {}, "dependentSchemas": {}, "not": False},
        {"if": {"type": "null"}},
        {"then": False, "else": False, "maxContains": 0},
    ],
)
def test_keywords_without_effect_are_left_out(idle: dict[str, Any]) -> None:
    names = {"properties": {name: {"const": {**idle}} for name in idle}}
    schema = {**idle, **names, "items": {**idle, "type": "string"}}
    notes = {name: value for name, value in idle.items() if name == "writeOnly"}
    expected = {**notes, **names, "items": {**notes, "type": "string"}}
    assert {**enforceable(schema), "x-guidance": None} == {**expected, "x-guidance": None}


@pytest.mark.parametrize(
    "schema",
    [{"uniqueItems": True}, {"format": "regex"}, {"not": {}}, {"if": {}, "then": {}},
     {"contains": {}, "minContains": 0}, {"dependentRequired": {"a": []}}],
)  # fmt: skip
def test_keywords_with_an_effect_stay(schema: dict[str, Any]) -> None:
    assert schema.items() <= enforceable(schema).items()
