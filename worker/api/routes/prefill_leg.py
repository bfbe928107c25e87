"""The first leg of a disaggregated request, which draws one token at the named prefill worker.

`pointsman sidecar` runs it in front of a decode worker, and `worker --pd-proxy` inside one. If it
fails, the second leg runs without it: its worker computes the prompt, or finds the fault.
"""

import asyncio
import logging
import re
from collections.abc import Sequence
from typing import Any

import aiohttp
import msgspec

from base.forwarding import Headers, json_headers
from worker.errors import KvTransferError, RequestError
from worker.kv.access import may_ask

logger = logging.getLogger(__name__)

PREFILL_SPAN = "llm_d.pd_proxy.prefill"  # llm-d's name
PREFILLER_HEADER = "x-prefiller-host-port"
REQUEST_ID_HEADER = "x-request-id"
_PARAMS = "kv_transfer_params"
# Where KV is taken from: vLLM's field, and SGLang's.
_SOURCES = (_PARAMS, "bootstrap_host", "bootstrap_port", "bootstrap_room")
_GENERATE = "/inference/v1/generate"
PATHS = ("/v1/chat/completions", "/v1/completions", _GENERATE)
_LIMITS = ("max_tokens", "max_completion_tokens", "min_tokens")
_ADDRESS = re.compile(r"(?:([0-9.]+)|\[([0-9a-fA-F:.]+)\]):[0-9]{1,5}", re.ASCII)
KEEP_KV = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}

Json = dict[str, Any]


class PrefillLeg:
    """Asks prefill workers in `networks` (None: private networks, but no link-local addresses)."""

    def __init__(self, networks: Sequence[str] | None, timeout_seconds: float) -> None:
        self._networks = networks
        self._timeout_seconds = timeout_seconds

    def prefiller(self, header: str) -> str:
        """Return the header's first address. Raises `RequestError` (403) if it may not be asked."""
        prefiller = header.split(",")[0].strip()
        if not self._may_ask(prefiller):
            reason = (
                f"{PREFILLER_HEADER} {prefiller} is not the IP address and port of a worker in"
                " --prefiller-networks"
            )
            raise RequestError(reason, status=403, type="Forbidden")
        return prefiller

    def _may_ask(self, prefiller: str) -> bool:
        found = _ADDRESS.fullmatch(prefiller)  # nothing that a URL would read as more than that
        try:
            return found is not None and may_ask(found[1] or found[2], self._networks)
        except ValueError:
            return False

    async def second_body(
        self, session: aiohttp.ClientSession, url: str, headers: Headers, path: str, body: bytes
    ) -> bytes:
        """Return the body of the second leg: the original body if the first leg failed."""
        asked = decoded(body)
        if asked is None:
            return body
        leg = msgspec.json.encode(prefill_body(path, asked))
        answer = await self.post(session, url, headers, leg)
        if answer is None:
            return body
        try:
            params = msgspec.json.decode(answer, type=Json).get(_PARAMS)
        except (msgspec.MsgspecError, RecursionError) as error:
            logger.warning("prefill at %s failed, decoding without: %s", url, error)
            return body
        return msgspec.json.encode({**asked, _PARAMS: params})

    async def post(
        self, session: aiohttp.ClientSession, url: str, headers: Headers, leg: bytes
    ) -> bytes | None:
        try:
            async with (
                asyncio.timeout(self._timeout_seconds),
                session.post(url, data=leg, headers=json_headers(headers)) as answer,
            ):
                said = await answer.read()
            if answer.status != 200:
                raise KvTransferError(f"it answers {answer.status}")
        except (aiohttp.ClientError, OSError, KvTransferError) as error:
            reason = str(error) or "it takes too long"  # a TimeoutError is an OSError
            logger.warning("prefill at %s failed, decoding without: %s", url, reason)
            return None
        return said


def decoded(body: bytes) -> Json | None:
    """Return a JSON object; None for anything else, which the second leg's worker refuses."""
    try:
        return msgspec.json.decode(body, type=Json)
    except (msgspec.MsgspecError, RecursionError):
        return None


def without_source(body: bytes) -> bytes:
    """Drop the fields that name a source of KV: a worker connects there, so only we may name it."""
    # The fields, unless they are spelled with escapes.
    if b"\\u" not in body and not any(name.encode() in body for name in _SOURCES):
        return body
    try:
        asked = msgspec.json.decode(body, type=dict[str, msgspec.Raw])  # as lenient as any worker
    except (msgspec.MsgspecError, RecursionError) as error:
        raise RequestError(f"the body is no JSON object: {error}") from error
    if asked.keys().isdisjoint(_SOURCES):
        return body
    return msgspec.json.encode({k: v for k, v in asked.items() if k not in _SOURCES})


def prefill_body(path: str, asked: Json) -> Json:
    # These two go with streams alone, and the leg is none.
    leg = {name: value for name, value in asked.items() if name not in ("stream_options", "resume")}
    leg |= {"stream": False, _PARAMS: KEEP_KV}
    limits = leg
    if path == _GENERATE:
        given = leg.get("sampling_params")
        limits = leg["sampling_params"] = dict(given) if isinstance(given, dict) else {}
    # Also `min_tokens`, which must not be more than `max_tokens`.
    limits |= dict.fromkeys((name for name in _LIMITS if name in limits), 1)
    limits["max_tokens"] = 1
    return leg
