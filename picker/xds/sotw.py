"""One client of the state-of-the-world variant: every request names all that it subscribes to, and
every response holds all of that.

Theory of operation. `receive` takes requests as they come, `poll` says what to send now, if there
is anything: nothing while a response is not answered, and nothing that was sent already, whether
the client has taken it over or refused it. So changes that come faster than a client answers
become one response, and `poll` may be called as often as one likes.

A response of this variant cannot say that something is gone: what is absent from it stays as it
was. A resource that has vanished is therefore told as an empty one. And a client that comes back
after a break is always answered: its version is of its last response, which need not be of the
names that it asks for now.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from picker.xds.cache import Resource, ResourceSet, version_of
from picker.xds.subscription import Flight, Subscription, Verdict


@dataclass(frozen=True, slots=True)
class Request:
    """`problem` is why the response with this nonce was refused; None: it was not."""

    names: tuple[str, ...] = ()
    nonce: str = ""
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Response:
    """All that the client subscribes to and that exists, or has existed."""

    version: str
    resources: tuple[Resource, ...]
    nonce: str


class SotwSession:
    """Owns what one client was told and wants to know, of one type of resources.

    `emptied` makes what is told of a name that has vanished.
    """

    def __init__(self, emptied: Callable[[str], Resource]) -> None:
        self._emptied = emptied
        self._flight = Flight()
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

    def receive(self, request: Request) -> Verdict:
        """A request has come. A stale one is disregarded: the client will say it all again."""
        verdict = Verdict.NONE
        if self._flight.nonce:  # before that a nonce is one of a stream that has ended
            verdict = self._flight.land(request.nonce, request.problem)
            if verdict is Verdict.STALE:
                return verdict
        # No names at all are every name, but only until the client has named some.
        self._has_named = self._has_named or bool(request.names)
        self._wanted.use(request.names, is_wildcard=not self._has_named)
        self._has_asked = True
        self._was_refused = self._was_refused or verdict is Verdict.NACK
        # What is subscribed to again later is told again.
        kept = {name: version for name, version in self._sent.items() if self._wanted.covers(name)}
        if self._was_refused and len(kept) < len(self._sent):
            self._is_due = True  # what is left may be without what it was refused for
        self._sent = kept
        return verdict

    def poll(self, current: ResourceSet | None) -> Response | None:
        """What to send now, if anything."""
        if current is None or not self._has_asked or self._flight.is_under_way:
            return None
        told = {name: one for name, one in current.resources.items() if self._wanted.covers(name)}
        for name in self._sent:
            if name not in told:
                told[name] = self._emptied(name)
        versions = {name: one.version for name, one in told.items()}
        if not told or (versions == self._sent and not self._is_due):
            return None
        self._sent, self._was_refused, self._is_due = versions, False, False
        resources = tuple(told.values())
        return Response(version_of(resources), resources, self._flight.launch())
