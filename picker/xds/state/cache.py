"""The resources that clients are sent, by name, each with the version that its content has.

Versions are digests of the content and not numbers, so that a picker that was restarted, and has
found the same endpoints, has nothing to send to a client that still has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from types import MappingProxyType

import xxhash

_DIGEST_BYTES = 8


@dataclass(frozen=True, slots=True)
class XdsResource:
    """A named message, serialized; see `resource_of`."""

    name: str
    version: str
    body: bytes


@dataclass(frozen=True, slots=True)
class ResourceSet:
    """All resources at one moment; `number` counts the sets there have been, from 1.

    Of those `awaited` nothing is known yet, not even that they are not there.
    """

    resources: Mapping[str, XdsResource]
    number: int
    awaited: frozenset[str] = frozenset()


def resource_of(name: str, body: bytes) -> XdsResource:
    """`body` under `name`; the same bytes have the same version, here and after a restart."""
    return XdsResource(name, xxhash.xxh3_64_hexdigest(body), body)


def version_of(resources: Iterable[XdsResource]) -> str:
    """One version for several resources; their order does not matter."""
    digest = blake2b(digest_size=_DIGEST_BYTES)
    for name, version in sorted((one.name, one.version) for one in resources):
        digest.update(f"{len(name)}:{name}{version}".encode())
    return digest.hexdigest()


class Cache:
    """Owns the current set. `current` None: nothing is known yet, so nothing is sent.

    Nor is anything sent about one of `awaited` before it was published.
    """

    def __init__(self, awaited: Iterable[str] = ()) -> None:
        self._awaited = frozenset(awaited)
        self._current: ResourceSet | None = None
        self._watchers: list[Callable[[], None]] = []

    @property
    def current(self) -> ResourceSet | None:
        """The set that was published last."""
        return self._current

    def publish(self, resources: Iterable[XdsResource]) -> bool:
        """Let `resources` be all there are, and notify; whether that changes anything."""
        fresh = {one.name: one for one in resources}
        before = self._current
        if before is not None and dict(before.resources) == fresh:
            return False
        number = 1 if before is None else before.number + 1
        self._awaited -= fresh.keys()
        self._current = ResourceSet(MappingProxyType(fresh), number, self._awaited)
        for watcher in tuple(self._watchers):
            watcher()
        return True

    def update(self, resource: XdsResource) -> bool:
        """Let `resource` be the one of its name; whether that changes anything."""
        before = {} if self._current is None else dict(self._current.resources)
        return self.publish((before | {resource.name: resource}).values())

    def watch(self, watcher: Callable[[], None]) -> None:
        """Call `watcher` after every change, until it is unwatched. It must be quick."""
        self._watchers.append(watcher)

    def unwatch(self, watcher: Callable[[], None]) -> None:
        """Do not call `watcher` any more."""
        self._watchers.remove(watcher)
