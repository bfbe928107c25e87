"""The suite's own endpoints: who they are, and what they received, over either protocol."""

import json

import aiohttp
import httpx
import pytest

from conformance.echo.answers import SERVED_BY
from conformance.echo.h2c import H2cEchoServer
from conformance.echo.pool import EchoPool, own_endpoints
from conformance.echo.server import STREAM_EVENTS, EchoServer
from conformance.ports import free_ports


async def prior_knowledge(
    endpoint: str, bodies: list[bytes], headers: dict[str, str]
) -> list[tuple[int, dict[str, str], bytes]]:
    async with httpx.AsyncClient(http1=False, http2=True, timeout=60) as client:
        found = []
        for body in bodies:
            answer = await client.post(f"http://{endpoint}/a/path", content=body, headers=headers)
            found.append((answer.status_code, dict(answer.headers), answer.content))
        return found


async def test_an_endpoint_reports_its_name_and_its_request() -> None:
    server = EchoServer("127.0.0.1", free_ports(1)[0])
    await server.start()
    try:
        async with aiohttp.ClientSession() as client:
            url = f"http://{server.endpoint}"
            async with client.post(f"{url}/p", data=b"four", headers={"x-one": "1"}) as answer:
                echoed = await answer.json()
                assert answer.headers[SERVED_BY] == server.endpoint
            assert (echoed["endpoint"], echoed["path"], echoed["bytes"]) == (
                server.endpoint,
                "/p",
                4,
            )
            assert ["x-one", "1"] in echoed["headers"]
            async with client.post(url, data=b"back", headers={"x-echo": "body"}) as answer:
                assert await answer.read() == b"back"
            async with client.get(url, headers={"x-echo": "stream"}) as answer:
                assert (await answer.read()).count(b"data:") == STREAM_EVENTS + 1
            server.is_full = True
            async with client.get(f"{url}/metrics") as answer:
                assert 'num_requests_waiting{model_name="conformance"} 500' in await answer.text()
    finally:
        await server.stop()
    assert [one.path for one in server.received] == ["/p", "/", "/"]


async def test_an_endpoint_can_vanish_and_come_back() -> None:
    server = EchoServer("127.0.0.1", free_ports(1)[0])
    async with aiohttp.ClientSession() as client:
        for _ in range(2):
            await server.start()
            async with client.get(f"http://{server.endpoint}/") as answer:
                assert answer.status == 200
            await server.stop()
            with pytest.raises(aiohttp.ClientConnectionError):
                await client.get(f"http://{server.endpoint}/")


async def test_the_h2c_endpoint_speaks_http2_and_nothing_else() -> None:
    server = H2cEchoServer("127.0.0.1", free_ports(1)[0])
    await server.start()
    try:
        small, large = b"four", b"x" * 300_000
        found = await prior_knowledge(server.endpoint, [small, large], {"x-echo": "body"})
        assert [(status, body) for status, _, body in found] == [(200, small), (200, large)]
        assert found[0][1][SERVED_BY] == server.endpoint
        ((_, _, described),) = await prior_knowledge(server.endpoint, [small], {})
        assert json.loads(described)["protocol"] == "h2c"
        async with aiohttp.ClientSession() as client:
            with pytest.raises(aiohttp.ClientError):
                await client.get(f"http://{server.endpoint}/")
    finally:
        await server.stop()
    assert [one.path for one in server.received] == ["/a/path"] * 3


def test_the_suites_own_pool_has_two_ports_at_one_address() -> None:
    endpoints = own_endpoints()
    assert len(set(endpoints)) == 4
    assert EchoPool(endpoints).same_address() == endpoints[2:]
    assert EchoPool(endpoints[:3]).same_address() == ()
