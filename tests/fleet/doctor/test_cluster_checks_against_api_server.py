"""A pool and its pickers in the test API server: without faults, and then with one at a time."""

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial

import pytest
import pytest_asyncio

from fleet.doctor.command import diagnose
from fleet.doctor.diagnosis import Facts
from fleet.doctor.picker_look import PickerFacts
from picker.admin.views import HEALTHY, EndpointView
from picker.config.findings import Severity
from picker.types import EndpointMetrics
from tests.fakes.kube_api.access import Rule
from tests.fakes.kube_api.server import KubeApi
from tests.support.kube.doctor_cluster import (
    ACCOUNT,
    LEASE_ROLE,
    PICKERS,
    POOL_RULE,
    ROLE,
    Object,
    cluster_in_order,
    edited,
    findings,
    lease,
    look,
    objective,
    respecified,
    running,
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
_OLD_GROUP = {"poolRef": {"name": "it", "group": "inference.networking.x-k8s.io"}}
_SHORT = {"terminationGracePeriodSeconds": 10}
_LATE = {"lifecycle": {"preStop": {"sleep": {"seconds": 10}}}}
service = partial(respecified, "services", "picker")


def container(pod: str, change: Callable[[Object], object]) -> Callable[[KubeApi], object]:
    return edited("pods", pod, lambda one: change(one["spec"]["containers"][0]))


def _no_endpoint_is_ready(one: Object) -> None:
    one["endpoints"][0]["conditions"] = {"ready": False}


SPOILT: list[tuple[str, str, Callable[[KubeApi], object]]] = [
    ("kinds", "inferencepools", lambda api: api.remove(_POOLS)),
    ("kinds", "inferenceobjectives", lambda api: api.remove("inferenceobjectives.llm-d.ai")),
    ("pool", "there is no InferencePool", lambda api: api.erase(_POOLS, "it")),
    ("pool", "targetPorts", respecified(_POOLS, "it", targetPorts=[])),
    ("parents", "Accepted is False, NotSupported: no", edited(_POOLS, "it", _refusing)),
    ("pods", "selects no Pod", respecified(_POOLS, "it", selector={"matchLabels": {"app": "x"}})),
    ("pods", "is ready", _both_unready),
    ("target-ports", "9999", respecified(_POOLS, "it", targetPorts=[{"number": 9999}])),
    ("probes", "worker-1", container("worker-1", lambda one: one.pop("readinessProbe"))),
    ("grace-period", "--shutdown-timeout 20 s", respecified("pods", "worker-22", **_SHORT)),
    (
        "grace-period",
        "after 10 s of preStop",
        container("picker-333", lambda one: one.update(_LATE)),
    ),
    ("service", "does not exist", lambda api: api.erase("services", "picker")),
    ("service", "has no port 9002 (it has 80)", service(ports=[{"port": 80}])),
    ("service", "appProtocol http", service(ports=[{"port": 9002, "appProtocol": "http"}])),
    ("service", "no ready endpoints", edited("endpointslices", "picker-1", _no_endpoint_is_ready)),
    ("policies", "poolRef names the pool in group", lambda api: api.write(objective(**_OLD_GROUP))),
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


ELECTION, AUTH = "--ha-enable-leader-election", "--metrics-endpoint-auth"
SLICES_ROLE = [
    Rule(["discovery.k8s.io"], ["endpointslices"], ["list", "watch"], namespace="default")
]
AUTH_ROLE = [
    Rule(["authentication.k8s.io"], ["tokenreviews"], ["create"]),
    Rule(["authorization.k8s.io"], ["subjectaccessreviews"], ["create"]),
]
EXTRA = {
    "election": ([ELECTION], LEASE_ROLE),
    "slices": (["--peer-slices=picker-peers:9005"], SLICES_ROLE),
    "auth": ([AUTH], AUTH_ROLE),
}


def start(server: KubeApi, *args: str, name: str = "picker-333", is_ready: bool = True) -> None:
    server.write(running(name, PICKERS, *args, port=9002, is_ready=is_ready))


def elect(server: KubeApi, *args: str, **how: str) -> None:
    server.access.grant("picker", ACCOUNT, ROLE + LEASE_ROLE)
    start(server, ELECTION, *args)
    start(server, ELECTION, *args, name="picker-4444", is_ready=False)
    server.write(lease(**how))


@pytest.mark.parametrize("extra", EXTRA.values(), ids=EXTRA)
async def test_the_rights_of_a_flag_are_checked(
    api: KubeApi, extra: tuple[list[str], list[Rule]]
) -> None:
    flags, rules = extra
    start(api, *flags)
    api.write(lease())
    found = await findings(api)
    assert len(found) == sum(len(one.verbs) * len(one.resources) for one in rules)
    for rule in rules:
        for verb in rule.verbs:
            (fix,) = [
                one.fix
                for one in found
                if f"resources: [{rule.resources[0]}]" in one.fix and f"verbs: [{verb}]" in one.fix
            ]
            assert f'apiGroups: ["{rule.groups[0]}"]' in fix
            assert (f"resourceNames: [{''.join(rule.names)}]" in fix) == bool(rule.names)
    api.access.grant("picker", ACCOUNT, ROLE + rules)
    assert await findings(api) == ()
    api.access.grant("picker", ACCOUNT, ROLE)
    start(api, *(f"{one}=false" for one in flags if one in (ELECTION, AUTH)))
    assert await findings(api) == ()


async def test_reviews_need_a_cluster_role(api: KubeApi) -> None:
    start(api, AUTH)
    api.access.grant(
        "picker", ACCOUNT, ROLE + [replace(one, namespace="default") for one in AUTH_ROLE]
    )
    found = await findings(api)
    assert len(found) == 2
    assert all("ClusterRole" in one.fix and " in default" not in one.seen for one in found)


async def test_an_election_in_order(api: KubeApi) -> None:
    elect(api)
    assert await findings(api) == ()
    elect(api, holder="somebody_1")
    respecified("pods", "picker-333", hostNetwork=True)(api)
    assert await findings(api) == ()  # the holder has the name of the host, which may be any


@pytest.mark.parametrize(
    ("how", "severity", "text"),
    [
        ({"holder": ""}, "error", "has no holder"),
        ({"renewed": "2026-09-21T14:12:00.000000Z"}, "error", "was renewed 80 s ago"),
        ({"holder": "picker-9_6f0a"}, "warning", "held by picker-9_6f0a, none of the Pods"),
    ],
)
async def test_a_lease_without_its_own_holder_is_found(
    api: KubeApi, how: dict[str, str], severity: str, text: str
) -> None:
    elect(api, **how)
    (found,) = await findings(api)
    assert (found.check, found.severity) == ("k8s-lease", Severity(severity))
    assert text in found.seen


async def test_a_missing_lease_is_found(api: KubeApi) -> None:
    elect(api)
    api.erase("leases", "epp-default-it.llm-d.ai")
    (found,) = await findings(api)
    assert "has no holder" in found.seen


async def test_two_ready_pickers_of_an_election_are_found(api: KubeApi) -> None:
    elect(api)
    start(api, ELECTION, name="picker-4444")
    (found,) = await findings(api)
    assert (found.check, found.severity) == ("k8s-lease", Severity.WARNING)
    assert "2 pickers are ready though one leads (picker-333, picker-4444)" in found.seen


async def test_the_lease_of_several_pools_has_the_name_of_the_first(api: KubeApi) -> None:
    pools = ("--pool=name=file,endpoints-file=f.yaml", "--pool=x/first", "--pool", "it:9002")
    space = {"name": "NAMESPACE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}}}
    elect(api, *pools)
    for name in ("picker-333", "picker-4444"):
        edited("pods", name, lambda one: one["spec"]["containers"][0].update(env=[space]))(api)
    facts = await look(api)
    assert str(facts.lease_name) == "default/epp-default-first.llm-d.ai"
    assert {one.name for one in facts.denied} == {"epp-default-first.llm-d.ai"}
    api.write(lease(name="epp-default-first.llm-d.ai"))
    assert {one.check for one in await findings(api)} == {"k8s-rights"}


def to_port(target: object, port: int = 9002) -> Object:
    return {"ports": [{"port": port, "targetPort": target, "appProtocol": "http2"}]}


IN_ORDER: list[tuple[list[str], object]] = [
    (["--pool-name=it"], None),
    (["--pool-name", "it", "--pool-namespace=$(NAMESPACE)"], None),  # unknown flags: no finding
    (["--pool-name=it", "--grpc-port=9102"], 9102),
    (["--pool-name=it"], "server"),
    (["--pool=it"], 9002),
    (["--pool=other", "--pool=it:9013"], 9013),
    (["--pool=other:9014", "--pool=default/it:9013", "--grpc-port=9002"], 9013),
    (["--pool=other", "--pool=name=it,grpc-port=0"], 9013),
]
AMISS: list[tuple[list[str], object, str, str]] = [
    (["--pool-name=other"], None, "error", "serves default/other and not default/it"),
    (["--pool-name=it", "--pool-namespace=b"], None, "error", "serves b/it and not default/it"),
    (["--pool=b/it:9002", "--pool=c"], None, "error", "serves b/it, default/c and not default/it"),
    (["--pool-name=it", "--grpc-port=9102"], None, "error", "which serves the pool at 9102"),
    (["--pool-name=it"], 9003, "error", "leads to port 9003"),
    (["--pool=other", "--pool=it:9013"], None, "error", "which serves the pool at 9013"),
    (["--pool=other", "--pool=it:9013"], "server", "error", "leads to port 9002"),
    (["--pool=other:9013", "--pool=it"], None, "warning", "where it serves 2 pools"),
]


@pytest.mark.parametrize(("flags", "target"), IN_ORDER, ids=[str(one) for one in IN_ORDER])
async def test_a_port_of_the_pool_has_no_findings(
    api: KubeApi, flags: list[str], target: object
) -> None:
    start(api, *flags)
    _name_port(api)
    respecified("services", "picker", **to_port(target))(api)
    assert await findings(api) == ()


@pytest.mark.parametrize(
    ("flags", "target", "severity", "text"), AMISS, ids=[str(one[:2]) for one in AMISS]
)
async def test_a_port_of_another_pool_is_found(
    api: KubeApi, flags: list[str], target: object, severity: str, text: str
) -> None:
    start(api, *flags)
    _name_port(api)
    respecified("services", "picker", **to_port(target))(api)
    (found,) = await findings(api)
    assert (found.check, found.severity) == ("k8s-picker-port", Severity(severity))
    assert text in found.seen


def _name_port(server: KubeApi) -> None:
    def change(one: Object) -> None:
        one["spec"]["containers"][0]["ports"] = [{"name": "server", "containerPort": 9002}]

    edited("pods", "picker-333", change)(server)


async def test_isolated_pickers_are_found(api: KubeApi) -> None:
    start(api, name="picker-4444")
    (found,) = await findings(api)
    assert found.check == "k8s-replicas"
    assert "2 pickers serve the pool" in found.seen


@pytest.mark.parametrize(
    "flag", ["--peers=a:9005,b:9005", "--peer-service=picker-peers", "--peer-slices=picker-peers"]
)
async def test_connected_pickers_have_no_findings(api: KubeApi, flag: str) -> None:
    api.access.grant("picker", ACCOUNT, ROLE + SLICES_ROLE)
    start(api, flag)
    start(api, flag, name="picker-4444")
    start(api, flag, "--pool-name=other", name="picker-55555", is_ready=False)
    facts = Facts(cluster=await look(api))
    assert "k8s-replicas" not in {one.check for one in diagnose(facts)}
    for publishing, expected in ((1.0, []), (0.0, ["picker-peers"])):
        series = {
            "llm_d_epp_ready_endpoints": 1.0,
            "pointsman_peers_connected": 1.0,
            "pointsman_peers_heard": publishing,
        }
        picker = PickerFacts("http://it", endpoints=(_ENDPOINT,), metrics=series)
        found = diagnose(replace(facts, picker=picker))
        assert [one.check for one in found if one.check.startswith("picker")] == expected


_ENDPOINT = EndpointView(
    *("default/one", "one", "default", "10.0.0.1:8000", {}, HEALTHY, 0),
    metrics=EndpointMetrics(),
    metrics_age_seconds=0.1,
)
