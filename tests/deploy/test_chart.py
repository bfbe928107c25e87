"""The Helm chart renders what kustomize renders, and refuses values that nobody reads."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml
from crd_rules import CrdRules
from deploy_wiring import loose_ends
from manifests import CHART, Object, charted, kustomized, name_of, of_kind, pod_of, workloads
from pod_security import violations, wishes

pytestmark = pytest.mark.usefixtures("kubectl", "helm")
OF_HELM = ("app.kubernetes.io/managed-by", "helm.sh/chart")
HASH = re.compile(r"(pointsman-envoy)-[a-z0-9]{10}\b")
QUIET = ("gateway.create=false", "route.create=false", "pool.create=false", "objectives=null")
OVERLAYS = "deploy/k8s/overlays"
ADDONS = "deploy/k8s/addons"
# What the chart renders with these values → the folders that say the same.
SAME: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "base": (QUIET, ("deploy/k8s/base",)),
    "gateway": ((), (f"{OVERLAYS}/gateway",)),
    "standalone": (("mode=standalone",), (f"{OVERLAYS}/standalone",)),
    "ha": (
        ("picker.highAvailability=leader-election", "picker.replicas=2"),
        (f"{OVERLAYS}/ha",),
    ),
    "active-active": (
        ("picker.highAvailability=active-active", "picker.replicas=2"),
        (f"{OVERLAYS}/active-active",),
    ),
    "workers": (
        ("workers.sim.enabled=true", "workers.gpu.enabled=true"),
        (f"{OVERLAYS}/gateway", f"{OVERLAYS}/sim-workers", f"{OVERLAYS}/gpu-workers"),
    ),
    "hpa": (("autoscaling.kind=hpa",), (f"{OVERLAYS}/gateway", f"{ADDONS}/autoscaling-hpa")),
    "keda": (("autoscaling.kind=keda",), (f"{OVERLAYS}/gateway", f"{ADDONS}/autoscaling-keda")),
    "everything else": (
        (
            "networkPolicy.enabled=true",
            "monitoring.enabled=true",
            "admissionPolicy.enabled=true",
            "istio.enabled=true",
        ),
        (
            f"{OVERLAYS}/gateway",
            f"{ADDONS}/network-policy",
            f"{ADDONS}/monitoring",
            f"{ADDONS}/admission-policy",
            f"{ADDONS}/istio",
        ),
    ),
}


def plain(obj: Object) -> Object:
    """An object without what each of the two renderers adds of its own, its lists in order."""
    text = yaml.safe_dump(obj)
    same: Object = yaml.safe_load(HASH.sub(r"\1", text))
    for key in OF_HELM:
        same["metadata"].get("labels", {}).pop(key, None)
    template = same.get("spec", {}).get("template", {})
    template.get("metadata", {}).get("annotations", {}).pop("checksum/envoy", None)
    if not template.get("metadata", {}).get("annotations", True):
        del template["metadata"]["annotations"]
    for container in template.get("spec", {}).get("containers", ()):
        container["ports"].sort(key=lambda port: port["containerPort"])
        if container["name"] == "worker":
            container["args"].sort()
    for volumes in (template.get("spec", {}).get("volumes", []),):
        volumes.sort(key=lambda volume: volume["name"])
    if same["kind"] == "ConfigMap":
        same["data"] = {
            name: yaml.safe_load(content) if name.endswith(".yaml") else content
            for name, content in same["data"].items()
        }
    return same


def by_name(objects: list[Object]) -> dict[tuple[str, str], Object]:
    """All of them, without what the renderers add."""
    return {name_of(one): one for one in map(plain, objects)}


@pytest.mark.parametrize(("settings", "folders"), SAME.values(), ids=SAME.keys())
def test_both_render_the_same(settings: tuple[str, ...], folders: tuple[str, ...]) -> None:
    """Object by object and field by field."""
    ours = by_name(charted(*settings))
    theirs = by_name([one for folder in folders for one in kustomized(folder)])
    assert ours.keys() == theirs.keys()
    for name, one in ours.items():
        assert one == theirs[name], name


def test_a_certificate_for_peers_is_mounted() -> None:
    """As components/peer-tls does, but for the certificates themselves."""
    settings = ("picker.highAvailability=active-active", "picker.replicas=2")
    ours = by_name(charted(*settings, "picker.peerCertificateSecret=pointsman-picker-peers"))
    theirs = by_name(kustomized(f"{OVERLAYS}/active-active-tls"))
    name = ("Deployment", "pointsman-picker")
    assert ours[name] == theirs[name]


@pytest.mark.parametrize("mode", ["gateway", "standalone"])
def test_names_follow_the_release(mode: str) -> None:
    """Two releases in one namespace share no object, and nothing of one leads to the other."""
    settings = (f"mode={mode}", "workers.sim.enabled=true", "objectives[0].name=chat-batch")
    settings += ("objectives[0].priority=-1", "networkPolicy.enabled=true")
    objects = charted(*settings, release="chat", namespace="team-a")
    assert loose_ends(objects) == []
    assert not by_name(objects).keys() & by_name(charted(*settings[:2])).keys()
    for one in objects:
        assert one["metadata"]["namespace"] == "team-a"
    for workload in workloads(objects):
        assert violations(pod_of(workload)) == []
        is_picker = workload["metadata"]["name"] == "chat-picker"
        assert wishes(pod_of(workload), may_ask_the_api=is_picker) == []


def test_a_shared_claim_takes_the_place_of_volumes_of_their_own() -> None:
    """Models are fetched once then."""
    settings = ("workers.gpu.enabled=true", "workers.gpu.cache.existingClaim=models")
    [gpu] = [w for w in workloads(charted(*settings)) if w["metadata"]["name"].endswith("gpu")]
    volumes = {volume["name"]: volume for volume in pod_of(gpu)["volumes"]}
    assert volumes["cache"]["persistentVolumeClaim"] == {"claimName": "models"}


def test_a_pool_of_other_labels_is_valid() -> None:
    """Selector and ports of one's own pass the definition's rules."""
    settings = ("pool.selector.app=vllm", "pool.targetPorts={8000,8001}", "pool.name=vllm")
    [pool] = of_kind(charted(*settings), "InferencePool")
    assert pool["spec"]["selector"] == {"matchLabels": {"app": "vllm"}}
    rules = CrdRules.load(CHART / "crds" / "inference.networking.k8s.io_inferencepools.yaml")
    assert not rules.errors(pool)


def test_notes_say_where_to_look(helm: Path) -> None:
    """In either mode, and without a cluster."""
    for mode, word in (("gateway", "InferencePool pointsman"), ("standalone", "Envoy")):
        command = [helm, "install", "pointsman", CHART, "--dry-run=client", "--set", f"mode={mode}"]
        told = subprocess.run(command, capture_output=True, text=True, check=True)
        assert word in told.stdout.split("NOTES:")[1]


REFUSED = {
    "a value that does not exist": "picker.replica=2",
    "a mode that does not exist": "mode=sidecar",
    "no replica": "picker.replicas=0",
    "a port that is none": "pool.targetPorts={70000}",
    "nine ports": "pool.targetPorts={1,2,3,4,5,6,7,8,9}",
    "a word for a number": "autoscaling.maxReplicas=many",
    "a flag without dashes": "picker.extraArgs={processes=2}",
    "a name with capitals": "fullnameOverride=Chat",
    "another failure mode": "pool.failureMode=Fail",
}


@pytest.mark.parametrize("setting", REFUSED.values(), ids=REFUSED.keys())
def test_values_that_make_no_sense_are_refused(helm: Path, setting: str) -> None:
    """By the schema, before anything is rendered."""
    command = [str(helm), "template", "pointsman", str(CHART), "--set", setting]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "values don't meet the specifications of the schema" in done.stderr


def test_the_chart_has_no_fault_that_helm_knows(helm: Path) -> None:
    """`helm lint --strict`."""
    done = subprocess.run([helm, "lint", "--strict", CHART], capture_output=True, check=False)
    assert done.returncode == 0, done.stdout
