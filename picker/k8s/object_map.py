"""The objects of a selection as small records, updated by the events of a watch. No I/O."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Generic, TypeAlias, TypeVar

import msgspec

logger = logging.getLogger(__name__)

R = TypeVar("R")
ObjectKey: TypeAlias = tuple[str, str]
Decode: TypeAlias = Callable[[msgspec.Raw], R | None]
_UNNAMED: ObjectKey = ("", "")


class MalformedObjectError(Exception):
    """An object that cannot be followed; without `keep_last_good` its last record is dropped."""

    def __init__(self, message: str, *, keep_last_good: bool = True) -> None:
        super().__init__(message)
        self.keep_last_good = keep_last_good


# The errors of decoders for a malformed object.
_MALFORMED = (
    MalformedObjectError,
    msgspec.MsgspecError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    RecursionError,
)


class Metadata(msgspec.Struct, frozen=True, rename="camel"):
    """The identity and the version of an object; "" for missing fields."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    deletion_timestamp: str | None = None

    @property
    def key(self) -> ObjectKey:
        return self.namespace, self.name


class _Headed(msgspec.Struct, frozen=True):
    metadata: Metadata


_HEAD = msgspec.json.Decoder(_Headed)


def metadata_of(raw: msgspec.Raw) -> Metadata | None:
    """Return the metadata of an object; None if it is missing or malformed."""
    try:
        return _HEAD.decode(raw).metadata
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


@dataclass(frozen=True, slots=True)
class _Held(Generic[R]):
    uid: str
    record: R | None


class ObjectMap(Generic[R]):
    """Owns the records by namespace and name, and the problems of malformed objects.

    `decode` returns None for an irrelevant object. If it raises an error, the last record of the
    same uid stays unless a `MalformedObjectError` says otherwise.
    """

    def __init__(self, decode: Decode[R], label: str) -> None:
        self._decode = decode
        self._label = label
        self._held: dict[ObjectKey, _Held[R]] = {}
        self._records: dict[ObjectKey, R] = {}  # of all objects that have one; quick to copy
        self._malformed: dict[ObjectKey, str] = {}
        self._view: Mapping[ObjectKey, R] | None = MappingProxyType({})
        self._news: dict[ObjectKey, None] = {}  # in the order of the changes

    @property
    def view(self) -> Mapping[ObjectKey, R]:
        """All records, in the order of appearance; the same immutable mapping until a change."""
        if self._view is None:
            self._view = MappingProxyType(self._records.copy())
        return self._view

    @property
    def malformed(self) -> Mapping[ObjectKey, str]:
        return MappingProxyType(self._malformed)

    def take_news(self) -> tuple[ObjectKey, ...]:
        """Return the keys of records that may have changed since the last call, each once."""
        news, self._news = self._news, {}
        return tuple(news)

    def put(self, metadata: Metadata, raw: msgspec.Raw) -> bool:
        """Add or replace an object; return whether the view changed."""
        key = metadata.key
        before = self._held.get(key)
        held = self._held[key] = self._read(metadata, raw)
        if held.record is None:
            self._records.pop(key, None)
        else:
            self._records[key] = held.record
        same = before is not None and before.uid == held.uid and before.record == held.record
        return self._changed(key, not same and (held.record is not None or _shown(before)))

    def remove(self, metadata: Metadata) -> bool:
        """Remove an object unless another one has its name; return whether the view changed."""
        before = self._held.get(metadata.key)
        if before is None or (metadata.uid and before.uid != metadata.uid):
            return False
        del self._held[metadata.key]
        self._records.pop(metadata.key, None)
        self._malformed.pop(metadata.key, None)
        return self._changed(metadata.key, _shown(before))

    def clear(self) -> bool:
        return self._replace({})

    def read(self, raw: msgspec.Raw) -> tuple[ObjectKey, _Held[R]] | None:
        """Read one object of a list, for `replace`; None if it cannot be identified."""
        metadata = metadata_of(raw)
        if metadata is None or not metadata.name:
            self.unreadable("it has no name")
            return None
        return metadata.key, self._read(metadata, raw)

    def replace(self, listed: Sequence[tuple[ObjectKey, _Held[R]] | None]) -> bool:
        """Replace all objects with the results of `read`; return whether the view changed."""
        known, found = self._held, dict(one for one in listed if one is not None)
        # An unidentified object may be any of the known ones, so none of these is removed.
        old = known | found if None in listed else {k: found[k] for k in known if k in found}
        return self._replace(old | found)

    def unreadable(self, why: str) -> None:
        self._report(_UNNAMED, why)

    def _replace(self, held: dict[ObjectKey, _Held[R]]) -> bool:
        before = self.view
        uids = {key: one.uid for key, one in self._held.items()}
        self._held = held
        self._records = {key: one.record for key, one in held.items() if one.record is not None}
        for key in [key for key in self._malformed if key not in held]:
            del self._malformed[key]
        self._view = None
        view = self.view
        news = [key for key in before if key not in view]
        for key, record in view.items():
            if key not in before or before[key] != record or uids[key] != held[key].uid:
                news.append(key)
        if not news:
            self._view = before
        self._news.update(dict.fromkeys(news))
        return bool(news)

    def _changed(self, key: ObjectKey, changed: bool) -> bool:
        if changed:
            self._view = None
            self._news[key] = None
        return changed

    def _read(self, metadata: Metadata, raw: msgspec.Raw) -> _Held[R]:
        key, before = metadata.key, self._held.get(metadata.key)
        try:
            record = self._decode(raw)
        except _MALFORMED as error:
            self._report(key, str(error) or type(error).__name__)
            keep = not isinstance(error, MalformedObjectError) or error.keep_last_good
            same = before is not None and before.uid == metadata.uid
            return _Held(metadata.uid, before.record if before and same and keep else None)
        self._malformed.pop(key, None)
        return _Held(metadata.uid, record)

    def _report(self, key: ObjectKey, why: str) -> None:
        if self._malformed.get(key) != why:
            self._malformed[key] = why
            name = "/".join(part for part in key if part) or "an object without a name"
            logger.warning("%s %s is not followed: %s", self._label, name, why)


def _shown(held: _Held[R] | None) -> bool:
    return held is not None and held.record is not None
