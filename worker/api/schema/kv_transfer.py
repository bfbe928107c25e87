"""KV that a request leaves for another engine, or takes from one. Pure.

In vLLM's protocol, the prefill's answer has `kv_transfer_params` for the decode. In SGLang's, both
workers get the same body, whose `bootstrap_room` names the KV; their roles decide who runs the
prompt.
"""

import ipaddress
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from worker.api.http.arrival import KV_SOURCE
from worker.api.schema.parse import Whole, decode_whole
from worker.api.schema.requests import GenerationFields, KvPeerFields
from worker.config import KvAddress, KvTransferConfig
from worker.errors import RequestError
from worker.types import KvOffer, KvPeer, KvSource

_FIELD = "kv_transfer_params"
_MAX_CHARS = 512  # of a name
_MAX_TOKENS = 1 << 31
_END_OF_PORTS = 1 << 16
_HOST_PORT = re.compile(r"(?:([0-9.]+)|\[([0-9a-fA-F:.]+)\]):([0-9]{1,5})", re.ASCII)
_MAX_ROOM = 1 << 63
_BOOTSTRAP_PORT = 8998  # SGLang's default


class KvTransferFields(msgspec.Struct, kw_only=True):
    """The fields that we read; the others belong to other engines' connectors."""

    do_remote_decode: bool | None = None
    do_remote_prefill: bool | None = None
    remote_engine_id: str | None = None
    remote_request_id: str | None = None
    remote_host: str | None = None
    remote_port: Whole | None = None
    remote_num_tokens: Whole | None = None
    remote_kv_source: KvPeerFields | None = None


class KvTransfer(NamedTuple):
    """The fate of a request's KV: stored under `name` if `keeps`, or taken from `source`."""

    keeps: bool = False
    name: str | None = None
    source: KvSource | None = None


def kv_transfer(
    request: GenerationFields, role: str | None, prompt_sizes: Sequence[int]
) -> KvTransfer:
    if request.bootstrap_room is not None:
        return _in_room(request, role, prompt_sizes)
    if request.kv_transfer_params:
        return _by_params(request, role, len(prompt_sizes))
    return KvTransfer()


def _by_params(request: GenerationFields, role: str | None, num_prompts: int) -> KvTransfer:
    if role is None:
        raise _refused("", "needs a worker that was started with --kv-transfer-config")
    try:
        fields = msgspec.convert(
            request.kv_transfer_params, KvTransferFields, dec_hook=decode_whole
        )
    except msgspec.ValidationError as error:
        raise _refused("", f"is not as it should be: {error}") from error
    config = KvTransferConfig(kv_role=role)
    if fields.do_remote_decode and fields.do_remote_prefill:
        raise _refused("", "has do_remote_decode and do_remote_prefill: one request does one")
    if (fields.do_remote_decode or fields.do_remote_prefill) and num_prompts > 1:
        raise _refused("", "goes with one prompt: send a request for each")
    if fields.do_remote_decode:
        if not config.gives:
            raise _refused("do_remote_decode", f"needs kv_role kv_producer or kv_both, not {role}")
        if request.stream:
            raise _refused("do_remote_decode", "goes with stream false: the answer has parameters")
        return KvTransfer(keeps=True)
    if fields.do_remote_prefill:
        if not config.takes:
            raise _refused("do_remote_prefill", f"needs kv_role kv_consumer or kv_both, not {role}")
        return KvTransfer(source=_source(fields))
    asks = (fields.do_remote_decode, fields.do_remote_prefill, fields.remote_kv_source)
    if asks == (None, None, None):
        names = "do_remote_decode, do_remote_prefill or remote_kv_source"
        raise _refused("", f"asks for nothing: set {names}")
    return KvTransfer()


def _in_room(
    request: GenerationFields, role: str | None, prompt_sizes: Sequence[int]
) -> KvTransfer:
    field, room, host = "bootstrap_room", request.bootstrap_room, request.bootstrap_host
    port = _BOOTSTRAP_PORT if request.bootstrap_port is None else request.bootstrap_port
    wrong = None
    if role is None:
        wrong = "needs a worker that was started with --kv-transfer-config"
    elif role == "kv_both":
        wrong = "needs kv_role kv_producer, where the prompt is run, or kv_consumer, not kv_both"
    elif len(prompt_sizes) > 1:
        wrong = "goes with one prompt: send a request for each"
    elif request.kv_transfer_params:
        wrong = f"does not go with {_FIELD}: one request does one"
    elif room is None or not 0 <= room < _MAX_ROOM:
        wrong = f"must be in [0, 2^63), got {room}"
    elif not 0 < port < 1 << 16:
        field, wrong = "bootstrap_port", f"must be in [1, 65535], got {port}"
    elif not _is_name(host):
        field, wrong = "bootstrap_host", f"must have 1 to {_MAX_CHARS} printable characters"
    if wrong is not None:
        raise RequestError(f"`{field}` {wrong}", param=field)
    name = f"room {room:d}"
    if role == "kv_producer":
        return KvTransfer(keeps=True, name=name)
    return KvTransfer(source=KvSource(str(host), int(port), None, name, prompt_sizes[0]))


def kv_peer(
    resumed: KvPeerFields | None,
    given: dict[str, Any] | None,
    header: str | None,
    role: str | None,
    address: KvAddress | None,
) -> KvPeer | None:
    """Return the worker whose caches to ask: the one that `resume` names, else
    `kv_transfer_params`, else the picker's `header`. None if this worker takes no KV. Raises
    `RequestError`.
    """
    if role is None or address is None or not KvTransferConfig(kv_role=role).takes:
        return None
    if resumed is not None:
        return _peer(resumed, "resume.kv")
    # The body is nearer to the request than the picker's header.
    source = (given or {}).get("remote_kv_source")
    if source is not None:
        fields = msgspec.convert(source, KvPeerFields, dec_hook=decode_whole)  # checked before
        return _peer(fields, f"{_FIELD}.remote_kv_source")
    if not header:
        return None
    found = _HOST_PORT.fullmatch(header)
    try:
        host = str(ipaddress.ip_address((found[1] or found[2]) if found else ""))
    except ValueError:
        host = ""
    port = int(found[3]) if found else 0
    if not host or not 0 < port < _END_OF_PORTS:
        reason = f"must be the IP address and port of a worker, got {header[:_MAX_CHARS]!r}"
        raise RequestError(f"{KV_SOURCE} {reason}", param=KV_SOURCE)
    return KvPeer(host, address.port_of(port))


def _peer(fields: KvPeerFields, path: str) -> KvPeer:
    host, port, name = fields.remote_host or "", fields.remote_port, fields.kv_request_id or ""
    try:
        ipaddress.ip_address(host)
    except ValueError as error:
        reason = f"must be an IP address, got {host[:_MAX_CHARS]!r}"
        raise RequestError(f"`{path}.remote_host` {reason}", param=path) from error
    if port is None or not 0 < port < _END_OF_PORTS:
        raise RequestError(f"`{path}.remote_port` must be in [1, 65535], got {port}", param=path)
    if len(name) > _MAX_CHARS or not name.isprintable():
        reason = f"must have at most {_MAX_CHARS} printable characters"
        raise RequestError(f"`{path}.kv_request_id` {reason}", param=path)
    return KvPeer(host, int(port), name)


def kv_peer_answer(request_id: str, role: str | None, address: KvAddress | None) -> Any:
    """Return the fields with which another worker asks this one for the KV of a stream."""
    if role is None or address is None or not KvTransferConfig(kv_role=role).gives:
        return None
    return {"remote_host": address.host, "remote_port": address.port, "kv_request_id": request_id}


def kv_transfer_answer(offer: KvOffer) -> dict[str, Any]:
    source = offer.source
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [list(offer.block_ids)],
        "remote_engine_id": source.engine_id,
        "remote_request_id": source.transfer_id,
        "remote_host": source.host,
        "remote_port": source.port,
        "tp_size": 1,
        "remote_num_tokens": source.num_tokens,
        "remote_blocks_expiry_time": offer.expires_seconds,
        "transfer_mode": "pull",
    }


def _source(fields: KvTransferFields) -> KvSource:
    port, num_tokens = fields.remote_port, fields.remote_num_tokens
    if port is None or not 0 < port < _END_OF_PORTS:
        raise _refused("remote_port", f"must be in [1, 65535], got {port}")
    if num_tokens is None or not 0 < num_tokens < _MAX_TOKENS:
        raise _refused("remote_num_tokens", f"must be the number of tokens, got {num_tokens}")
    names = {}
    for name in ("remote_host", "remote_engine_id", "remote_request_id"):
        value = getattr(fields, name)
        if not _is_name(value):
            raise _refused(name, f"must have 1 to {_MAX_CHARS} printable characters")
        names[name] = value
    host, engine_id, transfer_id = names.values()
    return KvSource(host, int(port), engine_id, transfer_id, int(num_tokens))


def _is_name(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= _MAX_CHARS and value.isprintable()


def _refused(name: str, reason: str) -> RequestError:
    path = f"{_FIELD}.{name}" if name else _FIELD
    return RequestError(f"`{path}` {reason}", param=path)
