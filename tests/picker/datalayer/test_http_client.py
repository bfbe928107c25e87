"""Plugins' questions to other servers are answered, or end in an `HttpError` with its reason."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from picker.datalayer.http_client import MAX_ANSWER_BYTES, AiohttpClient
from picker.framework.services import HttpClient, HttpError

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[str]:
    """A real HTTP server; its URL."""
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/ask"
    finally:
        await runner.cleanup()


async def test_a_question_is_json_and_so_is_the_answer() -> None:
    """Over one connection, with the headers that were given."""
    peers: set[object] = set()

    async def echo(request: web.Request) -> web.Response:
        assert request.transport is not None
        peers.add(request.transport.get_extra_info("peername"))
        said = await request.json()
        return web.json_response({"said": said, "who": request.headers["X-Who"]}, status=201)

    async with serving(echo) as url, AiohttpClient() as made:
        client: HttpClient = made
        for number in range(3):
            answer = await client.post_json(
                url, {"n": number}, timeout_seconds=10, headers={"X-Who": "me"}
            )
            assert answer == {"said": {"n": number}, "who": "me"}
    assert len(peers) == 1


async def empty(_: web.Request) -> web.Response:
    return web.Response(status=204)


async def test_an_answer_may_be_empty() -> None:
    """Then it is None."""
    async with serving(empty) as url, AiohttpClient() as client:
        assert await client.post_json(url, None, timeout_seconds=10) is None


async def moved(request: web.Request) -> web.Response:
    return web.Response(status=307, headers={"Location": str(request.url)})


async def broken(_: web.Request) -> web.Response:
    return web.Response(status=500)


async def huge(_: web.Request) -> web.Response:
    return web.Response(body=b"1" * (MAX_ANSWER_BYTES + 1))


async def compressed(_: web.Request) -> web.Response:
    return web.Response(body=b"\x1f\x8b", headers={"Content-Encoding": "gzip"})


async def prose(_: web.Request) -> web.Response:
    return web.Response(text="hello")


async def nested(_: web.Request) -> web.Response:
    return web.Response(body=b"[" * 100_000)


async def silent(_: web.Request) -> web.Response:
    await asyncio.Event().wait()
    return web.Response()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (moved, "status 307"),
        (broken, "status 500"),
        (huge, "larger than"),
        (compressed, "compressed"),
        (prose, "not valid JSON"),
        (nested, "not valid JSON"),
        (silent, r"no answer within 0\.05 s"),
    ],
)
async def test_what_is_no_answer_is_an_error_with_a_reason(answer: Answer, reason: str) -> None:
    """Redirects are not followed; sizes, times and nesting are bounded."""
    patience = 0.05 if answer is silent else 10.0
    async with serving(answer) as url, AiohttpClient() as client:
        with pytest.raises(HttpError, match=reason):
            await client.post_json(url, {}, timeout_seconds=patience)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/", "ftp://127.0.0.1/", "nonsense", "http://"])
async def test_nobody_to_ask_is_an_error_too(url: str) -> None:
    """Down, or no such thing."""
    async with AiohttpClient() as client:
        with pytest.raises(HttpError):
            await client.post_json(url, {}, timeout_seconds=10)


async def test_nothing_is_asked_before_the_start_and_after_the_end() -> None:
    """A plugin may hold the client for longer than that."""
    client = AiohttpClient()
    for _ in range(2):
        with pytest.raises(HttpError, match="before the picker has started"):
            await client.post_json("http://127.0.0.1:1/", {}, timeout_seconds=1)
        async with client:
            pass
