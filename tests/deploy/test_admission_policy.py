"""The optional admission policy closes what the schema of InferencePool leaves open."""

import copy
from typing import Any

import cel
import pytest

from tests.support.kube.manifests import Object, charted, kustomized, of_kind

pytestmark = pytest.mark.usefixtures("kubectl")
FOLDER = "deploy/k8s/addons/admission-policy"


def denials(new: Object, old: Object | None = None) -> list[str]:
    [policy] = of_kind(kustomized(FOLDER), "ValidatingAdmissionPolicy")
    given: dict[str, Any] = {"object": new, "oldObject": old or {}}
    given["request"] = {"operation": "UPDATE" if old else "CREATE"}
    return [
        validation["message"]
        for validation in policy["spec"]["validations"]
        if cel.evaluate(validation["expression"], given) is not True
    ]


@pytest.fixture
def pool() -> Object:
    [found] = of_kind(kustomized("deploy/k8s/overlays/gateway"), "InferencePool")
    return copy.deepcopy(found)


def test_the_example_is_let_in(pool: Object) -> None:
    assert denials(pool) == []
    changed = copy.deepcopy(pool)
    changed["spec"]["targetPorts"] = [{"number": 9000}]
    assert denials(changed, pool) == []


@pytest.mark.parametrize("key", ["bad key!", "", "a/b/c", "-a", "Team.Com/x", "a" * 64, "é"])
def test_keys_that_are_none_are_denied(pool: Object, key: str) -> None:
    pool["spec"]["selector"]["matchLabels"] = {key: "x"}
    assert [message.split(" ")[2:5] for message in denials(pool)] == [
        ["of", "spec.selector.matchLabels", "is"]
    ]


@pytest.mark.parametrize(
    "key", ["app", "a", "llm-d.ai/role", "A_b.c-d", "a" * 63, "x.y/" + "b" * 63]
)
def test_keys_of_labels_are_let_in(pool: Object, key: str) -> None:
    pool["spec"]["selector"]["matchLabels"] = {key: "x"}
    assert denials(pool) == []


def test_a_pool_without_a_picker_is_denied(pool: Object) -> None:
    del pool["spec"]["endpointPickerRef"]
    [message] = denials(pool)
    assert message.startswith("spec.endpointPickerRef is missing")


def test_another_selector_is_denied(pool: Object) -> None:
    changed = copy.deepcopy(pool)
    changed["spec"]["selector"]["matchLabels"]["more"] = "x"
    [message] = denials(changed, pool)
    assert message.startswith("spec.selector cannot change")


def test_the_policy_is_in_force() -> None:
    objects = kustomized(FOLDER)
    [policy] = of_kind(objects, "ValidatingAdmissionPolicy")
    [binding] = of_kind(objects, "ValidatingAdmissionPolicyBinding")
    assert binding["spec"] == {
        "policyName": policy["metadata"]["name"],
        "validationActions": ["Deny"],
    }
    [rule] = policy["spec"]["matchConstraints"]["resourceRules"]
    assert rule["resources"] == ["inferencepools"]


def test_the_policy_has_values_that_an_api_server_takes() -> None:
    for objects in (kustomized(FOLDER), charted("admissionPolicy.enabled=true")):
        [policy] = of_kind(objects, "ValidatingAdmissionPolicy")
        assert policy["spec"]["failurePolicy"] in ("Fail", "Ignore")
        for one in policy["spec"]["validations"]:
            assert one["reason"] in ("Forbidden", "Invalid", "RequestEntityTooLarge")
            assert one["message"] == " ".join(one["message"].split())
