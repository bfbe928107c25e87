"""Which rule decides about a model; replacing the model of a body, and nothing else."""

from __future__ import annotations

import json
from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from picker.errors import RefusedError
from picker.requestcontrol.rewrite import (
    NO_REWRITES,
    RewriteRule,
    RewriteRules,
    RewriteTarget,
    changes,
    with_members,
    with_model,
)

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def test_members_are_sorted_and_compact_as_the_reference_writes_them() -> None:
    """The bytes of the reference picker's own hermetic case."""
    body = b'{"model": "my-model", "prompt": "P", "max_tokens": 100, "temperature": 0}'
    expected = b'{"max_tokens":100,"model":"my-model-12345","prompt":"P","temperature":0}'
    assert with_model(body, "my-model-12345") == expected


def test_other_values_keep_their_very_bytes() -> None:
    """Numbers keep every digit and nested values their spelling."""
    body = b'{"n":123456789012345678901234567890.10,"deep":{"b": 1,"a" :"\\u00e9"}}'
    assert with_model(body, 'a"b') == (
        b'{"deep":{"b": 1,"a" :"\\u00e9"},"model":"a\\"b","n":123456789012345678901234567890.10}'
    )


@settings(deadline=None, max_examples=100)
@given(st.dictionaries(st.text(), values, max_size=5), st.text())
def test_every_body_differs_in_its_model_alone(members: dict[str, object], model: str) -> None:
    """Read back by another library, all members but the model are what they were."""
    rewritten = json.loads(with_model(json.dumps(members).encode(), model))
    assert rewritten == {**members, "model": model}


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"a":' * 10_000])
def test_what_is_no_json_object_is_a_400(body: bytes) -> None:
    """The client is told, whatever is wrong with the body."""
    with pytest.raises(RefusedError) as refusal:
        with_model(body, "m")
    assert refusal.value.status == 400


def test_members_are_added_replaced_and_removed_alike() -> None:
    """Removing what is not there is no error."""
    body = b'{"b": 1.0, "a": [1, 2], "c": null}'
    assert with_members(body, {"c": {"d": 1}, "e": "é"}, ["a", "x"]) == (
        '{"b":1.0,"c":{"d":1},"e":"é"}'.encode()
    )


def test_of_members_with_one_name_the_last_one_stays() -> None:
    """As every reader of the body will have it."""
    assert with_model(b'{"model":"a","n":1,"model":"b","n":2}', "c") == b'{"model":"c","n":2}'


def test_changes_are_what_is_another_object() -> None:
    """Values that were kept are not written again."""
    deep = {"x": 1}
    before = {"a": deep, "b": 1, "c": 2}
    assert changes(before, {"a": deep, "b": 3, "d": 4}) == ({"b": 3, "d": 4}, ["c"])


def rule(name: str, *targets: RewriteTarget, models: str = "", **fields: float) -> RewriteRule:
    """A rule that matches `models`, separated by spaces."""
    made = targets or (RewriteTarget(f"{name}-target"),)
    return RewriteRule(name, made, frozenset(models.split()), **fields)  # type: ignore[arg-type]


def applied(incoming: str, *rules: RewriteRule) -> str | None:
    """The rule that decides, by its name and in any order of `rules`."""
    names = set()
    for ordered in (rules, rules[::-1]):
        made = RewriteRules(ordered).apply(incoming, Random(1))
        names.add(None if made is None else made.rule)
    (name,) = names
    return name


@pytest.mark.parametrize(
    ("incoming", "rules", "expected"),
    [
        ("m", (), None),
        ("m", (rule("other", models="n"),), None),
        ("m", (rule("generic"), rule("exact", models="m n", created_at_seconds=9)), "exact"),
        ("x", (rule("generic"), rule("exact", models="m n")), "generic"),
        ("", (rule("generic"), rule("exact", models="m")), "generic"),
        (
            "m",
            (
                rule("young", models="m", created_at_seconds=2),
                rule("old", models="m", created_at_seconds=1),
            ),
            "old",
        ),
        ("m", (rule("b", created_at_seconds=1), rule("a", created_at_seconds=1)), "a"),
    ],
)
def test_exact_rules_come_before_generic_ones_and_old_ones_before_young_ones(
    incoming: str, rules: tuple[RewriteRule, ...], expected: str | None
) -> None:
    """Of the same age the name decides; never the order in which they were told."""
    assert applied(incoming, *rules) == expected


def test_within_a_resource_the_order_of_the_rules_decides() -> None:
    """However many there are."""
    rules = [rule("one", RewriteTarget(f"t{n}"), position=n) for n in range(20)]
    made = RewriteRules(reversed(rules)).apply("m", Random(1))
    assert made is not None
    assert made.model == "t0"


@pytest.mark.parametrize(
    ("weights", "shares"),
    [
        ((70, 30), (0.7, 0.3)),
        ((None, None), (0.5, 0.5)),
        ((None, 100), (0.0, 1.0)),
        ((1, None, 3), (0.25, 0.0, 0.75)),
        ((None,), (1.0,)),
        ((1_000_000, 1_000_000), (0.5, 0.5)),
    ],
)
def test_targets_are_drawn_by_weight_and_evenly_where_there_is_none(
    weights: tuple[int | None, ...], shares: tuple[float, ...]
) -> None:
    """A target without a weight beside one that has one is never drawn."""
    targets = [RewriteTarget(str(place), weight) for place, weight in enumerate(weights)]
    one, rng = rule("split", *targets), Random(3)
    drawn = Counter(one.draw(rng) for _ in range(2000))
    for place, share in enumerate(shares):
        assert drawn[str(place)] / 2000 == pytest.approx(share, abs=0.05)
        assert (drawn[str(place)] == 0) is (share == 0)


def test_no_rules_match_nothing() -> None:
    """Not even a missing model."""
    assert NO_REWRITES.apply("", Random(1)) is None
