"""Plugins exchange JSON with other servers; every failure is an `HttpError` that names the URL."""

from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from picker.app.json_client import JsonClient
from picker.framework.services import HttpError
from tests.support.web_server import serving


@pytest.fixture
async def server() -> AsyncIterator[str]:
    async def echo(request: web.Request) -> web.Response:
        return web.json_response({"said": await request.json(), "by": request.headers.get("x-by")})

    async def quiet(_: web.Request) -> web.Response:
        return web.Response(status=202)

    async def broken(_: web.Request) -> web.Response:
        return web.Response(text="{")

    async def nested(_: web.Request) -> web.Response:
        return web.Response(body=b"[" * 100_000)

    application = web.Application()
    for handler in (echo, quiet, broken, nested):
        application.router.add_post(f"/{handler.__name__}", handler)
    async with serving(application) as port:
        yield f"http://127.0.0.1:{port}"


async def test_the_answer_is_decoded_json(server: str) -> None:
    async with JsonClient() as client:
        answer = await client.post_json(
            f"{server}/echo", {"a": [1]}, timeout_seconds=30, headers={"x-by": "me"}
        )
        assert answer == {"said": {"a": [1]}, "by": "me"}
        assert await client.post_json(f"{server}/quiet", {}, timeout_seconds=30) is None


@pytest.mark.parametrize(
    ("path", "reason"),
    [("/none", "status 404"), ("/broken", "no JSON"), ("/nested", "no JSON"), (":x", "URL")],
)
async def test_an_unusable_answer_is_an_error(server: str, path: str, reason: str) -> None:
    async with JsonClient() as client:
        with pytest.raises(HttpError, match=f"^{server}{path}: .*{reason}"):
            await client.post_json(server + path, {}, timeout_seconds=30)
