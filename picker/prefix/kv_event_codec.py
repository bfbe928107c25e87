"""Decodes the KV-cache events of engines. Pure; validates everything.

A message has a topic, `kv@<pod>@<model>`, a number that an engine increments with each message, and
a msgpack payload: the array `[seconds, events, rank?]`. Newer vLLM sends an event as a map with
`type`, older vLLM and SGLang as an array that begins with the type and may omit trailing fields:

    BlockStored       block_hashes, parent_block_hash, token_ids, block_size, lora_id, medium,
                      lora_name, extra_keys, group_idx, kv_cache_spec_kind
    BlockRemoved      block_hashes, medium, group_idx
    AllBlocksCleared

A hash is an integer or bytes, of which the last eight count. An extra key is a string, or a list
that begins with one. Unusable events, and blocks of a group that caches only part of the tokens,
are skipped alone; matches of blocks whose parents were skipped become too short.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

import msgspec

from picker.errors import PickerError
from picker.framework.interfaces import SkippedKvEvent

DEFAULT_TIER = "gpu"
MAX_EXTRA_KEYS = 256  # of one block: each is hashed into every key that the block overlaps
_FULL_ATTENTION = ("", "full_attention", "mla_attention", "sink_full_attention")
_MASK = 2**64 - 1
_FIELDS: dict[str, tuple[str, ...]] = {
    "BlockStored": (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
        "kv_cache_spec_kind",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}
_REQUIRED = {"BlockStored": 4, "BlockRemoved": 1, "AllBlocksCleared": 0}  # leading fields

_BATCH = msgspec.msgpack.Decoder(list[msgspec.Raw])
_EVENT = msgspec.msgpack.Decoder()
_MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class KvEventError(PickerError): ...


class _SkipError(PickerError):
    """An event that is skipped; `reason` is a metric label."""

    def __init__(self, text: str, reason: str = "unusable") -> None:
        super().__init__(text)
        self.reason = reason


class EngineType(Enum):
    """The dialect of an engine; SGLang sends no maps."""

    VLLM = "vllm"
    SGLANG = "sglang"


@dataclass(frozen=True, slots=True)
class Topic:
    """The sender of a message; `model` is "" if the topic does not name it."""

    pod: str
    model: str = ""


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Consecutive blocks of packed uint32 `tokens`, which are empty if only the tier is new."""

    hashes: tuple[int, ...]
    parent: int | None
    tokens: bytes
    block_size: int
    tier: str = DEFAULT_TIER
    adapter: str = ""
    extras: tuple[tuple[str, ...], ...] = ()
    group: int | None = None


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks that left a cache."""

    hashes: tuple[int, ...]
    tier: str = DEFAULT_TIER
    group: int | None = None


@dataclass(frozen=True, slots=True)
class CacheCleared:
    """An event after which all caches of the engine are empty."""


KvEvent: TypeAlias = BlocksStored | BlocksRemoved | CacheCleared


def parse_topic(topic: str) -> Topic:
    """Read `kv@<pod>@<model>`; a topic without these three parts is a pod name."""
    parts = topic.split("@", 2)
    return Topic(parts[1], parts[2]) if len(parts) == 3 else Topic(topic)


def split_message(payload: bytes, part_bytes: int) -> Iterator[bytes]:
    """Split a large message into messages of about `part_bytes` with at least one event."""
    if len(payload) <= part_bytes:
        yield payload
        return
    try:
        time, events, *rest = _BATCH.decode(payload)
        raws = _BATCH.decode(events)
    except (*_MALFORMED, ValueError):
        yield payload
        return
    part: list[msgspec.Raw] = []
    size = 0
    for raw in raws:
        part.append(raw)
        size += len(memoryview(raw))
        if size >= part_bytes:
            yield msgspec.msgpack.encode([time, part, *rest])
            part, size = [], 0
    if part:
        yield msgspec.msgpack.encode([time, part, *rest])


def decode_events(
    payload: bytes, engine: EngineType = EngineType.VLLM
) -> tuple[list[KvEvent], list[SkippedKvEvent]]:
    """Decode the events of one message, and list the skipped ones. Raises `KvEventError`."""
    try:
        batch = _BATCH.decode(payload)
        raws = _BATCH.decode(batch[1]) if len(batch) > 1 else None
    except _MALFORMED as error:
        raise KvEventError(f"a message is not an array of a time and events: {error}") from None
    if raws is None:
        raise KvEventError("a message is not an array of a time and events")
    events: list[KvEvent] = []
    skipped: list[SkippedKvEvent] = []
    for raw in raws:
        try:
            events.append(_event(_EVENT.decode(raw), engine))
        except _SkipError as error:
            skipped.append(SkippedKvEvent(error.reason, str(error)))
        except _MALFORMED as error:
            skipped.append(SkippedKvEvent("unusable", f"an event is not msgpack: {error}"))
    return events, skipped


def _event(raw: object, engine: EngineType) -> KvEvent:
    tag, fields = _fields(raw, engine)
    if tag == "BlockStored":
        return _stored(fields)
    if tag == "BlockRemoved":
        return BlocksRemoved(
            _hashes(fields["block_hashes"]),
            _tier(fields.get("medium")),
            _optional(fields.get("group_idx"), int, "group_idx"),
        )
    return CacheCleared()


def _fields(raw: object, engine: EngineType) -> tuple[str, dict[str, Any]]:
    """Return the type and the fields by name of an event in either form."""
    if isinstance(raw, dict) and engine is EngineType.VLLM:
        tag = _known(raw.get("type"))
        fields = {name: raw[name] for name in _FIELDS[tag] if name in raw}
    elif isinstance(raw, list) and raw:
        tag = _known(raw[0])
        fields = dict(zip(_FIELDS[tag], raw[1:], strict=False))
    else:
        raise _SkipError("an event is neither an array nor a map that this engine sends")
    missing = [name for name in _FIELDS[tag][: _REQUIRED[tag]] if name not in fields]
    if missing:
        raise _SkipError(f"{tag} has no {', '.join(missing)}")
    return tag, fields


def _known(tag: object) -> str:
    if not isinstance(tag, str):
        raise _SkipError("an event has no type")
    if tag not in _FIELDS:
        raise _SkipError(f"unknown event type {tag!r:.50}", "unknown_type")
    return tag


def _stored(fields: dict[str, Any]) -> BlocksStored:
    kind = _optional(fields.get("kv_cache_spec_kind"), str, "kv_cache_spec_kind") or ""
    if kind not in _FULL_ATTENTION:  # first: such a group may have fewer blocks than tokens need
        raise _SkipError(
            f"a prompt cannot resume from a cache of kind {kind!r:.50}", "not_resumable"
        )
    hashes = _hashes(fields["block_hashes"])
    size = fields["block_size"]
    if type(size) is not int or size < 1:
        raise _SkipError("block_size is not a positive integer")
    tokens = _tokens(fields["token_ids"])
    if tokens and len(tokens) != len(hashes) * size * 4:
        raise _SkipError("token_ids does not have block_size tokens per block")
    parent = fields["parent_block_hash"]
    adapter = _optional(fields.get("lora_name"), str, "lora_name") or ""
    return BlocksStored(
        hashes=hashes,
        parent=None if parent is None else _hash(parent) or None,
        tokens=tokens,
        block_size=size,
        tier=_tier(fields.get("medium")),
        adapter=adapter,
        extras=_extras(fields.get("extra_keys"), adapter),
        group=_optional(fields.get("group_idx"), int, "group_idx"),
    )


def _hashes(value: object) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise _SkipError("block_hashes is not a list")
    return tuple(map(_hash, value))


def _hash(value: object) -> int:
    if isinstance(value, bytes):
        return int.from_bytes(value[-8:], "big")
    if type(value) is not int:
        raise _SkipError("a block hash is neither an integer nor bytes")
    return value & _MASK


def _tokens(value: object) -> bytes:
    if not isinstance(value, list):
        raise _SkipError("token_ids is not a list")
    try:
        return struct.pack(f"<{len(value)}I", *value)
    except struct.error as error:
        raise _SkipError(f"token_ids has an invalid token id: {error}") from None


def _tier(value: object) -> str:
    return (_optional(value, str, "medium") or DEFAULT_TIER).lower()


def _extras(value: object, adapter: str) -> tuple[tuple[str, ...], ...]:
    """Read the extra keys of each block, without the adapter's name: the root contains it."""
    if value is None:
        return ()
    if not isinstance(value, list):
        raise _SkipError("extra_keys is not a list")
    return tuple(() if own is None else _extra_texts(own, adapter) for own in value)


def _extra_texts(own: object, adapter: str) -> tuple[str, ...]:
    if not isinstance(own, list):
        raise _SkipError("the extra keys of a block are not a list")
    if len(own) > MAX_EXTRA_KEYS:
        raise _SkipError(f"a block has more than {MAX_EXTRA_KEYS} extra keys")
    texts: list[str] = []
    for entry in own:
        text = entry[0] if isinstance(entry, list) and entry else entry
        if not isinstance(text, str):
            raise _SkipError("an extra key is not a string")
        if text != adapter:
            texts.append(text)
    return tuple(texts)


def _optional(value: object, kind: type[Any], name: str) -> Any:
    if value is not None and type(value) is not kind:
        raise _SkipError(f"{name} is not of type {kind.__name__}: {value!r:.50}")
    return value
