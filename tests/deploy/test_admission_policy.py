"""The optional admission policy closes what the schema of InferencePool leaves open."""

from __future__ import annotations

import copy
from typing import Any

import cel
import pytest
from kube_api.cluster import Answer, open_cluster
from manifests import Object, charted, kustomized, of_kind

pytestmark = pytest.mark.usefixtures("kubectl")
FOLDER = "deploy/k8s/addons/admission-policy"
POLICY, BINDING = "validatingadmissionpolicies", "validatingadmissionpolicybindings"


def denials(new: Object, old: Object | None = None) -> list[str]:
    """The messages that a request is denied with, by the policy's own expressions."""
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
    """The example's pool."""
    [found] = of_kind(kustomized("deploy/k8s/overlays/gateway"), "InferencePool")
    return copy.deepcopy(found)


def test_the_example_is_let_in(pool: Object) -> None:
    """Made, and changed in anything but its selector."""
    assert denials(pool) == []
    changed = copy.deepcopy(pool)
    changed["spec"]["targetPorts"] = [{"number": 9000}]
    assert denials(changed, pool) == []


@pytest.mark.parametrize("key", ["bad key!", "", "a/b/c", "-a", "Team.Com/x", "a" * 64, "é"])
def test_keys_that_are_none_are_denied(pool: Object, key: str) -> None:
    """The schema takes any key, and the picker could never list by these."""
    pool["spec"]["selector"]["matchLabels"] = {key: "x"}
    assert [message.split(" ")[2:5] for message in denials(pool)] == [
        ["of", "spec.selector.matchLabels", "is"]
    ]


@pytest.mark.parametrize(
    "key", ["app", "a", "llm-d.ai/role", "A_b.c-d", "a" * 63, "x.y/" + "b" * 63]
)
def test_keys_of_labels_are_let_in(pool: Object, key: str) -> None:
    """Nothing valid is denied."""
    pool["spec"]["selector"]["matchLabels"] = {key: "x"}
    assert denials(pool) == []


def test_a_pool_without_a_picker_is_denied(pool: Object) -> None:
    """The reference is optional in the schema."""
    del pool["spec"]["endpointPickerRef"]
    [message] = denials(pool)
    assert message.startswith("spec.endpointPickerRef is missing")


def test_another_selector_is_denied(pool: Object) -> None:
    """It would take the endpoints from under requests."""
    changed = copy.deepcopy(pool)
    changed["spec"]["selector"]["matchLabels"]["more"] = "x"
    [message] = denials(changed, pool)
    assert message.startswith("spec.selector cannot change")


def test_the_policy_is_in_force() -> None:
    """A binding denies by it; status, which others write, is not its matter."""
    objects = kustomized(FOLDER)
    [policy] = of_kind(objects, "ValidatingAdmissionPolicy")
    [binding] = of_kind(objects, "ValidatingAdmissionPolicyBinding")
    assert binding["spec"] == {
        "policyName": policy["metadata"]["name"],
        "validationActions": ["Deny"],
    }
    [rule] = policy["spec"]["matchConstraints"]["resourceRules"]
    assert rule["resources"] == ["inferencepools"]


async def posted(plural: str, obj: Object) -> Answer:
    """What an API server answers to a create of the whole object."""
    path = f"/apis/admissionregistration.k8s.io/v1/{plural}"
    async with open_cluster() as cluster:
        return await cluster.call("POST", path, obj, dryRun="All", fieldValidation="Strict")


async def test_an_api_server_accepts_the_policy_and_its_binding() -> None:
    """As kustomize renders them, and as Helm does."""
    charts = charted("admissionPolicy.enabled=true")
    for objects in (kustomized(FOLDER), charts):
        [policy] = of_kind(objects, "ValidatingAdmissionPolicy")
        [binding] = of_kind(objects, "ValidatingAdmissionPolicyBinding")
        for plural, obj in ((POLICY, policy), (BINDING, binding)):
            answer = await posted(plural, obj)
            assert answer.code == 201, answer.body


REFUSALS = {
    "reason": (
        {"reason": "Required"},
        'reason: Unsupported value: "Required": supported values: '
        '"Forbidden", "Invalid", "RequestEntityTooLarge"',
    ),
    "no expression": ({"expression": " "}, "expression: Required value"),
    "bad expression": ({"expression": "object.spec =="}, "expression: Invalid value: "),
    "blank message": ({"message": " "}, "message: Invalid value: "),
    "two lines": ({"message": "a\nb"}, "message: Invalid value: "),
}


@pytest.mark.parametrize("name", REFUSALS)
async def test_an_api_server_refuses_a_policy_that_breaks_its_rules(name: str) -> None:
    """Rules about values, which the schema of the object does not have."""
    changes, why = REFUSALS[name]
    [policy] = of_kind(kustomized(FOLDER), "ValidatingAdmissionPolicy")
    policy["spec"]["validations"][1] |= changes
    answer = await posted(POLICY, policy)
    assert answer.short == (422, "Invalid")
    assert f"spec.validations[1].{why}" in answer.body["message"]


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"failurePolicy": "Open"}, "spec.failurePolicy"),
        ({"validations": []}, "spec.validations"),
        ({"matchConstraints": {}}, "spec.matchConstraints.resourceRules"),
    ],
)
async def test_an_api_server_refuses_a_policy_of_nothing(changes: Object, path: str) -> None:
    """And one that it would not know what to do with when it fails."""
    [policy] = of_kind(kustomized(FOLDER), "ValidatingAdmissionPolicy")
    answer = await posted(POLICY, policy | {"spec": policy["spec"] | changes})
    assert answer.short == (422, "Invalid")
    assert path in answer.body["message"]


@pytest.mark.parametrize("actions", [[], ["Refuse"], ["Deny", "Deny"], ["Deny", "Warn"]])
async def test_an_api_server_refuses_a_binding_that_breaks_its_rules(actions: list[str]) -> None:
    """Actions are known, not repeated, and not both of those that speak to the client."""
    [binding] = of_kind(kustomized(FOLDER), "ValidatingAdmissionPolicyBinding")
    answer = await posted(
        BINDING, binding | {"spec": binding["spec"] | {"validationActions": actions}}
    )
    assert answer.short == (422, "Invalid")
    assert "spec.validationActions" in answer.body["message"]
