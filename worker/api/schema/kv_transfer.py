"""KV that a request leaves for another engine, or takes from one. Pure.

As vLLM has it: a prefill asks with `do_remote_decode` in `kv_transfer_params`, is answered with an
object, and that object goes into the body of the decode as it is. As SGLang has it: both workers
are sent the same body, at once, and its `bootstrap_room` names the KV; which of them runs the
prompt is a matter of their roles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from worker.api.schema.parse import Whole, decode_whole
from worker.api.schema.requests import GenerationFields
from worker.config import KvTransferConfig
from worker.errors import RequestError
from worker.types import KvOffer, KvSource

_FIELD = "kv_transfer_params"
_MAX_CHARS = 512  # of a name
_MAX_TOKENS = 1 << 31
_MAX_ROOM = 1 << 63
_BOOTSTRAP_PORT = 8998  # SGLang's default


class KvTransferFields(msgspec.Struct, kw_only=True):
    """What we look at; what other engines' connectors add is theirs."""

    do_remote_decode: bool | None = None
    do_remote_prefill: bool | None = None
    remote_engine_id: str | None = None
    remote_request_id: str | None = None
    remote_host: str | None = None
    remote_port: Whole | None = None
    remote_num_tokens: Whole | None = None


class KvTransfer(NamedTuple):
    """Whether to keep the KV of a request, as `name` if it has one, and where to take it from."""

    keeps: bool = False
    name: str | None = None
    source: KvSource | None = None


def kv_transfer(
    request: GenerationFields, role: str | None, prompt_sizes: Sequence[int]
) -> KvTransfer:
    """What a request asks for, whose prompts have so many tokens. `role` is the worker's, None
    without transfers. Raises `RequestError`.
    """
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
    if fields.do_remote_decode is None and fields.do_remote_prefill is None:
        raise _refused("", "asks for nothing: set do_remote_decode or do_remote_prefill")
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


def kv_transfer_answer(offer: KvOffer) -> dict[str, Any]:
    """What the decode is to be sent."""
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
    if port is None or not 0 < port < 1 << 16:
        raise _refused("remote_port", f"must be in [1, 65535], got {port}")
    if num_tokens is None or not 0 < num_tokens < _MAX_TOKENS:
        raise _refused("remote_num_tokens", f"must be how many tokens are kept, got {num_tokens}")
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
