"""Access control with bearer tokens and role rules, as RBAC evaluates them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.fakes.kube_api.statuses import forbidden, unauthorized
from tests.fakes.kube_api.target import Target


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule of a Role; without `names` it covers all names, without `namespace` all namespaces."""

    groups: Sequence[str]
    resources: Sequence[str]
    verbs: Sequence[str]
    names: Sequence[str] = ()
    namespace: str | None = None

    def allows(self, target: Target) -> bool:
        """Return whether the rule covers a request; a list has the name of its field selector."""
        wanted = target.resource.plural
        if target.subresource:
            wanted = f"{wanted}/{target.subresource}"
        fits = (
            _has(self.groups, target.resource.group)
            and _has(self.resources, wanted)
            and _has(self.verbs, target.verb)
        )
        place = self.namespace in (None, target.namespace)
        named = not self.names or (target.verb != "create" and target.named in self.names)
        return fits and place and named


def _has(allowed: Sequence[str], wanted: str) -> bool:
    return "*" in allowed or wanted in allowed


@dataclass(slots=True)
class Access:
    """The known tokens and the rules of each user. Without any token every user may do everything.

    Only new requests are checked: open watches stay open when rules are removed.
    """

    users: dict[str, str] = field(default_factory=dict)
    rules: dict[str, list[Rule]] = field(default_factory=dict)
    denied: list[tuple[str, str]] = field(default_factory=list)

    def grant(self, token: str, user: str, rules: Sequence[Rule]) -> None:
        self.users[token] = user
        self.rules[user] = list(rules)

    def deny(self, verb: str, plural: str = "*") -> None:
        self.denied.append((verb, plural))

    def check(self, target: Target, authorization: str | None) -> None:
        user = self.user_of(authorization)
        if not self.may(user, target):
            raise forbidden(target.resource, user, target.verb, target.namespace, target.name or "")

    def user_of(self, authorization: str | None) -> str:
        if not self.users:
            return "system:anonymous"
        kind, _, token = (authorization or "").partition(" ")
        if kind != "Bearer" or token not in self.users:
            raise unauthorized()
        return self.users[token]

    def may(self, user: str, target: Target) -> bool:
        refused = any(
            verb in (target.verb, "*") and target.resource.is_called(plural)
            for verb, plural in self.denied
        )
        rules = self.rules.get(user, [])
        return not refused and (not self.users or any(rule.allows(target) for rule in rules))
