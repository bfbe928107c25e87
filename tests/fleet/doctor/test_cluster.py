"""A pool in the test API server: in order, and then spoilt one thing at a time."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from kube_api.access import Rule
from kube_api.kubelet import pod
from kube_api.server import KubeApi, running_kube_api
from wired_client import client_of

from fleet.doctor.cluster_facts import ClusterFacts
from fleet.doctor.cluster_look import ClusterLook
from fleet.doctor.facts import Facts
from fleet.doctor.findings import Severity
from fleet.doctor.registry import Told, diagnose
from picker.k8s.tls import Access

CRDS = sorted((Path(__file__).parents[3] / "crds").glob("*.yaml"))
NOW = 1_790_000_000.0
ACCOUNT = "system:serviceaccount:default:picker"
WORKERS, PICKERS = {"app": "worker"}, {"app": "picker"}
POOL_RULE = Rule(
    ["inference.networking.k8s.io"], ["inferencepools"], ["get", "list", "watch"], ["it"]
)
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


def pool() -> Object:
    """A pool as in the manifests."""
    return {
        "apiVersion": "inference.networking.k8s.io/v1",
        "kind": "InferencePool",
        "metadata": {"name": "it"},
        "spec": {
            "selector": {"matchLabels": WORKERS},
            "targetPorts": [{"number": 8000}],
            "endpointPickerRef": {"name": "picker", "port": {"number": 9002}},
        },
    }


def service() -> Object:
    """The picker's."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "picker"},
        "spec": {
            "selector": PICKERS,
            "ports": [{"name": "grpc", "port": 9002, "appProtocol": "http2"}],
        },
    }


def slices() -> Object:
    """Of the picker's Service."""
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": "picker-1", "labels": {"kubernetes.io/service-name": "picker"}},
        "addressType": "IPv4",
        "endpoints": [{"addresses": ["10.0.0.9"], "conditions": {"ready": True}}],
    }


def running(name: str, labels: dict[str, str], *args: str, port: int = 8000) -> Object:
    """A Pod that is ready, with a probe and a port."""
    made = pod(name, f"10.0.0.{len(name)}", labels)
    container = made["spec"]["containers"][0]
    container |= {
        "args": list(args),
        "ports": [{"containerPort": port}],
        "readinessProbe": {"httpGet": {"path": "/health", "port": port}},
    }
    made["spec"] |= {"serviceAccountName": "picker", "terminationGracePeriodSeconds": 30}
    return made


def lease(renewed: str = "2026-09-21T14:13:15.000000Z", holder: str = "a") -> Object:
    """That of the picker's election; NOW is five seconds after."""
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": "epp-default-it.llm-d.ai"},
        "spec": {"holderIdentity": holder, "renewTime": renewed, "leaseDurationSeconds": 15},
    }


def objective(**spec: object) -> Object:
    """One about the pool."""
    return {
        "apiVersion": "llm-d.ai/v1alpha2",
        "kind": "InferenceObjective",
        "metadata": {"name": "chat"},
        "spec": {"poolRef": {"name": "it"}, "priority": 1, **spec},
    }


@pytest_asyncio.fixture
async def api() -> AsyncIterator[KubeApi]:
    """A server with a pool, two workers and a picker, all in order."""
    async with asyncio.timeout(20), running_kube_api(None, *CRDS) as server:
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
    """What there is to see."""
    async with client_of(Access(server.url, f"Bearer {token}")) as client:
        return await ClusterLook(client, "default", "it", user, lambda: NOW).look()


async def told(server: KubeApi, token: str = "admin", user: str | None = None) -> tuple[Told, ...]:
    """What is said of it."""
    return diagnose(Facts(cluster=await look(server, token, user)))


async def test_a_cluster_in_order(api: KubeApi) -> None:
    """Nothing is said; rights are asked for the picker's own account."""
    facts = await look(api)
    assert diagnose(Facts(cluster=facts)) == ()
    assert facts.who == ACCOUNT
    assert facts.problem is None


async def test_a_picker_with_an_election_in_order(api: KubeApi) -> None:
    """Two of them, a lease that is fresh, and the rights for it."""
    api.access.grant("picker", ACCOUNT, ROLE + LEASE_ROLE)
    for name in ("picker-333", "picker-4444"):
        api.write(running(name, PICKERS, "--ha-enable-leader-election", port=9002))
    api.write(lease())
    assert await told(api) == ()


@pytest.mark.parametrize("rule", range(len(ROLE)))
async def test_each_right_that_is_missing_is_named(api: KubeApi, rule: int) -> None:
    """With the rule to add."""
    lost = ROLE[rule]
    api.access.grant("picker", ACCOUNT, [one for one in ROLE if one is not lost])
    found = await told(api)
    assert {one.check for one in found} == {"k8s-rights"}
    assert len(found) == len(lost.verbs) * len(lost.resources)
    fixes = " ".join(one.finding.fix for one in found)
    assert all(f"verbs: [{verb}]" in fixes for verb in lost.verbs)
    assert all(f"resources: [{plural}]" in fixes for plural in lost.resources)
    assert ("resourceNames: [it]" in fixes) == (lost is POOL_RULE)


async def test_a_right_under_another_name_is_none(api: KubeApi) -> None:
    """The Role has to name this pool."""
    other = Rule(POOL_RULE.groups, POOL_RULE.resources, POOL_RULE.verbs, ["other"])
    api.access.grant("picker", ACCOUNT, [ROLE[0], other, ROLE[2]])
    found = await told(api)
    assert [one.check for one in found] == ["k8s-rights"] * 3


async def test_who_may_not_ask_about_others_learns_of_himself(api: KubeApi) -> None:
    """Without --as; with it, that is a warning."""
    facts = await look(api, token="picker")
    assert facts.who == "you"
    assert facts.denied == ()
    assert {"services", "endpointslices"} <= set(facts.unseen)
    found = await told(api, token="picker", user="system:serviceaccount:default:other")
    assert "k8s-rights" in {one.check for one in found}
    (unknown,) = [one for one in found if one.check == "k8s-rights"]
    assert unknown.finding.severity is Severity.WARNING


async def test_rights_of_somebody_else(api: KubeApi) -> None:
    """An account that nobody has given anything lacks all of them."""
    found = await told(api, user="system:serviceaccount:default:new")
    assert {one.check for one in found} == {"k8s-rights"}
    assert len(found) == 9


def edited(plural: str, name: str, change: Callable[[Object], object]) -> Callable[[KubeApi], None]:
    """Change an object as it stands."""

    def apply(server: KubeApi) -> None:
        found = copy.deepcopy(server.read(plural, name))
        change(found)
        server.write(found)

    return apply


def _pool(change: Callable[[Object], object]) -> Callable[[KubeApi], None]:
    return edited("inferencepools.inference.networking.k8s.io", "it", change)


def _both_unready(server: KubeApi) -> None:
    for name in ("worker-1", "worker-22"):
        edited("pods", name, lambda one: one["status"].update(conditions=[]))(server)


def _electing(server: KubeApi) -> None:
    server.access.grant("picker", ACCOUNT, ROLE + LEASE_ROLE)
    server.write(running("picker-333", PICKERS, "--ha-enable-leader-election", port=9002))


def _with_lease(**how: str) -> Callable[[KubeApi], None]:
    def apply(server: KubeApi) -> None:
        _electing(server)
        server.write(lease(**how))

    return apply


def _refusing(one: Object) -> None:
    condition = {"type": "Accepted", "status": "False", "reason": "NotSupported", "message": "no"}
    one["status"] = {"parents": [{"parentRef": {"name": "gw"}, "conditions": [condition]}]}


SPOILT: list[tuple[str, str, Callable[[KubeApi], object]]] = [
    (
        "k8s-kinds",
        "inferencepools",
        lambda api: api.remove("inferencepools.inference.networking.k8s.io"),
    ),
    ("k8s-kinds", "inferenceobjectives", lambda api: api.remove("inferenceobjectives.llm-d.ai")),
    (
        "k8s-pool",
        "there is no InferencePool",
        lambda api: api.erase("inferencepools.inference.networking.k8s.io", "it"),
    ),
    ("k8s-pool", "targetPorts", _pool(lambda one: one["spec"].update(targetPorts=[]))),
    ("k8s-parents", "Accepted is False, NotSupported: no", _pool(_refusing)),
    (
        "k8s-pods",
        "selects no Pod",
        _pool(lambda one: one["spec"]["selector"].update(matchLabels={"app": "x"})),
    ),
    ("k8s-pods", "is ready", _both_unready),
    (
        "k8s-target-ports",
        "9999",
        _pool(lambda one: one["spec"].update(targetPorts=[{"number": 9999}])),
    ),
    (
        "k8s-probes",
        "worker-1",
        edited("pods", "worker-1", lambda one: one["spec"]["containers"][0].pop("readinessProbe")),
    ),
    (
        "k8s-grace-period",
        "--shutdown-timeout 20 s",
        edited(
            "pods", "worker-22", lambda one: one["spec"].update(terminationGracePeriodSeconds=10)
        ),
    ),
    (
        "k8s-grace-period",
        "after 10 s of preStop",
        edited(
            "pods",
            "picker-333",
            lambda one: one["spec"]["containers"][0].update(
                lifecycle={"preStop": {"sleep": {"seconds": 10}}}
            ),
        ),
    ),
    ("k8s-service", "is not there", lambda api: api.erase("services", "picker")),
    (
        "k8s-service",
        "has no port 9002 (it has 80)",
        edited("services", "picker", lambda one: one["spec"].update(ports=[{"port": 80}])),
    ),
    (
        "k8s-service",
        "appProtocol http",
        edited(
            "services", "picker", lambda one: one["spec"]["ports"][0].update(appProtocol="http")
        ),
    ),
    (
        "k8s-service",
        "no ready endpoints",
        edited(
            "endpointslices",
            "picker-1",
            lambda one: one["endpoints"][0]["conditions"].update(ready=False),
        ),
    ),
    (
        "k8s-policies",
        "poolRef names the pool in group",
        lambda api: api.write(
            objective(poolRef={"name": "it", "group": "inference.networking.x-k8s.io"})
        ),
    ),
    ("k8s-policies", "spec.priority", lambda api: api.write(objective(priority="high"))),
    (
        "k8s-replicas",
        "2 pickers serve the pool",
        lambda api: api.write(running("picker-4444", PICKERS, port=9002)),
    ),
    ("k8s-lease", "has no holder", _electing),
    ("k8s-lease", "has no holder", _with_lease(holder="")),
    ("k8s-lease", "ago", _with_lease(renewed="2026-09-21T14:12:00.000000Z")),
    ("k8s-unseen", "pods", lambda api: api.access.deny("list", "pods")),
]


@pytest.mark.parametrize(
    ("check", "text", "spoil"), SPOILT, ids=[f"{one[0]}-{one[1]}" for one in SPOILT]
)
async def test_what_is_spoilt_is_told_of(
    api: KubeApi, check: str, text: str, spoil: Callable[[KubeApi], object]
) -> None:
    """By the check that is meant, and by no other that it does not follow from."""
    spoil(api)
    found = await told(api)
    assert any(one.check == check and text in one.finding.seen for one in found), found
    follows = {
        "k8s-unseen": {"k8s-rights"},
    }
    assert {one.check for one in found} <= {check} | follows.get(check, set())


async def test_an_api_server_that_is_away(api: KubeApi) -> None:
    """One finding, not one for each thing that is not known."""
    await api.go_away()
    (found,) = await told(api)
    assert found.check == "k8s-reachable"


async def test_pickers_that_know_of_each_other(api: KubeApi) -> None:
    """Peers may be many."""
    for name in ("picker-333", "picker-4444"):
        api.write(running(name, PICKERS, "--peer-service=picker-peers", port=9002))
    assert await told(api) == ()
