"""`kv_transfer_params`: KV that a request leaves for another engine, or takes from one. Pure.

As vLLM has it: a prefill asks with `do_remote_decode`, is answered with an object, and that object
goes into the body of the decode as it is.
"""

from __future__ import annotations

from typing import Any

import msgspec

from worker.api.schema.parse import Whole, decode_whole
from worker.config import KvTransferConfig
from worker.errors import RequestError
from worker.types import KvOffer, KvSource

_FIELD = "kv_transfer_params"
_MAX_CHARS = 512  # of a name
_MAX_TOKENS = 1 << 31


class KvTransferFields(msgspec.Struct, kw_only=True):
    """What we look at; what other engines' connectors add is theirs."""

    do_remote_decode: bool | None = None
    do_remote_prefill: bool | None = None
    remote_engine_id: str | None = None
    remote_request_id: str | None = None
    remote_host: str | None = None
    remote_port: Whole | None = None
    remote_num_tokens: Whole | None = None


def kv_transfer(
    given: dict[str, Any] | None, role: str | None, *, streams: bool, num_prompts: int
) -> tuple[bool, KvSource | None]:
    """Whether to keep the KV of a request, and where to take it from. `role` is the worker's, None
    without transfers. Raises `RequestError`.
    """
    if not given:
        return False, None
    if role is None:
        raise _refused("", "needs a worker that was started with --kv-transfer-config")
    try:
        fields = msgspec.convert(given, KvTransferFields, dec_hook=decode_whole)
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
        if streams:
            raise _refused("do_remote_decode", "goes with stream false: the answer has parameters")
        return True, None
    if fields.do_remote_prefill:
        if not config.takes:
            raise _refused("do_remote_prefill", f"needs kv_role kv_consumer or kv_both, not {role}")
        return False, _source(fields)
    if fields.do_remote_decode is None and fields.do_remote_prefill is None:
        raise _refused("", "asks for nothing: set do_remote_decode or do_remote_prefill")
    return False, None


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
        if not value or len(value) > _MAX_CHARS or not value.isprintable():
            raise _refused(name, f"must have 1 to {_MAX_CHARS} printable characters")
        names[name] = value
    host, engine_id, transfer_id = names.values()
    return KvSource(host, int(port), engine_id, transfer_id, int(num_tokens))


def _refused(name: str, reason: str) -> RequestError:
    path = f"{_FIELD}.{name}" if name else _FIELD
    return RequestError(f"`{path}` {reason}", param=path)
