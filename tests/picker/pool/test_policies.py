"""Objectives and rewrites: objects become values, rules draw targets, changes apply as a whole."""

from collections import Counter
from random import Random
from typing import Any

import msgspec
import pytest

from picker.pool.policies import (
    KINDS,
    NO_RULES,
    InferenceModelRewrite,
    InferenceObjective,
    Objective,
    RequestRules,
    RewriteRule,
    RewriteRules,
    RewriteTarget,
    RuleSet,
    doubts_about,
    objective_of,
    rules_of,
)

TARGETS = [{"modelRewrite": "t"}]


def from_api(kind: str, spec: dict[str, Any], **metadata: Any) -> Any:
    document = {
        "apiVersion": "llm-d.ai/v1alpha2",
        "kind": kind,
        "metadata": {"name": "o", "uid": "u", "resourceVersion": "1"} | metadata,
        "spec": {"poolRef": {"name": "p"}} | spec,
    }
    return msgspec.convert(document, KINDS[kind])


def rewrite(*rules: dict[str, Any], **metadata: Any) -> InferenceModelRewrite:
    return from_api("InferenceModelRewrite", {"rules": list(rules)}, **metadata)


def test_defaults_are_those_of_the_types() -> None:
    given = from_api("InferenceObjective", {})
    assert isinstance(given, InferenceObjective)
    assert objective_of(given) == Objective("o", None, "default")
    reference = given.spec.pool_ref
    assert (reference.group, reference.kind) == ("inference.networking.k8s.io", "InferencePool")
    assert reference.names("p")
    assert not reference.names("q")
    rule = rewrite({"matches": [{"model": {"value": "m"}}], "targets": TARGETS}).spec.rules[0]
    assert rule.matches[0].model.type == "Exact"
    assert rule.targets[0].weight is None


def test_rules_know_their_place_and_their_age() -> None:
    given = rewrite({}, {"targets": TARGETS}, creationTimestamp="2026-01-01T00:00:00.5+01:00")
    (rule,) = rules_of(given)
    assert (rule.name, rule.position, rule.models) == ("o", 1, frozenset())
    assert rule.created_at_seconds == 1767222000.5
    assert rules_of(rewrite({"targets": TARGETS}))[0].created_at_seconds == 0.0


def test_doubts_name_their_place() -> None:
    assert list(doubts_about(from_api("InferenceObjective", {"priority": -5}))) == []
    targets = [{"modelRewrite": ""}, {"modelRewrite": "t", "weight": 2}]
    found = list(doubts_about(rewrite({"targets": targets}, {"targets": TARGETS})))
    assert [one.path for one in found] == [
        ("spec", "rules", 0, "targets", 0),
        ("spec", "rules", 0, "targets", 0, "modelRewrite"),
        ("spec", "rules", 1),
    ]


@pytest.mark.parametrize(
    "spec", [{"priority": 2**31}, {"poolRef": {}}, {"poolRef": {"name": "p", "x": 1}}, {"x": 1}]
)
def test_a_spec_outside_of_the_types_is_refused(spec: dict[str, Any]) -> None:
    """The same check applies wherever an object comes from."""
    with pytest.raises(msgspec.ValidationError):
        from_api("InferenceObjective", spec)


def rule(name: str, *targets: RewriteTarget, models: str = "", **fields: float) -> RewriteRule:
    made = targets or (RewriteTarget(f"{name}-target"),)
    return RewriteRule(name, made, frozenset(models.split()), **fields)  # type: ignore[arg-type]


def applied(incoming: str, *rules: RewriteRule) -> str | None:
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
    assert applied(incoming, *rules) == expected


def test_within_a_resource_the_order_of_the_rules_decides() -> None:
    rules = [rule("one", RewriteTarget(f"t{n}"), position=n) for n in range(20)]
    made = RewriteRules(reversed(rules)).apply("m", Random(1))
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
    targets = [RewriteTarget(str(place), weight) for place, weight in enumerate(weights)]
    one, rng = rule("split", *targets), Random(3)
    drawn = Counter(one.draw(rng) for _ in range(2000))
    for place, share in enumerate(shares):
        assert drawn[str(place)] / 2000 == pytest.approx(share, abs=0.05)
        assert (drawn[str(place)] == 0) is (share == 0)


def test_no_rules_match_nothing() -> None:
    assert RewriteRules().apply("", Random(1)) is None


RULES = RuleSet(
    (Objective("batch", -1), Objective("chat", 5), Objective("other", 5), Objective("plain")),
    (
        RewriteRule("a", (RewriteTarget("m1", 1), RewriteTarget("m2")), frozenset({"m"})),
        RewriteRule("b", (RewriteTarget("default"),)),
    ),
)


def test_names_of_objectives_resolve_to_priorities() -> None:
    rules = RequestRules()
    assert rules.use(RULES)
    asked = ("batch", "chat", "plain", "unknown", "")
    assert [rules.priority(name) for name in asked] == [-1, 5, None, None, None]
    assert rules.rules is not None
    rewritten = rules.rules.apply("m", Random(1))
    assert rewritten is not None
    assert (rewritten.model, rewritten.rule) == ("m1", "a")


def test_a_change_replaces_everything_and_is_notified_once() -> None:
    rules, received, found = RequestRules(), list[RuleSet](), list[int | None]()
    rules.subscribe(received.append)
    rules.subscribe(lambda _: found.append(rules.priority("chat")))
    assert not rules.use(NO_RULES)
    assert rules.use(RULES)
    assert not rules.use(RuleSet(RULES.objectives, RULES.rewrites))
    assert rules.current is RULES
    assert rules.use(RuleSet((Objective("new", 1),)))
    assert rules.priority("chat") is None
    assert rules.rules is None
    assert received == [RULES, rules.current]
    assert found == [5, None]


def test_priorities_and_models_are_listed_once() -> None:
    assert RULES.priorities == (5, -1)
    assert RULES.rewritten == {("m", "m1"), ("m", "m2"), ("default", "default")}
    assert NO_RULES.priorities == ()
