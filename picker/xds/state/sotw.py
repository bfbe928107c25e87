"""One client of the state-of-the-world variant: every request names all that it subscribes to, and
every response holds all of that.

Theory of operation. `receive` takes requests as they come, `poll` says what to send now, if there
is anything: nothing while a response is not answered, and nothing that was sent already, whether
the client has taken it over or refused it. So changes that come faster than a client answers
become one response, and `poll` may be called as often as one likes.

A response of this variant cannot say that something is gone: what is absent from it stays as it
was. A resource that has vanished is therefore sent as an empty one. And a client that comes back
after a break is always answered: its version is of its last response, which need not be of the
names that it asks for now.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from picker.xds.state.cache import ResourceSet, XdsResource, version_of
from picker.xds.state.subscription import Acknowledgement, PendingResponse, Subscription


@dataclass(frozen=True, slots=True)
class SotwRequest:
    """`problem` is why the response with this nonce was refused; None: it was not."""

    names: tuple[str, ...] = ()
    nonce: str = ""
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class SotwResponse:
    """All that the client subscribes to and that exists, or has existed."""

    version: str
    resources: tuple[XdsResource, ...]
    nonce: str


class SotwSession:
    """Owns what one client was sent and subscribes to, of one type of resources.

    `emptied` makes what is sent for a name that has vanished.
    """

    def __init__(self, emptied: Callable[[str], XdsResource]) -> None:
        self._emptied = emptied
        self._pending = PendingResponse()
        self._wanted = Subscription()
        self._has_asked = self._has_named = self._was_refused = self._is_due = False
        self._sent: dict[str, str] = {}  # name → version

    @property
    def names(self) -> frozenset[str]:
        """What the client subscribes to by name."""
        return self._wanted.names

    @property
    def remembered(self) -> int:
        """How many names it holds on to, at least."""
        return len(self._wanted.names)

    def receive(self, request: SotwRequest) -> Acknowledgement:
        """A request has come. A stale one is disregarded: the client will say it all again."""
        acknowledged = Acknowledgement.NONE
        if self._pending.nonce:  # before that a nonce is one of a stream that has ended
            acknowledged = self._pending.answer(request.nonce, request.problem)
            if acknowledged is Acknowledgement.STALE:
                return acknowledged
        # No names at all are every name, but only until the client has named some.
        self._has_named = self._has_named or bool(request.names)
        self._wanted.use(request.names, is_wildcard=not self._has_named)
        self._has_asked = True
        self._was_refused = self._was_refused or acknowledged is Acknowledgement.NACK
        # What is subscribed to again later is sent again.
        still = {name: version for name, version in self._sent.items() if self._wanted.covers(name)}
        if self._was_refused and len(still) < len(self._sent):
            self._is_due = True  # what is left may be without what it was refused for
        self._sent = still
        return acknowledged

    def poll(self, current: ResourceSet | None) -> SotwResponse | None:
        """What to send now, if anything."""
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
