"""The destinations of requests by a generated bootstrap, measured on the real Envoy."""

import asyncio
import json

import aiohttp
import pytest

from fleet.envoy.settings import Mechanism
from tests.support.waiting import until

pytestmark = pytest.mark.envoy
DESTINATION = "x-gateway-destination-endpoint"
BOTH = pytest.mark.parametrize("mechanism", list(Mechanism), ids=lambda m: m.value)


@BOTH
async def test_the_picked_endpoint_serves(bench, mechanism) -> None:
    async with bench(mechanism=mechanism) as b:
        for worker in b.workers:
            b.picker.answer.destination = worker.host_port
            for size in (1, 100_000, 3_000_000):
                answer = await b.post(size=size)
                assert (answer["worker"], answer["size"]) == (worker.name, size)


@BOTH
@pytest.mark.parametrize("host", [b"", b"Host: worker\r\n"], ids=["no host", "host"])
async def test_http_1_0_is_answered_without_chunks(bench, mechanism, host: bytes) -> None:
    async with bench(mechanism=mechanism) as b:
        b.picker.answer.destination = b.workers[1].host_port
        reader, writer = await asyncio.open_connection("127.0.0.1", int(b.url.rpartition(":")[2]))
        writer.write(b"POST /v1/echo HTTP/1.0\r\n" + host + b"Content-Length: 2\r\n\r\nhi")
        async with asyncio.timeout(60):
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
    assert head.split(b" ", 2)[1] == b"200"
    assert b"chunked" not in head.lower()
    answer = json.loads(body)
    assert (answer["worker"], answer["size"]) == ("b", 2)


async def test_dynamic_metadata_alone_is_enough(bench) -> None:
    async with bench() as b:
        b.picker.answer.header = False
        b.picker.answer.destination = b.workers[1].host_port
        assert {(await b.post())["worker"] for _ in range(10)} == {"b"}


async def test_a_retry_walks_the_pickers_list(bench) -> None:
    async with bench() as b:
        first, second = b.workers
        await b.until_healthy("pool", 2)
        await first.stop()
        b.picker.answer.destination = f"{first.host_port},{second.host_port}"
        answers = [await b.post() for _ in range(5)]
        assert [answer["worker"] for answer in answers] == ["b"] * 5


async def test_a_worker_that_dies_before_answering_is_replaced(bench) -> None:
    async with bench() as b:
        first, _ = b.workers
        await b.until_healthy("pool", 2)
        b.picker.answer.destination = first.host_port
        first.held.add("/v1/slow")
        async with asyncio.TaskGroup() as group:
            size = 2_000_000
            pending = [group.create_task(b.post("/v1/slow", size=size)) for _ in range(8)]
            await until(lambda: len(first.requests) == len(pending), what="all requests in")
            await first.stop()
        assert [task.result().get("worker") for task in pending] == ["b"] * len(pending)
        assert {task.result()["size"] for task in pending} == {size}


async def test_a_stream_that_has_begun_is_never_replayed(bench) -> None:
    async with bench() as b:
        await b.until_healthy("pool", 2)
        b.picker.answer.destination = b.workers[0].host_port
        async with b.client.post(f"{b.url}/stream", data=b"x") as response:
            assert await response.content.readline() == b"data: first\n"
            await b.workers[0].stop()
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.content.read()
        retries = await b.proxy.stats("^cluster.pool.upstream_rq_retry$")
        assert retries == {"cluster.pool.upstream_rq_retry": 0}


@BOTH
@pytest.mark.parametrize("picker_state", ["picks", "appends", "says nothing", "gone"])
async def test_a_client_cannot_choose_its_endpoint(bench, mechanism, picker_state) -> None:
    async with bench(mechanism=mechanism) as b:
        secret, picked = b.workers[1], b.workers[0]
        if mechanism is Mechanism.OVERRIDE_HOST:
            await b.until_healthy("pool", 2)
        if picker_state in ("picks", "appends"):
            b.picker.answer.destination = picked.host_port
            b.picker.answer.append = picker_state == "appends"
        if picker_state == "gone":
            await b.picker.stop()
            await b.until_healthy("picker", 0)
        served = {
            (await b.post(**{DESTINATION: secret.host_port})).get("worker", "nobody")
            for _ in range(12)
        }
        if picker_state in ("picks", "appends"):
            assert served == {"a"}
        elif mechanism is Mechanism.ORIGINAL_DST:
            assert served == {"nobody"}
        else:
            assert served == {"a", "b"}  # balanced by Envoy, not chosen by the client


async def test_routing_and_control_headers_never_arrive(bench) -> None:
    names = (
        "x-gateway-destination-endpoint-subset",
        "x-gateway-inference-objective",
        "x-llm-d-inference-fairness-id",
        "x-llm-d-model-name-rewrite",
        "x-prefiller-host-port",
        "x-data-parallel-host-port",
        "x-encoder-hosts-ports",
        "x-kv-cache-source-host-port",
    )
    spoofed = dict.fromkeys(names, "10.0.0.1:1")
    async with bench() as b:
        answer = await b.post(**spoofed, **{"x-harmless": "kept"})
        for headers in (answer["headers"], b.picker.streams[-1].headers):
            assert headers.keys() & spoofed.keys() == set()
            assert headers["x-harmless"] == "kept"


async def test_trusted_clients_may_say_what_a_request_is_but_not_where_it_goes(bench) -> None:
    async with bench(trust_control_headers=True) as b:
        await b.post(
            **{"x-llm-d-inference-objective": "batch", "x-prefiller-host-port": "10.0.0.1:1"},
            **{DESTINATION: b.workers[0].host_port, "x-llm-d-model-name-rewrite": "other"},
        )
        seen = b.picker.streams[-1].headers
        assert seen["x-llm-d-inference-objective"] == "batch"
        hidden = {"x-prefiller-host-port", DESTINATION, "x-llm-d-model-name-rewrite"}
        assert seen.keys() & hidden == set()
