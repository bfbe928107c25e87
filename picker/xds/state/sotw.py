"""One client of the state-of-the-world variant: all requests and responses are complete.

`poll` returns None while a response is unanswered, and no state that was sent before, whether
acknowledged or rejected. So changes that are faster than a client become one response.

A resource that is absent from a response of this variant stays. A vanished resource is therefore
sent as an empty one. A client that reconnects always gets a response: its version belongs to its
last response, which may be about other names.
"""

from collections.abc import Callable
from dataclasses import dataclass

from picker.xds.state.cache import ResourceSet, XdsResource, version_of
from picker.xds.state.subscription import Acknowledgement, PendingResponse, Subscription


@dataclass(frozen=True, slots=True)
class SotwRequest:
    """A request; `problem` is the reason for a NACK of the response with this nonce, else None."""

    names: tuple[str, ...] = ()
    nonce: str = ""
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class SotwResponse:
    """All subscribed resources that exist or have existed."""

    version: str
    resources: tuple[XdsResource, ...]
    nonce: str


class SotwSession:
    """Owns one client's subscription; `emptied` makes the resource for a name that has vanished."""

    def __init__(self, emptied: Callable[[str], XdsResource]) -> None:
        self._emptied = emptied
        self._pending = PendingResponse()
        self._wanted = Subscription()
        self._has_asked = self._has_named = self._was_refused = self._is_due = False
        self._sent: dict[str, str] = {}  # name → version

    @property
    def names(self) -> frozenset[str]:
        return self._wanted.names

    @property
    def remembered(self) -> int:
        return len(self._wanted.names)

    def receive(self, request: SotwRequest) -> Acknowledgement:
        """Process a request. A stale one is ignored, because the client repeats all of it."""
        acknowledged = Acknowledgement.NONE
        if self._pending.nonce:  # before the first response a nonce is from an earlier stream
            acknowledged = self._pending.answer(request.nonce, request.problem)
            if acknowledged is Acknowledgement.STALE:
                return acknowledged
        # A request without names means every name, until the client names some.
        self._has_named = self._has_named or bool(request.names)
        self._wanted.use(request.names, is_wildcard=not self._has_named)
        self._has_asked = True
        self._was_refused = self._was_refused or acknowledged is Acknowledgement.NACK
        # A name that is subscribed to again later is sent again.
        still = {name: version for name, version in self._sent.items() if self._wanted.covers(name)}
        if self._was_refused and len(still) < len(self._sent):
            self._is_due = True  # the rest may lack the reason of the NACK
        self._sent = still
        return acknowledged

    def poll(self, current: ResourceSet | None) -> SotwResponse | None:
        """Return the response to send now, if any."""
        if current is None or not self._has_asked or self._pending.is_unanswered:
            return None
        due = {name: one for name, one in current.resources.items() if self._wanted.covers(name)}
        for name in self._sent:
            if name not in due:
                due[name] = self._emptied(name)
        versions = {name: one.version for name, one in due.items()}
        if not due or (versions == self._sent and not self._is_due):
            return None
        self._sent, self._was_refused, self._is_due = versions, False, False
        resources = tuple(due.values())
        return SotwResponse(version_of(resources), resources, self._pending.send())
