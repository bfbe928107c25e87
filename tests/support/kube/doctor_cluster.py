"""A pool in the test API server without findings, and the doctor's view of it."""

import asyncio
import copy
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fleet.doctor.cluster_look import ClusterFacts, ClusterLook
from fleet.doctor.command import diagnose
from fleet.doctor.diagnosis import Diagnosis, Facts
from picker.k8s.credentials import Access
from tests.fakes.kube_api.access import Rule
from tests.fakes.kube_api.kubelet import pod
from tests.fakes.kube_api.server import KubeApi, running_kube_api
from tests.support.kube.wired_client import client_of

CRDS = sorted((Path(__file__).parents[3] / "crds").glob("*.yaml"))
NOW = 1_790_000_000.0
ACCOUNT = "system:serviceaccount:default:picker"
WORKERS, PICKERS = {"app": "worker"}, {"app": "picker"}
POOL_RULE = Rule(["inference.networking.k8s.io"], ["inferencepools"], ["list", "watch"], ["it"])
ROLE = [
    Rule([""], ["pods"], ["list", "watch"]),
    POOL_RULE,
    Rule(["llm-d.ai"], ["inferenceobjectives", "inferencemodelrewrites"], ["list", "watch"]),
]
LEASE_ROLE = [
    Rule(["coordination.k8s.io"], ["leases"], ["get", "update"], ["epp-default-it.llm-d.ai"]),
    Rule(["coordination.k8s.io"], ["leases"], ["create"]),
]
EVERYTHING = [Rule(["*"], ["*"], ["*"])]
Object = dict[str, Any]


def made(version: str, kind: str, name: str, **fields: object) -> Object:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}, **fields}


def pool() -> Object:
    spec = {
        "selector": {"matchLabels": WORKERS},
        "targetPorts": [{"number": 8000}],
        "endpointPickerRef": {"name": "picker", "port": {"number": 9002}},
    }
    return made("inference.networking.k8s.io/v1", "InferencePool", "it", spec=spec)


def service() -> Object:
    ports = [{"name": "grpc", "port": 9002, "appProtocol": "http2"}]
    return made("v1", "Service", "picker", spec={"selector": PICKERS, "ports": ports})


def slices() -> Object:
    endpoints = [{"addresses": ["10.0.0.9"], "conditions": {"ready": True}}]
    fields = {"addressType": "IPv4", "endpoints": endpoints}
    one = made("discovery.k8s.io/v1", "EndpointSlice", "picker-1", **fields)
    one["metadata"]["labels"] = {"kubernetes.io/service-name": "picker"}
    return one


def running(
    name: str, labels: dict[str, str], *args: str, port: int = 8000, is_ready: bool = True
) -> Object:
    one = pod(name, f"10.0.0.{len(name)}", labels, ready=is_ready)
    container = one["spec"]["containers"][0]
    container |= {
        "args": list(args),
        "ports": [{"containerPort": port}],
        "readinessProbe": {"httpGet": {"path": "/health", "port": port}},
    }
    one["spec"] |= {"serviceAccountName": "picker", "terminationGracePeriodSeconds": 30}
    return one


def lease(
    renewed: str = "2026-09-21T14:13:15.000000Z",
    holder: str = "picker-333_6f0a",
    name: str = "epp-default-it.llm-d.ai",
) -> Object:
    """Return the Lease of the picker's election; NOW is five seconds after."""
    spec = {"holderIdentity": holder, "renewTime": renewed, "leaseDurationSeconds": 15}
    return made("coordination.k8s.io/v1", "Lease", name, spec=spec)


def objective(**changes: object) -> Object:
    spec = {"poolRef": {"name": "it"}, "priority": 1, **changes}
    return made("llm-d.ai/v1alpha2", "InferenceObjective", "chat", spec=spec)


@asynccontextmanager
async def cluster_in_order() -> AsyncIterator[KubeApi]:
    async with asyncio.timeout(120), running_kube_api(None, *CRDS) as server:
        server.access.grant("admin", "admin", EVERYTHING)
        server.access.grant("picker", ACCOUNT, ROLE)
        for document in (
            pool(),
            service(),
            slices(),
            objective(),
            running("worker-1", WORKERS),
            running("worker-22", WORKERS, "--shutdown-timeout=20"),
            running("picker-333", PICKERS, "--drain-timeout", "25s", port=9002),
        ):
            server.write(document)
        yield server


async def look(server: KubeApi, token: str = "admin", user: str | None = None) -> ClusterFacts:
    async with client_of(Access(server.url, f"Bearer {token}")) as client:
        return await ClusterLook(client, "default", "it", user, lambda: NOW).look()


async def findings(
    server: KubeApi, token: str = "admin", user: str | None = None
) -> tuple[Diagnosis, ...]:
    return diagnose(Facts(cluster=await look(server, token, user)))


def edited(plural: str, name: str, change: Callable[[Object], object]) -> Callable[[KubeApi], None]:
    def apply(server: KubeApi) -> None:
        found = copy.deepcopy(server.read(plural, name))
        change(found)
        server.write(found)

    return apply


def respecified(plural: str, name: str, **changes: object) -> Callable[[KubeApi], None]:
    return edited(plural, name, lambda one: one["spec"].update(changes))
