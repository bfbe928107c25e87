"""Raw bytes on real sockets: what a connection may do, and how it ends."""

import asyncio
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from worker.api.http.connection import MAX_CONNECTIONS, allowed_connections
from worker.types import FinishReason

TEXT = "/v1/completions"
HOST = b"Host: worker\r\n"
GET = b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n"
LIMIT_SECONDS = 60


def post(body: bytes, *headers: bytes, path: str = TEXT) -> bytes:
    lines = [
        f"POST {path} HTTP/1.1".encode(),
        b"Host: worker",
        b"Content-Type: application/json",
        b"Content-Length: %d" % len(body),
        *headers,
    ]
    return b"\r\n".join([*lines, b"", body])


ASKED = post(b'{"prompt": "a"}')
STREAMED = post(b'{"prompt": "a", "stream": true}')


class Peer:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    async def reply(self) -> tuple[int, dict[str, str], bytes]:
        async with asyncio.timeout(LIMIT_SECONDS):
            head = (await self._reader.readuntil(b"\r\n\r\n")).decode()
            status, *lines = head.strip().split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in lines)
            body = await self._reader.readexactly(int(headers.get("content-length", 0)))
        return int(status.split()[1]), headers, body

    async def last_reply(self) -> tuple[int, dict[str, str], bytes]:
        reply = await self.reply()
        assert await self.rest() == b""
        return reply

    async def rest(self) -> bytes:
        async with asyncio.timeout(LIMIT_SECONDS):
            return await self._reader.read()

    def half_close(self) -> None:
        self._writer.write_eof()

    def stop_reading(self) -> None:
        self._writer.transport.pause_reading()  # type: ignore[attr-defined]

    def reset(self) -> None:
        self._writer.transport.abort()


@asynccontextmanager
async def peers(
    bench: Any, number: int = 1, *, api: Any = None, **settings: object
) -> AsyncIterator[list[Peer]]:
    async with bench.listening(api or bench.api(**settings)) as url:
        port = int(url.rpartition(":")[2])
        opened = [Peer(*await asyncio.open_connection("127.0.0.1", port)) for _ in range(number)]
        yield opened
        for peer in opened:
            peer.reset()


CHUNKED = b"Transfer-Encoding: chunked\r\n"
LENGTH = b"Content-Length: 3\r\n"
POST = b"POST / HTTP/1.1\r\n" + HOST
END = b"\r\n0\r\n\r\n"  # of a head, and of a body in chunks
SMUGGLING = {
    "length and chunked": POST + LENGTH + CHUNKED + END,
    "chunked and length": POST + CHUNKED + LENGTH + END,
    "two lengths": POST + LENGTH + LENGTH + b"\r\nabc",
    "signed length": POST + b"Content-Length: +3\r\n\r\nabc",
    "list of lengths": POST + b"Content-Length: 3, 3\r\n\r\nabc",
    "two codings": POST + b"Transfer-Encoding: identity\r\n" + CHUNKED + END,
    "another coding": POST + b"Transfer-Encoding: gzip, chunked\r\n" + END,
    "misspelt coding": POST + b"Transfer-Encoding: xchunked\r\n" + END,
    "chunked in 1.0": POST.replace(b"1.1", b"1.0") + CHUNKED + END,
    "bare line feeds": b"GET /health HTTP/1.1\nHost: worker\n\n",
    "one bare line feed": b"GET /health HTTP/1.1\r\nHost: worker\nA: b\r\n\r\n",
    "folded header": b"GET /health HTTP/1.1\r\n" + HOST + b"A: b\r\n c\r\n\r\n",
    "space before colon": b"GET /health HTTP/1.1\r\n" + HOST + b"A : b\r\n\r\n",
    "space in name": b"GET /health HTTP/1.1\r\n" + HOST + b"A B: c\r\n\r\n",
    "NUL in value": b"GET /health HTTP/1.1\r\n" + HOST + b"A: b\x00c\r\n\r\n",
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "two hosts": b"GET /health HTTP/1.1\r\n" + HOST + HOST + b"\r\n",
    "bad chunk size": POST + CHUNKED + b"\r\nzz\r\n\r\n",
    "prefixed chunk size": POST + CHUNKED + b"\r\n0x3\r\nabc\r\n",
    "too much chunk": POST + CHUNKED + b"\r\n3\r\nabcX\r\n0\r\n\r\n",
    "TLS to a plain port": b"\x16\x03\x01\x02\x00\x01\x00",
    "HTTP/2 to a plain port": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "not ASCII target": b"GET /\xc3\xa9 HTTP/1.1\r\n" + HOST + b"\r\n",
}


@pytest.mark.parametrize("name", SMUGGLING)
async def test_ambiguous_requests_are_refused(bench: Any, name: str) -> None:
    async with peers(bench) as [peer]:
        peer.send(SMUGGLING[name] + GET)
        status, headers, body = await peer.last_reply()
    assert (status, headers["connection"]) == (400, "close")
    assert msgspec.json.decode(body)["error"]["code"] == 400
    assert bench.engine.requests == []


@pytest.mark.parametrize("target", [b"worker:443", b"[::1]:443", b"/health", b"*"])
async def test_connect_is_refused(bench: Any, target: bytes) -> None:
    async with peers(bench) as [peer]:
        peer.send(b"CONNECT " + target + b" HTTP/1.1\r\n" + HOST + b"\r\n" + GET)
        status, headers, body = await peer.last_reply()
    assert (status, headers["allow"]) == (405, "get, post, options")
    assert msgspec.json.decode(body)["error"]["message"] == "This is no proxy"


@pytest.mark.parametrize("target", [b"/\xc3\xa9", b"http://[::/", b"x"])
async def test_an_unreadable_target_is_named(bench: Any, target: bytes) -> None:
    async with peers(bench) as [peer]:
        peer.send(b"GET " + target + b" HTTP/1.1\r\n" + HOST + b"\r\n")
        status, _, body = await peer.reply()
    assert status == 400
    assert b"callback" not in body


async def test_a_half_closed_connection_gets_cheap_answers(bench: Any) -> None:
    async with peers(bench) as [peer]:
        peer.send(GET * 3)
        peer.half_close()
        received = await peer.rest()
    assert received.count(b"HTTP/1.1 200") == 3
    assert received.count(b"connection: close") == 1


async def test_a_half_closed_connection_does_not_generate(bench: Any) -> None:
    """A client that left looks like one that closed its half, so what it asked for is aborted."""
    bench.engine.steps = [bench.say("x"), asyncio.Event()]
    async with peers(bench) as [peer]:
        peer.send(ASKED + GET)
        await bench.engine.saw_request.wait()
        peer.half_close()
        assert await peer.rest() == b""
        async with asyncio.timeout(LIMIT_SECONDS):
            await bench.engine.saw_abort.wait()


async def test_a_cut_answer_is_no_server_error(
    bench: Any, caplog: pytest.LogCaptureFixture
) -> None:
    bench.engine.steps = [bench.say("x"), bench.say("", FinishReason.ERROR, error="broken")]
    async with peers(bench) as [peer]:
        peer.send(STREAMED)
        received = await peer.rest()
    assert b'"broken"' in received
    assert not received.endswith(b"0\r\n\r\n")
    assert [r for r in caplog.records if r.name.startswith("uvicorn")] == []


async def test_a_client_that_stops_reading_is_dropped(bench: Any) -> None:
    bench.engine.steps = [bench.say("x" * 60_000)] * 1000
    api = bench.api(write_stall_seconds=0.05, max_connections=1)
    async with bench.listening(api) as url, asyncio.timeout(LIMIT_SECONDS):
        port = int(url.rpartition(":")[2])
        peer = Peer(*await asyncio.open_connection("127.0.0.1", port))
        peer.stop_reading()
        peer.send(STREAMED)
        await bench.engine.saw_abort.wait()
        status = 503  # as long as the first one is there
        while status == 503:
            other = Peer(*await asyncio.open_connection("127.0.0.1", port))
            other.send(GET)
            status, _, _ = await other.reply()
            other.reset()
        peer.reset()
    assert status == 200


async def test_old_versions_are_named(bench: Any) -> None:
    async with peers(bench) as [peer]:
        peer.send(b"GET /health\r\n\r\n")
        assert (await peer.reply())[0] == 505


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.1\r\n" + HOST + b"".join(b"x-%d: 1\r\n" % n for n in range(10_000)),
        b"GET /health HTTP/1.1\r\n" + HOST + b"x: " + b"y" * 200_000,
        b"GET /" + b"y" * 200_000,
    ],
    ids=["10,000 headers", "a long header", "a long target"],
)
async def test_a_head_is_bounded_while_it_comes(bench: Any, head: bytes) -> None:
    async with peers(bench) as [peer]:
        peer.send(head)
        status, _, body = await peer.last_reply()
    assert (status, msgspec.json.decode(body)["error"]["code"]) == (431, 431)


async def test_a_slow_head_times_out(bench: Any) -> None:
    api = bench.api(header_timeout_seconds=0.05)
    async with peers(bench, 2, api=api) as [slow, idle]:
        idle.send(GET)
        assert (await idle.reply())[0] == 200
        slow.send(b"GET /health HTTP/1.1\r\nHost:")
        assert (await slow.last_reply())[0] == 408
        idle.send(GET)  # nor does the time of the first head run
        assert (await idle.reply())[0] == 200
    assert 'http_requests_total{handler="none",method="other",status="4xx"} 1\n' in api.page()


async def test_a_slow_body_times_out(bench: Any) -> None:
    async with peers(bench, body_timeout_seconds=0.05) as [peer]:
        peer.send(post(b'{"prompt": "a"}')[:-3])
        status, headers, _ = await peer.reply()
        assert (status, headers["connection"]) == (408, "close")
    assert bench.engine.requests == []


async def test_an_endless_body_is_cut_off(bench: Any) -> None:
    async with peers(bench, max_body_bytes=100_000) as [peer]:
        head = b"POST " + TEXT.encode() + b" HTTP/1.1\r\n" + HOST + CHUNKED + b"\r\n"
        peer.send(head + (b"10000\r\n" + b" " * 65536 + b"\r\n") * 64)
        status, headers, _ = await peer.last_reply()
    assert (status, headers["connection"]) == (413, "close")


async def test_an_unread_body_ends_the_connection(bench: Any) -> None:
    async with peers(bench) as [peer]:
        peer.send(b"GET /health HTTP/1.1\r\n" + HOST + CHUNKED + b"\r\n3\r\nabc\r\n")
        status, headers, _ = await peer.last_reply()
    assert (status, headers["connection"]) == (200, "close")


async def test_requests_in_a_row_are_answered_in_order(bench: Any) -> None:
    async with peers(bench) as [peer]:
        peer.send(ASKED + GET + b"broken\r\n\r\n" + GET)
        first, second = await peer.reply(), await peer.last_reply()
    assert (first[0], second[0]) == (200, 200)
    assert b"text_completion" in first[2]


async def test_a_broken_body_does_not_disturb_the_answer_before_it(bench: Any) -> None:
    bench.engine.steps = [go := asyncio.Event(), *bench.engine.steps]
    async with peers(bench) as [peer]:
        peer.send(ASKED + POST + CHUNKED + b"\r\nzz\r\n")
        await bench.engine.saw_request.wait()
        go.set()
        assert (await peer.last_reply())[0] == 200


async def test_a_pipeline_is_bounded(bench: Any) -> None:
    bench.engine.steps = [go := asyncio.Event(), *bench.engine.steps]
    async with peers(bench) as [peer]:
        peer.send(ASKED + GET * 300)
        await bench.engine.saw_request.wait()
        go.set()
        received = await peer.rest()
    assert received.count(b"HTTP/1.1 200") == 101


async def test_leaving_aborts_the_request_before_the_last(bench: Any) -> None:
    bench.engine.steps = [bench.say("x"), asyncio.Event()]
    async with peers(bench) as [peer]:
        peer.send(STREAMED + GET)
        await bench.engine.saw_request.wait()
        peer.reset()
        async with asyncio.timeout(LIMIT_SECONDS):
            await bench.engine.saw_abort.wait()
    assert len(bench.engine.aborted) == 1


H2C = (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAEAAEAA")
WEBSOCKET = (b"Connection: upgrade", b"Upgrade: websocket", b"Sec-WebSocket-Version: 13")


@pytest.mark.parametrize("offer", [H2C, WEBSOCKET], ids=["h2c", "websocket"])
@pytest.mark.parametrize("is_chunked", [False, True], ids=["length", "chunked"])
@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_an_offer_to_upgrade_is_ignored(
    bench: Any, offer: tuple[bytes, ...], is_chunked: bool, size: int
) -> None:
    body = b'{"prompt": "a"}'
    request = post(body, *offer)
    if is_chunked:
        head = request[: -len(body)].replace(b"Content-Length: %d\r\n" % len(body), CHUNKED)
        request = head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    bench.engine.steps = [bench.say("x", FinishReason.LENGTH)] * 2
    sent = GET[:-2] + b"\r\n".join((*offer, b"", b"")) + request + GET + request
    async with peers(bench) as [peer]:
        for start in range(0, len(sent), size):
            peer.send(sent[start : start + size])
        replies = [await peer.reply() for _ in range(4)]
    assert [status for status, _, _ in replies] == [200] * 4
    assert all("connection" not in headers for _, headers, _ in replies)
    assert len(bench.engine.requests) == 2


async def test_garbage_behind_an_offer_to_upgrade_ends_the_connection(bench: Any) -> None:
    async with peers(bench) as [peer]:
        peer.send(GET[:-2] + b"\r\n".join((*WEBSOCKET, b"", b"")) + b"\x81\x05hello")
        status, headers, _ = await peer.last_reply()
    assert (status, headers["connection"]) == (200, "close")


async def test_a_stream_over_http_1_0_has_no_chunks(bench: Any) -> None:
    bench.engine.steps = [bench.say("ab"), bench.say("c", FinishReason.LENGTH)]
    request = STREAMED.replace(HOST, HOST + b"Connection: keep-alive\r\n")
    async with peers(bench) as [peer]:
        peer.send(request.replace(b"HTTP/1.1", b"HTTP/1.0"))
        status, headers, _ = await peer.reply()
        events = (await peer.rest()).decode().removesuffix("\n\n").split("\n\n")
    assert (status, headers["connection"]) == (200, "close")
    assert headers.keys().isdisjoint({"transfer-encoding", "content-length"})
    *frames, done = [event.removeprefix("data: ") for event in events]
    texts = [msgspec.json.decode(frame)["choices"][0]["text"] for frame in frames]
    assert ("".join(texts), done) == ("abc", "[DONE]")


async def test_an_answer_of_known_length_over_http_1_0_has_that_length(bench: Any) -> None:
    async with peers(bench) as [peer]:
        peer.send(b"GET /version HTTP/1.0\r\n\r\n")
        status, headers, body = await peer.last_reply()
    assert (status, headers["content-length"]) == (200, str(len(body)))


async def test_trailers_are_not_headers(bench: Any) -> None:
    async with peers(bench, api_keys=["k"]) as [peer]:
        body = b'{"prompt": "a"}'
        head = POST.replace(b"/ ", TEXT.encode() + b" ") + CHUNKED
        chunk = b"\r\n%x\r\n%b\r\n0\r\n" % (len(body), body)
        peer.send(head + chunk + b"Authorization: Bearer k\r\n\r\n")
        assert (await peer.reply())[0] == 401


async def test_too_many_connections_get_an_error(bench: Any) -> None:
    async with peers(bench, 3, max_connections=2) as [first, second, third]:
        for peer in (first, second):
            peer.send(GET)
            assert (await peer.reply())[0] == 200
        status, headers, _ = await third.last_reply()
    assert (status, headers["retry-after"]) == (503, "1")


@pytest.mark.parametrize(
    ("files", "asked", "allowed"),
    [
        (resource.RLIM_INFINITY, (), MAX_CONNECTIONS),
        (1 << 20, (), MAX_CONNECTIONS),
        (256, (), 192),
        (10, (), 1),
        (256, (100_000,), 192),
        (256, (5,), 5),
    ],
)
def test_connections_leave_files_for_others(
    monkeypatch: pytest.MonkeyPatch, files: int, asked: tuple[int, ...], allowed: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (files, files))
    assert allowed_connections(*asked) == allowed
