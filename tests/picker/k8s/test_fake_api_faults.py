"""Faults of the fake API server that the tests of the client and the reflector do not show."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from kube_api import statuses
from kube_api.access import Rule
from kube_api.clock import ManualClock
from kube_api.cluster import Address, Cluster, address_in
from kube_api.kubelet import Kubelet
from kube_api.server import KubeApi, running_kube_api

CRDS = sorted((Path(__file__).parents[3] / "crds").glob("*.yaml"))
PODS = "/api/v1/namespaces/default/pods"
POOLS = "/apis/inference.networking.k8s.io/v1/namespaces/default/inferencepools"
PATIENCE_SECONDS = 60


@pytest_asyncio.fixture
async def api() -> AsyncIterator[KubeApi]:
    """A fake server with one Pod."""
    async with running_kube_api(ManualClock(), *CRDS) as running:
        Kubelet(running).run("a", "10.0.0.1", {"app": "x"})
        yield running


@pytest_asyncio.fixture
async def cluster(api: KubeApi) -> AsyncIterator[Cluster]:
    """A client of it."""
    async with asyncio.timeout(PATIENCE_SECONDS), aiohttp.ClientSession() as session:
        assert isinstance(api.clock, ManualClock)
        yield Cluster(session, Address(api.url), "default", api, api.clock)


def begun(cluster: Cluster, **how: Any) -> asyncio.Task[list[dict[str, Any]]]:
    """A watch that goes on while the test does."""
    return asyncio.create_task(cluster.watch(PODS, **how))


async def test_an_answer_can_be_refused_so_many_times(api: KubeApi, cluster: Cluster) -> None:
    """429 with its Retry-After, on the verb and resource named, and then no more."""
    api.faults.answer(statuses.initializing(), "list", plural="pods", times=2)
    for _ in range(2):
        refused = await cluster.call("GET", PODS)
        assert refused.short == (429, "TooManyRequests")
        assert refused.headers["Retry-After"] == "1"
    assert (await cluster.call("GET", PODS)).code == 200
    assert [one.verb for one in api.asked] == ["list"] * 3


async def test_a_list_can_be_late_by_the_clock(api: KubeApi, cluster: Cluster) -> None:
    """It is answered once the time has come, and shows what is there then."""
    fault = api.faults.delay(30, "list")
    late = asyncio.create_task(cluster.call("GET", PODS))
    await fault.reached.wait()
    assert isinstance(api.clock, ManualClock)
    api.clock.advance(29)
    api.erase("pods", "a")
    assert not late.done()
    api.clock.advance(1)
    assert (await late).body["items"] == []


async def test_a_silent_watch_says_nothing_until_the_path_is_back(
    api: KubeApi, cluster: Cluster
) -> None:
    """Neither events nor its own end pass; after it nothing is lost."""
    start = (await cluster.call("GET", PODS)).version
    watch = begun(cluster, resourceVersion=start, timeoutSeconds="60")
    await api.watches.wait_for(1)
    api.watches.silence()
    Kubelet(api).set_ready("a", False)
    assert isinstance(api.clock, ManualClock)
    api.clock.advance(600)
    await cluster.call("GET", PODS)
    assert not watch.done()
    api.watches.speak()
    assert [event["type"] for event in await watch] == ["MODIFIED", "EOF"]


async def test_a_watch_can_carry_what_no_server_should_send(api: KubeApi, cluster: Cluster) -> None:
    """An object without metadata, and afterwards the watch goes on."""
    start = (await cluster.call("GET", PODS)).version
    watch = begun(cluster, events=2, resourceVersion=start)
    await api.watches.wait_for(1)
    api.watches.inject_object("MODIFIED", {"kind": "Pod", "spec": []}, "pods")
    Kubelet(api).set_ready("a", False)
    events = await watch
    assert events[0] == {"type": "MODIFIED", "object": {"kind": "Pod", "spec": []}}
    assert events[1]["object"]["metadata"]["name"] == "a"


async def test_a_verb_can_be_forbidden_while_open_watches_go_on(
    api: KubeApi, cluster: Cluster
) -> None:
    """403 in the authorizer's words for what is new; what is open delivers on."""
    start = (await cluster.call("GET", PODS)).version
    watch = begun(cluster, events=1, resourceVersion=start)
    await api.watches.wait_for(1)
    api.access.deny("list", "pods")
    refused = await cluster.call("GET", PODS)
    assert refused.short == (403, "Forbidden")
    assert refused.body["message"] == (
        'pods is forbidden: User "system:anonymous" cannot list resource "pods" in API group "" '
        'in the namespace "default"'
    )
    Kubelet(api).set_ready("a", False)
    assert (await watch)[0]["type"] == "MODIFIED"
    api.access.allow_again()
    assert (await cluster.call("GET", PODS)).code == 200


async def test_a_rule_with_names_needs_the_field_selector_of_that_name(
    api: KubeApi, cluster: Cluster, tmp_path: Path
) -> None:
    """The least Role of a picker: its own pool only, and nothing without a token."""
    rule = Rule(["inference.networking.k8s.io"], ["inferencepools"], ["list"], ["p"], "default")
    api.access.grant("secret", "system:serviceaccount:default:picker", [rule])
    assert (await cluster.call("GET", POOLS)).short == (401, "Unauthorized")
    address = address_in(api.write_kubeconfig(tmp_path / "config", "secret"))
    picker = Cluster(cluster.session, address, "default")
    assert (await picker.call("GET", POOLS, fieldSelector="metadata.name=p")).code == 200
    assert (await picker.call("GET", POOLS, fieldSelector="metadata.name=q")).code == 403
    assert (await picker.call("GET", POOLS)).code == 403
    assert (await picker.call("GET", PODS)).code == 403


async def test_a_definition_that_is_deleted_takes_its_objects_and_watches_along(
    api: KubeApi, cluster: Cluster
) -> None:
    """DELETED for each object at once, the end of the watch a second later, then a text 404."""
    spec = {"selector": {"matchLabels": {"app": "x"}}, "targetPorts": [{"number": 8000}]}
    made = await cluster.call("POST", POOLS, {"metadata": {"name": "p"}, "spec": spec})
    watch = asyncio.create_task(cluster.watch(POOLS, resourceVersion=made.version))
    await api.watches.wait_for(1, "inferencepools")
    api.remove("inferencepools")
    assert isinstance(api.clock, ManualClock)
    assert len(api.watches.of("inferencepools")) == 1
    api.clock.advance(1)
    assert [event["type"] for event in await watch] == ["DELETED", "EOF"]
    gone = await cluster.call("GET", POOLS)
    assert (gone.code, gone.body) == (404, "404 page not found\n")
    api.install(*CRDS)
    assert (await cluster.call("GET", POOLS)).body["items"] == []


@pytest.mark.looptime
async def test_ten_minutes_without_a_server_pass_in_virtual_time() -> None:
    """Sockets and a virtual loop go together: watches and stamps keep the loop's time."""
    loop = asyncio.get_running_loop()
    async with running_kube_api() as running, aiohttp.ClientSession() as session:
        Kubelet(running).run("a", "10.0.0.1", {"app": "x"})
        client = Cluster(session, Address(running.url), "default", running)
        begin, before = loop.time(), running.clock.now()
        quiet = await client.watch(PODS, timeoutSeconds="20", resourceVersion="0")
        assert [event["type"] for event in quiet] == ["ADDED", "EOF"]
        assert loop.time() - begin == pytest.approx(20, abs=1)
        await running.go_away()
        await asyncio.sleep(600)
        await running.come_back(forget_changes=True)
        assert (await client.call("GET", PODS)).code == 200
        assert running.clock.now() - before == pytest.approx(620, abs=1)
