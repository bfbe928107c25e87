"""Recorded kubelet streams, replayed: a watching client sees what was recorded, in that order."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from kube_api.clock import ManualClock
from kube_api.cluster import Address, Cluster, open_cluster
from kube_api.replay import Recording, replay
from kube_api.server import KubeApi, running_kube_api

FOLDER = Path(__file__).parents[3] / "tests/data/kubernetes"
STREAMS = ("pod_lifecycle", "pod_faults", "deployment_rollout")


@pytest_asyncio.fixture
async def api() -> AsyncIterator[KubeApi]:
    """A fake server."""
    async with running_kube_api(ManualClock()) as running:
        yield running


@pytest_asyncio.fixture
async def cluster(api: KubeApi) -> AsyncIterator[Cluster]:
    """A client of it."""
    async with aiohttp.ClientSession() as session:
        yield Cluster(session, Address(api.url), "default", api)


@pytest.mark.parametrize("name", STREAMS)
async def test_a_replayed_stream_is_watched_as_it_was_recorded(
    api: KubeApi, cluster: Cluster, name: str
) -> None:
    """Types, uids and states are the recording's, versions are the server's own."""
    recording = Recording.load(FOLDER / f"{name}.jsonl")
    for pod in recording.met_midway():
        api.write(pod)
    start = str(api.store.version)
    steps = list(replay(api, recording))
    api.store.check_integrity()
    events = await cluster.watch(
        "/api/v1/pods", events=len(steps), resourceVersion=start, timeoutSeconds="60"
    )
    assert [(e["type"], e["object"]["metadata"]["uid"]) for e in events] == [
        (step.type, step.obj["metadata"]["uid"]) for step in steps
    ]
    assert [e["object"].get("status") for e in events] == [s.obj.get("status") for s in steps]
    versions = [int(event["object"]["metadata"]["resourceVersion"]) for event in events]
    assert versions == sorted(set(versions))


async def test_pods_met_midway_were_ready_before(api: KubeApi) -> None:
    """A stream that begins with a change of a Pod has the Pod before it."""
    recording = Recording.load(FOLDER / "pod_faults.jsonl")
    earlier = {pod["metadata"]["name"] for pod in recording.met_midway()}
    assert {"hostnet", "cni"} < earlier
    first = next(replay(api, recording))
    assert first.seconds == pytest.approx(0.41)
    conditions = api.read("pods", "hostnet")["status"]["conditions"]
    assert {"Ready": "True"}.items() <= {c["type"]: c["status"] for c in conditions}.items()


async def test_a_real_or_a_fake_server_can_be_asked_the_same() -> None:
    """Whatever `KUBECONFIG` says, there is a namespace to write to."""
    async with open_cluster() as opened:
        body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"}}
        assert (await opened.call("POST", opened.path("configmaps"), body)).code == 201


async def test_a_server_named_by_kubeconfig_is_asked_within_a_namespace_of_its_own(
    api: KubeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Definitions are created where they are missing; the namespace is deleted afterwards."""
    crds = sorted((Path(__file__).parents[3] / "crds").glob("*.yaml"))
    monkeypatch.setenv("KUBECONFIG", str(api.write_kubeconfig(tmp_path / "config")))
    async with open_cluster(*crds) as opened:
        assert opened.fake is None
        assert opened.namespace.startswith("pointsman-test-")
        path = opened.path("inferencepools", group="inference.networking.k8s.io/v1")
        assert (await opened.call("GET", path)).body["items"] == []
        name = opened.namespace
    assert api.store.find(api.resource("namespaces"), ("", name)) is None
