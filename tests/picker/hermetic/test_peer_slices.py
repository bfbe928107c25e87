"""A whole picker that finds another replica by the EndpointSlices of a Service."""

from pathlib import Path
from random import Random
from typing import Any

import pytest

from picker.cli.options import KubernetesFlags, PeerFlags
from picker.errors import ConfigError
from picker.metrics.picker_metrics import PickerMetrics
from picker.peers.discovery import PeerName
from picker.peers.server import PeerServer, PoolReports, peer_port
from tests.fakes.kube_api.kubelet import Kubelet
from tests.fakes.kube_api.server import running_kube_api
from tests.support.kube.kubernetes_objects import CRDS, pool
from tests.support.picker.replica_mesh import node
from tests.support.picker.replicas_scene import LOOPBACK
from tests.support.picker.whole_picker import FOUR_SCORERS, whole_picker
from tests.support.waiting import until


def peers_slice(*addresses: str) -> dict[str, Any]:
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": "peers-x",
            "namespace": "default",
            "labels": {"kubernetes.io/service-name": "peers"},
        },
        "addressType": "IPv4",
        "endpoints": [{"addresses": [address]} for address in addresses],
    }


async def test_endpoint_slices_add_and_remove_replicas(tmp_path: Path) -> None:
    other, series, now = node(Random(1)), PickerMetrics().peers, 0.0
    server = PeerServer({"pool": PoolReports(other.exchange, series, lambda: True)}, lambda: now)
    port = await server.start(peer_port(LOOPBACK, 0))

    def reporting() -> float:
        return dict(series.reporting.numbers()).get((), 0.0)

    try:
        async with running_kube_api(None, *sorted(CRDS.glob("*.yaml"))) as api:
            Kubelet(api).run("a", "127.0.0.11", {"app": "vllm"}, grace_seconds=600)
            api.write(pool(name="pool"))
            api.write(peers_slice(LOOPBACK))
            cluster = KubernetesFlags("pool", kubeconfig=api.write_kubeconfig(tmp_path / "config"))
            peers = PeerFlags((), 0, slices=PeerName("peers", port))
            changes = {"endpoints_file": None, "kubernetes": cluster, "pool_name": "pool"}
            plan = tmp_path / "autoscale.yaml"
            plan.write_text("mode: thresholds\ngroups: [{}]")
            changes |= {"peers": peers, "autoscale": plan}
            async with whole_picker(tmp_path, (), FOUR_SCORERS, **changes):
                await until(lambda: reporting() == 1)
                # For a planner there, which needs the load of all replicas.
                await until(lambda: "--autoscale" in other.exchange.inbox.loads())
                api.write(peers_slice())
                await until(lambda: reporting() == 0)
    finally:
        await server.stop()


async def test_slices_need_a_cluster(tmp_path: Path) -> None:
    peers = PeerFlags((), 0, slices=PeerName("peers", 1))
    with pytest.raises(ConfigError, match="--peer-slices needs a pool"):
        async with whole_picker(tmp_path, (), FOUR_SCORERS, peers=peers):
            pass
