"""The Helm chart renders what kustomize renders, and refuses unknown values."""

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from fleet.command_lines import parser_of
from fleet.commands.cli import main
from picker.planner.autoscale_file import read_autoscale_file
from scripts.project import read_project
from tests.support.kube.crd_rules import CrdRules
from tests.support.kube.deploy_wiring import loose_ends
from tests.support.kube.manifests import (
    CHART,
    ROOT,
    Object,
    charted,
    composed,
    helm_says,
    kustomized,
    name_of,
    of_kind,
    pod_of,
    workloads,
)
from tests.support.kube.pod_security import violations, wishes

pytestmark = [pytest.mark.usefixtures("kubectl", "helm"), pytest.mark.full]
OF_HELM = (
    "app.kubernetes.io/instance",
    "app.kubernetes.io/version",
    "app.kubernetes.io/managed-by",
    "helm.sh/chart",
)
HASH = re.compile(r"(pointsman-envoy)-[a-z0-9]{10}\b")
QUIET = ("gateway.create=false", "route.create=false", "pool.create=false", "objectives=null")
OVERLAYS = "deploy/k8s/overlays"
ADDONS = "deploy/k8s/addons"
POOLS = (
    "pools[0].name=llama",
    "pools[0].grpcPort=9012",
    "pools[1].name=qwen",
    "pools[1].grpcPort=9013",
    "pools[2].name=mixtral",
    "pools[2].namespace=research",
    "pools[2].grpcPort=9014",
)
# What the chart renders with these values → the folders that say the same.
SAME: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "base": (QUIET, ("deploy/k8s/base",)),
    "gateway": ((), (f"{OVERLAYS}/gateway",)),
    "standalone": (("mode=standalone",), (f"{OVERLAYS}/standalone",)),
    "standalone with a front": (
        ("mode=standalone", "standalone.front.enabled=true"),
        (f"{OVERLAYS}/standalone-front",),
    ),
    "ha": (("picker.highAvailability=leader-election", "picker.replicas=2"), (f"{OVERLAYS}/ha",)),
    "active-active": (
        ("picker.highAvailability=active-active", "picker.replicas=2"),
        (f"{OVERLAYS}/active-active",),
    ),
    "several pools": (
        (*POOLS[:4], "networkPolicy.enabled=true"),
        (f"{OVERLAYS}/several-pools", f"{ADDONS}/network-policy", f"{ADDONS}/network-policy-pools"),
    ),
    "several namespaces": (POOLS, (f"{OVERLAYS}/several-namespaces",)),
    "body-based routing": (
        (*POOLS[:4], "bodyBasedRouting.enabled=true"),
        (f"{OVERLAYS}/body-based-routing",),
    ),
    "workers": (
        ("workers.sim.enabled=true", "workers.cpu.enabled=true", "workers.gpu.enabled=true"),
        tuple(
            f"{OVERLAYS}/{one}" for one in ("gateway", "sim-workers", "cpu-workers", "gpu-workers")
        ),
    ),
    "disaggregated": (
        ("workers.disaggregation.enabled=true", "networkPolicy.enabled=true"),
        (
            f"{OVERLAYS}/disaggregated",
            f"{ADDONS}/network-policy",
            f"{ADDONS}/network-policy-disaggregated",
        ),
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
    text = yaml.safe_dump(obj)
    same: Object = yaml.safe_load(HASH.sub(r"\1", text))
    template = same.get("spec", {}).get("template", {})
    for key in OF_HELM:
        same["metadata"].get("labels", {}).pop(key, None)
        template.get("metadata", {}).get("labels", {}).pop(key, None)
    template.get("metadata", {}).get("annotations", {}).pop("checksum/envoy", None)
    if not template.get("metadata", {}).get("annotations", True):
        del template["metadata"]["annotations"]
    for container in template.get("spec", {}).get("containers", ()):
        container["ports"].sort(key=lambda port: port["containerPort"])
        if container["name"] == "worker":
            container["args"].sort()
    if same["kind"] == "Service":
        same["spec"]["ports"].sort(key=lambda port: port["port"])
    for volumes in (template.get("spec", {}).get("volumes", []),):
        volumes.sort(key=lambda volume: volume["name"])
    if same["kind"] == "ConfigMap":
        same["data"] = {
            name: yaml.safe_load(content) if name.endswith(".yaml") else content
            for name, content in same["data"].items()
        }
    return same


def by_name(objects: list[Object]) -> dict[tuple[str, str], Object]:
    return {name_of(one): one for one in map(plain, objects)}


@pytest.mark.parametrize(("settings", "folders"), SAME.values(), ids=SAME.keys())
def test_both_render_the_same(settings: tuple[str, ...], folders: tuple[str, ...]) -> None:
    ours = by_name(charted(*settings))
    theirs = by_name([one for folder in folders for one in kustomized(folder)])
    assert ours.keys() == theirs.keys()
    for name, one in ours.items():
        assert one == theirs[name], name


# As above, where cert-manager is asked for a certificate: of the chart's a secret is asked for.
CERTIFIED = {
    "peers": (
        (*SAME["active-active"][0], "picker.peerCertificateSecret=pointsman-picker-peers"),
        (f"{OVERLAYS}/active-active-tls",),
    ),
    "metrics": (
        (
            "picker.metrics.auth=true",
            "picker.metrics.certificateSecret=pointsman-picker-metrics",
            "monitoring.enabled=true",
        ),
        (f"{OVERLAYS}/metrics-auth", f"{ADDONS}/monitoring-auth"),
    ),
}


@pytest.mark.parametrize(("settings", "folders"), CERTIFIED.values(), ids=CERTIFIED.keys())
def test_both_use_certificates_alike(settings: tuple[str, ...], folders: tuple[str, ...]) -> None:
    theirs = [one for folder in folders for one in kustomized(folder)]
    made = of_kind(theirs, "Certificate") + of_kind(theirs, "Issuer")
    assert made
    assert by_name(charted(*settings)) == by_name([one for one in theirs if one not in made])


def test_probes_of_a_port_with_a_certificate_speak_tls() -> None:
    settings = ("mode=standalone", "picker.metrics.certificateSecret=c", "picker.metrics.auth=true")
    [workload] = workloads(charted(*settings))
    [picker] = pod_of(workload)["initContainers"]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert picker[probe]["httpGet"]["scheme"] == "HTTPS"
        assert picker[probe]["httpGet"]["path"] in ("/healthz", "/readyz")  # without a token
    [plain] = pod_of(workloads(charted("mode=standalone"))[0])["initContainers"]
    assert "scheme" not in plain["readinessProbe"]["httpGet"]


def test_tenants_of_a_secret_are_added_before_envoy_starts(tmp_path: Path) -> None:
    settings = ("mode=standalone", "standalone.tenantsSecret=tenants")
    [workload] = workloads(charted(*settings, "standalone.responseBodies=usage"))
    pod = pod_of(workload)
    assert violations(pod) == []
    adding, picker = pod["initContainers"]
    [envoy] = pod["containers"]
    assert "--token-limits" in picker["args"]
    assert {one["name"] for one in pod["volumes"]} >= {"tenants", "bootstrap", "envoy"}
    mounts = {one["name"]: one["mountPath"] for one in adding["volumeMounts"]}
    (tmp_path / "tenants.yaml").write_text("tenants: [{name: a, keys: [{file: key}]}]")
    (tmp_path / "key").write_text("sk-0123456789abcdef\n")
    places = {mounts["envoy"]: CHART / "envoy", mounts["tenants"]: tmp_path, "/run/envoy": tmp_path}
    words = [*adding["command"][1:], *adding["args"]]
    for place, folder in places.items():
        words = [word.replace(place, str(folder)) for word in words]
    assert main(words) == 0
    written = Path(envoy["args"][1].replace("/run/envoy", str(tmp_path))).read_text()
    assert "sk-0123456789abcdef" in written
    refused = helm_says(*settings)
    assert "standalone.tenantsSecret needs standalone.responseBodies" in refused.stderr


def test_a_seed_of_ones_own_is_mounted(tmp_path: Path) -> None:
    theirs = by_name(
        composed(
            tmp_path,
            "resources: [k8s/overlays/active-active-tls]\n"
            "components: [k8s/components/hash-seed, k8s/components/metrics-auth]\n",
        )
    )
    settings = [one for given, _ in CERTIFIED.values() for one in given]
    ours = by_name(charted(*settings, "picker.hashSeedSecret=pointsman-picker-hash-seed"))
    name = ("Deployment", "pointsman-picker")
    assert ours[name] == theirs[name]


def test_roles_have_values_of_their_own_where_they_need_them() -> None:
    settings = (
        "mode=standalone",
        "workers.disaggregation.enabled=true",
        "workers.disaggregation.keySecret=chat-key",
        "workers.disaggregation.kvBufferSize=4000000000",
        "workers.disaggregation.sidecar.prefillerNetworks={100.64.0.0/10,fd00::/8}",
        "workers.disaggregation.prefill.args={--model=m,--max-num-batched-tokens=16384}",
        "workers.disaggregation.prefill.nodeSelector.pool=large",
        "workers.gpu.args={--model=m}",
        "workers.gpu.cache.existingClaim=models",
    )
    objects = charted(*settings, release="chat", namespace="team-a")
    assert loose_ends(objects) == []
    pods = {one["metadata"]["name"]: pod_of(one) for one in workloads(objects)}
    prefill, decode = (pods[f"chat-worker-gpu-{role}"] for role in ("prefill", "decode"))
    assert prefill["nodeSelector"] == {"pool": "large"}
    assert "nodeSelector" not in decode
    [sidecar], [giver], [taker] = (
        decode["initContainers"],
        prefill["containers"],
        decode["containers"],
    )
    networks = parser_of("sidecar").parse_args(sidecar["args"]).prefiller_networks
    assert [str(one) for one in networks] == ["100.64.0.0/10", "fd00::/8"]
    assert ("--max-num-batched-tokens=16384" in giver["args"], len(taker["args"])) == (True, 6)
    for pod, worker in ((prefill, giver), (decode, taker)):
        assert {"name": "cache", "persistentVolumeClaim": {"claimName": "models"}} in pod["volumes"]
        [key] = [one for one in worker["env"] if one["name"] == "POINTSMAN_KV_TRANSFER_KEY"]
        assert key["valueFrom"]["secretKeyRef"]["name"] == "chat-key"
        [transfer] = [one for one in worker["args"] if one.startswith("--kv-transfer-config=")]
        assert json.loads(transfer.partition("=")[2])["kv_buffer_size"] == 4_000_000_000


def test_a_picker_scales_what_components_autoscale_names(tmp_path: Path) -> None:
    resources = "resources: [k8s/overlays/gateway, k8s/overlays/gpu-workers]\n"
    components = "components: [k8s/components/autoscale]\n"
    theirs = by_name(composed(tmp_path, resources + components))
    ours = by_name(charted("autoscaling.kind=picker", "workers.gpu.enabled=true"))
    assert theirs["Deployment", "pointsman-worker-gpu"]["spec"].pop("replicas") == 1
    assert ours == theirs


SCALED = {
    "one for each role": (
        ("workers.disaggregation.enabled=true", "autoscaling.maxReplicas=4"),
        {"prefill": "chat-worker-gpu-prefill", "decode": "chat-worker-gpu-decode"},
        {"team-a": {"chat-worker-gpu-prefill", "chat-worker-gpu-decode"}},
    ),
    "those of other namespaces": (
        (
            "workers.gpu.enabled=true",
            "autoscaling.plan.groups[0].deployment=vllm",
            "autoscaling.plan.groups[0].namespace=research",
            "autoscaling.plan.groups[0].maxReplicas=4",
            "autoscaling.plan.groups[1].name=reported",
            "autoscaling.plan.groups[1].stage=decode",
            "autoscaling.plan.groups[1].maxReplicas=4",
        ),
        {"both": "vllm", "decode": ""},
        {"research": {"vllm"}},
    ),
    "those of several pools": (
        (
            *POOLS,
            "picker.highAvailability=active-active",
            "autoscaling.plan.groups[0].pool=llama",
            "autoscaling.plan.groups[0].deployment=vllm",
            "autoscaling.plan.groups[0].maxReplicas=4",
            "autoscaling.plan.groups[1].pool=mixtral",
            "autoscaling.plan.groups[1].deployment=experts",
            "autoscaling.plan.groups[1].stage=decode",
            "autoscaling.plan.groups[1].maxReplicas=4",
        ),
        {"both": "vllm", "decode": "experts"},
        {"team-a": {"vllm"}, "research": {"experts"}},
    ),
}


@pytest.mark.parametrize(("settings", "groups", "rights"), SCALED.values(), ids=SCALED.keys())
def test_a_picker_may_scale_what_its_plan_names(
    settings: tuple[str, ...], groups: dict[str, str], rights: dict[str, set[str]]
) -> None:
    plan = ("autoscaling.kind=picker", "autoscaling.plan.capacity.kvTokens=2000000")
    objects = charted(*plan, *settings, release="chat", namespace="team-a")
    assert loose_ends(objects) == []
    [config] = [one["data"] for one in of_kind(objects, "ConfigMap") if len(one["data"]) > 1]
    read = read_autoscale_file(config["autoscale.yaml"].encode(), "autoscale.yaml")
    assert {one.scaling.stage.value: one.deployment for one in read} == groups
    assert {one.scaling.max_replicas for one in read} == {4}
    allowed = {
        role["metadata"]["namespace"]: set(rule["resourceNames"])
        for role in of_kind(objects, "Role")
        for rule in role["rules"]
        if rule["resources"] == ["deployments/scale"] and rule["verbs"] == ["get", "update"]
    }
    assert allowed == rights
    for workload in workloads(objects):
        is_scaled = workload["metadata"]["name"] in rights.get("team-a", ())
        assert ("replicas" in workload["spec"]) is not is_scaled


def test_the_picker_of_pools_of_other_namespaces_asks_nothing_in_its_own() -> None:
    objects = charted("pools[0].name=a", "pools[0].grpcPort=9012", "pools[0].namespace=team-b")
    roles = {one["metadata"]["namespace"]: one["rules"] for one in of_kind(objects, "Role")}
    assert roles["pointsman"] == []
    assert [rule["resources"] for rule in roles["team-b"]][:2] == [["pods"], ["inferencepools"]]
    assert loose_ends(objects) == []


def test_a_gateway_s_own_filter_may_ask_the_picker_for_models() -> None:
    enabled = "bodyBasedRouting.enabled=true"
    theirs = charted(*POOLS, enabled, "bodyBasedRouting.provider=none")
    assert not {"EnvoyFilter", "DestinationRule"} & {name_of(one)[0] for one in theirs}
    ours = charted(*POOLS, enabled, release="chat", namespace="team-a")
    assert loose_ends(ours) == []
    for objects in (theirs, ours):
        [picker] = pod_of(workloads(objects)[0])["containers"]
        assert picker["args"][-2:] == ["--route-by-model", "--model-header-only"]
    assert "bodyBasedRouting: only with pools" in helm_says(enabled).stderr


def test_pools_have_what_they_are_given() -> None:
    settings = (
        *POOLS[:4],
        "pools[0].selector.app=vllm",
        "pools[0].targetPorts={8000,8001}",
        "pools[0].models={llama-8b,llama-70b}",
        "pools[0].objectives[0].name=batch",
        "pools[0].objectives[0].priority=-1",
        "picker.highAvailability=leader-election",
    )
    objects = charted(*settings, release="chat", namespace="team-a")
    assert loose_ends(objects) == []
    llama, qwen = of_kind(objects, "InferencePool")
    assert llama["spec"]["selector"] == {"matchLabels": {"app": "vllm"}}
    assert [port["number"] for port in llama["spec"]["targetPorts"]] == [8000, 8001]
    assert qwen["spec"]["selector"] == {"matchLabels": {"app": "qwen"}}
    route = next(one for one in of_kind(objects, "HTTPRoute") if name_of(one)[1] == "llama")
    matches = route["spec"]["rules"][0]["matches"]
    assert [one["headers"][0]["value"] for one in matches] == ["llama-8b", "llama-70b"]
    [objective] = of_kind(objects, "InferenceObjective")
    assert objective["spec"]["poolRef"]["name"] == "llama"
    [role] = of_kind(objects, "Role")
    named = [name for rule in role["rules"] for name in rule.get("resourceNames", ())]
    assert named == ["llama", "qwen", "epp-team-a-llama.llm-d.ai"]


CONTRADICTIONS = {
    "one port for two pools": (*POOLS[:3], "pools[1].grpcPort=9012"),
    "one pool twice": (*POOLS[:2], "pools[1].name=llama", "pools[1].grpcPort=9013"),
    "pools without a gateway": (*POOLS[:2], "mode=standalone"),
    "one autoscaler of several pools": (*POOLS[:4], "autoscaling.kind=hpa"),
    "tokens in plain text": ("picker.metrics.auth=true",),
    "a plan for nothing": ("autoscaling.kind=picker",),
    "a plan for no pool": (
        *POOLS[:2],
        "autoscaling.kind=picker",
        "autoscaling.plan.groups[0].pool=lama",
        "autoscaling.plan.groups[0].deployment=vllm",
    ),
    "an autoscaler of workers that are not there": (
        "autoscaling.kind=keda",
        "workers.disaggregation.enabled=true",
    ),
}


@pytest.mark.parametrize("mode", ["gateway", "standalone"])
def test_names_follow_the_release(mode: str) -> None:
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


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_a_shared_claim_takes_the_place_of_volumes_of_their_own(kind: str) -> None:
    settings = (f"workers.{kind}.enabled=true", f"workers.{kind}.cache.existingClaim=models")
    [found] = [w for w in workloads(charted(*settings)) if w["metadata"]["name"].endswith(kind)]
    volumes = {volume["name"]: volume for volume in pod_of(found)["volumes"]}
    assert volumes["cache"]["persistentVolumeClaim"] == {"claimName": "models"}


def test_a_pool_of_other_labels_is_valid() -> None:
    settings = ("pool.selector.app=vllm", "pool.targetPorts={8000,8001}", "pool.name=vllm")
    [pool] = of_kind(charted(*settings), "InferencePool")
    assert pool["spec"]["selector"] == {"matchLabels": {"app": "vllm"}}
    rules = CrdRules.load(CHART / "crds" / "inference.networking.k8s.io_inferencepools.yaml")
    assert not rules.errors(pool)


def test_notes_say_where_to_look(helm: Path) -> None:
    several = f"mode=gateway,{','.join(POOLS)}"
    for setting, word in (
        ("mode=gateway", "InferencePool pointsman"),
        ("mode=standalone", "Envoy"),
        (several, "research/mixtral:9014"),
        ("workers.disaggregation.enabled=true", "create secret generic pointsman-kv-transfer"),
        ("picker.highAvailability=active-active", "with one replica"),
    ):
        settings = ("--set", setting)
        command = [helm, "install", "pointsman", CHART, "--dry-run=client", *settings]
        rendered = subprocess.run(command, capture_output=True, text=True, check=True)
        assert word in rendered.stdout.split("NOTES:")[1]


VERSION = read_project(ROOT).version
_OF_ENVOY = yaml.safe_load((CHART / "values.yaml").read_text())["images"]["envoy"]
ENVOY = "{repository}:{tag}@{digest}".format(**_OF_ENVOY).removesuffix("@")
IMAGES = {
    "a registry for all": (
        ("images.registry=ghcr.example/a/b",),
        {f"ghcr.example/a/b/pointsman-{one}:{VERSION}" for one in ("picker", "worker-cpu")},
    ),
    "the registry of a parent chart": (
        ("global.imageRegistry=localhost:5000", "images.registry=unused.example"),
        {
            f"localhost:5000/{one}"
            for one in (
                f"pointsman-picker:{VERSION}",
                f"pointsman-worker-cpu:{VERSION}",
                ENVOY.partition("/")[2],
            )
        },
    ),
    "one for each": (
        (
            "images.picker.repository=quay.example/epp",
            "images.workerCpu.repository=localhost/cpu",
            f"images.workerCpu.digest=sha256:{'0a' * 32}",
            "images.registry=unused.example",
        ),
        {f"quay.example/epp:{VERSION}", f"localhost/cpu:{VERSION}@sha256:{'0a' * 32}"},
    ),
}


@pytest.mark.parametrize(("settings", "images"), IMAGES.values(), ids=IMAGES)
def test_images_come_from_the_registries_that_are_named(
    settings: tuple[str, ...], images: set[str]
) -> None:
    flags = ("mode=standalone", "workers.sim.enabled=true", "images.pullPolicy=Always", *settings)
    done = helm_says(*flags)
    assert done.returncode == 0, done.stderr
    pods = [pod_of(one) for one in workloads([o for o in yaml.safe_load_all(done.stdout) if o])]
    found = [one for pod in pods for one in (*pod.get("initContainers", ()), *pod["containers"])]
    if len(images) == 2:
        images = {*images, ENVOY}
    assert {one["image"] for one in found} == images
    assert {one["imagePullPolicy"] for one in found} == {"Always"}


@pytest.mark.parametrize(
    ("settings", "image"),
    [
        ((), "images.picker.repository: pointsman-picker names"),
        (("images.picker.repository=team/epp",), "images.picker.repository: team/epp names"),
        (
            ("images.picker.repository=quay.example/epp", "workers.gpu.enabled=true"),
            "images.workerGpu.repository: pointsman-worker-gpu names",
        ),
    ],
)
def test_an_image_without_a_registry_is_refused(settings: tuple[str, ...], image: str) -> None:
    done = helm_says("images.registry=", *settings)
    assert done.returncode != 0
    assert f"{image} no registry: set images.registry" in done.stderr


def test_objects_and_pods_carry_what_others_need() -> None:
    settings = (
        "mode=standalone",
        "commonLabels.team=search",
        "picker.podLabels.tier=gold",
        r"picker.serviceAccount.annotations.eks\.amazonaws\.com/role-arn=arn:x",
        "picker.serviceAccount.name=epp",
        "picker.extraVolumes[0].name=ca",
        "picker.extraVolumes[0].emptyDir.medium=Memory",
        "picker.extraVolumeMounts[0].name=ca",
        "picker.extraVolumeMounts[0].mountPath=/ca",
        r"standalone.service.annotations.lb\.example/scheme=internal",
        "workers.cpu.enabled=true",
        "workers.cpu.podLabels.tier=bronze",
        "workers.cpu.podAnnotations.note=x",
        "workers.cpu.extraVolumes[0].name=models",
        "workers.cpu.extraVolumes[0].hostPath.path=/models",
        "workers.cpu.extraVolumeMounts[0].name=models",
        "workers.cpu.extraVolumeMounts[0].mountPath=/models",
    )
    objects = charted(*settings, release="chat")
    assert loose_ends(objects) == []
    for one in objects:
        labels = one["metadata"]["labels"]
        assert labels["app.kubernetes.io/instance"] == "chat"
        assert (labels["app.kubernetes.io/version"], labels["team"]) == (VERSION, "search")
    worker, picker = sorted(workloads(objects), key=lambda one: one["kind"] + name_of(one)[1])[::-1]
    for workload, tier in ((picker, "gold"), (worker, "bronze")):
        template = workload["spec"]["template"]["metadata"]
        assert template["labels"].items() >= {"tier": tier, "team": "search"}.items()
        selected = workload["spec"]["selector"]["matchLabels"]
        assert not {"tier", "team", "app.kubernetes.io/instance"} & selected.keys()
    assert worker["spec"]["template"]["metadata"]["annotations"] == {"note": "x"}
    assert pod_of(picker)["serviceAccountName"] == "epp"
    [account] = [one for one in of_kind(objects, "ServiceAccount") if name_of(one)[1] == "epp"]
    assert account["metadata"]["annotations"] == {"eks.amazonaws.com/role-arn": "arn:x"}
    [binding] = of_kind(objects, "RoleBinding")
    assert binding["subjects"][0]["name"] == "epp"
    services = {name_of(one)[1]: one["metadata"] for one in of_kind(objects, "Service")}
    assert services["chat"]["annotations"] == {"lb.example/scheme": "internal"}
    for workload, kind, name in (
        (picker, "initContainers", "ca"),
        (worker, "containers", "models"),
    ):
        assert name in {volume["name"] for volume in pod_of(workload)["volumes"]}
        assert name in {mount["name"] for mount in pod_of(workload)[kind][0]["volumeMounts"]}


def test_an_account_that_is_there_is_not_made() -> None:
    settings = ("picker.serviceAccount.create=false", "picker.serviceAccount.name=mine")
    objects = charted(*settings)
    assert not of_kind(objects, "ServiceAccount")
    [deployment] = workloads(objects)
    assert pod_of(deployment)["serviceAccountName"] == "mine"


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
    "a pool without a port": "pools[0].name=llama",
    "a role that does not exist": "workers.disaggregation.encode.replicas=1",
    "a network that is none": "workers.disaggregation.sidecar.prefillerNetworks={pods}",
    "a digest that is none": "images.picker.digest=sha256:12",
    "a policy that does not exist": "images.pullPolicy=Sometimes",
    "no room for KV": "workers.disaggregation.kvBufferSize=0",
    "a pool at the port of health": "pools[0].name=llama,pools[0].grpcPort=9003",
}


UNKNOWN = r"values don't meet the specifications of the schema"
CONTRADICTED = r"execution error at .*: (pools|picker\.metrics\.auth|autoscaling)"


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        *(pytest.param((one,), UNKNOWN, id=name) for name, one in REFUSED.items()),
        *(pytest.param(c, CONTRADICTED, id=n) for n, c in CONTRADICTIONS.items()),
    ],
)
def test_values_that_make_no_sense_are_refused(settings: tuple[str, ...], why: str) -> None:
    done = helm_says(*settings)
    assert done.returncode != 0
    assert re.search(why, done.stderr)


def test_the_chart_has_no_fault_that_helm_knows(helm: Path) -> None:
    done = subprocess.run([helm, "lint", "--strict", CHART], capture_output=True, check=False)
    assert done.returncode == 0, done.stdout
