"""Objects as a Kubernetes API hands them out become values."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from picker.pool.policies import (
    KINDS,
    InferenceModelRewrite,
    InferenceObjective,
    Objective,
    doubts_about,
    objective_of,
    rules_of,
)

TARGETS = [{"modelRewrite": "t"}]


def from_api(kind: str, spec: dict[str, Any], **metadata: Any) -> Any:
    """An object in JSON, read as its kind says."""
    document = {
        "apiVersion": "llm-d.ai/v1alpha2",
        "kind": kind,
        "metadata": {"name": "o", "uid": "u", "resourceVersion": "1"} | metadata,
        "spec": {"poolRef": {"name": "p"}} | spec,
    }
    return msgspec.convert(document, KINDS[kind])


def rewrite(*rules: dict[str, Any], **metadata: Any) -> InferenceModelRewrite:
    """A rewrite of these rules."""
    made = from_api("InferenceModelRewrite", {"rules": list(rules)}, **metadata)
    assert isinstance(made, InferenceModelRewrite)
    return made


def test_defaults_are_those_of_the_types() -> None:
    """Group and kind of the pool, the kind of a match; no priority and no weight."""
    given = from_api("InferenceObjective", {})
    assert isinstance(given, InferenceObjective)
    assert objective_of(given) == Objective("o", None, "default")
    reference = given.spec.pool_ref
    assert (reference.group, reference.kind) == ("inference.networking.k8s.io", "InferencePool")
    assert reference.names("p")
    assert not reference.names("q")
    rule = rewrite({"matches": [{"model": {"value": "m"}}], "targets": TARGETS}).spec.rules[0]
    assert rule.matches[0].model.type == "Exact"
    assert rule.targets is not None
    assert rule.targets[0].weight is None


def test_rules_know_their_place_and_their_age() -> None:
    """One that nobody can follow is left out, and the others keep their places."""
    given = rewrite({}, {"targets": TARGETS}, creationTimestamp="2026-01-01T00:00:00.5+01:00")
    (rule,) = rules_of(given)
    assert (rule.name, rule.position, rule.models) == ("o", 1, frozenset())
    assert rule.created_at_seconds == 1767222000.5
    assert rules_of(rewrite({"targets": TARGETS}))[0].created_at_seconds == 0.0


def test_doubts_name_their_place() -> None:
    """Of an objective there are none."""
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
def test_what_the_types_do_not_allow_is_refused(spec: dict[str, Any]) -> None:
    """The same description says so wherever an object comes from."""
    with pytest.raises(msgspec.ValidationError):
        from_api("InferenceObjective", spec)
