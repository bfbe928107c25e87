"""What replicas report to each other, as values and as the bytes of proto/pointsman/replica/v1.

What others send is checked here. Each entry of a message stands alone: one that makes no sense is
left out and counted, the others count. A batch is encoded once for all peers: bytes of messages
that are put together mean the messages put together, so a batch's bytes are followed by those of
what belongs to one peer alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import numpy as np
from google.protobuf.message import DecodeError, Message

from picker.errors import PickerError
from picker.framework.attributes import EndpointLoad
from picker.peers.generated import replica_pb2 as pb
from picker.prefix.block_hash import BlockHashes

REPORT_METHOD = "/pointsman.replica.v1.ReplicaExchange/Tell"
MAX_MESSAGE_BYTES = 4 * 2**20
MAX_NAME = 1024  # characters of whatever has a name
MAX_LOADS = 65_536  # of one message
MAX_COUNT = 2**40  # requests or tokens under way at one endpoint, by one replica
_MAX_UINT32 = 2**32 - 1
_HASH_BYTES = 8
_HASHES = np.dtype("<u8")
M = TypeVar("M", bound=Message)
E = TypeVar("E")
T = TypeVar("T")
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

    `fingerprints` are those of the hash seeds of the plugins whose placements these are; so many
    further entries were `unusable`.
    """

    sequence: int
    placements: tuple[Placement, ...] = ()
    bindings: tuple[Binding, ...] = ()
    fingerprints: Mapping[str, int] = {}
    unusable: int = 0


class LoadReport(msgspec.Struct, frozen=True):
    """The load of a replica. `is_whole`: there is nothing else; otherwise what changed. So
    many further entries were `unusable`.
    """

    version: int
    is_whole: bool
    loads: Loads
    unusable: int = 0


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
class PeerWelcome:
    """The answer to a `Hello`: who answers, and the last batch heard of the caller (0: none)."""

    replica_id: bytes
    last_sequence: int
    seed: Seed


class PeerReport(msgspec.Struct, frozen=True):
    """One message of a call, of which every part may be missing."""

    hello: Hello | None = None
    batch: Batch | None = None
    loads: LoadReport | None = None
    seed: Seed | None = None
    age_seconds: float = 0.0  # of the batch
    goodbye: bool = False


class PeerMessageError(PickerError):
    """A peer sent what cannot be understood."""


class _EntryError(PickerError):
    """An entry of a message that makes no sense."""


def encoded_batch(batch: Batch) -> bytes:
    """A message of a batch alone."""
    message = pb.Told()
    body = message.batch
    body.sequence = batch.sequence
    endpoints: dict[EndpointName, int] = {}
    plugins: dict[str, int] = {}
    for one in batch.placements:
        body.placements.add(
            plugin=plugins.setdefault(one.plugin, len(plugins)),
            endpoint=endpoints.setdefault(one.endpoint, len(endpoints)),
            capacity=min(one.capacity, _MAX_UINT32),
            hashes=one.hashes.astype(_HASHES, copy=False).tobytes(),
        )
    for bound in batch.bindings:
        body.bindings.add(
            plugin=plugins.setdefault(bound.plugin, len(plugins)),
            endpoint=endpoints.setdefault(bound.endpoint, len(endpoints)),
            session=_text(bound.session),
            moves=min(bound.moves, _MAX_UINT32),
        )
    for name in endpoints:
        body.endpoints.add(key=name.key, host_port=name.host_port, incarnation=name.incarnation)
    for plugin in plugins:
        body.plugins.add(name=plugin, seed_fingerprint=batch.fingerprints.get(plugin, 0))
    return message.SerializeToString()


def encoded_report(told: PeerReport) -> bytes:
    """A message of all parts but the batch, to be sent alone or behind an encoded batch."""
    message = pb.Told(age_milliseconds=int(told.age_seconds * 1000), goodbye=told.goodbye)
    if told.hello is not None:
        hello = told.hello
        message.hello.version = hello.version
        message.hello.replica_id = hello.replica_id
        message.hello.pool = hello.pool
        message.hello.seed.CopyFrom(_seed_message(hello.seed))
    if told.seed is not None:
        message.seed.CopyFrom(_seed_message(told.seed))
    if told.loads is not None:
        message.loads.version = told.loads.version
        message.loads.is_whole = told.loads.is_whole
        for (plugin, endpoint), load in told.loads.loads.items():
            # Beyond that peers leave the entry out.
            message.loads.loads.add(
                plugin=plugin,
                endpoint=endpoint,
                requests=min(load.requests, MAX_COUNT),
                tokens=min(load.tokens, MAX_COUNT),
            )
    return message.SerializeToString()


def decoded_report(data: bytes) -> PeerReport:
    """What `data` says. Raises `PeerMessageError`."""
    message = _parsed(pb.Told(), data)
    return PeerReport(
        _hello(message.hello) if message.HasField("hello") else None,
        _batch(message.batch) if message.HasField("batch") else None,
        _loads(message.loads) if message.HasField("loads") else None,
        _seed(message.seed) if message.HasField("seed") else None,
        message.age_milliseconds / 1000,
        message.goodbye,
    )


def encoded_welcome(heard: PeerWelcome) -> bytes:
    """The answer to a `Hello`."""
    message = pb.Heard(replica_id=heard.replica_id, last_sequence=heard.last_sequence)
    message.seed.CopyFrom(_seed_message(heard.seed))
    return message.SerializeToString()


def decoded_welcome(data: bytes) -> PeerWelcome:
    """What `data` says. Raises `PeerMessageError`."""
    message = _parsed(pb.Heard(), data)
    return PeerWelcome(_id(message.replica_id), message.last_sequence, _seed(message.seed))


def _parsed(message: M, data: bytes) -> M:
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise PeerMessageError(f"no message of a replica: {error}") from error
    return message


def _hello(message: pb.Hello) -> Hello:
    return Hello(_id(message.replica_id), message.pool, _seed(message.seed), message.version)


def _id(value: bytes) -> bytes:
    if len(value) != ID_BYTES:
        raise PeerMessageError(f"a replica's id has {ID_BYTES} bytes, not {len(value)}")
    return value


def _seed_message(seed: Seed) -> pb.Seed:
    return pb.Seed(
        fingerprint=seed.fingerprint,
        value=seed.value,
        is_settled=seed.is_settled,
        chosen_at_milliseconds=seed.chosen_at_milliseconds,
        chosen_by=seed.chosen_by,
    )


def _seed(message: pb.Seed) -> Seed:
    return Seed(
        message.fingerprint,
        message.value if message.HasField("value") else None,
        message.is_settled,
        message.chosen_at_milliseconds,
        message.chosen_by[:ID_BYTES],
    )


def _batch(message: pb.Batch) -> Batch:
    endpoints = [_or_none(_endpoint_name, one) for one in message.endpoints]
    plugins = [_or_none(_name, one.name) for one in message.plugins]

    def placement(one: pb.Placement) -> Placement:
        plugin, endpoint = _referred(plugins, one.plugin), _referred(endpoints, one.endpoint)
        return Placement(plugin, endpoint, one.capacity, _hashes(one.hashes))

    def binding(one: pb.Binding) -> Binding:
        plugin, endpoint = _referred(plugins, one.plugin), _referred(endpoints, one.endpoint)
        return Binding(plugin, endpoint, _name(one.session), one.moves)

    placements = [_or_none(placement, one) for one in message.placements]
    bindings = [_or_none(binding, one) for one in message.bindings]
    fingerprints = {one.name: one.seed_fingerprint for one in message.plugins}
    return Batch(
        message.sequence,
        tuple(one for one in placements if one is not None),
        tuple(one for one in bindings if one is not None),
        fingerprints,
        placements.count(None) + bindings.count(None),
    )


def _or_none(read: Callable[[E], T], entry: E) -> T | None:
    """Apply `read` to an entry; None if the entry makes no sense."""
    try:
        return read(entry)
    except _EntryError:
        return None


def _referred(named: Sequence[T | None], index: int) -> T:
    found = named[index] if index < len(named) else None
    if found is None:
        raise _EntryError("it refers to what is not named")
    return found


def _endpoint_name(one: pb.Endpoint) -> EndpointName:
    return EndpointName(_name(one.key), _name(one.host_port), _name(one.incarnation))


def _hashes(data: bytes) -> BlockHashes:
    if len(data) % _HASH_BYTES:
        raise _EntryError(f"{len(data)} bytes are no hashes")
    return np.frombuffer(data, _HASHES)


def _loads(message: pb.Loads) -> LoadReport:
    loads: dict[LoadKey, EndpointLoad] = {}
    unusable = max(0, len(message.loads) - MAX_LOADS)
    for one in message.loads[:MAX_LOADS]:
        found = _or_none(_load, one)
        if found is None:
            unusable += 1
        else:
            loads[found[0]] = found[1]
    return LoadReport(message.version, message.is_whole, loads, unusable)


def _load(one: pb.Load) -> tuple[LoadKey, EndpointLoad]:
    if max(one.requests, one.tokens) > MAX_COUNT:
        raise _EntryError(f"no replica has {max(one.requests, one.tokens)} under way")
    key = (_name(one.plugin) if one.plugin else PICKER, _name(one.endpoint))
    return key, EndpointLoad(one.requests, one.tokens)


def _name(text: str) -> str:
    if len(text) > MAX_NAME:
        raise _EntryError(f"a name of {len(text)} characters")
    return text


def _text(text: str) -> str:
    """What UTF-8 can carry: clients may send half a character, and it stays the same half."""
    return text.encode(errors="backslashreplace").decode()
