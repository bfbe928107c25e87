"""A generated bootstrap on the real Envoy when the picker is lost, hangs or returns."""

import asyncio
import json

import pytest

from fleet.envoy.bootstrap import endpoints_document
from fleet.envoy.settings import SocketAddress
from tests.support.waiting import until

pytestmark = pytest.mark.envoy


async def test_a_lost_picker_costs_at_most_one_request(bench) -> None:
    async with bench() as b:
        await b.until_healthy("pool", 2)
        b.picker.answer.destination = b.workers[1].host_port
        assert (await b.post())["worker"] == "b"
        await b.picker.stop()
        answers = [await b.post()]
        # Envoy ejects it on another thread than the one that meets the failure.
        await b.until_healthy("picker", 0)
        answers += [await b.post() for _ in range(29)]
        assert sum("worker" not in answer for answer in answers) <= 1
        assert {answer["worker"] for answer in answers if "worker" in answer} == {"a", "b"}


async def test_a_body_given_to_a_dying_picker_is_lost(bench) -> None:
    async with bench() as b:
        await b.until_healthy("pool", 2)
        b.picker.silent = True
        async with asyncio.TaskGroup() as group:
            lost = group.create_task(b.post())
            await until(lambda: b.picker.has_a_body, what="the body reaches the picker")
            await b.picker.stop()
        assert lost.result()["status"] in (500, 503)


async def test_buffered_bodies_survive_the_pickers_death(bench) -> None:
    async with bench(buffer_request_body=True, message_timeout_seconds=60.0) as b:
        await b.until_healthy("pool", 2)
        b.picker.answer.destination = b.workers[0].host_port
        async with b.client.post(f"{b.url}/stream", data=b"x") as response:
            assert await response.content.readline() == b"data: first\n"
            async with asyncio.TaskGroup() as group:
                b.picker.silent = True
                held = group.create_task(b.post(size=500_000))
                await until(lambda: len(b.picker.streams) == 2, what="the picker has it")
                await b.picker.stop()
            assert held.result()["size"] == 500_000
            b.workers[0].go_on.set()
            assert (await response.content.read()).endswith(b"data: [DONE]\n\n")


async def test_buffered_bodies_survive_a_picker_that_hangs(bench) -> None:
    async with bench(buffer_request_body=True, message_timeout_seconds=0.2) as b:
        await b.until_healthy("pool", 2)
        b.picker.silent = True
        assert (await b.post())["size"] == 100
        timeouts = await b.proxy.stats("ext_proc.message_timeouts$")
        assert timeouts == {"http.ingress.ext_proc.message_timeouts": 1}


async def test_without_a_picker_a_fail_closed_bootstrap_refuses_requests(bench) -> None:
    async with bench(failure_mode_allow=False) as b:
        await b.until_healthy("pool", 2)
        await b.picker.stop()
        await b.until_healthy("picker", 0)
        assert (await b.post())["status"] >= 500
        assert [worker.requests for worker in b.workers] == [[], []]


async def test_the_endpoints_file_is_followed(bench, tmp_path) -> None:
    file = tmp_path / "endpoints.json"
    file.write_text(endpoints_document([]))
    async with bench(endpoints_file=str(file)) as b:
        new = tmp_path / "next.json"
        new.write_text(endpoints_document([SocketAddress("127.0.0.1", b.workers[1].port)]))
        new.rename(file)
        await b.until_healthy("pool", 1)
        assert {(await b.post())["worker"] for _ in range(4)} == {"b"}
        assert json.loads(file.read_text())["resources"]


async def test_an_endpoint_that_cannot_serve_now_is_passed_over(bench) -> None:
    async with bench() as b:
        await b.until_healthy("pool", 2)
        first, second = b.workers
        b.picker.answer.destination = first.host_port
        first.status = 503
        answer = await b.post(size=100_000)
        assert (answer["worker"], answer["size"]) == (second.name, 100_000)
        second.requests.clear()
        for status in (500, 429):
            first.status = status
            assert (await b.post())["status"] == status
        assert second.requests == []
