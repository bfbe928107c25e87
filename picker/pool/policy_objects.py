"""InferenceObjective and InferenceModelRewrite as Kubernetes knows them, and what they mean.

The structs are the one description of both kinds: fields, defaults and limits; their objects are
JSON, wherever they come from. What an object says that is allowed but cannot be meant is a doubt.

Source: `llm-d.ai/v1alpha2` of the reference picker. As its API server does, a rule without targets,
no rules and an empty target are taken; what no request can follow is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Final, Literal, TypeAlias

from msgspec import Meta

from picker.pool.object_parts import (
    MAX_CONDITIONS,
    Condition,
    GroupName,
    Int32,
    KindName,
    ObjectMeta,
    Part,
    ReferentName,
    conditions_schema,
)
from picker.pool.request_rules import Objective
from picker.pool.rewrites import RewriteRule, RewriteTarget

GROUP: Final = "llm-d.ai"
LEGACY_GROUP: Final = "inference.networking.x-k8s.io"
VERSION: Final = "v1alpha2"
API_VERSION: Final = f"{GROUP}/{VERSION}"
LEGACY_API_VERSION: Final = f"{LEGACY_GROUP}/{VERSION}"
POOL_GROUP: Final = "inference.networking.k8s.io"
POOL_KIND: Final = "InferencePool"
MIN_WEIGHT, MAX_WEIGHT = 1, 1_000_000


class PoolReference(Part, frozen=True, kw_only=True):
    """The pool whose requests an object is about."""

    group: GroupName = POOL_GROUP
    kind: KindName = POOL_KIND
    name: ReferentName

    def names(self, pool: str, group: str = POOL_GROUP) -> bool:
        """Whether it is the InferencePool called `pool` of `group`."""
        return (self.group, self.kind, self.name) == (group, POOL_KIND, pool)


class ObjectiveStatus(Part, frozen=True, kw_only=True):
    """What others say of an objective; it decides nothing."""

    conditions: Annotated[
        tuple[Condition, ...],
        Meta(max_length=MAX_CONDITIONS, extra_json_schema=conditions_schema("Ready")),
    ] = ()


class RewriteStatus(Part, frozen=True, kw_only=True):
    """What others say of a rewrite; it decides nothing."""

    conditions: Annotated[
        tuple[Condition, ...],
        Meta(max_length=MAX_CONDITIONS, extra_json_schema=conditions_schema("Accepted")),
    ] = ()


class ObjectiveSpec(Part, frozen=True, kw_only=True):
    """Without a priority those who follow the objective have priority 0."""

    pool_ref: PoolReference
    priority: Int32 | None = None


class InferenceObjective(Part, frozen=True, kw_only=True):
    """A name that requests give in a header, and their priority."""

    api_version: str
    kind: Literal["InferenceObjective"]
    metadata: ObjectMeta
    spec: ObjectiveSpec
    status: ObjectiveStatus = ObjectiveStatus()


class ModelMatch(Part, frozen=True, kw_only=True):
    """A model as requests name it."""

    type: Literal["Exact"] = "Exact"
    value: Annotated[str, Meta(min_length=1)]


class Match(Part, frozen=True, kw_only=True):
    """What a request has to be like."""

    model: ModelMatch


class Target(Part, frozen=True, kw_only=True):
    """The model to ask for instead, and its share of the requests."""

    model_rewrite: str
    weight: (
        Annotated[int, Meta(ge=MIN_WEIGHT, le=MAX_WEIGHT, extra_json_schema={"format": "int32"})]
        | None
    ) = None


class Rule(Part, frozen=True, kw_only=True):
    """One of `matches` has to hold; without any, every request matches."""

    matches: tuple[Match, ...] = ()
    targets: Annotated[tuple[Target, ...], Meta(min_length=1)] | None = None

    def drawn(self) -> tuple[str, tuple[Target, ...]]:
        """What a request that matches draws from, and the key that it stands under."""
        return "targets", self.targets or ()


class RewriteSpec(Part, frozen=True, kw_only=True):
    """The rules, those before others first."""

    pool_ref: PoolReference
    rules: tuple[Rule, ...]


class InferenceModelRewrite(Part, frozen=True, kw_only=True):
    """Which models requests get instead of those that they name."""

    api_version: str
    kind: Literal["InferenceModelRewrite"]
    metadata: ObjectMeta
    spec: RewriteSpec
    status: RewriteStatus = RewriteStatus()


class LegacyRule(Rule, frozen=True, kw_only=True):
    """`split` is what v1.2 of the legacy group called `targets`."""

    split: Annotated[tuple[Target, ...], Meta(min_length=1)] | None = None

    def drawn(self) -> tuple[str, tuple[Target, ...]]:
        """See the base class; `targets` go first."""
        return ("split", self.split) if self.split and not self.targets else super().drawn()


class LegacyRewriteSpec(RewriteSpec, frozen=True, kw_only=True):
    """The rules, those before others first."""

    rules: tuple[LegacyRule, ...]


class LegacyModelRewrite(InferenceModelRewrite, frozen=True, kw_only=True):
    """A rewrite in the form of the legacy group: read, never installed."""

    spec: LegacyRewriteSpec


PolicyObject: TypeAlias = InferenceObjective | InferenceModelRewrite
KINDS: Final[dict[str, type[PolicyObject]]] = {
    "InferenceObjective": InferenceObjective,
    "InferenceModelRewrite": InferenceModelRewrite,
}


def shape_of(kind: str, version: object) -> type[PolicyObject] | None:
    """What objects of a kind look like in a version; None for an unknown kind."""
    if version == LEGACY_API_VERSION and kind == "InferenceModelRewrite":
        return LegacyModelRewrite
    return KINDS.get(kind)


@dataclass(frozen=True, slots=True)
class Doubt:
    """Something at `path` of an object that is allowed, but hardly what its author wants."""

    path: tuple[str | int, ...]
    text: str


def objective_of(given: InferenceObjective) -> Objective:
    """What an objective says."""
    return Objective(given.metadata.name, given.spec.priority, given.metadata.namespace)


def rules_of(given: InferenceModelRewrite) -> tuple[RewriteRule, ...]:
    """The rules of a rewrite; one without targets is left out. Without a creation timestamp it is
    older than all that have one.
    """
    created = given.metadata.creation_timestamp
    return tuple(
        RewriteRule(
            name=given.metadata.name,
            targets=tuple(RewriteTarget(one.model_rewrite, one.weight) for one in rule.drawn()[1]),
            models=frozenset(match.model.value for match in rule.matches),
            created_at_seconds=0.0 if created is None else created.timestamp(),
            position=position,
        )
        for position, rule in enumerate(given.spec.rules)
        if rule.drawn()[1]
    )


def doubts_about(given: PolicyObject) -> Iterator[Doubt]:
    """What an object says that cannot be meant."""
    if isinstance(given, InferenceObjective):
        return
    if not given.spec.rules:
        yield Doubt(("spec", "rules"), "there are none, so nothing is rewritten")
    matched: set[str] = set()
    is_generic_taken = False
    for position, rule in enumerate(given.spec.rules):
        at = ("spec", "rules", position)
        models = {match.model.value for match in rule.matches}
        yield from _doubts_about_targets(rule, at)
        if (is_generic_taken and not models) or (models and models <= matched):
            yield Doubt(at, "no request comes to this rule: earlier ones match all that it does")
        if rule.drawn()[1]:
            matched |= models
            is_generic_taken |= not models


def _doubts_about_targets(rule: Rule, at: tuple[str | int, ...]) -> Iterator[Doubt]:
    key, targets = rule.drawn()
    if not targets:
        yield Doubt(at, "there are no 'targets', so the rule is left out")
        return
    if isinstance(rule, LegacyRule) and rule.split and key != "split":
        yield Doubt((*at, "split"), "is not used: the rule has 'targets'")
    is_weighted = any(one.weight is not None for one in targets)
    for index, target in enumerate(targets):
        place = (*at, key, index)
        if is_weighted and target.weight is None:
            yield Doubt(place, "is never drawn: others have a 'weight', and it has none")
        if not target.model_rewrite:
            text = "is empty, so requests that draw it are refused"
            yield Doubt((*place, "modelRewrite"), text)
