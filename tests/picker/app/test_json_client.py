"""Other servers are asked with a timeout, and whatever goes wrong is one kind of error."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from picker.app.json_client import JsonClient
from picker.framework.services import HttpError


@pytest.fixture
async def server() -> AsyncIterator[str]:
    """Answers by path; yields its address."""

    async def echo(request: web.Request) -> web.Response:
        return web.json_response({"said": await request.json(), "by": request.headers.get("x-by")})

    async def quiet(_: web.Request) -> web.Response:
        return web.Response(status=202)

    async def broken(_: web.Request) -> web.Response:
        return web.Response(text="{")

    async def away(_: web.Request) -> web.Response:
        raise web.HTTPFound("/echo")

    async def huge(_: web.Request) -> web.Response:
        return web.Response(body=b" " * (16 * 1024 * 1024 + 1))

    async def silent(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await asyncio.Event().wait()
        return response

    async def packed(_: web.Request) -> web.Response:
        return web.Response(body=b"\x1f\x8b", headers={"Content-Encoding": "gzip"})

    async def nested(_: web.Request) -> web.Response:
        return web.Response(body=b"[" * 100_000)

    application = web.Application()
    for handler in (echo, quiet, broken, away, huge, silent, packed, nested):
        application.router.add_post(f"/{handler.__name__}", handler)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


async def test_the_answer_is_decoded_json(server: str) -> None:
    """Headers go along; an answer without a body is None."""
    async with JsonClient() as client:
        answer = await client.post_json(
            f"{server}/echo", {"a": [1]}, timeout_seconds=30, headers={"x-by": "me"}
        )
        assert answer == {"said": {"a": [1]}, "by": "me"}
        assert await client.post_json(f"{server}/quiet", {}, timeout_seconds=30) is None


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/none", "status 404"),
        ("/away", "status 302"),
        ("/broken", "no JSON"),
        ("/huge", "more than"),
        ("/packed", "compressed"),
        ("/nested", "no JSON"),
    ],
)
async def test_an_answer_that_is_of_no_use_is_an_error(server: str, path: str, reason: str) -> None:
    """Redirects are not followed, large answers not kept."""
    async with JsonClient() as client:
        with pytest.raises(HttpError, match=reason):
            await client.post_json(server + path, {}, timeout_seconds=30)


async def test_a_server_that_does_not_answer_is_an_error(server: str) -> None:
    """In time; one that is not there, and a url that is none, too."""
    async with JsonClient() as client:
        with pytest.raises(HttpError, match=r"no answer within 0\.05 s"):
            await client.post_json(f"{server}/silent", {}, timeout_seconds=0.05)
        for url in ("http://127.0.0.1:1/x", "nonsense", "http://[::x/"):
            with pytest.raises(HttpError):
                await client.post_json(url, {}, timeout_seconds=30)


async def test_a_client_that_is_not_open_asks_nobody() -> None:
    """Before the picker runs and after."""
    client = JsonClient()
    with pytest.raises(HttpError, match="not running"):
        await client.post_json("http://127.0.0.1:1/", {}, timeout_seconds=1)
