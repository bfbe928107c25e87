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
import signal
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from fleet.errors import FleetError
from fleet.sidecar_flags import Network, build_parser

logger = logging.getLogger(__name__)

PREFILLER_HEADER = "x-prefiller-host-port"
REQUEST_ID_HEADER = "x-request-id"
MAX_BODY_BYTES = 64 << 20
_CONNECT_SECONDS = 5.0
_GENERATE = "/inference/v1/generate"
_PATHS = ("/v1/chat/completions", "/v1/completions", _GENERATE)
_LIMITS = ("max_tokens", "max_completion_tokens", "min_tokens")
_ADDRESS = re.compile(r"(?:([0-9.]+)|\[([0-9a-fA-F:.]+)\]):[0-9]{1,5}", re.ASCII)
# Of one connection, or what the client library sets anew; and what is for us alone.
_NOT_PASSED_ON = re.compile(
    "connection|keep-alive|proxy-authenticate|proxy-authorization|te|trailer|transfer-encoding"
    f"|upgrade|host|content-length|expect|{PREFILLER_HEADER}",
    re.IGNORECASE,
)
KEEP_KV = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}

Json = dict[str, Any]
Headers = list[tuple[str, str]]


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
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
    return asyncio.run(_serve(options))


async def _serve(options: SidecarOptions) -> int:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with new_session() as session:
        runner = runner_of(Sidecar(options, session), options.drain_timeout)
        await runner.setup()
        try:
            await web.TCPSite(runner, options.host, options.port).start()
        except OSError as error:
            await runner.cleanup()
            where = f"--host {options.host} --port {options.port}"
            raise FleetError(f"cannot listen on {where}: {error.strerror or error}") from error
        sys.stdout.write(f"sidecar ready on http://{options.host}:{options.port}\n")
        sys.stdout.flush()
        await stop.wait()
        await runner.cleanup()
    return 0


def new_session() -> aiohttp.ClientSession:
    """Connections to workers: as many as there are requests, without a limit of time."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
        auto_decompress=False,
        skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        cookie_jar=aiohttp.DummyCookieJar(),
    )


def runner_of(sidecar: Sidecar, drain_seconds: float) -> web.AppRunner:
    """A server of it. A request ends with its client."""
    application = web.Application(client_max_size=MAX_BODY_BYTES)
    application.router.add_route("*", "/{path:.*}", sidecar.handle)
    return web.AppRunner(
        application, handler_cancellation=True, shutdown_timeout=drain_seconds, access_log=None
    )


class Sidecar:
    """Handles requests; keeps nothing of them."""

    def __init__(self, options: SidecarOptions, session: aiohttp.ClientSession) -> None:
        self._options = options
        self._session = session

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """One request, from its client to the end of the answer."""
        prefiller = request.headers.get(PREFILLER_HEADER)
        headers = _passed_on(request.headers)
        body = await request.read()
        if prefiller and request.method == "POST" and request.path in _PATHS:
            prefiller = prefiller.split(",")[0].strip()
            if not self._may_ask(prefiller):
                reason = (
                    f"{PREFILLER_HEADER} {prefiller} is not the IP address and port of a worker in "
                    "--prefiller-networks"
                )
                return _error(403, "Forbidden", reason)
            if REQUEST_ID_HEADER not in request.headers:
                headers.append((REQUEST_ID_HEADER, str(uuid.uuid1())))
            body = await self._prefilled(prefiller, request, headers, body)
        return await self._decode(request, headers, body)

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
                self._session.post(url, data=leg, headers=_of_json(headers)) as answer,
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

    async def _decode(
        self, request: web.Request, headers: Headers, body: bytes
    ) -> web.StreamResponse:
        url = f"{self._options.decoder.rstrip('/')}{request.rel_url}"
        data = body if body or request.body_exists else None
        response: web.StreamResponse | None = None
        try:
            async with self._session.request(
                request.method, url, data=data, headers=headers, allow_redirects=False
            ) as answer:
                response = web.StreamResponse(
                    status=answer.status,
                    reason=answer.reason,
                    headers=_passed_on(answer.headers),
                )
                response.content_length = answer.content_length
                await response.prepare(request)
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
                await response.write_eof()
                return response
        except (aiohttp.ClientError, OSError) as error:
            if response is not None and response.prepared:
                raise  # the client sees the answer cut off, as it was here
            reason = f"the decode worker does not answer: {error}"
            return _error(503, "ServiceUnavailable", reason)


def prefill_body(path: str, asked: Json) -> Json:
    """The body of the first leg."""
    leg = {name: value for name, value in asked.items() if name != "stream_options"}
    leg |= {"stream": False, "kv_transfer_params": KEEP_KV}
    limits = leg
    if path == _GENERATE:
        given = leg.get("sampling_params")
        limits = leg["sampling_params"] = dict(given) if isinstance(given, dict) else {}
    limits |= dict.fromkeys((name for name in _LIMITS if name in limits), 1)
    limits["max_tokens"] = 1
    return leg


def _of_json(headers: Headers) -> Headers:
    """For a body of our own making, which is not compressed; nor may the answer be."""
    theirs = ("content-type", "content-encoding", "accept-encoding")
    kept = [(name, value) for name, value in headers if name.lower() not in theirs]
    return [*kept, ("Content-Type", "application/json")]


def _passed_on(headers: Mapping[str, str]) -> Headers:
    return [(name, value) for name, value in headers.items() if not _NOT_PASSED_ON.fullmatch(name)]


def _error(status: int, kind: str, message: str) -> web.Response:
    text = {"object": "error", "message": message, "type": kind, "param": None, "code": status}
    return web.Response(
        status=status, body=msgspec.json.encode(text), content_type="application/json"
    )
