# Apart: a subcommand, imported only when it runs.
"""`pointsman sidecar`: both legs of a disaggregated request, in front of a decode worker.

Theory of operation
-------------------
A request whose header `x-prefiller-host-port` names a prefill worker goes there first, for one
token and not streamed, with `kv_transfer_params` that ask for its KV to be kept. What that answers
as `kv_transfer_params` goes with the request to the decode worker, which takes the KV and streams
its answer through here. Whatever goes wrong with the first leg, the second one goes on without it:
the decode worker then computes the prompt, or finds what is wrong with the request. Everything else
is passed on as it is, without the header.

Nothing is stored here, and a client that leaves ends the leg that runs.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from fleet.errors import FleetError
from fleet.http_proxy import (
    Headers,
    error_answer,
    new_session,
    of_json,
    pass_on,
    passed_on,
    serve,
)
from fleet.sidecar_flags import Network, build_parser

logger = logging.getLogger(__name__)

PREFILLER_HEADER = "x-prefiller-host-port"
REQUEST_ID_HEADER = "x-request-id"
_PARAMS = "kv_transfer_params"
_GENERATE = "/inference/v1/generate"
_PATHS = ("/v1/chat/completions", "/v1/completions", _GENERATE)
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


@dataclass(frozen=True, slots=True)
class SidecarOptions:
    """What the user asked for. `prefiller_networks` None: private ones."""

    host: str
    port: int
    decoder: str
    prefiller_networks: tuple[Network, ...] | None
    prefill_timeout: float
    drain_timeout: float


def sidecar_command(argv: Sequence[str]) -> int:
    """Serve until SIGTERM or SIGINT. Raises `FleetError` when the port cannot be listened on."""
    options = SidecarOptions(**vars(build_parser().parse_args(argv)))
    return asyncio.run(_serve(options))


async def _serve(options: SidecarOptions) -> int:
    async with new_session() as session:
        handle = Sidecar(options, session).handle
        address = (options.host, options.port)
        await serve("sidecar", handle, address, options.drain_timeout, reads=True)
    return 0


class Sidecar:
    """Handles requests; keeps nothing of them."""

    def __init__(self, options: SidecarOptions, session: aiohttp.ClientSession) -> None:
        self._options = options
        self._session = session

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """One request, from its client to the end of the answer."""
        prefiller = request.headers.get(PREFILLER_HEADER)
        headers = passed_on(request.headers, PREFILLER_HEADER, "content-encoding")
        body = _without_params(await request.read())
        if prefiller and request.method == "POST" and request.path in _PATHS:
            prefiller = prefiller.split(",")[0].strip()
            if not self._may_ask(prefiller):
                reason = (
                    f"{PREFILLER_HEADER} {prefiller} is not the IP address and port of a worker in "
                    "--prefiller-networks"
                )
                return error_answer(403, "Forbidden", reason)
            if REQUEST_ID_HEADER not in request.headers:
                headers.append((REQUEST_ID_HEADER, str(uuid.uuid1())))
            body = await self._prefilled(prefiller, request, headers, body)
        url = f"{self._options.decoder.rstrip('/')}{request.rel_url}"
        data = body if body or request.body_exists else None
        return await pass_on(self._session, request, url, data, headers)

    def _may_ask(self, prefiller: str) -> bool:
        found = _ADDRESS.fullmatch(prefiller)  # nothing that a URL would read as more than that
        try:
            address = ipaddress.ip_address((found[1] or found[2]) if found else "")
        except ValueError:
            return False
        allowed = self._options.prefiller_networks
        if allowed is None:
            return address.is_private and not (address.is_link_local or address.is_unspecified)
        return any(address in network for network in allowed)

    async def _prefilled(
        self, prefiller: str, request: web.Request, headers: Headers, body: bytes
    ) -> bytes:
        """The body of the second leg; after a first one that failed, the one that it was."""
        try:
            asked = msgspec.json.decode(body, type=Json)
            leg = msgspec.json.encode(prefill_body(request.path, asked))
        except (msgspec.MsgspecError, RecursionError):
            return body  # the decode worker says what is wrong with it
        url = f"http://{prefiller}{request.rel_url}"
        try:
            async with (
                asyncio.timeout(self._options.prefill_timeout),
                self._session.post(url, data=leg, headers=of_json(headers)) as answer,
            ):
                said = await answer.read()
            if answer.status != 200:
                raise FleetError(f"it answers {answer.status}")
            params = msgspec.json.decode(said, type=Json).get("kv_transfer_params")
        except (aiohttp.ClientError, OSError, FleetError, msgspec.MsgspecError) as error:
            reason = str(error) or "it takes too long"  # a TimeoutError is an OSError
            logger.warning("prefill at %s failed, decoding without: %s", prefiller, reason)
            return body
        return msgspec.json.encode({**asked, "kv_transfer_params": params})


def _without_params(body: bytes) -> bytes:
    """Only we say where KV is taken from: the decode worker connects to that address."""
    # The field, unless it is spelled with escapes.
    if _PARAMS.encode() not in body and b"\\u" not in body:
        return body
    try:
        asked = msgspec.json.decode(body, type=Json)
    except (msgspec.MsgspecError, RecursionError):
        return body  # nor does the decode worker take it
    return body if asked.pop(_PARAMS, None) is None else msgspec.json.encode(asked)


def prefill_body(path: str, asked: Json) -> Json:
    """The body of the first leg."""
    leg = {name: value for name, value in asked.items() if name not in ("stream_options", "resume")}
    leg |= {"stream": False, "kv_transfer_params": KEEP_KV}
    limits = leg
    if path == _GENERATE:
        given = leg.get("sampling_params")
        limits = leg["sampling_params"] = dict(given) if isinstance(given, dict) else {}
    limits |= dict.fromkeys((name for name in _LIMITS if name in limits), 1)
    limits["max_tokens"] = 1
    return leg
