"""`pointsman sidecar`: both legs of a disaggregated request, in front of a decode worker.

A request whose header `x-prefiller-host-port` names a prefill worker is sent there and to the
decode worker. With `nixlv2` the prefill worker goes first, and the decode worker gets its
description of the KV (`worker.api.routes.prefill_leg`). With `sglang` both get the same body at
once: it names a room at the prefill worker's bootstrap server, where the decode worker waits for
the KV.

With `--ec-connector`, media of a request are encoded before, by the workers that the header
`x-encoder-hosts-ports` names (`fleet.proxy.encode`).

With `--data-parallel-size` each rank of the decode worker has a port here, in their order, and is
also named by the header `x-data-parallel-host-port`.

When a client disconnects, the running leg ends; but SGLang's prefill worker is not interrupted,
because the decode worker may be reading from its room.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import aiohttp
import msgspec
from aiohttp import web
from yarl import URL

from base.forwarding import Headers, forwarded_headers, new_session
from base.tracing import RequestTrace, Traced, call_of
from fleet.proxy.encode import ENCODERS_HEADER, EncodeStep, identified
from fleet.proxy.forward import TRACE, error_answer, pass_on, serve, tracing_of, with_traces
from worker.api.routes.prefill_leg import (
    PATHS,
    PREFILL_SPAN,
    PREFILLER_HEADER,
    PrefillLeg,
    decoded,
    without_source,
)
from worker.errors import RequestError

# llm-d's names.
TRACED = Traced("sidecar", "pointsman-sidecar", "llm_d.pd_proxy.request")
DECODE_SPAN = "llm_d.pd_proxy.decode"
DATA_PARALLEL_HEADER = "x-data-parallel-host-port"
_ROOMS_AT_ONCE = 1000  # started in the same nanosecond


@dataclass(frozen=True, slots=True)
class SidecarOptions:
    """The options of a sidecar. `prefiller_networks` None means the private networks, and
    `ec_connector` None that it encodes nothing.
    """

    host: str
    port: int
    decoder: str
    kv_connector: str
    bootstrap_port: int
    prefiller_networks: tuple[str, ...] | None
    prefill_timeout: float
    drain_timeout: float
    tracing: bool = False
    data_parallel_size: int = 1
    ec_connector: str | None = None


def sidecar_command(given: argparse.Namespace) -> int:
    options = SidecarOptions(**vars(given))
    return asyncio.run(_serve(options))


async def _serve(options: SidecarOptions) -> int:
    async with tracing_of(options.tracing, TRACED) as tracing, Sidecar.running(options) as sidecar:
        address, handle = (options.host, options.port), with_traces(sidecar.handle, tracing)
        count = options.data_parallel_size
        await serve("sidecar", handle, address, options.drain_timeout, reads=True, num_ports=count)
    return 0


class Sidecar:
    def __init__(self, options: SidecarOptions, session: aiohttp.ClientSession) -> None:
        self._options = options
        self._session = session
        timeout = options.prefill_timeout
        self._leg = PrefillLeg(options.prefiller_networks, timeout)
        connector = options.ec_connector
        self._encode = EncodeStep(session, self._leg, connector, timeout) if connector else None
        self._prefills: set[asyncio.Task[bytes | None]] = set()
        first = URL(options.decoder)
        ports = range(first.port or 0, (first.port or 0) + options.data_parallel_size)
        self._decoders = [str(first.with_port(port)).rstrip("/") for port in ports]

    @classmethod
    @contextlib.asynccontextmanager
    async def running(cls, options: SidecarOptions) -> AsyncIterator[Sidecar]:
        """Yield a sidecar with connections; cancel its prefills at the end."""
        async with new_session() as session:
            sidecar = cls(options, session)
            try:
                yield sidecar
            finally:
                for prefill in sidecar._prefills:
                    prefill.cancel()
                await asyncio.gather(*sidecar._prefills, return_exceptions=True)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        named, trace = request.headers.get(PREFILLER_HEADER), request.get(TRACE)
        # The body is decompressed here: whatever its coding, it is searched for sources of KV.
        removed = (PREFILLER_HEADER, ENCODERS_HEADER, DATA_PARALLEL_HEADER, "content-encoding")
        headers = forwarded_headers(request.headers.items(), *removed)
        has_two_legs = request.method == "POST" and request.path in PATHS
        try:
            decoder = self._decoder_of(request)
            body = without_source(await request.read())
            prefiller = self._leg.prefiller(named) if named and has_two_legs else ""
            if self._encode:
                body = await self._encode.next_body(request, headers, body)
        except RequestError as error:
            return error_answer(error)
        if prefiller:
            if self._options.kv_connector == "sglang":
                body = self._begin_prefill(prefiller, request, headers, body)
            else:
                identified(headers)
                url = f"http://{prefiller}{request.rel_url}"
                path = request.path
                with call_of(trace, PREFILL_SPAN, headers, url=url) as within:
                    body = await self._leg.second_body(self._session, url, within, path, body)
        url = f"{decoder}{request.rel_url}"
        data = body if body or request.body_exists else None
        with call_of(trace, DECODE_SPAN, headers, url=url) as within:
            return await pass_on(self._session, request, url, data, within)

    def _decoder_of(self, request: web.Request) -> str:
        """Return the decode worker of the rank that the header names, else of the port that was
        asked. Raises `RequestError` (400) if the header names none of this sidecar's ports.
        """
        own: tuple[str, int] = request.get_extra_info("sockname", ("", 0))[:2]
        host, port = own
        named = request.headers.get(DATA_PARALLEL_HEADER)
        if named is not None:
            named_host, _, text = named.rpartition(":")
            if named_host.strip("[]") != host or not text.isdecimal():
                raise RequestError(f"{DATA_PARALLEL_HEADER} {named} is not an address of this one")
            port = int(text)
        rank = port - self._options.port
        if 0 <= rank < len(self._decoders):
            return self._decoders[rank]
        if named is not None:
            raise RequestError(f"{DATA_PARALLEL_HEADER} {named} is of no rank here")
        return self._decoders[0]

    def _begin_prefill(
        self, prefiller: str, request: web.Request, headers: Headers, body: bytes
    ) -> bytes:
        asked = decoded(body)
        if asked is None:
            return body
        asked |= {
            "bootstrap_host": prefiller.rpartition(":")[0].strip("[]"),
            "bootstrap_port": self._options.bootstrap_port,
            "bootstrap_room": time.time_ns() + secrets.randbelow(_ROOMS_AT_ONCE),
        }
        body = msgspec.json.encode(asked)
        url = f"http://{prefiller}{request.rel_url}"
        post = self._prefilled(request.get(TRACE), url, headers, body)
        prefill = asyncio.create_task(post, name="prefill")
        self._prefills.add(prefill)
        prefill.add_done_callback(self._prefills.discard)
        return body

    async def _prefilled(
        self, trace: RequestTrace | None, url: str, headers: Headers, body: bytes
    ) -> bytes | None:
        with call_of(trace, PREFILL_SPAN, headers, url=url) as within:
            return await self._leg.post(self._session, url, within, body)
