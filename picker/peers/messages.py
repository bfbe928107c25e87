"""What replicas tell each other, as values. `picker.peers.wire` knows the bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from picker.framework.attributes import EndpointLoad
from picker.prefix.block_hash import BlockHashes

VERSION = 1
ID_BYTES = 16
# Whose count a load is, and of which endpoint; the picker's own count is of the plugin "".
LoadKey = tuple[str, str]
Loads = Mapping[LoadKey, EndpointLoad]
PICKER = ""


class EndpointName(msgspec.Struct, frozen=True):
    """An endpoint, and what has to be equal for it to be the same server elsewhere."""

    key: str
    host_port: str
    incarnation: str = ""


class Placement(msgspec.Struct, frozen=True):
    """A plugin learned that a prompt was sent to an endpoint with room for `capacity` blocks."""

    plugin: str
    endpoint: EndpointName
    capacity: int
    hashes: BlockHashes


class Binding(msgspec.Struct, frozen=True):
    """A plugin bound a session to an endpoint, the so-manieth that the session has."""

    plugin: str
    endpoint: EndpointName
    session: str
    moves: int


class Batch(msgspec.Struct, frozen=True):
    """What a replica learned within some milliseconds; numbered from 1 without gaps.

    `fingerprints` are those of the hash seeds of the plugins whose placements these are.
    """

    sequence: int
    placements: tuple[Placement, ...] = ()
    bindings: tuple[Binding, ...] = ()
    fingerprints: Mapping[str, int] = {}


class LoadReport(msgspec.Struct, frozen=True):
    """What a replica has under way. `is_whole`: there is nothing else; otherwise what changed."""

    version: int
    is_whole: bool
    loads: Loads


@dataclass(frozen=True, slots=True)
class Seed:
    """A hash seed as replicas tell it; `value` None: only its fingerprint is told.

    Times are since 1970. Who has the least `rank` is followed.
    """

    fingerprint: int
    value: int | None = None
    is_settled: bool = False
    chosen_at_milliseconds: int = 0
    chosen_by: bytes = b""

    @property
    def rank(self) -> tuple[bool, int, bytes]:
        """Its place among seeds that were agreed upon."""
        return (not self.is_settled, self.chosen_at_milliseconds, self.chosen_by)


@dataclass(frozen=True, slots=True)
class Hello:
    """The beginning of a call."""

    replica_id: bytes
    pool: str
    seed: Seed
    version: int = VERSION


@dataclass(frozen=True, slots=True)
class Heard:
    """The answer to a `Hello`: who answers, and the last batch heard of the caller (0: none)."""

    replica_id: bytes
    last_sequence: int
    seed: Seed


class Told(msgspec.Struct, frozen=True):
    """One message of a call, of which every part may be missing."""

    hello: Hello | None = None
    batch: Batch | None = None
    loads: LoadReport | None = None
    seed: Seed | None = None
    age_seconds: float = 0.0  # of the batch
    goodbye: bool = False
