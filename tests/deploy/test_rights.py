"""The picker may ask of the API server what it asks, and nothing else."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from picker.k8s.reviews import ACCESS_REVIEWS, TOKEN_REVIEWS
from picker.planner.autoscale_file import read_autoscale_file
from tests.support.kube.manifests import (
    BUILDS,
    NAMESPACE,
    Object,
    charted,
    composed,
    kustomized,
    of_kind,
    pod_of,
    workloads,
)

pytestmark = pytest.mark.usefixtures("kubectl")
Right = tuple[str, str, str, str]  # group, resource, name or "", verb

PODS: set[Right] = {("", "pods", "", verb) for verb in ("list", "watch")}
POLICIES: set[Right] = {
    ("llm-d.ai", resource, "", verb)
    for resource in ("inferenceobjectives", "inferencemodelrewrites")
    for verb in ("list", "watch")
}


def pools(*names: str) -> set[Right]:
    group, resource = "inference.networking.k8s.io", "inferencepools"
    verbs = ("list", "watch")
    return PODS | POLICIES | {(group, resource, name, verb) for name in names for verb in verbs}


POOL = pools("pointsman")
LEASE = {
    ("coordination.k8s.io", "leases", "epp-pointsman-pointsman.llm-d.ai", "get"),
    ("coordination.k8s.io", "leases", "epp-pointsman-pointsman.llm-d.ai", "update"),
    ("coordination.k8s.io", "leases", "", "create"),
}
VERBS = ("get", "update")
PEERS = {("discovery.k8s.io", "endpointslices", "", verb) for verb in ("list", "watch")}
EXPECTED = {
    "base": POOL,
    "gateway": POOL,
    "disaggregated": POOL,
    "standalone": PODS,
    "active-active": POOL | PEERS,
    "active-active-tls": POOL | PEERS,
    "ha": POOL | LEASE,
    "several-pools": pools("llama", "qwen"),
    "body-based-routing": pools("llama", "qwen"),
    "several-namespaces": pools("llama", "qwen"),
    "metrics-auth": POOL,
}
ASKING = "pointsman-pointsman-picker-reviews"
READING = "pointsman-pointsman-metrics-reader"


def rights(objects: list[Object], namespace: str = NAMESPACE) -> Iterator[Right]:
    for role in of_kind(objects, "Role"):
        for rule in role["rules"] if role["metadata"]["namespace"] == namespace else ():
            for group in rule["apiGroups"]:
                for resource in rule["resources"]:
                    for name in rule.get("resourceNames", [""]):
                        yield from ((group, resource, name, verb) for verb in rule["verbs"])


@pytest.mark.parametrize("name", EXPECTED)
def test_rights_are_exactly_these(name: str) -> None:
    folder = next(folder for folder in BUILDS if folder.split("/")[-1] == name)
    found = list(rights(kustomized(folder)))
    assert set(found) == EXPECTED[name]
    assert len(found) == len(set(found))


def test_another_namespace_gives_rights_about_its_own_pool() -> None:
    objects = kustomized("deploy/k8s/overlays/several-namespaces")
    assert set(rights(objects, "research")) == pools("mixtral")


@pytest.mark.parametrize("folder", BUILDS)
def test_nothing_is_allowed_beyond_the_namespace(folder: str) -> None:
    objects = kustomized(folder)
    for group, resource, _, verb in (*rights(objects), *rights(objects, "research")):
        assert "*" not in (group, resource, verb)
        assert resource not in ("secrets", "serviceaccounts", "pods/exec")
    for binding in of_kind(objects, "RoleBinding"):
        assert subjects(binding) == [(NAMESPACE, "pointsman-picker")]
    expected = {ASKING, READING} if folder.endswith("/metrics-auth") else set()
    for kind in ("ClusterRole", "ClusterRoleBinding"):
        assert {one["metadata"]["name"] for one in of_kind(objects, kind)} == expected


def subjects(binding: Object) -> list[tuple[str, str]]:
    return [(one["namespace"], one["name"]) for one in binding["subjects"]]


def _cluster_wide(objects: list[Object], name: str) -> tuple[list[Object], list[tuple[str, str]]]:
    [role] = [one for one in of_kind(objects, "ClusterRole") if one["metadata"]["name"] == name]
    [binding] = [
        one for one in of_kind(objects, "ClusterRoleBinding") if one["roleRef"]["name"] == name
    ]
    return role["rules"], subjects(binding)


def test_a_picker_that_asks_about_tokens_may_ask_that_alone() -> None:
    rules, bearers = _cluster_wide(kustomized("deploy/k8s/overlays/metrics-auth"), ASKING)
    assert bearers == [(NAMESPACE, "pointsman-picker")]
    posted = []
    for path in (TOKEN_REVIEWS, ACCESS_REVIEWS):
        _, _, group, _, resource = path.split("/")
        posted.append({"apiGroups": [group], "resources": [resource], "verbs": ["create"]})
    assert rules == posted


def test_a_scraper_may_read_metrics_alone() -> None:
    objects = kustomized("deploy/k8s/overlays/metrics-auth")
    monitors = of_kind(kustomized("deploy/k8s/addons/monitoring-auth"), "ServiceMonitor")
    [endpoint] = [one for monitor in monitors for one in monitor["spec"]["endpoints"]]
    rules, bearers = _cluster_wide(objects, READING)
    assert rules == [{"nonResourceURLs": [endpoint["path"]], "verbs": ["get"]}]
    [secret] = of_kind(objects, "Secret")
    of_account = secret["metadata"]["annotations"]["kubernetes.io/service-account.name"]
    assert bearers == [(NAMESPACE, of_account)]
    assert secret["type"] == "kubernetes.io/service-account-token"
    shown = endpoint["authorization"]
    assert shown["type"] == "Bearer"
    assert shown["credentials"] == {"name": secret["metadata"]["name"], "key": "token"}
    accounts = {one["metadata"]["name"]: one for one in of_kind(objects, "ServiceAccount")}
    assert accounts[of_account]["automountServiceAccountToken"] is False


def test_a_scraper_knows_the_picker_by_its_certificate() -> None:
    objects = kustomized("deploy/k8s/overlays/metrics-auth")
    monitors = of_kind(kustomized("deploy/k8s/addons/monitoring-auth"), "ServiceMonitor")
    [endpoint] = [one for monitor in monitors for one in monitor["spec"]["endpoints"]]
    certificates = {one["spec"]["secretName"]: one for one in of_kind(objects, "Certificate")}
    [workload] = workloads(objects)
    volumes = {one["name"]: one for one in pod_of(workload)["volumes"]}
    mounted = volumes["metrics-certificate"]["secret"]["secretName"]
    assert endpoint["scheme"] == "https"
    assert endpoint["tlsConfig"]["ca"]["secret"] == {"name": mounted, "key": "ca.crt"}
    assert [endpoint["tlsConfig"]["serverName"]] == certificates[mounted]["spec"]["dnsNames"]


@pytest.mark.usefixtures("helm")
def test_rights_of_another_release_are_about_its_own_pool() -> None:
    objects = charted("picker.highAvailability=leader-election", release="chat", namespace="team-a")
    named = {name for _, _, name, _ in rights(objects, "team-a")}
    assert named == {"", "chat", "epp-team-a-chat.llm-d.ai"}


def test_a_picker_that_scales_workers_may_scale_those(tmp_path: Path) -> None:
    resources = "resources: [k8s/overlays/ha, k8s/overlays/gpu-workers]\n"
    objects = composed(tmp_path, f"{resources}components: [k8s/components/autoscale]\n")
    [config] = [one for one in of_kind(objects, "ConfigMap") if "autoscale.yaml" in one["data"]]
    assert "picker.yaml" in config["data"]
    groups = read_autoscale_file(config["data"]["autoscale.yaml"].encode(), "autoscale.yaml")
    named = {group.deployment for group in groups}
    assert named <= {one["metadata"]["name"] for one in of_kind(objects, "Deployment")}
    scales = {("apps", "deployments/scale", name, verb) for name in named for verb in VERBS}
    assert set(rights(objects)) == POOL | LEASE | scales
