"""The messages between replicas, as values and as the bytes of proto/pointsman/replica/v1.

Decoding skips and counts each invalid entry and accepts the rest. Concatenated protobuf messages
are equivalent to their merge, so a batch is encoded once for all peers, and the fields for one peer
follow its bytes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from google.protobuf.message import DecodeError, Message

from picker.errors import PickerError
from picker.framework.attributes import EndpointLoad
from picker.peers.generated import replica_pb2 as pb
from picker.prefix.block_hash import BlockHashes

REPORT_METHOD = "/pointsman.replica.v1.ReplicaExchange/Tell"
MAX_MESSAGE_BYTES = 4 * 2**20  # batches have 32 KiB
MAX_NAME = 1024  # characters of any name
MAX_LOADS = 65_536  # in one message
MAX_COUNT = 2**40  # requests or tokens under way at one endpoint, by one replica
_MAX_UINT32 = 2**32 - 1
_HASH_BYTES = 8
M = TypeVar("M", bound=Message)
E = TypeVar("E")
T = TypeVar("T")
VERSION = 1
ID_BYTES = 16
# The plugin that counts, and the endpoint; the plugin of the picker's own count is "".
LoadKey = tuple[str, str]
Loads = Mapping[LoadKey, EndpointLoad]
PICKER = ""


class EndpointName(msgspec.Struct, frozen=True):
    """An endpoint; two replicas mean the same server if all fields are equal."""

    key: str
    host_port: str
    incarnation: str = ""


class Placement(msgspec.Struct, frozen=True):
    """A plugin learned that a prompt was sent to an endpoint with `capacity` blocks."""

    plugin: str
    endpoint: EndpointName
    capacity: int
    hashes: BlockHashes


class Binding(msgspec.Struct, frozen=True):
    """A binding of a session to an endpoint by a plugin; the one with more `moves` wins."""

    plugin: str
    endpoint: EndpointName
    session: str
    moves: int


class Batch(msgspec.Struct, frozen=True):
    """The entries of some milliseconds, numbered from 1; `fingerprints` are those of hash seeds."""

    sequence: int
    placements: tuple[Placement, ...] = ()
    bindings: tuple[Binding, ...] = ()
    fingerprints: Mapping[str, int] = {}
    unusable: int = 0


class LoadReport(msgspec.Struct, frozen=True):
    """The load of a replica: all of it (`is_whole`), or the changes."""

    version: int
    is_whole: bool
    loads: Loads
    unusable: int = 0


@dataclass(frozen=True, slots=True)
class Seed:
    """A hash seed as replicas send it; a configured one has only a fingerprint and no `value`."""

    fingerprint: int
    value: int | None = None
    is_settled: bool = False
    chosen_at_milliseconds: int = 0
    chosen_by: bytes = b""

    @property
    def rank(self) -> tuple[bool, int, bytes]:
        """The place in the order of seeds; the lowest wins."""
        return (not self.is_settled, self.chosen_at_milliseconds, self.chosen_by)


@dataclass(frozen=True, slots=True)
class Hello:
    replica_id: bytes
    pool: str
    seed: Seed
    version: int = VERSION


@dataclass(frozen=True, slots=True)
class PeerWelcome:
    """The answer to a `Hello`: the sender, and the number of the caller's last batch (0: none)."""

    replica_id: bytes
    last_sequence: int
    seed: Seed


class PeerReport(msgspec.Struct, frozen=True):
    hello: Hello | None = None
    batch: Batch | None = None
    loads: LoadReport | None = None
    seed: Seed | None = None
    age_seconds: float = 0.0  # of the batch
    goodbye: bool = False


class PeerMessageError(PickerError):
    """A peer sent a message that cannot be decoded."""


class _EntryError(PickerError): ...


def encoded_batch(batch: Batch) -> bytes:
    """Encode a message that holds only a batch."""
    message = pb.Report()
    body = message.batch
    body.sequence = batch.sequence
    endpoints: dict[EndpointName, int] = {}
    plugins: dict[str, int] = {}
    for one in batch.placements:
        body.placements.add(
            plugin=plugins.setdefault(one.plugin, len(plugins)),
            endpoint=endpoints.setdefault(one.endpoint, len(endpoints)),
            capacity=min(one.capacity, _MAX_UINT32),
            hashes=one.hashes,
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


def encoded_report(report: PeerReport) -> bytes:
    """Encode all parts except the batch; send them alone or after an encoded batch."""
    message = pb.Report(age_milliseconds=int(report.age_seconds * 1000), goodbye=report.goodbye)
    if report.hello is not None:
        hello = report.hello
        message.hello.version = hello.version
        message.hello.replica_id = hello.replica_id
        message.hello.pool = hello.pool
        message.hello.seed.CopyFrom(_seed_message(hello.seed))
    if report.seed is not None:
        message.seed.CopyFrom(_seed_message(report.seed))
    if report.loads is not None:
        message.loads.version = report.loads.version
        message.loads.is_whole = report.loads.is_whole
        for (plugin, endpoint), load in report.loads.loads.items():
            # Peers skip an entry with a greater count.
            message.loads.loads.add(
                plugin=plugin,
                endpoint=endpoint,
                requests=min(load.requests, MAX_COUNT),
                tokens=min(load.tokens, MAX_COUNT),
            )
    return message.SerializeToString()


def decoded_report(data: bytes) -> PeerReport:
    message = _parsed(pb.Report(), data)
    return PeerReport(
        _hello(message.hello) if message.HasField("hello") else None,
        _batch(message.batch) if message.HasField("batch") else None,
        _loads(message.loads) if message.HasField("loads") else None,
        _seed(message.seed) if message.HasField("seed") else None,
        message.age_milliseconds / 1000,
        message.goodbye,
    )


def encoded_welcome(welcome: PeerWelcome) -> bytes:
    message = pb.Welcome(replica_id=welcome.replica_id, last_sequence=welcome.last_sequence)
    message.seed.CopyFrom(_seed_message(welcome.seed))
    return message.SerializeToString()


def decoded_welcome(data: bytes) -> PeerWelcome:
    message = _parsed(pb.Welcome(), data)
    return PeerWelcome(_id(message.replica_id), message.last_sequence, _seed(message.seed))


def _parsed(message: M, data: bytes) -> M:
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise PeerMessageError(f"not a message of a replica: {error}") from error
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
    try:
        return read(entry)
    except _EntryError:
        return None


def _referred(named: Sequence[T | None], index: int) -> T:
    found = named[index] if index < len(named) else None
    if found is None:
        raise _EntryError("a reference to an unknown name")
    return found


def _endpoint_name(one: pb.Endpoint) -> EndpointName:
    return EndpointName(_name(one.key), _name(one.host_port), _name(one.incarnation))


def _hashes(data: bytes) -> BlockHashes:
    if len(data) % _HASH_BYTES:
        raise _EntryError(f"{len(data)} bytes are not hashes")
    return data


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
        raise _EntryError(f"a count of {max(one.requests, one.tokens)}")
    key = (_name(one.plugin) if one.plugin else PICKER, _name(one.endpoint))
    return key, EndpointLoad(one.requests, one.tokens)


def _name(text: str) -> str:
    if len(text) > MAX_NAME:
        raise _EntryError(f"a name of {len(text)} characters")
    return text


def _text(text: str) -> str:
    """Escape lone surrogates, which clients may send and UTF-8 cannot carry."""
    return text.encode(errors="backslashreplace").decode()
