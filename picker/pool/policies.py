"""Objectives and rewrites: the objects, their meaning, and the rules that apply to requests.

Of the rules that match a request's model exactly the first one decides, in the order of
`RewriteRules`; where there is none, the first generic one. As in the reference, a rule without
targets, no rules and an empty target are accepted; a rule that no request can follow is omitted and
reported as a doubt.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Annotated, Any, Final, Literal, TypeAlias

from msgspec import Meta

from picker.pool.object_parts import GroupName, Int32, KindName, ObjectMeta, Part, ReferentName

GROUP: Final = "llm-d.ai"
LEGACY_GROUP: Final = "inference.networking.x-k8s.io"
VERSION: Final = "v1alpha2"
API_VERSION: Final = f"{GROUP}/{VERSION}"
LEGACY_API_VERSION: Final = f"{LEGACY_GROUP}/{VERSION}"
POOL_GROUP: Final = "inference.networking.k8s.io"
POOL_KIND: Final = "InferencePool"


# The objects


class PoolReference(Part, frozen=True, kw_only=True):
    group: GroupName = POOL_GROUP
    kind: KindName = POOL_KIND
    name: ReferentName

    def names(self, pool: str, group: str = POOL_GROUP) -> bool:
        """Return whether this refers to the InferencePool called `pool` of `group`."""
        return (self.group, self.kind, self.name) == (group, POOL_KIND, pool)


class ObjectiveSpec(Part, frozen=True, kw_only=True):
    """Requests of an objective without a priority have priority 0."""

    pool_ref: PoolReference
    priority: Int32 | None = None


class InferenceObjective(Part, frozen=True, kw_only=True):
    api_version: str
    kind: Literal["InferenceObjective"]
    metadata: ObjectMeta
    spec: ObjectiveSpec
    status: Any = None


class ModelMatch(Part, frozen=True, kw_only=True):
    type: Literal["Exact"] = "Exact"
    value: Annotated[str, Meta(min_length=1)]


class Match(Part, frozen=True, kw_only=True):
    model: ModelMatch


class Target(Part, frozen=True, kw_only=True):
    model_rewrite: str
    weight: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None


class Rule(Part, frozen=True, kw_only=True):
    """One of `matches` must hold; without any, every request matches."""

    matches: tuple[Match, ...] = ()
    targets: Annotated[tuple[Target, ...], Meta(min_length=1)] | None = None

    def drawn(self) -> tuple[str, tuple[Target, ...]]:
        """Return the targets' key in the object, and the targets of a matching request."""
        return "targets", self.targets or ()


class RewriteSpec(Part, frozen=True, kw_only=True):
    pool_ref: PoolReference
    rules: tuple[Rule, ...]


class InferenceModelRewrite(Part, frozen=True, kw_only=True):
    api_version: str
    kind: Literal["InferenceModelRewrite"]
    metadata: ObjectMeta
    spec: RewriteSpec
    status: Any = None


class LegacyRule(Rule, frozen=True, kw_only=True):
    """In v1.2 of the legacy group `targets` was called `split`; `targets` takes precedence."""

    split: Annotated[tuple[Target, ...], Meta(min_length=1)] | None = None

    def drawn(self) -> tuple[str, tuple[Target, ...]]:
        return ("split", self.split) if self.split and not self.targets else super().drawn()


class LegacyRewriteSpec(RewriteSpec, frozen=True, kw_only=True):
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
    """Return the struct of a kind and version; None for an unknown kind."""
    if version == LEGACY_API_VERSION and kind == "InferenceModelRewrite":
        return LegacyModelRewrite
    return KINDS.get(kind)


# Their meaning


@dataclass(frozen=True, slots=True)
class Objective:
    """An objective; requests name it without a namespace. Below priority 0 they may be shed."""

    name: str
    priority: int | None = None
    namespace: str = "default"


@dataclass(frozen=True, slots=True)
class RewriteTarget:
    """A replacement model; `weight` None: drawn only if no target has a weight."""

    model: str
    weight: int | None = None


@dataclass(frozen=True, slots=True)
class RewriteRule:
    """One rule of one resource; without `models` it is generic, and `targets` is never empty."""

    name: str
    targets: tuple[RewriteTarget, ...]
    models: frozenset[str] = frozenset()
    created_at_seconds: float = 0.0
    position: int = 0

    def draw(self, rng: Random) -> str:
        """Draw a target's model by weight; evenly if no target has a weight."""
        targets = self.targets
        if len(targets) == 1:
            return targets[0].model
        weighted = [target for target in targets if target.weight]
        if not weighted:
            return targets[rng.randrange(len(targets))].model
        weights = [target.weight or 0 for target in weighted]
        left = rng.randrange(sum(weights))
        for target, weight in zip(weighted, weights, strict=True):
            left -= weight
            if left < 0:
                return target.model
        raise AssertionError("a draw below the sum of the weights falls on none of them")


def objective_of(given: InferenceObjective) -> Objective:
    return Objective(given.metadata.name, given.spec.priority, given.metadata.namespace)


def rules_of(given: InferenceModelRewrite) -> tuple[RewriteRule, ...]:
    """Convert a rewrite to rules with targets; without a creation time it counts as the oldest."""
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


@dataclass(frozen=True, slots=True)
class Doubt:
    """A part of an object, at `path`, that is valid but probably unintended."""

    path: tuple[str | int, ...]
    text: str


def doubts_about(given: PolicyObject) -> Iterator[Doubt]:
    """Yield the parts of an object that have no effect."""
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


# The rules for requests


@dataclass(frozen=True, slots=True)
class Rewritten:
    """The replacement of a model; `rule` is the name of its resource."""

    model: str
    rule: str


class RewriteRules:
    __slots__ = ("_exact", "_generic")

    def __init__(self, rules: Iterable[RewriteRule] = ()) -> None:
        ordered = sorted(rules, key=lambda one: (one.created_at_seconds, one.name, one.position))
        self._exact: dict[str, RewriteRule] = {}
        for rule in ordered:
            for model in rule.models:
                self._exact.setdefault(model, rule)
        self._generic = next((rule for rule in ordered if not rule.models), None)

    def apply(self, incoming: str, rng: Random) -> Rewritten | None:
        """Return the replacement of `incoming` ("": no model was named); None: no rule matches."""
        rule = self._exact.get(incoming, self._generic)
        return None if rule is None else Rewritten(rule.draw(rng), rule.name)


@dataclass(frozen=True, slots=True)
class RuleSet:
    objectives: tuple[Objective, ...] = ()
    rewrites: tuple[RewriteRule, ...] = ()

    @property
    def priorities(self) -> tuple[int, ...]:
        known = {one.priority for one in self.objectives if one.priority is not None}
        return tuple(sorted(known, reverse=True))

    @property
    def rewritten(self) -> frozenset[tuple[str, str]]:
        """Return pairs of model and replacement; for a generic rule both are the target."""
        return frozenset(
            (model, target.model)
            for rule in self.rewrites
            for target in rule.targets
            for model in rule.models or (target.model,)
        )


NO_RULES = RuleSet()


class RequestRules:
    """Owns the objectives and the rewrites, which change all at once. Event-loop thread only."""

    def __init__(self) -> None:
        self.current = NO_RULES
        self._priorities: dict[str, int | None] = {}
        self.rules: RewriteRules | None = None  # the current ones, for rewriting models
        self._listeners: list[Callable[[RuleSet], None]] = []

    def subscribe(self, listener: Callable[[RuleSet], None]) -> None:
        self._listeners.append(listener)

    def use(self, rules: RuleSet) -> bool:
        """Replace all rules; return whether that is a change."""
        if rules == self.current:
            return False
        self.current = rules
        self._priorities = {one.name: one.priority for one in rules.objectives}
        self.rules = RewriteRules(rules.rewrites) if rules.rewrites else None
        for listener in self._listeners:
            listener(rules)
        return True

    def priority(self, objective: str) -> int | None:
        """Return an objective's priority; None if it is unknown or has no priority."""
        return self._priorities.get(objective)
