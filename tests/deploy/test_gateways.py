"""The objects for each gateway have the fields of their kinds, and fit together."""

import copy
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from envoy.extensions.filters.http.ext_proc.v3 import ext_proc_pb2
from envoy.extensions.filters.network.http_connection_manager.v3 import http_connection_manager_pb2
from google.protobuf import json_format

from fleet.envoy.settings import CONTROL_PREFIXES, ROUTING_HEADERS, ROUTING_PREFIXES
from tests.support.kube.crd_rules import CrdRules
from tests.support.kube.deploy_wiring import loose_ends
from tests.support.kube.manifests import (
    K8S,
    NAMESPACE,
    ROOT,
    Object,
    container_of,
    kustomized,
    name_of,
    of_kind,
)
from tests.support.kube.recorded_schemas import FOLDER, main, shapes
from tests.support.kube.recorded_schemas import problems as problems_of_fields

GATEWAYS = K8S / "gateways"
FOLDERS = sorted(path.name for path in GATEWAYS.iterdir())
ASIDE = ("kustomization.yaml", "values.yaml")
MANIFESTS = [path for path in sorted(GATEWAYS.rglob("*.yaml")) if path.name not in ASIDE]
MANIFESTS += sorted((K8S / "addons" / "istio").glob("destinationrule.yaml"))
MANIFESTS.append(K8S / "components" / "body-based-routing" / "envoyfilter.yaml")
POOL = CrdRules.load(ROOT / "crds" / "inference.networking.k8s.io_inferencepools.yaml")
PAGES = sorted((ROOT / "docs" / "gateways").glob("*.md"))
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
WRITTEN = re.compile(r"# (deploy/\S+)\n")
# Commands of the pages that need a cluster, or the charts of another project.
NOT_RUN = {
    "kubectl -n pointsman get": "reads a cluster",
    "kubectl -n pointsman describe": "reads a cluster",
    "helm upgrade --install": "installs a chart that its project publishes",
    "gcloud container clusters": "changes a cluster of Google's",
}


def objects_of(path: Path) -> list[Object]:
    return list(yaml.safe_load_all(path.read_text()))


def named(path: Path) -> str:
    return str(path.relative_to(K8S))


def foreign(path: Path) -> list[Object]:
    return [one for one in objects_of(path) if (one["apiVersion"], one["kind"]) in shapes()]


def problems(one: Object) -> list[str]:
    """Also of the filters that an EnvoyFilter adds, by Envoy's own definitions."""
    found = problems_of_fields(one)
    for patch in one["spec"].get("configPatches", ()) if one["kind"] == "EnvoyFilter" else ():
        if not found:
            found += problems_of_filter(patch["patch"]["value"])
    return found


def problems_of_filter(value: Object) -> list[str]:
    http_filter = http_connection_manager_pb2.HttpFilter()
    try:
        json_format.ParseDict(value, http_filter)
    except (json_format.ParseError, AttributeError) as error:  # the latter: "@type" is no string
        return [str(error)]
    settings = ext_proc_pb2.ExternalProcessor()
    return [] if http_filter.typed_config.Unpack(settings) else ["this is no ext_proc filter"]


@pytest.mark.parametrize("path", MANIFESTS, ids=named)
def test_objects_have_the_fields_of_their_kinds(path: Path) -> None:
    for one in objects_of(path):
        if one["kind"] == "InferencePool":
            assert not POOL.prune(copy.deepcopy(one))
            assert not POOL.errors(one)
        elif one["apiVersion"] != "v1":
            assert problems(one) == []


def changed(value: Any) -> Iterator[Any]:
    """Yield `value` with each of its fields misspelt in turn, and with each leaf a list."""
    if isinstance(value, dict):
        for name, one in value.items():
            others = {key: value[key] for key in value if key != name}
            yield {**others, f"{name}x": one}
            yield from ({**others, name: other} for other in changed(one))
    elif isinstance(value, list):
        for index, one in enumerate(value):
            yield from ([*value[:index], other, *value[index + 1 :]] for other in changed(one))
    else:
        yield [value]


@pytest.mark.parametrize("path", [path for path in MANIFESTS if foreign(path)], ids=named)
def test_every_misspelt_field_and_every_wrong_type_is_found(path: Path) -> None:
    for one in foreign(path):
        for spec in changed(one["spec"]):
            assert problems({**one, "spec": spec}), spec


def test_every_recorded_kind_is_in_use() -> None:
    used = {(one["apiVersion"], one["kind"]) for path in MANIFESTS for one in objects_of(path)}
    assert shapes().keys() <= used


def test_a_definition_is_recorded_as_deep_as_its_objects_reach(
    capsys: pytest.CaptureFixture[str],
) -> None:
    crd = ROOT / "crds" / "inference.networking.k8s.io_inferencepools.yaml"
    main(str(crd), str(GATEWAYS / "istio" / "gateway.yaml"))
    [(name, shape)] = yaml.safe_load(capsys.readouterr().out).items()
    assert name == "inference.networking.k8s.io/v1 InferencePool"
    assert shape["spec!"]["targetPorts!"] == [{"number!": "integer"}]
    assert shape["spec!"]["selector!"] == {"matchLabels!": {"*": "string"}}
    assert shape["spec!"]["endpointPickerRef"]["failureMode"] == "FailOpen|FailClose"


def test_records_are_small() -> None:
    assert all(path.stat().st_size < 6_000 for path in FOLDER.iterdir())


def targets(objects: list[Object]) -> Iterator[tuple[str, str]]:
    """Kind and name of every object that another one refers to."""
    for one in objects:
        spec = one.get("spec", {})
        refs = [*spec.get("targetRefs", ()), *filter(None, [spec.get("targetRef")])]
        refs += spec.get("parentRefs", [])
        for part in (*spec.get("rules", ()), *spec.get("extProc", ())):
            refs += part.get("backendRefs", [])
        yield from ((ref.get("kind", "Service"), ref["name"]) for ref in refs)
        if one["kind"] == "InferencePool":
            yield "Service", spec["endpointPickerRef"]["name"]
        if one["kind"] == "DestinationRule":
            yield "Service", spec["host"]
        if one["kind"] == "Backend":
            for endpoint in spec["endpoints"]:
                service, namespace, rest = endpoint["fqdn"]["hostname"].split(".", 2)
                assert (namespace, rest) == (NAMESPACE, "svc.cluster.local")
                yield "Service", service


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_is_whole(folder: str, kubectl: Path) -> None:
    objects = kustomized(f"deploy/k8s/gateways/{folder}")
    workers = kustomized("deploy/k8s/overlays/sim-workers")
    assert loose_ends([*objects, *workers]) == []
    asked = set(targets(objects))
    assert {("Gateway", "pointsman"), ("Service", "pointsman-picker")} <= asked
    assert asked <= set(map(name_of, objects))
    assert container_of(objects, "picker")["args"]


@pytest.mark.parametrize("folder", FOLDERS)
def test_pool_gateway_and_route_are_those_of_the_overlay(folder: str) -> None:
    ours = objects_of(GATEWAYS / folder / "gateway.yaml")
    [gateway], [route], [pool] = (
        of_kind(ours, k) for k in ("Gateway", "HTTPRoute", "InferencePool")
    )
    overlay = K8S / "overlays" / "gateway"
    there = {name: objects_of(overlay / f"{name}.yaml")[0] for name in ("gateway", "httproute")}
    assert {**gateway["spec"], "gatewayClassName": "istio"} == there["gateway"]["spec"]
    [rule], [theirs] = route["spec"]["rules"], there["httproute"]["spec"]["rules"]
    assert {**theirs, **rule, "backendRefs": 0, "timeouts": 0} == {
        **theirs,
        "backendRefs": 0,
        "timeouts": 0,
    }
    mode = "FailClose" if folder == "envoy-ai-gateway" else "FailOpen"
    [expected] = objects_of(overlay / "inferencepool.yaml")
    assert pool["spec"].pop("endpointPickerRef") == {
        **expected["spec"].pop("endpointPickerRef"),
        "failureMode": mode,
    }
    assert pool == expected


@pytest.mark.parametrize("folder", ["envoy-gateway", "envoy-ai-gateway"])
def test_clients_cannot_set_the_headers_that_our_envoy_removes(folder: str) -> None:
    policies = objects_of(GATEWAYS / folder / "policies.yaml")
    [policy] = of_kind(policies, "ClientTrafficPolicy")
    removed = policy["spec"]["headers"]["earlyRequestHeaders"]["removeOnMatch"]
    prefixes = CONTROL_PREFIXES + ROUTING_PREFIXES
    exact = [name for name in ROUTING_HEADERS if not name.startswith(prefixes)]
    assert [one["value"] for one in removed if one["type"] == "Prefix"] == list(prefixes)
    assert [one["value"] for one in removed if one["type"] == "Exact"] == exact


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_yaml_of_a_page_is_that_of_its_file(page: Path) -> None:
    for kind, text in FENCE.findall(page.read_text()):
        if kind == "yaml":
            found = WRITTEN.match(text)
            assert found, text
            assert text[found.end() :] == (ROOT / found[1]).read_text(), found[1]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_of_a_page_name_what_is_there(page: Path, kubectl: Path) -> None:
    """Check that folders render and files exist; `NOT_RUN` has what cannot run here."""
    for kind, text in FENCE.findall(page.read_text()):
        for line in text.replace("\\\n", " ").splitlines() if kind == "bash" else ():
            words = line.split("#")[0].split()
            for flag, path in pairwise(words):
                if flag in ("-f", "-k", "-c"):
                    assert (ROOT / path).exists(), line
            if words[:3] == ["kubectl", "apply", "-k"]:
                assert kustomized(words[3])
            elif words[:3] == ["kubectl", "apply", "-f"]:
                assert objects_of(ROOT / words[3])
            elif words[0] not in ("pointsman", "envoy"):
                assert any(line.startswith(start) for start in NOT_RUN), line
