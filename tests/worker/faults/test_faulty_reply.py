"""Replies are held up for as long as asked, and pages are broken in every way there is."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from worker.faults.faulty_reply import FaultyReply, bad_metrics
from worker.faults.settings import Faults

pytestmark = pytest.mark.looptime


class Client:
    """Keeps what it gets, and when; it is gone before part number `leaves_at`."""

    def __init__(self, leaves_at: int | None = None) -> None:
        self.heads: list[Any] = []
        self.parts: list[tuple[bytes, float]] = []
        self._leaves_at = leaves_at
        self._started = asyncio.get_running_loop().time()

    async def send(self, message: Any) -> None:
        """An ASGI `send`."""
        if message["type"] == "http.response.start":
            self.heads.append(message)
        elif len(self.parts) == self._leaves_at:
            raise OSError("gone")
        else:
            elapsed = asyncio.get_running_loop().time() - self._started
            self.parts.append((message["body"], elapsed))


async def stream(client: Client, after_events: int | None, seconds: float) -> None:
    """Four parts, one each second."""
    headers = ((b"x-a", b"b"),)
    async with FaultyReply(client.send, headers, after_events, seconds) as reply:
        await reply.send({"type": "http.response.start", "status": 200, "headers": []})
        for number in range(4):
            body = {"body": b"%d" % number, "more_body": number < 3}
            await reply.send({"type": "http.response.body", **body})
            await asyncio.sleep(1)


@pytest.mark.parametrize(
    ("after_events", "seconds", "times"),
    [
        (None, 0.0, [0, 1, 2, 3]),
        (2, 2.5, [0, 1, 3.5, 3.5]),
        (1, 60.0, [0, 60, 60, 60]),
        (1, 1.5, [0, 1.5, 2, 3]),
    ],
)
async def test_a_held_up_stream_goes_on_when_its_time_is_over(
    after_events: int | None, seconds: float, times: list[float]
) -> None:
    """Not with the next part, which may be long in coming; all of it and in order."""
    client = Client()
    await stream(client, after_events, seconds)
    assert [body for body, _ in client.parts] == [b"0", b"1", b"2", b"3"]
    assert [time for _, time in client.parts] == pytest.approx(times)
    assert client.heads[0]["headers"] == [(b"x-a", b"b")]


async def test_what_is_held_back_goes_with_a_writer_that_fails() -> None:
    """The failure is told at once, nothing leaves afterwards, and no task stays behind."""
    client = Client()

    async def fail() -> None:
        async with FaultyReply(client.send, (), 1, 60.0) as reply:
            for _ in range(2):
                await reply.send({"type": "http.response.body", "body": b"", "more_body": True})
            raise OSError("writer")

    with pytest.raises(OSError, match="writer"):
        await fail()
    assert len(client.parts) == 1
    assert len(asyncio.all_tasks()) == 1


@pytest.mark.parametrize("seconds", [1.5, 60.0])
async def test_a_client_that_leaves_a_stall_is_noticed(seconds: float) -> None:
    """The writer hears of it with its next part, or at the end."""
    client = Client(leaves_at=1)
    with pytest.raises(OSError, match="gone"):
        await stream(client, 1, seconds)
    assert len(client.parts) == 1


async def page(scope: Any, receive: Any, send: Any) -> None:
    """A short page."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"# HELP a b\na 1\nbbb 2\nccc 3\n"})


async def never() -> Any:
    """A client that stays and says no more."""
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("name", "status", "size"),
    [
        ("garbage", 200, 65536),
        ("empty", 200, 0),
        ("error", 500, 21),
        ("redirect", 302, 0),
        ("truncated", 200, 13),
        ("huge", 200, 200_000),
    ],
)
async def test_metrics_pages_can_be_broken(name: str, status: int, size: int) -> None:
    """In every way that a scraper must survive."""
    client = Client()
    there = "http://127.0.0.1:1/x"
    faults = Faults(metrics_page=name, metrics_bytes=200_000, metrics_redirect=there)
    await bad_metrics(faults, page, {}, never, client.send)
    body = b"".join(body for body, _ in client.parts)
    assert (client.heads[0]["status"], len(body)) == (status, size)
    if name == "redirect":
        assert dict(client.heads[0]["headers"])[b"location"] == there.encode()
    if name == "truncated":
        assert not body.endswith(b"\n")
