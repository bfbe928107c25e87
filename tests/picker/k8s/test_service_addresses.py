"""The addresses behind a Service, from its EndpointSlices, in virtual time."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import msgspec
import pytest

from picker.k8s.api import ENDPOINT_SLICES
from picker.k8s.service_addresses import SERVICE_LABEL, follow_service, of_service, slice_addresses
from tests.fakes.kube_api.clock import LoopClock
from tests.fakes.kube_api.server import KubeApi
from tests.support.kube.in_process_kube_api import InProcessKubeApi

pytestmark = pytest.mark.looptime
SLICES = ENDPOINT_SLICES.path("default")


def sliced(name: str, *addresses: str, service: str = "peers") -> dict[str, Any]:
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": name, "namespace": "default", "labels": {SERVICE_LABEL: service}},
        "addressType": "IPv4",
        "endpoints": [
            {"addresses": [address], "conditions": {"ready": False}} for address in addresses
        ],
    }


def encoded(document: dict[str, Any]) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(document))


@asynccontextmanager
async def following(api: InProcessKubeApi, found: list[Sequence[str]]) -> AsyncIterator[None]:
    @asynccontextmanager
    async def opened() -> AsyncIterator[InProcessKubeApi]:
        yield api

    clock = asyncio.get_running_loop().time
    selection = of_service("default", "peers")
    following = follow_service(opened, selection, found.append, rng=Random(1), clock=clock)
    task = asyncio.create_task(following)
    await asyncio.sleep(1)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_all_slices_of_the_service_are_published_together_and_followed() -> None:
    api = InProcessKubeApi(KubeApi(LoopClock()), Random(2))
    first = await api.send("POST", SLICES, sliced("a", "10.0.0.2", "10.0.0.1"))
    await api.send("POST", SLICES, sliced("b", "10.0.0.2", "10.0.0.3"))
    await api.send("POST", SLICES, sliced("c", "10.0.9.9", service="other"))
    found: list[Sequence[str]] = []
    async with following(api, found):
        assert found == [["10.0.0.1", "10.0.0.2", "10.0.0.3"]]
        first["endpoints"] = []
        await api.send("PUT", f"{SLICES}/a", first)
        await asyncio.sleep(0.1)
        assert found[1:] == [["10.0.0.2", "10.0.0.3"]]


async def test_peers_remain_during_an_outage_of_the_api_server() -> None:
    api = InProcessKubeApi(KubeApi(LoopClock()), Random(3))
    await api.send("POST", SLICES, sliced("a", "10.0.0.1"))
    found: list[Sequence[str]] = []
    async with following(api, found):
        api.go_away()
        await asyncio.sleep(600)
        assert found == [["10.0.0.1"]]
        api.come_back()
        await api.send("POST", SLICES, sliced("b", "10.0.0.2"))
        await asyncio.sleep(30)
        assert found[-1] == ["10.0.0.1", "10.0.0.2"]


async def test_a_service_without_endpoints_is_published_as_empty() -> None:
    found: list[Sequence[str]] = []
    async with following(InProcessKubeApi(KubeApi(LoopClock()), Random(4)), found):
        assert found == [[]]


def test_host_names_and_endpoints_without_addresses_are_skipped() -> None:
    odd = sliced("a", "peer.example", "fd00::1")
    odd["endpoints"] += [{"addresses": []}, {"addresses": ["10.0.0.1", "10.0.0.2"]}]
    assert slice_addresses(encoded(odd)) == ("fd00::1", "10.0.0.1")
    assert slice_addresses(encoded({**odd, "endpoints": None})) == ()
    with pytest.raises(msgspec.MsgspecError):
        slice_addresses(encoded({**odd, "endpoints": [{"addresses": "10.0.0.1"}]}))
