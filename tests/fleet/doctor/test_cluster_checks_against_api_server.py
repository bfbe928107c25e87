"""A pool in the test API server: without faults, and then with one at a time."""

from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio

from fleet.doctor.command import diagnose
from fleet.doctor.diagnosis import Facts
from picker.config.findings import Severity
from tests.fakes.kube_api.access import Rule
from tests.fakes.kube_api.server import KubeApi
from tests.support.kube.doctor_cluster import (
    ACCOUNT,
    POOL_RULE,
    ROLE,
    Object,
    cluster_in_order,
    edited,
    findings,
    look,
    objective,
    respecified,
)


@pytest_asyncio.fixture
async def api() -> AsyncIterator[KubeApi]:
    async with cluster_in_order() as server:
        yield server


async def test_a_cluster_in_order(api: KubeApi) -> None:
    facts = await look(api)
    assert diagnose(Facts(cluster=facts)) == ()
    assert facts.who == ACCOUNT
    assert facts.problem is None


@pytest.mark.parametrize("rule", range(len(ROLE)))
async def test_each_missing_right_is_named(api: KubeApi, rule: int) -> None:
    lost = ROLE[rule]
    api.access.grant("picker", ACCOUNT, [one for one in ROLE if one is not lost])
    found = await findings(api)
    assert {one.check for one in found} == {"k8s-rights"}
    assert len(found) == len(lost.verbs) * len(lost.resources)
    fixes = " ".join(one.fix for one in found)
    assert all(f"verbs: [{verb}]" in fixes for verb in lost.verbs)
    assert all(f"resources: [{plural}]" in fixes for plural in lost.resources)
    assert ("resourceNames: [it]" in fixes) == (lost is POOL_RULE)


async def test_a_right_under_another_name_does_not_count(api: KubeApi) -> None:
    other = Rule(POOL_RULE.groups, POOL_RULE.resources, POOL_RULE.verbs, ["other"])
    api.access.grant("picker", ACCOUNT, [ROLE[0], other, ROLE[2]])
    found = await findings(api)
    assert [one.check for one in found] == ["k8s-rights"] * 2


async def test_an_account_that_may_not_review_others_gets_its_own_rights(api: KubeApi) -> None:
    """With --as, rights that cannot be reviewed are a warning."""
    facts = await look(api, token="picker")
    assert facts.who == "you"
    assert facts.denied == ()
    assert {"services", "endpointslices"} <= set(facts.unseen)
    found = await findings(api, token="picker", user="system:serviceaccount:default:other")
    assert "k8s-rights" in {one.check for one in found}
    (unknown,) = [one for one in found if one.check == "k8s-rights"]
    assert unknown.severity is Severity.WARNING


async def test_the_rights_of_another_account_are_checked(api: KubeApi) -> None:
    found = await findings(api, user="system:serviceaccount:default:new")
    assert {one.check for one in found} == {"k8s-rights"}
    assert len(found) == 8


def _both_unready(server: KubeApi) -> None:
    for name in ("worker-1", "worker-22"):
        edited("pods", name, lambda one: one["status"].update(conditions=[]))(server)


def _refusing(one: Object) -> None:
    condition = {"type": "Accepted", "status": "False", "reason": "NotSupported", "message": "no"}
    one["status"] = {"parents": [{"parentRef": {"name": "gw"}, "conditions": [condition]}]}


_POOLS = "inferencepools.inference.networking.k8s.io"
_LEGACY = {"name": "it", "group": "inference.networking.x-k8s.io"}
_PRE_STOP = {"preStop": {"sleep": {"seconds": 10}}}
SPOILT: list[tuple[str, str, Callable[[KubeApi], object]]] = [
    ("kinds", "inferencepools", lambda api: api.remove(_POOLS)),
    ("kinds", "inferenceobjectives", lambda api: api.remove("inferenceobjectives.llm-d.ai")),
    ("pool", "there is no InferencePool", lambda api: api.erase(_POOLS, "it")),
    ("pool", "targetPorts", respecified(_POOLS, "it", targetPorts=[])),
    ("parents", "Accepted is False, NotSupported: no", edited(_POOLS, "it", _refusing)),
    ("pods", "selects no Pod", respecified(_POOLS, "it", selector={"matchLabels": {"app": "x"}})),
    ("pods", "is ready", _both_unready),
    ("target-ports", "9999", respecified(_POOLS, "it", targetPorts=[{"number": 9999}])),
    (
        "probes",
        "worker-1",
        edited("pods", "worker-1", lambda one: one["spec"]["containers"][0].pop("readinessProbe")),
    ),
    (
        "grace-period",
        "--shutdown-timeout 20 s",
        respecified("pods", "worker-22", terminationGracePeriodSeconds=10),
    ),
    (
        "grace-period",
        "after 10 s of preStop",
        edited(
            "pods",
            "picker-333",
            lambda one: one["spec"]["containers"][0].update(lifecycle=_PRE_STOP),
        ),
    ),
    ("service", "does not exist", lambda api: api.erase("services", "picker")),
    (
        "service",
        "has no port 9002 (it has 80)",
        respecified("services", "picker", ports=[{"port": 80}]),
    ),
    (
        "service",
        "appProtocol http",
        respecified("services", "picker", ports=[{"port": 9002, "appProtocol": "http"}]),
    ),
    (
        "service",
        "no ready endpoints",
        edited(
            "endpointslices",
            "picker-1",
            lambda one: one["endpoints"][0].update(conditions={"ready": False}),
        ),
    ),
    (
        "policies",
        "poolRef names the pool in group",
        lambda api: api.write(objective(poolRef=_LEGACY)),
    ),
    ("policies", "spec.priority", lambda api: api.write(objective(priority="high"))),
    ("unseen", "pods", lambda api: api.access.deny("list", "pods")),
]


@pytest.mark.parametrize(
    ("check", "text", "spoil"), SPOILT, ids=[f"{one[0]}-{one[1]}" for one in SPOILT]
)
async def test_a_fault_is_found_by_its_check(
    api: KubeApi, check: str, text: str, spoil: Callable[[KubeApi], object]
) -> None:
    spoil(api)
    found = await findings(api)
    assert any(one.check == f"k8s-{check}" and text in one.seen for one in found), found
    follows = {"k8s-rights"} if check == "unseen" else set()
    assert {one.check for one in found} <= {f"k8s-{check}"} | follows


async def test_a_missing_api_server_is_one_finding(api: KubeApi) -> None:
    await api.go_away()
    (found,) = await findings(api)
    assert found.check == "k8s-reachable"
