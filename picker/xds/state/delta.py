"""One client of the incremental variant: requests say how a subscription changes, responses what
has changed.

Theory of operation. As in `sotw`, `receive` takes requests and `poll` says what to send now.
`_known` is what the client has, or was sent: name → version, None for what does not exist.
A difference between that and the set of the moment, within the subscription, is what is sent, and
what is `_due` by the rules of the protocol though nothing differs. What came with a response that
was refused has not arrived; it goes with the next difference, since alone it would be refused
again. About what is not known yet nothing is sent: the client keeps what it has. A client that
comes back says which versions it has; what is unchanged is not sent again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from picker.xds.state.cache import ResourceSet, XdsResource
from picker.xds.state.subscription import WILDCARD, Acknowledgement, PendingResponse, Subscription

_NOTHING: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class DeltaRequest:
    """`initial_versions` is what the client has from before; it counts in its first request.

    `problem` is why the response with this nonce was refused; None: it was not.
    """

    subscribe: tuple[str, ...] = ()
    unsubscribe: tuple[str, ...] = ()
    initial_versions: Mapping[str, str] = field(default_factory=lambda: _NOTHING)
    nonce: str = ""
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class DeltaResponse:
    """What is new or different, and the names of what does not exist."""

    resources: tuple[XdsResource, ...]
    removed: tuple[str, ...]
    nonce: str


class DeltaSession:
    """Owns what one client was sent and subscribes to, of one type of resources."""

    def __init__(self) -> None:
        self._pending = PendingResponse()
        self._wanted = Subscription()
        self._has_asked = False
        self._known: dict[str, str | None] = {}
        self._due: set[str] = set()  # to be sent whatever the client has
        self._sent: frozenset[str] = frozenset()  # by the last response
        self._refused: frozenset[str] = frozenset()  # the same, if it was

    @property
    def names(self) -> frozenset[str]:
        """What the client subscribes to by name."""
        return self._wanted.names

    @property
    def remembered(self) -> int:
        """How many names it holds on to, at least."""
        return max(map(len, (self._wanted.names, self._known, self._due)))

    def receive(self, request: DeltaRequest) -> Acknowledgement:
        """A request has come. Its changes of the subscription count even if its nonce is stale:
        the client will not say them again.
        """
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
        self._drop_what_is_not_wanted()
        return acknowledged

    def _drop_what_is_not_wanted(self) -> None:
        covers = self._wanted.covers
        if not all(map(covers, self._refused)):
            self._due |= self._refused  # what is left may be without what it was refused for
            self._refused = frozenset()
        self._known = {name: has for name, has in self._known.items() if covers(name)}
        self._due = set(filter(covers, self._due))

    def _subscribe(self, names: tuple[str, ...]) -> None:
        """Send these whether or not the client has them: it may have dropped them silently."""
        wanted = self._wanted
        wanted.use(wanted.names.union(names), wanted.is_wildcard)
        self._due.update(self._known if WILDCARD in names else names)

    def _unsubscribe(self, names: tuple[str, ...]) -> None:
        wanted = self._wanted
        wanted.use(wanted.names.difference(names), wanted.is_wildcard and WILDCARD not in names)
        self._due.update(names)  # the client drops it; as one of all names it is sent again

    def poll(self, current: ResourceSet | None) -> DeltaResponse | None:
        """What to send now, if anything."""
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
        """The names of what the client has to be sent."""
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
