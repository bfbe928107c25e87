"""Which rule decides about a model, and which of its targets it draws."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from picker.pool.policies import (
    NO_REWRITES,
    RewriteRule,
    RewriteRules,
    RewriteTarget,
)


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
