"""One client of the incremental variant: requests change a subscription, responses hold changes.

`_known` maps each name that the client has or was sent to its version, None for a resource that
does not exist. A response holds the differences between `_known` and the current set within the
subscription, and the names that are `_due` by the rules of the protocol. The contents of a rejected
response have not arrived; they go with the next difference, since alone they would be rejected
again. Nothing is sent about awaited names. A client that reconnects states its versions.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from picker.xds.state.cache import ResourceSet, XdsResource
from picker.xds.state.subscription import WILDCARD, Acknowledgement, PendingResponse, Subscription

_NOTHING: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class DeltaRequest:
    """A request; `problem` is the reason for a NACK of the response with this nonce, else None."""

    subscribe: tuple[str, ...] = ()
    unsubscribe: tuple[str, ...] = ()
    initial_versions: Mapping[str, str] = field(default_factory=lambda: _NOTHING)
    nonce: str = ""
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class DeltaResponse:
    """New and changed resources, and the names of those that do not exist."""

    resources: tuple[XdsResource, ...]
    removed: tuple[str, ...]
    nonce: str


class DeltaSession:
    """Owns one client's subscription and known resources, all of one type."""

    def __init__(self) -> None:
        self._pending = PendingResponse()
        self._wanted = Subscription()
        self._has_asked = False
        self._known: dict[str, str | None] = {}
        self._due: set[str] = set()  # to send whatever the client has
        self._sent: frozenset[str] = frozenset()  # the names in the last response
        self._refused: frozenset[str] = frozenset()  # the same, after a NACK

    @property
    def names(self) -> frozenset[str]:
        return self._wanted.names

    @property
    def remembered(self) -> int:
        return max(map(len, (self._wanted.names, self._known, self._due)))

    def receive(self, request: DeltaRequest) -> Acknowledgement:
        """Process a request; even with a stale nonce, its changes to the subscription count."""
        acknowledged = Acknowledgement.NONE
        if self._has_asked and request.nonce:
            acknowledged = self._pending.answer(request.nonce, request.problem)
        if acknowledged is Acknowledgement.NACK:
            self._refused = self._sent
        if not self._has_asked:
            self._has_asked = True
            self._wanted.use(request.subscribe, is_wildcard=not request.subscribe)
            self._known.update(request.initial_versions)
        else:
            self._subscribe(request.subscribe)
        self._unsubscribe(request.unsubscribe)
        self._drop_unsubscribed()
        return acknowledged

    def _drop_unsubscribed(self) -> None:
        covers = self._wanted.covers
        if not all(map(covers, self._refused)):
            self._due |= self._refused  # the rest may lack the reason of the NACK
            self._refused = frozenset()
        self._known = {name: has for name, has in self._known.items() if covers(name)}
        self._due = set(filter(covers, self._due))

    def _subscribe(self, names: tuple[str, ...]) -> None:
        """Add names and send them again: the client may have dropped them silently."""
        wanted = self._wanted
        wanted.use(wanted.names.union(names), wanted.is_wildcard)
        self._due.update(self._known if WILDCARD in names else names)

    def _unsubscribe(self, names: tuple[str, ...]) -> None:
        wanted = self._wanted
        wanted.use(wanted.names.difference(names), wanted.is_wildcard and WILDCARD not in names)
        self._due.update(names)  # the client drops them; a wildcard client needs them again

    def poll(self, current: ResourceSet | None) -> DeltaResponse | None:
        """Return the response to send now, if any."""
        if current is None or not self._has_asked or self._pending.is_unanswered:
            return None
        news = self._news(current)
        if not news:
            return None
        news |= self._refused
        existing = current.resources
        changed = tuple(one for name, one in existing.items() if name in news)
        removed = tuple(sorted(news - existing.keys()))
        self._known.update({one.name: one.version for one in changed})
        self._known.update(dict.fromkeys(removed))
        self._due &= current.awaited
        self._sent, self._refused = frozenset(news), frozenset()
        return DeltaResponse(changed, removed, self._pending.send())

    def _news(self, current: ResourceSet) -> set[str]:
        existing, known = current.resources, self._known
        news = {
            name
            for name, one in existing.items()
            if self._wanted.covers(name) and known.get(name) != one.version
        }
        had = {name for name, version in known.items() if version is not None}
        never_sent = self._wanted.names - known.keys()
        gone = (had | never_sent) - existing.keys()
        return (news | self._due | gone) - current.awaited
