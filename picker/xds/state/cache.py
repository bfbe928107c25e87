"""The published resources by name, each with a version that identifies its content.

Versions are digests of the content, so that a restarted picker with the same endpoints sends
nothing to a client that still has them.
"""

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
    """All resources at one moment; whether the names in `awaited` exist is unknown."""

    resources: Mapping[str, XdsResource]
    number: int
    awaited: frozenset[str] = frozenset()


def resource_of(name: str, body: bytes) -> XdsResource:
    return XdsResource(name, xxhash.xxh3_64_hexdigest(body), body)


def version_of(resources: Iterable[XdsResource]) -> str:
    """Return one version for several resources, independent of their order."""
    digest = blake2b(digest_size=_DIGEST_BYTES)
    for name, version in sorted((one.name, one.version) for one in resources):
        digest.update(f"{len(name)}:{name}{version}".encode())
    return digest.hexdigest()


class Cache:
    """Owns the current set. While `current` is None nothing is known, and nothing is sent."""

    def __init__(self, awaited: Iterable[str] = ()) -> None:
        self._awaited = frozenset(awaited)
        self.current: ResourceSet | None = None
        self._watchers: list[Callable[[], None]] = []

    def publish(self, resources: Iterable[XdsResource]) -> bool:
        """Replace all resources and notify the watchers; return False if nothing changed."""
        fresh = {one.name: one for one in resources}
        before = self.current
        if before is not None and dict(before.resources) == fresh:
            return False
        number = 1 if before is None else before.number + 1
        self._awaited -= fresh.keys()
        self.current = ResourceSet(MappingProxyType(fresh), number, self._awaited)
        for watcher in tuple(self._watchers):
            watcher()
        return True

    def update(self, resource: XdsResource) -> bool:
        """Replace one resource and notify the watchers; return False if nothing changed."""
        before = {} if self.current is None else dict(self.current.resources)
        return self.publish((before | {resource.name: resource}).values())

    def watch(self, watcher: Callable[[], None]) -> None:
        """Call `watcher` after every change, until `unwatch`. It must be quick."""
        self._watchers.append(watcher)

    def unwatch(self, watcher: Callable[[], None]) -> None:
        self._watchers.remove(watcher)
