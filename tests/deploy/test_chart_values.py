"""The chart takes the values that charts usually take, for every supported Kubernetes."""

import http.server
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import kubernetes_validate
import pytest
import yaml

from scripts.project import read_project
from tests.depth import by_depth
from tests.support.kube.manifests import (
    CHART,
    ROOT,
    Object,
    charted,
    containers,
    name_of,
    of_kind,
    pod_of,
    workloads,
)
from tests.support.kube.pod_security import violations

pytestmark = pytest.mark.usefixtures("kubectl", "helm")

CRDS = CHART / "crds"
VERSIONS = ("1.30", "1.31", "1.32", "1.33", "1.34", "1.35", "1.36")  # `kubeVersion` of Chart.yaml
FOREIGN = (
    "inference.networking.k8s.io/",
    "llm-d.ai/",
    "gateway.networking.k8s.io/",
    "monitoring.coreos.com/",
    "keda.sh/",
    "networking.istio.io/",
)
ALL_WORKERS = tuple(f"workers.{kind}.enabled=true" for kind in ("sim", "cpu", "gpu"))
DISAGGREGATED = ("mode=standalone", "workers.disaggregation.enabled=true")
MODES = {
    "gateway": (
        *ALL_WORKERS,
        "picker.highAvailability=active-active",
        "picker.metrics.auth=true",
        "picker.metrics.certificateSecret=c",
        *(f"{one}.enabled=true" for one in ("networkPolicy", "monitoring", "admissionPolicy")),
    ),
    "standalone": (
        *DISAGGREGATED,
        "autoscaling.kind=picker",
        "picker.hashSeedSecret=seed",
        "standalone.service.type=LoadBalancer",
        "standalone.front.enabled=true",
        "tracing.endpoint=http://otel-collector:4318",
    ),
    "several pools": (
        "pools[0].name=llama",
        "pools[0].grpcPort=9012",
        "pools[1].name=mixtral",
        "pools[1].namespace=research",
        "pools[1].grpcPort=9013",
        "picker.highAvailability=leader-election",
    ),
    "hpa": ("autoscaling.kind=hpa", "workers.gpu.enabled=true"),
    "keda": ("autoscaling.kind=keda", "workers.gpu.enabled=true", "istio.enabled=true"),
}
# As other charts name them.
OF_PODS: dict[str, object] = {
    "podLabels": {"tier": "gold"},
    "podAnnotations": {"note": "x"},
    "serviceAccount": {"annotations": {"role": "arn"}},
    "nodeSelector": {"disk": "ssd"},
    "tolerations": [{"key": "spot"}],
    "affinity": {"podAffinity": {}},
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "rack", "whenUnsatisfiable": "DoNotSchedule"}
    ],
    "priorityClassName": "high",
    "runtimeClassName": "kata",
    "podSecurityContext": {"fsGroup": 7},
    "securityContext": {"readOnlyRootFilesystem": False},
    "extraEnv": [{"name": "A", "value": "b"}],
    "extraEnvFrom": [{"secretRef": {"name": "more"}}],
    "extraVolumes": [{"name": "ca", "configMap": {"name": "ca"}}],
    "extraVolumeMounts": [{"name": "ca", "mountPath": "/ca"}],
    "extraContainers": [{"name": "beside", "image": "x"}],
    "extraInitContainers": [{"name": "before", "image": "x"}],
}
USUAL: dict[str, object] = {
    "nameOverride": "llm",
    "commonLabels": {"team": "search"},
    "commonAnnotations": {"owner": "me"},
    "global": {"imagePullSecrets": [{"name": "theirs"}]},
    "images.pullSecrets": ["mine"],
    "images.pullPolicy": "Always",
    "picker": OF_PODS | {"service": {"annotations": {"scrape": "yes"}}},
    "standalone.service": {"annotations": {"scrape": "yes"}, "loadBalancerClass": "internal"},
    "workers": OF_PODS,
    "extraObjects": [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "{{ .Release.Name }}-llm-more"},
        }
    ],
}
# What is found where in each object of a kind; `main` is the container of picker or worker.
FOUND: list[tuple[str, str, object]] = [
    ("Deployment", "metadata.labels.team", "search"),
    ("Role", "metadata.annotations.owner", "me"),
    ("Service", "metadata.annotations.scrape", "yes"),
    ("ServiceAccount", "metadata.annotations.role", "arn"),
    ("Deployment", "template.metadata.labels.team", "search"),
    ("Deployment", "template.metadata.labels.tier", "gold"),
    ("Deployment", "template.metadata.annotations.note", "x"),
    ("Deployment", "pod.imagePullSecrets", [{"name": "theirs"}, {"name": "mine"}]),
    ("Deployment", "pod.nodeSelector.disk", "ssd"),
    ("Deployment", "pod.tolerations.0.key", "spot"),
    ("Deployment", "pod.affinity", {"podAffinity": {}}),
    ("Deployment", "pod.topologySpreadConstraints.0.topologyKey", "rack"),
    ("Deployment", "pod.priorityClassName", "high"),
    ("Deployment", "pod.runtimeClassName", "kata"),
    ("Deployment", "pod.securityContext.fsGroup", 7),
    ("Deployment", "pod.securityContext.runAsUser", 65532),
    ("Deployment", "pod.volumes.-1.name", "ca"),
    ("Deployment", "pod.containers.-1.name", "beside"),
    ("Deployment", "pod.initContainers.0.name", "before"),
    ("Deployment", "main.imagePullPolicy", "Always"),
    ("Deployment", "main.env.-1.name", "A"),
    ("Deployment", "main.envFrom.0.secretRef.name", "more"),
    ("Deployment", "main.volumeMounts.-1.mountPath", "/ca"),
    ("Deployment", "main.securityContext.readOnlyRootFilesystem", False),
    ("Deployment", "main.securityContext.allowPrivilegeEscalation", False),
]


@pytest.fixture(scope="module")
def usual() -> list[Object]:
    return charted("mode=standalone", *ALL_WORKERS, release="chat", values=USUAL)


def _at(one: Object, path: str) -> object:
    first, *words = path.split(".")
    found: object = one[first] if first == "metadata" else one["spec"]["template"]
    if first in ("pod", "main"):
        found = pod_of(one)
    if first == "main":
        [found] = [c for c in containers(pod_of(one)) if c["name"] in ("picker", "worker")]
    for word in words:
        found = found[int(word)] if isinstance(found, list) else found[word]  # type: ignore[index]
    return found


@pytest.mark.parametrize(("kind", "path", "expected"), FOUND, ids=[path for _, path, _ in FOUND])
def test_usual_values_have_their_usual_effect(
    usual: list[Object], kind: str, path: str, expected: object
) -> None:
    found = of_kind(usual, kind)
    assert [_at(one, path) for one in found] == [expected] * len(found)
    assert len(found) == {"Deployment": 4, "ServiceAccount": 4, "Service": 2, "Role": 1}[kind]


def test_every_object_has_the_labels_and_names_of_its_release(usual: list[Object]) -> None:
    for one in usual:
        assert name_of(one)[1].startswith("chat-llm"), name_of(one)
        if name_of(one)[1] != "chat-llm-more":
            labels = one["metadata"]["labels"]
            assert labels["app.kubernetes.io/instance"] == "chat"
            assert labels["app.kubernetes.io/part-of"] == "pointsman"
            assert labels["helm.sh/chart"] == f"pointsman-{read_project(ROOT).chart_version}"


def test_values_of_one_kind_of_worker_go_before_those_of_all() -> None:
    own = {"serviceAccount": {"create": False, "name": "mine"}, "podLabels": {"tier": "silver"}}
    own |= {"extraEnv": [{"name": "C", "value": "d"}], "priorityClassName": "low"}
    values = {"workers.gpu": own | {"securityContext": {"runAsNonRoot": False}}}
    objects = charted(*ALL_WORKERS[1:], values={"workers": OF_PODS} | values)
    cpu, gpu = sorted(workloads(objects)[-2:], key=name_of)
    assert _at(gpu, "template.metadata.labels.tier") == "silver"
    assert _at(cpu, "template.metadata.labels.tier") == "gold"
    assert [one["name"] for one in _at(gpu, "main.env")[-2:]] == ["A", "C"]  # type: ignore[index]
    assert _at(gpu, "pod.tolerations.0.key") == "spot"
    assert _at(gpu, "pod.tolerations.1.key") == "nvidia.com/gpu"
    assert (_at(cpu, "pod.priorityClassName"), _at(gpu, "pod.priorityClassName")) == ("high", "low")
    assert _at(gpu, "main.securityContext.runAsNonRoot") is False
    assert _at(gpu, "pod.serviceAccountName") == "mine"
    assert "mine" not in {name_of(one)[1] for one in of_kind(objects, "ServiceAccount")}


def test_every_program_sends_its_spans_to_the_collector() -> None:
    values = {"tracing": {"endpoint": "http://otel:4318", "samplerRatio": 0.5}}
    with_front = "standalone.front.enabled=true"
    objects = charted(*DISAGGREGATED, with_front, *ALL_WORKERS, values=values)
    sending = {
        one["name"]
        for workload in workloads(objects)
        for one in containers(pod_of(workload))
        if "--tracing" in one["args"]
        and {"name": "OTEL_EXPORTER_OTLP_ENDPOINT", "value": "http://otel:4318"} in one["env"]
        and {"name": "OTEL_TRACES_SAMPLER_ARG", "value": "0.5"} in one["env"]
    }
    assert sending == {"picker", "front", "sidecar", "worker"}


def test_ids_of_users_are_left_to_openshift() -> None:
    ids = ("runAsUser", "runAsGroup", "fsGroup")
    unset = (f"podSecurityContext.{one}=null" for one in ids)
    for one in workloads(charted(*unset, *ALL_WORKERS)):
        assert pod_of(one)["securityContext"] == {
            "runAsNonRoot": True,
            "seccompProfile": {"type": "RuntimeDefault"},
        }


@pytest.mark.parametrize("version", by_depth(VERSIONS[-1:], VERSIONS))
def test_every_object_is_one_of_kubernetes(version: str, usual: list[Object]) -> None:
    modes = by_depth(list(MODES.values())[:2], list(MODES.values()))
    for one in (*usual, *(o for settings in modes for o in charted(*settings, tests=True))):
        if not one["apiVersion"].startswith(FOREIGN):
            kubernetes_validate.validate(one, version, strict=True)


@pytest.mark.full
def test_helm_3_renders_what_helm_4_renders(usual: list[Object], older_kubectl: str) -> None:
    """The wheels of Kubernetes 1.30 and 1.32 have Helm 3."""
    for settings in MODES.values():
        older = charted(*settings, tests=True, version=older_kubectl)
        assert older == charted(*settings, tests=True)
    values = charted(
        "mode=standalone", *ALL_WORKERS, release="chat", values=USUAL, version=older_kubectl
    )
    assert values == usual


@contextmanager
def a_picker_and_a_model(ready: int) -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    asked: list[tuple[str, bytes]] = []
    answers = {
        "/readyz": b"ok",
        "/v1/models": b'{"data": [{"id": "m"}]}',
        "/v1/completions": b'{"choices": [{"text": " there"}]}',
    }

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append((self.path, self.rfile.read(int(self.headers["content-length"] or 0))))
            self.send_response(ready if self.path == "/readyz" else 200)
            self.end_headers()
            self.wfile.write(answers[self.path])

        do_POST = do_GET  # noqa: N815 (the library's names)

        def log_message(self, *_: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(("ready", "status"), [(200, 0), (503, 1)])
def test_helm_test_asks_the_picker_and_a_model(ready: int, status: int) -> None:
    settings = (*DISAGGREGATED, "networkPolicy.enabled=true")
    hooks = [one for one in charted(*settings, tests=True) if "-test" in name_of(one)[1]]
    pod, policy = sorted(hooks, key=lambda one: str(one["kind"]), reverse=True)
    assert violations(pod["spec"]) == []
    [rule] = policy["spec"]["ingress"]
    selected = rule["from"][0]["podSelector"]["matchLabels"].items()
    assert selected <= pod["metadata"]["labels"].items()
    [container] = pod["spec"]["containers"]
    script, *urls = container["args"]
    assert urls == ["http://pointsman-picker:9090", "http://pointsman:80"]
    with a_picker_and_a_model(ready) as (url, asked):
        command = [sys.executable, *container["command"][1:], script, url, url]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert min(done.returncode, 1) == status, done.stderr
    if status == 0:
        assert [path for path, _ in asked] == ["/readyz", "/v1/models", "/v1/completions"]
        assert json.loads(asked[-1][1])["model"] == "m"
        assert done.stdout.endswith("m answers: ' there'\n")


def test_the_chart_says_who_makes_it_and_what_it_defines() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["maintainers"] and chart["icon"] and chart["home"]  # noqa: PT018
    listed = {one["name"] for one in yaml.safe_load(chart["annotations"]["artifacthub.io/crds"])}
    present = {yaml.safe_load(one.read_text())["metadata"]["name"] for one in CRDS.glob("*.yaml")}
    assert listed == present
