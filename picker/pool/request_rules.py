"""What objectives and rewrites say about requests, as this process knows it.

`RequestRules` is the sole owner of that state. Discovery replaces it as a whole, requests ask it,
and who has to know beforehand what may be asked for subscribes. All methods are synchronous and do
no I/O; they are called from the event-loop thread only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from picker.pool.rewrites import NO_REWRITES, RewriteRule, RewriteRules


@dataclass(frozen=True, slots=True)
class Objective:
    """What the name of an objective stands for.

    Requests name it by its name alone, whatever its namespace. Without a priority it is as good as
    none; below 0 requests may be shed.
    """

    name: str
    priority: int | None = None
    namespace: str = "default"


@dataclass(frozen=True, slots=True)
class RuleSet:
    """All objectives, no two of the same name, and all rules of all rewrites."""

    objectives: tuple[Objective, ...] = ()
    rewrites: tuple[RewriteRule, ...] = ()

    @property
    def priorities(self) -> tuple[int, ...]:
        """Those that objectives name, each once, highest first."""
        known = {one.priority for one in self.objectives if one.priority is not None}
        return tuple(sorted(known, reverse=True))

    @property
    def models(self) -> frozenset[str]:
        """The models that rewrites name: those that they match, and those they ask for instead."""
        matched = {model for rule in self.rewrites for model in rule.models}
        return frozenset(matched.union(one.model for rule in self.rewrites for one in rule.targets))


RuleListener = Callable[[RuleSet], None]
NO_RULES = RuleSet()


class RequestRules:
    """Owns the objectives and the rewrites.

    It is the `ObjectiveSource` and the `RewriteSource` of requests. A request asks for each once,
    so a change applies to those that come after it.
    """

    def __init__(self) -> None:
        self._current = NO_RULES
        self._priorities: dict[str, int | None] = {}
        self._rules = NO_REWRITES
        self._listeners: list[RuleListener] = []

    @property
    def current(self) -> RuleSet:
        """All of them now; the same object until something changes."""
        return self._current

    def subscribe(self, listener: RuleListener) -> None:
        """Call `listener` after every change, until it is unsubscribed; it must not fail."""
        self._listeners.append(listener)

    def unsubscribe(self, listener: RuleListener) -> None:
        """Do not call `listener` any more."""
        self._listeners.remove(listener)

    def use(self, rules: RuleSet) -> bool:
        """Go by `rules` alone from now on; whether that is a change."""
        if rules == self._current:
            return False
        self._current = rules
        self._priorities = {one.name: one.priority for one in rules.objectives}
        self._rules = RewriteRules(rules.rewrites)
        for listener in tuple(self._listeners):
            listener(rules)
        return True

    def priority(self, objective: str) -> int | None:
        """What it stands for; None: there is no such objective, or it names no priority."""
        return self._priorities.get(objective)

    def rules(self) -> RewriteRules:
        """The rules by which models are rewritten now."""
        return self._rules
