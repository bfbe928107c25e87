"""Objectives and rewrites are replaced as a whole, and who listens is told."""

from __future__ import annotations

from random import Random

from picker.pool.policies import (
    NO_RULES,
    Objective,
    RequestRules,
    RewriteRule,
    RewriteTarget,
    RuleSet,
)

RULES = RuleSet(
    (Objective("batch", -1), Objective("chat", 5), Objective("other", 5), Objective("plain")),
    (
        RewriteRule("a", (RewriteTarget("m1", 1), RewriteTarget("m2")), frozenset({"m"})),
        RewriteRule("b", (RewriteTarget("default"),)),
    ),
)


def test_requests_are_told_what_names_stand_for() -> None:
    """An objective without a priority is as good as none."""
    rules = RequestRules()
    assert rules.use(RULES)
    asked = ("batch", "chat", "plain", "unknown", "")
    assert [rules.priority(name) for name in asked] == [-1, 5, None, None, None]
    rewritten = rules.rules().apply("m", Random(1))
    assert rewritten is not None
    assert (rewritten.model, rewritten.rule) == ("m1", "a")


def test_a_change_replaces_everything_and_is_told_once() -> None:
    """What is the same as before is no change."""
    rules, told = RequestRules(), list[RuleSet]()
    rules.subscribe(told.append)
    assert not rules.use(NO_RULES)
    assert rules.use(RULES)
    assert not rules.use(RuleSet(RULES.objectives, RULES.rewrites))
    assert rules.current is RULES
    assert rules.use(RuleSet((Objective("new", 1),)))
    assert rules.priority("chat") is None
    assert rules.rules().apply("m", Random(1)) is None
    assert told == [RULES, rules.current]
    rules.unsubscribe(told.append)
    assert rules.use(NO_RULES)
    assert len(told) == 2


def test_listeners_find_the_change_in_use() -> None:
    """A queue that makes room for a priority can ask for it at once."""
    rules, found = RequestRules(), list[int | None]()
    rules.subscribe(lambda _: found.append(rules.priority("chat")))
    rules.use(RULES)
    assert found == [5]


def test_priorities_and_models_are_listed_once() -> None:
    """Highest first; models as they are asked for and as they are asked for instead."""
    assert RULES.priorities == (5, -1)
    assert RULES.models == {"m", "m1", "m2", "default"}
    assert NO_RULES.priorities == ()
