"""Which model a request is rewritten to.

Theory of operation: a rule matches some models exactly, or every model (it is generic then). Of the
rules that match a request's model exactly the first one decides, in the order of `RewriteRules`;
where there is none, the first generic one. The rule then draws one of its targets.

Source: InferenceModelRewrite of the reference picker. Where that leaves the order of equal
timestamps to its sort, here names and then the order within a resource decide.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True)
class RewriteTarget:
    """A model to ask for instead; `weight` 1 or more, None: drawn only where no target has one."""

    model: str
    weight: int | None = None


@dataclass(frozen=True, slots=True)
class RewriteRule:
    """One rule of one resource.

    `models` are the names that it matches exactly; empty: it is generic. `created_at_seconds` and
    `name` are of the resource, `position` is the rule's own place in it. `targets` is never empty.
    """

    name: str
    targets: tuple[RewriteTarget, ...]
    models: frozenset[str] = frozenset()
    created_at_seconds: float = 0.0
    position: int = 0

    def draw(self, rng: Random) -> str:
        """One target's model, by weight; evenly when no target has a weight."""
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


@dataclass(frozen=True, slots=True)
class Rewritten:
    """What a rule made of a model; `rule` is the name of its resource."""

    model: str
    rule: str


class RewriteRules:
    """All rules, in their order of precedence. Immutable."""

    __slots__ = ("_exact", "_generic")

    def __init__(self, rules: Iterable[RewriteRule]) -> None:
        ordered = sorted(rules, key=lambda one: (one.created_at_seconds, one.name, one.position))
        self._exact: dict[str, RewriteRule] = {}
        for rule in ordered:
            for model in rule.models:
                self._exact.setdefault(model, rule)
        self._generic = next((rule for rule in ordered if not rule.models), None)

    def apply(self, incoming: str, rng: Random) -> Rewritten | None:
        """What the model `incoming` ("": the body names none) becomes; None: no rule matches."""
        rule = self._exact.get(incoming, self._generic)
        return None if rule is None else Rewritten(rule.draw(rng), rule.name)


NO_REWRITES = RewriteRules(())
