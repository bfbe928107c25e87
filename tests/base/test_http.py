"""Responses are complete and bounded; every failure is one kind of error in plain words."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from base.http import HttpClient, HttpError
from tests.support.web_server import serving


def application() -> web.Application:
    async def echo(request: web.Request) -> web.Response:
        body = await request.read()
        return web.Response(status=404, body=body, headers={"X-Method": request.method})

    async def broken_off(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "10"})
        await response.prepare(request)
        await response.write(b"12345")
        assert request.transport is not None
        request.transport.close()
        return response

    async def silent(_: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    async def redirect(_: web.Request) -> web.Response:
        raise web.HTTPFound("/echo")

    async def compressed(_: web.Request) -> web.Response:
        return web.Response(body=b"\x1f\x8b", headers={"Content-Encoding": "gzip"})

    made = web.Application()
    for handler in (echo, broken_off, silent, redirect, compressed):
        made.router.add_route("*", f"/{handler.__name__}", handler)
    return made


@pytest.fixture
async def client_and_url() -> AsyncIterator[tuple[HttpClient, str]]:
    async with serving(application()) as port, HttpClient() as client:
        yield client, f"http://127.0.0.1:{port}"


Served = tuple[HttpClient, str]


async def test_a_response_of_any_status_is_returned(client_and_url: Served) -> None:
    client, url = client_and_url
    answer = await client.request("PUT", f"{url}/echo", timeout_seconds=30, json=[1])
    assert (answer.status, answer.body) == (404, b"[1]")
    assert answer.headers["x-method"] == "PUT"


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("broken_off", "broke off"),
        ("silent", r"no answer within 0\.2 s"),
        ("compressed", "compressed"),
    ],
)
async def test_an_unusable_response_is_an_error(
    client_and_url: Served, path: str, reason: str
) -> None:
    client, url = client_and_url
    with pytest.raises(HttpError, match=reason):
        await client.request("GET", f"{url}/{path}", timeout_seconds=0.2)


async def test_a_body_above_the_limit_is_an_error(client_and_url: Served) -> None:
    client, url = client_and_url
    with pytest.raises(HttpError, match="more than 3 bytes"):
        await client.request("PUT", f"{url}/echo", timeout_seconds=30, json="abc", max_bytes=3)


async def test_a_redirect_is_not_followed(client_and_url: Served) -> None:
    client, url = client_and_url
    assert (await client.request("GET", f"{url}/redirect", timeout_seconds=30)).status == 302


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://u:secret@127.0.0.1:1/x", r"^no connection to 127\.0\.0\.1:1: Connection refused$"),
        ("nonsense", "^the URL is not valid$"),
        ("http://[::x/", "."),
    ],
)
async def test_an_unreachable_server_is_named_without_the_url(url: str, reason: str) -> None:
    """URLs may contain passwords."""
    async with HttpClient() as client:
        with pytest.raises(HttpError, match=reason):
            await client.request("GET", url, timeout_seconds=30)


async def test_a_client_outside_its_context_sends_nothing() -> None:
    with pytest.raises(HttpError, match="not running"):
        await HttpClient().request("GET", "http://127.0.0.1:1/", timeout_seconds=1)
