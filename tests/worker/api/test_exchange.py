"""Reading within limits and writing to clients that may not read."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any

import pytest

from worker.api.exchange import ClientGoneError, Exchange

Message = MutableMapping[str, Any]


def exchange(incoming: list[Message], sent: list[Message], stall: float = 30.0) -> Exchange:
    """An exchange over lists: what comes in, what goes out. Sending "stall" never ends."""

    async def receive() -> Message:
        return incoming.pop(0)

    async def send(message: Message) -> None:
        if message.get("body") == b"stall":
            await asyncio.Event().wait()
        sent.append(message)

    scope = {"method": "POST", "path": "/", "headers": [(b"x-a", b"1"), (b"x-a", b"2")]}
    return Exchange(scope, receive, send, write_stall_seconds=stall)


async def test_a_body_in_pieces_is_joined() -> None:
    """The body is complete when ASGI says that no more comes."""
    parts: list[Message] = [
        {"type": "http.request", "body": b"ab", "more_body": True},
        {"type": "http.request", "body": b"c"},
    ]
    assert await exchange(parts, []).json_body(3) == b"abc"


async def test_a_client_that_leaves_while_sending_is_gone() -> None:
    """Half a body is no request."""
    parts: list[Message] = [
        {"type": "http.request", "body": b"ab", "more_body": True},
        {"type": "http.disconnect"},
    ]
    with pytest.raises(ClientGoneError):
        await exchange(parts, []).json_body(10)


async def test_waiting_for_the_end_skips_what_else_comes() -> None:
    """Only a disconnect is one."""
    parts: list[Message] = [{"type": "http.request"}, {"type": "http.disconnect"}]
    with pytest.raises(ClientGoneError):
        await exchange(parts, []).disconnected()


async def test_a_stream_sends_its_headers_once() -> None:
    """The first event brings the status and headers; the last one ends the body."""
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
    """A write that stays blocked for the given time counts as a disconnect."""
    loop = asyncio.get_running_loop()
    before = loop.time()
    with pytest.raises(ClientGoneError):
        await exchange([], []).write_event(b"stall", last=False)
    assert loop.time() - before == 30


def test_the_first_header_of_a_name_counts() -> None:
    """Later ones of the same name are not looked at."""
    assert exchange([], []).header(b"x-a") == "1"
    assert exchange([], []).header(b"x-b") is None
