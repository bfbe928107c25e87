"""The objects of the fake API server, one version counter, and a window of changes to replay.

Stored objects are never changed in place; a reader must copy one before writing to it.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

import msgspec

from tests.fakes.kube_api.resources import Object, Resource
from tests.fakes.kube_api.statuses import already_exists, expired, not_found

Key: TypeAlias = tuple[str, str]  # namespace ("" where there is none), name
Kind: TypeAlias = tuple[str, str]  # group, plural: versions of a resource share their objects


class Type(StrEnum):
    ADDED = "ADDED"
    MODIFIED = "MODIFIED"
    DELETED = "DELETED"


@dataclass(frozen=True, slots=True)
class Stored:
    obj: Object
    version: int
    raw: bytes


@dataclass(frozen=True, slots=True)
class Change:
    version: int
    type: Type
    old: Stored | None
    new: Stored


@dataclass(slots=True)
class _Shelf:
    floor: int
    objects: dict[Key, Stored] = field(default_factory=dict)
    changes: deque[Change] = field(default_factory=deque)
    listeners: list[Callable[[Change], None]] = field(default_factory=list)


class Store:
    """All objects and the version counter.

    `window` is the number of changes of each resource that can be replayed; a watch from an older
    version is refused with 410. The counter does not start at 1, so that 1 is too old.
    """

    def __init__(self, window: int = 1000, first_version: int = 1000) -> None:
        self.window = window
        self.version = first_version
        self._floor = first_version
        self._shelves: dict[Kind, _Shelf] = {}

    def get(self, resource: Resource, key: Key) -> Stored:
        found = self._shelf(resource).objects.get(key)
        if found is None:
            raise not_found(resource, key[1])
        return found

    def find(self, resource: Resource, key: Key) -> Stored | None:
        return self._shelf(resource).objects.get(key)

    def all(self, resource: Resource) -> list[Stored]:
        objects = self._shelf(resource).objects
        return [objects[key] for key in sorted(objects)]

    def insert(self, resource: Resource, obj: Object) -> Stored:
        if self.find(resource, key_of(obj)) is not None:
            raise already_exists(resource, obj["metadata"]["name"])
        return self._commit(resource, Type.ADDED, None, obj)

    def replace(self, resource: Resource, obj: Object, *, even_if_same: bool = False) -> Stored:
        """Write a new state; an equal one counts only if a field that is not stored has changed."""
        old = self.get(resource, key_of(obj))
        if not even_if_same and _without_version(old.obj) == _without_version(obj):
            return old
        return self._commit(resource, Type.MODIFIED, old, obj)

    def delete(self, resource: Resource, key: Key) -> Stored:
        old = self.get(resource, key)
        return self._commit(resource, Type.DELETED, old, old.obj)

    def since(self, resource: Resource, version: int) -> list[Change]:
        shelf = self._shelf(resource)
        if version < shelf.floor:
            raise expired(version, shelf.floor)
        return [change for change in shelf.changes if change.version > version]

    def listen(self, resource: Resource, listener: Callable[[Change], None]) -> None:
        self._shelf(resource).listeners.append(listener)

    def unlisten(self, resource: Resource, listener: Callable[[Change], None]) -> None:
        self._shelf(resource).listeners.remove(listener)

    def compact(self, resource: Resource | None = None) -> None:
        if resource is None:
            self._floor = self.version
        for kind, shelf in self._shelves.items():
            if resource is None or kind == _kind(resource):
                shelf.changes.clear()
                shelf.floor = self.version

    def rewind(self, version: int) -> None:
        """Set the counter back, as a restored backup does, while clients hold later versions."""
        self.version = version
        self.compact()

    def check_integrity(self) -> None:
        for kind, shelf in self._shelves.items():
            versions = [change.version for change in shelf.changes]
            if versions != sorted(set(versions)) or len(versions) > self.window:
                raise ValueError(f"{kind}: the window is out of order")
            if versions and not shelf.floor < versions[0] <= versions[-1] <= self.version:
                raise ValueError(f"{kind}: the window has a gap")
            for key, stored in shelf.objects.items():
                if stored.obj["metadata"]["resourceVersion"] != str(stored.version):
                    raise ValueError(f"{kind} {key}: two versions of one object")
                if msgspec.json.decode(stored.raw) != stored.obj:
                    raise ValueError(f"{kind} {key}: somebody wrote into a stored object")

    def _shelf(self, resource: Resource) -> _Shelf:
        shelf = self._shelves.get(_kind(resource))
        if shelf is None:
            shelf = self._shelves[_kind(resource)] = _Shelf(self._floor)
        return shelf

    def _commit(self, resource: Resource, how: Type, old: Stored | None, obj: Object) -> Stored:
        shelf = self._shelf(resource)
        self.version += 1
        new = stored(obj, self.version)
        change = Change(self.version, how, old, new)
        if how is Type.DELETED:
            del shelf.objects[key_of(obj)]
        else:
            shelf.objects[key_of(obj)] = new
        shelf.changes.append(change)
        if len(shelf.changes) > self.window:
            shelf.floor = shelf.changes.popleft().version
        for listener in list(shelf.listeners):
            listener(change)
        return new


def stored(obj: Object, version: int) -> Stored:
    raw = msgspec.json.encode(
        {**obj, "metadata": {**obj["metadata"], "resourceVersion": str(version)}}
    )
    return Stored(msgspec.json.decode(raw), version, raw)


def key_of(obj: Object) -> Key:
    metadata = obj["metadata"]
    return metadata.get("namespace") or "", metadata["name"]


def _kind(resource: Resource) -> Kind:
    return resource.group, resource.plural


def _without_version(obj: Object) -> Object:
    metadata = {k: v for k, v in obj["metadata"].items() if k != "resourceVersion"}
    return {**obj, "metadata": metadata}
