"""Everything under deploy/k8s renders, and into objects that an API server takes."""

import kubernetes_validate
import pytest
import yaml

from picker.k8s.objects import read_policy, read_pool
from scripts import document_chart, gen_deploy
from tests.support.kube.crd_rules import CrdRules
from tests.support.kube.manifests import (
    BUILDS,
    DEPLOY,
    NAMESPACE,
    ROOT,
    kustomized,
    name_of,
    of_kind,
)
from tests.support.kube.recorded_schemas import problems, shapes

pytestmark = pytest.mark.usefixtures("kubectl")
KUBERNETES = "1.36"
OURS = {
    (
        "inference.networking.k8s.io/v1",
        "InferencePool",
    ): "inference.networking.k8s.io_inferencepools",
    ("llm-d.ai/v1alpha2", "InferenceObjective"): "llm-d.ai_inferenceobjectives",
}
FOREIGN = ("monitoring.coreos.com/", "keda.sh/", "cert-manager.io/")
CLUSTER_WIDE = {
    "CustomResourceDefinition",
    "ClusterRole",
    "ClusterRoleBinding",
    "Namespace",
    "ValidatingAdmissionPolicy",
    "ValidatingAdmissionPolicyBinding",
}
ELSEWHERE = {
    "deploy/k8s/overlays/several-namespaces": {
        ("InferencePool", "mixtral"): "research",
        ("Role", "pointsman-pointsman-picker"): "research",
        ("RoleBinding", "pointsman-pointsman-picker"): "research",
    }
}
DOCUMENTS = [path for path in sorted(DEPLOY.rglob("*.yaml")) if "templates" not in path.parts]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(DEPLOY)))
def test_every_document_is_yaml(path) -> None:
    assert [one for one in yaml.safe_load_all(path.read_text()) if one]


@pytest.mark.parametrize("folder", BUILDS)
def test_every_object_is_there_once_and_in_its_namespace(folder: str) -> None:
    objects = kustomized(folder)
    names = [name_of(one) for one in objects]
    assert names
    assert len(set(names)) == len(names)
    for one in objects:
        usual = NAMESPACE if one["kind"] not in CLUSTER_WIDE else None
        expected = ELSEWHERE.get(folder, {}).get(name_of(one), usual)
        assert one["metadata"].get("namespace") == expected, name_of(one)


@pytest.mark.full
def test_every_folder_renders_the_same_with_an_older_kubectl(older_kubectl: str) -> None:
    for folder in BUILDS:
        assert kustomized(folder, older_kubectl) == kustomized(folder), folder


@pytest.mark.full
@pytest.mark.parametrize("folder", BUILDS)
def test_objects_have_no_field_that_their_schema_lacks(folder: str) -> None:
    checked = 0
    for one in kustomized(folder):
        ours = OURS.get((one["apiVersion"], one["kind"]))
        if ours is not None:
            rules = CrdRules.load(ROOT / "crds" / f"{ours}.yaml")
            assert not rules.prune(one)
            assert not rules.errors(one)
        elif (one["apiVersion"], one["kind"]) in shapes():
            assert problems(one) == []
        elif not one["apiVersion"].startswith(FOREIGN):
            kubernetes_validate.validate(one, KUBERNETES, strict=True)
        else:
            continue
        checked += 1
    assert checked or "monitoring" in folder or "keda" in folder


def test_the_picker_reads_its_pool_and_objectives() -> None:
    objects = kustomized("deploy/k8s/overlays/gateway")
    pools = [read_pool(one) for one in of_kind(objects, "InferencePool")]
    objectives = [read_policy(one) for one in of_kind(objects, "InferenceObjective")]
    assert len(pools) == len(objectives) == 1
    for reading in (*pools, *objectives):
        assert not reading.problems
        assert reading.value is not None


def test_files_that_are_written_are_up_to_date() -> None:
    assert gen_deploy.different() == []
    assert document_chart.table() in document_chart.README.read_text()
