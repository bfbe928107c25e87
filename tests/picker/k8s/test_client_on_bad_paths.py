"""The client behind what forwards nothing, too little, or something else instead."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from authority import Authority, certificates
from kube_api import statuses
from local_ports import free_port
from wired_client import answering, client_of

from picker.k8s.api import PODS, ApiError, Selection, SilentError, UnreachableError
from picker.k8s.client import KubernetesClient, Limits
from picker.k8s.credentials import Access

ALL = Selection("default")
QUICK = Limits(silent_seconds=0.4, connect_seconds=2, request_seconds=0.4, list_seconds=0.4)
DRIP_SECONDS = 0.1  # between two pieces: shorter than any limit
PATIENCE_SECONDS = 60
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


@asynccontextmanager
async def dripping(head: bytes, drops: Iterable[bytes]) -> AsyncIterator[str]:
    """A server that says a beginning, and then something again and again."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(head)
            for drop in drops:
                writer.write(drop)
                await writer.drain()
                await asyncio.sleep(DRIP_SECONDS)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def watched(client: KubernetesClient) -> None:
    """The first event of a watch, which is to fail."""
    async with asyncio.timeout(PATIENCE_SECONDS), client.watch(PODS, ALL, "1") as events:
        await anext(events)


async def test_a_proxy_that_does_not_answer_is_given_up() -> None:
    """It takes the connection and never says whether there is a way to the server."""
    async with (
        answering(holds=True) as url,
        client_of(Access("https://10.0.0.1", proxy=url), limits=QUICK) as client,
    ):
        with pytest.raises(UnreachableError, match="no answer in time"):
            await watched(client)
        with pytest.raises(UnreachableError, match="no answer in time"):
            await client.list(PODS, ALL)


async def refused(access: Access) -> str:
    """What is said of a list that fails."""
    async with client_of(access) as client:
        with pytest.raises(UnreachableError) as raised:
            await client.list(PODS, ALL)
    return str(raised.value)


@pytest.mark.parametrize("tls", [None, ssl.create_default_context()])
async def test_a_port_that_nobody_listens_on(tls: ssl.SSLContext | None) -> None:
    """Is named with the reason, and with nothing that Python says of its objects."""
    url = f"{'http' if tls is None else 'https'}://127.0.0.1:{free_port()}"
    place = url.partition("//")[2]
    said = await refused(Access(url, tls=tls))
    assert said == f"no connection to {place}: Connection refused"


async def test_a_name_that_nobody_knows() -> None:
    """By the resolver's words."""
    said = await refused(Access("https://nowhere.invalid", tls=ssl.create_default_context()))
    assert said.startswith("no connection to nowhere.invalid:443: ")
    assert "<" not in said


@pytest.mark.parametrize(
    ("pieces", "why"),
    [
        ((), "the connection was closed without an answer"),
        ((b"HTTP/1.1 200 OK\r\n",), "the connection was closed without an answer"),
        ((HEAD + b"Content-Length: 100\r\n\r\n{",), "the answer broke off"),
        ((CHUNKED + b"5\r\nab",), "the answer broke off"),
    ],
)
async def test_an_answer_that_breaks_off(pieces: tuple[bytes, ...], why: str) -> None:
    """At its beginning or in the middle."""
    async with answering(*pieces) as url:
        assert await refused(Access(url)) == why


@pytest.mark.parametrize(
    ("has_tls", "why"),
    [
        (True, "the certificate is not accepted: "),
        (False, "TLS failed: "),
    ],
)
async def test_a_server_that_cannot_be_trusted(tmp_path: Path, has_tls: bool, why: str) -> None:
    """Its certificate is of an unknown authority, or it has none; in OpenSSL's plain words."""
    folder = certificates(tmp_path, Authority(), "localhost")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "tls.crt", folder / "tls.key")

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context if has_tls else None)
    port = server.sockets[0].getsockname()[1]
    try:
        said = await refused(Access(f"https://localhost:{port}", tls=ssl.create_default_context()))
    finally:
        server.close()
    assert said.startswith(f"no connection to localhost:{port}: {why}")
    assert not set(said) & set("<>(_")


async def test_an_answer_whose_head_does_not_end_is_given_up() -> None:
    """Though something comes all the time."""
    headers = (b"X-%d: y\r\n" % number for number in range(300))
    async with (
        dripping(b"HTTP/1.1 200 OK\r\n", headers) as url,
        client_of(Access(url), limits=QUICK) as client,
    ):
        with pytest.raises(UnreachableError, match="no answer in time"):
            await watched(client)


async def test_blanks_do_not_keep_a_watch_alive() -> None:
    """A proxy's heartbeat says nothing of the server behind it."""
    async with (
        dripping(CHUNKED, (b"2\r\n \n\r\n" for _ in range(300))) as url,
        client_of(Access(url), limits=QUICK) as client,
    ):
        with pytest.raises(SilentError):
            await watched(client)


@pytest.mark.looptime
async def test_events_keep_a_watch_alive() -> None:
    """For longer than a silent one lasts, each in two pieces."""
    line = b'{"type":"ADDED","object":{"metadata":{"name":"a"}}}\n'
    halves = [line[:20], line[20:]]
    chunks = [b"%x\r\n%s\r\n" % (len(half), half) for half in halves]
    async with (
        asyncio.timeout(PATIENCE_SECONDS),
        dripping(CHUNKED, [*chunks * 5, b"0\r\n\r\n"]) as url,
        client_of(Access(url), limits=QUICK) as client,
        client.watch(PODS, ALL, "1") as events,
    ):
        assert len([event async for event in events]) == 5


async def test_a_refusal_that_comes_in_pieces_is_read_whole() -> None:
    """What it says of waiting stands at its end."""
    body = json.dumps(statuses.too_many_requests("busy", 7).body()).encode()
    head = b"HTTP/1.1 429 Busy\r\nContent-Length: %d\r\n\r\n" % len(body)
    async with dripping(head, (body[:20], body[20:])) as url, client_of(Access(url)) as client:
        with pytest.raises(ApiError, match="TooManyRequests: busy") as raised:
            await client.list(PODS, ALL)
    assert raised.value.retry_after_seconds == 7


async def test_a_refusal_that_breaks_off_is_one() -> None:
    """Its status says enough: a version that is too old must not be tried again."""
    head = b'HTTP/1.1 410 Gone\r\nContent-Length: 100\r\n\r\n{"kind":'
    async with answering(head) as url, client_of(Access(url), limits=QUICK) as client:
        with pytest.raises(ApiError) as raised:
            await watched(client)
    assert raised.value.status == 410


async def test_a_page_for_people_is_no_watch() -> None:
    """What asks to sign in says 200 to everything; it must not pass for a server that is well."""
    page = b"<html>Sign in</html>"
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=utf-8\r\n"
    sent = head + b"Content-Length: %d\r\n\r\n" % len(page) + page
    async with answering(sent) as url, client_of(Access(url)) as client:
        with pytest.raises(UnreachableError, match="text/html"):
            async with client.watch(PODS, ALL, "1"):
                pytest.fail("it opened")
        with pytest.raises(UnreachableError, match="text/html"):
            await client.list(PODS, ALL)
