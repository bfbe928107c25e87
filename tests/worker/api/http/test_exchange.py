"""Exchanges read and write within limits; long work leaves the event loop."""

import asyncio
import gzip
import threading
import zlib
from collections.abc import MutableMapping
from typing import Any

import pytest

from worker.api.http.exchange import ClientGoneError, Exchange
from worker.api.http.off_loop import INLINE, off_loop_when_large
from worker.errors import RequestError

Message = MutableMapping[str, Any]


def request(body: bytes, more: bool = False) -> Message:
    return {"type": "http.request", "body": body, "more_body": more}


def exchange(
    incoming: list[Message],
    sent: list[Message],
    stall: float = 30.0,
    headers: list[tuple[bytes, bytes]] | None = None,
    query: bytes = b"",
) -> Exchange:
    """Sending "stall" never ends."""

    async def receive() -> Message:
        return incoming.pop(0)

    async def send(message: Message) -> None:
        if message.get("body") == b"stall":
            await asyncio.Event().wait()
        sent.append(message)

    scope = {
        "method": "POST",
        "path": "/",
        "query_string": query,
        "headers": [(b"x-a", b"1"), (b"x-a", b"2")] if headers is None else headers,
    }
    return Exchange(scope, receive, send, write_stall_seconds=stall)


async def test_a_body_in_pieces_is_joined() -> None:
    parts = [request(b"ab", more=True), request(b"c")]
    assert await exchange(parts, []).json_body(3) == b"abc"


@pytest.mark.looptime
async def test_a_slow_body_times_out() -> None:
    loop = asyncio.get_running_loop()

    async def receive() -> Message:
        await asyncio.sleep(4)
        return request(b" ", more=True)

    async def send(message: Message) -> None:
        raise AssertionError(message)

    scope = {"method": "POST", "path": "/", "headers": [(b"transfer-encoding", b"chunked")]}
    subject = Exchange(scope, receive, send, write_stall_seconds=1, body_timeout_seconds=10)
    with pytest.raises(RequestError, match="within 10 seconds") as late:
        await subject.json_body(100)
    assert (late.value.status, loop.time()) == (408, 10)


@pytest.mark.parametrize(
    ("headers", "waiting", "closes"),
    [
        ([], 1, False),
        ([(b"content-length", b"0")], 1, False),
        ([(b"content-length", b"2")], 0, False),
        ([(b"content-length", b"999999")], 1, True),
        ([(b"content-length", b"2"), (b"expect", b"100-continue")], 1, True),
        ([(b"transfer-encoding", b"chunked")], 1, True),
    ],
)
async def test_a_short_unread_body_is_discarded(
    headers: list[tuple[bytes, bytes]], waiting: int, closes: bool
) -> None:
    sent: list[Message] = []
    subject = exchange(incoming := [request(b"ab")], sent, headers=headers)
    await subject.discard_body()
    await subject.reply(b"", 404)
    assert len(incoming) == waiting
    assert ((b"connection", b"close") in sent[0]["headers"]) is closes


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        (b"application/json", True),
        (b"Application/JSON; charset=utf-8", True),
        (b"application/problem+json", True),
        (b"text/json", False),
        (b"application/jsonp", False),
        (b"application/x-www-form-urlencoded", False),
    ],
)
async def test_only_json_is_read(given: bytes, taken: bool) -> None:
    subject = exchange([request(b"{}")], [], headers=[(b"content-type", given)])
    if taken:
        assert await subject.json_body(10) == b"{}"
    else:
        with pytest.raises(RequestError, match="must be application/json"):
            await subject.json_body(10)


@pytest.mark.parametrize("coding", ["gzip", "x-gzip", "deflate", " GZIP"])
async def test_a_compressed_body_is_decoded(coding: str) -> None:
    text = b'{"prompt": "' + bytes(range(97, 123)) * 1000 + b'"}'
    compress = zlib.compress if coding == "deflate" else gzip.compress
    headers = [(b"content-encoding", coding.encode())]
    subject = exchange([request(compress(text))], [], headers=headers)
    assert await subject.json_body(len(text)) == text


RAW_DEFLATE = zlib.compress(b"{}", wbits=-15)


@pytest.mark.parametrize(
    ("coding", "body", "status", "message"),
    [
        ("gzip", b"{}", 400, "not valid gzip: .*incorrect header"),
        ("gzip", gzip.compress(b"{}", mtime=0)[:-3], 400, "it ends too early"),
        ("deflate", b"", 400, "it ends too early"),
        ("deflate", RAW_DEFLATE, 400, "not valid deflate"),
        ("gzip", gzip.compress(b"{}", mtime=0) * 2, 400, "data follows its end"),
        ("gzip", gzip.compress(b" " * 101, mtime=0), 413, "longer than 100 bytes"),
        ("gzip", gzip.compress(b" " * (1 << 22), mtime=0), 413, "longer than"),
        ("br", b"{}", 415, "Content-Encoding 'br' is not supported: send gzip or deflate"),
        ("gzip, gzip", b"{}", 415, "'gzip, gzip' is not supported"),
    ],
)
async def test_a_body_in_a_coding_that_cannot_be_read_is_refused(
    coding: str, body: bytes, status: int, message: str
) -> None:
    incoming = [request(body)]
    subject = exchange(incoming, [], headers=[(b"content-encoding", coding.encode())])
    with pytest.raises(RequestError, match=message) as refused:
        await subject.json_body(max(100, len(body)))
    assert refused.value.status == status
    assert len(incoming) == (status == 415)


async def test_a_byte_order_mark_is_skipped() -> None:
    assert await exchange([request("\ufeff[1]".encode())], []).json_body(10) == b"[1]"


def test_queries_are_read_in_order() -> None:
    assert exchange([], [], query=b"a=1&b=&a=%20x").query() == [("a", "1"), ("b", ""), ("a", " x")]
    assert exchange([], []).query() == []


@pytest.mark.parametrize("query", [b"a", b"a=%ff", b"\xff=1", b"&".join([b"a=1"] * 40)])
def test_a_malformed_query_is_refused(query: bytes) -> None:
    with pytest.raises(RequestError, match="query string"):
        exchange([], [], query=query).query()


async def test_both_sizes_are_known() -> None:
    subject = exchange([request(b"{}")], [])
    await subject.json_body(10)
    await subject.write_event(b"one", last=False)
    await subject.write_event(b"three", last=True)
    assert (subject.num_body_bytes, subject.num_reply_bytes, subject.status) == (2, 8, 200)


async def test_a_client_that_leaves_while_sending_raises() -> None:
    parts: list[Message] = [request(b"ab", more=True), {"type": "http.disconnect"}]
    with pytest.raises(ClientGoneError):
        await exchange(parts, []).json_body(10)


async def test_waiting_for_a_disconnect_skips_other_messages() -> None:
    parts: list[Message] = [{"type": "http.request"}, {"type": "http.disconnect"}]
    with pytest.raises(ClientGoneError):
        await exchange(parts, []).disconnected()


async def test_a_stream_sends_its_headers_once() -> None:
    sent: list[Message] = []
    subject = exchange([], sent)
    subject.add_header(b"x-request-id", "r")
    assert subject.started is False
    await subject.write_event(b"one", last=False)
    await subject.write_event(b"two", last=True)
    assert [m["type"].removeprefix("http.response.") for m in sent] == ["start", "body", "body"]
    assert (b"x-request-id", b"r") in sent[0]["headers"]
    assert [m["more_body"] for m in sent[1:]] == [True, False]


@pytest.mark.looptime
async def test_a_client_that_stops_reading_is_dropped() -> None:
    loop = asyncio.get_running_loop()
    before = loop.time()
    with pytest.raises(ClientGoneError):
        await exchange([], []).write_event(b"stall", last=False)
    assert loop.time() - before == 30


def test_the_first_header_of_a_name_counts() -> None:
    assert exchange([], []).header(b"x-a") == "1"
    assert exchange([], []).header(b"x-b") is None


@pytest.mark.parametrize(("size", "stays"), [(INLINE, True), (INLINE + 1, False)])
async def test_large_work_leaves_the_event_loop(size: int, stays: bool) -> None:
    worker = await off_loop_when_large(size, threading.get_ident)
    assert (worker == threading.get_ident()) is stays


@pytest.mark.parametrize("size", [1, INLINE + 1])
async def test_an_error_of_the_work_is_raised(size: int) -> None:
    with pytest.raises(ZeroDivisionError):
        await off_loop_when_large(size, lambda: 1 // 0)
