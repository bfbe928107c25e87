"""Objects of one rendering fit together, and programs take what they are given."""

import copy
import re
from collections.abc import Callable, Iterator

import pytest

import picker.__main__
import worker.cli.flags
from fleet.command_lines import parser_of
from picker.cli.flags import options_of
from picker.config.build import build
from picker.config.catalog import builtin_plugins
from picker.config.load import load_config
from picker.metrics.picker_metrics import PickerMetrics
from picker.rpc.health import LIVENESS, READINESS
from tests.support.kube.deploy_wiring import loose_ends
from tests.support.kube.manifests import (
    BUILDS,
    Object,
    container_of,
    containers,
    file_of,
    kustomized,
    name_of,
    of_kind,
    pod_of,
    workloads,
)
from worker.api.schema.routes import PROBE_ROUTES

pytestmark = pytest.mark.usefixtures("kubectl")
WHOLE = [folder for folder in BUILDS if "overlays" in folder or folder.endswith("base")]
WITH_WORKERS = [
    f"deploy/k8s/overlays/{name}"
    for name in ("gateway", "gpu-workers", "prefill-workers", "decode-workers")
]
ENVIRONMENT = {
    "NAMESPACE": "pointsman",
    "POD_NAME": "pointsman-picker-abc-xyz",
    "POD_IP": "10.0.0.1",
}


def test_clients_reach_the_front_that_asks_the_envoy_of_its_pod() -> None:
    objects = kustomized("deploy/k8s/overlays/standalone-front")
    [pod] = map(pod_of, workloads(objects))
    [front], [picker, envoy] = pod["containers"], pod["initContainers"]
    taken = parser_of("front").parse_args(front["args"])
    assert taken.gateway == f"http://127.0.0.1:{envoy['ports'][0]['containerPort']}"
    assert front["ports"] == [{"name": "http", "containerPort": taken.port}]
    [service] = [one for one in of_kind(objects, "Service") if name_of(one)[1] == "pointsman"]
    assert service["spec"]["ports"][0]["targetPort"] == "http"
    # Sidecars end after the front, and the last of them first.
    assert [one["restartPolicy"] for one in (picker, envoy)] == ["Always", "Always"]
    assert "lifecycle" not in envoy
    waits = front["lifecycle"]["preStop"]["sleep"]["seconds"] + taken.drain_timeout
    assert waits < pod["terminationGracePeriodSeconds"]
    assert front["image"] == picker["image"]


@pytest.mark.parametrize("folder", WHOLE)
def test_nothing_leads_nowhere(folder: str) -> None:
    assert loose_ends(kustomized(folder)) == []


@pytest.mark.parametrize(
    "addon", [folder for folder in BUILDS if "addons" in folder], ids=lambda f: f.split("/")[-1]
)
def test_additions_are_about_what_is_there(addon: str) -> None:
    objects = [one for folder in (*WITH_WORKERS, addon) for one in kustomized(folder)]
    assert loose_ends(objects) == []


def _arguments(container: Object) -> list[str]:
    names = {entry["name"] for entry in container.get("env", ())}

    def value(found: re.Match[str]) -> str:
        assert found[1] in names, f"{found[1]} is not in the environment"
        return ENVIRONMENT[found[1]]

    return [re.sub(r"\$\(([A-Z_]+)\)", value, word) for word in container["args"]]


PICKERS = [folder for folder in WHOLE if not folder.endswith("workers")]


@pytest.mark.parametrize("folder", PICKERS)
def test_the_picker_takes_its_flags(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    container = container_of(kustomized(folder), "picker")
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    options = options_of(picker.__main__.build_parser().parse_args(_arguments(container)))
    assert options.metrics_bind_address == "0.0.0.0"
    assert str(options.config_file) == "/config/picker.yaml"


@pytest.mark.parametrize("folder", [folder for folder in WHOLE if folder.endswith("workers")])
def test_workers_take_their_flags(folder: str) -> None:
    """No flag is unknown; ports are those that are declared. Behind a sidecar nothing else of the
    network reaches the worker.
    """
    objects = kustomized(folder)
    container = container_of(objects, "worker")
    taken = worker.cli.flags.build_parser().parse_args(_arguments(container))
    transfer = worker.cli.flags.resolve(taken, None, {}).engine.kv_transfer
    ports = {taken.port} | ({transfer.kv_port} if transfer and transfer.gives else set())
    assert ports == {port["containerPort"] for port in container["ports"]}
    names = {one["name"] for w in workloads(objects) for one in containers(pod_of(w))}
    assert taken.host == ("127.0.0.1" if "sidecar" in names else "0.0.0.0")


@pytest.mark.parametrize("folder", PICKERS)
def test_the_picker_loads_its_configuration(folder: str) -> None:
    loaded = load_config(file_of(kustomized(folder), "picker.yaml").encode(), "picker.yaml")
    assert not build(loaded, builtin_plugins(), PickerMetrics(), lambda: 0.0).warnings


@pytest.mark.parametrize("folder", PICKERS)
def test_probes_ask_for_what_the_picker_serves(folder: str) -> None:
    container = container_of(kustomized(folder), "picker")
    alive, ready = container["livenessProbe"], container["readinessProbe"]
    if "grpc" in alive:
        assert alive["grpc"]["service"] == LIVENESS
        assert ready["grpc"]["service"] in READINESS
    else:
        assert (alive["httpGet"]["path"], ready["httpGet"]["path"]) == ("/healthz", "/readyz")


@pytest.mark.parametrize("folder", [folder for folder in WHOLE if folder.endswith("workers")])
def test_probes_ask_for_what_workers_serve(folder: str) -> None:
    container = container_of(kustomized(folder), "worker")
    served = {route.path for route in PROBE_ROUTES if route.method == "GET"}
    probes = ("startupProbe", "livenessProbe", "readinessProbe")
    asked = [container[probe]["httpGet"]["path"] for probe in probes]
    assert asked == ["/health", "/health", "/health/ready"]
    assert set(asked) <= served


def test_envoy_goes_before_its_picker() -> None:
    [workload] = workloads(kustomized("deploy/k8s/overlays/standalone"))
    pod = pod_of(workload)
    assert [(c["name"], c["restartPolicy"]) for c in pod["initContainers"]] == [
        ("picker", "Always")
    ]
    assert [c["name"] for c in pod["containers"]] == ["envoy"]


def _walk(objects: list[Object], kind: str, *path: str | int) -> Iterator[tuple[Object, str | int]]:
    for one in of_kind(objects, kind):
        place = one
        for step in path[:-1]:
            place = place[step]
        yield place, path[-1]


def _set(value: object, kind: str, *path: str | int) -> Callable[[list[Object]], None]:
    def change(objects: list[Object]) -> None:
        for place, last in _walk(objects, kind, *path):
            place[last] = value

    return change


_POD = ("spec", "template", "spec")
BROKEN = {
    "service of other Pods": _set({"app": "x"}, "Service", "spec", "selector"),
    "service of another port": _set("web", "Service", "spec", "ports", 0, "targetPort"),
    "deployment of other Pods": _set({"app": "x"}, "Deployment", "spec", "selector", "matchLabels"),
    "budget of other Pods": _set(
        {"app": "x"}, "PodDisruptionBudget", "spec", "selector", "matchLabels"
    ),
    "account that is missing": _set("other", "Deployment", *_POD, "serviceAccountName"),
    "account of elsewhere": _set("other", "RoleBinding", "subjects", 0, "namespace"),
    "role that is missing": _set("other", "RoleBinding", "roleRef", "name"),
    "map that is missing": _set("other", "Deployment", *_POD, "volumes", 0, "configMap", "name"),
    "volume nobody mounts": _set([], "Deployment", *_POD, "containers", 0, "volumeMounts"),
    "little grace": _set(60, "Deployment", *_POD, "terminationGracePeriodSeconds"),
    "probe of another port": _set(
        1, "Deployment", *_POD, "containers", 0, "livenessProbe", "grpc", "port"
    ),
    "pool without its picker": _set("other", "InferencePool", "spec", "endpointPickerRef", "name"),
    "picker at another port": _set(
        1, "InferencePool", "spec", "endpointPickerRef", "port", "number"
    ),
    "route to another pool": _set(
        "other", "HTTPRoute", "spec", "rules", 0, "backendRefs", 0, "name"
    ),
    "route at another gateway": _set("other", "HTTPRoute", "spec", "parentRefs", 0, "name"),
    "objective of another pool": _set("other", "InferenceObjective", "spec", "poolRef", "name"),
}


ELSEWHERE = {
    "pool without its port": _set(
        9002, "InferencePool", "spec", "endpointPickerRef", "port", "number"
    ),
    "a pool that no flag names": _set("other", "InferencePool", "metadata", "name"),
    "a pool of another namespace": _set("other", "InferencePool", "metadata", "namespace"),
    "route to where no picker is": _set("research", "HTTPRoute", "metadata", "namespace"),
    "role of another namespace": _set("other", "Role", "metadata", "namespace"),
}


@pytest.mark.parametrize(
    ("overlay", "change"),
    [
        *(pytest.param("gateway", change, id=name) for name, change in BROKEN.items()),
        *(pytest.param("several-namespaces", one, id=name) for name, one in ELSEWHERE.items()),
    ],
)
def test_each_loose_end_is_found(overlay: str, change: Callable[[list[Object]], None]) -> None:
    objects = copy.deepcopy(kustomized(f"deploy/k8s/overlays/{overlay}"))
    assert loose_ends(objects) == []
    change(objects)
    assert loose_ends(objects)


def test_a_route_to_a_pool_whose_picker_is_elsewhere_is_found() -> None:
    objects = copy.deepcopy(kustomized("deploy/k8s/overlays/several-namespaces"))
    moved = copy.deepcopy(of_kind(objects, "HTTPRoute")[0])
    moved["metadata"]["namespace"] = "research"
    moved["spec"]["rules"][0]["backendRefs"][0]["name"] = "mixtral"
    gateway = copy.deepcopy(of_kind(objects, "Gateway")[0])
    gateway["metadata"]["namespace"] = "research"
    ends = loose_ends([*objects, moved, gateway])
    assert [end for end in ends if "in another namespace" in end] == ends != []
