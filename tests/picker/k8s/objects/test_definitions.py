"""The definitions under `crds/` take and refuse objects as a real API server was seen to."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from crd_rules import INVALID, NOWHERE, CrdRules
from kubernetes_objects import (
    IMPORT_RULES,
    LEFT_OUT,
    OBJECTIVE_RULES,
    POOL_RULES,
    REWRITE_RULES,
    condition,
    objective,
    pool,
    rewrite,
)

from picker.k8s.objects.definitions import (
    INSTALLED,
    LEGACY,
    OBJECTIVE,
    POOL,
    POOL_IMPORT,
    REWRITE,
    Definition,
)
from picker.k8s.objects.reading import read_pool

LABELS = {f"l{number}": "" for number in range(65)}
PORTS = [{"number": number} for number in range(1, 10)]
LABEL_PATTERN = "should match '^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$'"
UNCHECKED = "some validation rules were not checked"
NO_PORT = "port is required when kind is 'Service' or unspecified (defaults to 'Service')"


def labels(given: dict[str, Any]) -> dict[str, Any]:
    """A pool that selects by these labels."""
    return pool(selector={"matchLabels": given})


def picker(**fields: Any) -> dict[str, Any]:
    """A pool with this picker."""
    return pool(endpointPickerRef={"name": "epp", "port": {"number": 9002}} | fields)


def answer(rules: CrdRules, given: dict[str, Any]) -> str:
    """All that is wrong with an object; empty when it would be stored."""
    return "\n".join(map(str, rules.admit(given)[1]))


REFUSED = [
    (pool() | {"spec": None}, "spec: Required value"),
    (pool(selector=LEFT_OUT), "spec.selector: Required value"),
    (labels({}), "spec.selector.matchLabels in body should have at least 1 properties"),
    (pool(selector={"app": "vllm"}), "spec.selector.matchLabels: Required value"),
    (labels({"a": "x" * 64}), "spec.selector.matchLabels.a: Too long: may not be more than 63"),
    (labels({"a": "-bad-"}), LABEL_PATTERN),
    (labels({"a": "line\n"}), LABEL_PATTERN),
    (pool(targetPorts=LEFT_OUT), "spec.targetPorts: Required value"),
    (pool(targetPorts=[]), "spec.targetPorts in body should have at least 1 items"),
    (pool(targetPorts=PORTS), "spec.targetPorts: Too many: 9: must have at most 8 items"),
    (
        pool(targetPorts=PORTS[:2] + PORTS[:1]),
        "spec.targetPorts: Invalid value: port number must be unique",
    ),
    (pool(targetPorts=[{"number": 0}]), "should be greater than or equal to 1"),
    (pool(targetPorts=[{"number": 65536}]), "should be less than or equal to 65535"),
    (pool(targetPorts=[{"number": "8000"}]), "number in body must be of type integer"),
    (pool(targetPorts=[{}]), "spec.targetPorts[0].number: Required value"),
    (picker(port=None), f"spec.endpointPickerRef: Invalid value: {NO_PORT}"),
    (picker(port={}), "spec.endpointPickerRef.port.number: Required value"),
    (picker(name=""), "spec.endpointPickerRef.name in body should be at least 1 chars long"),
    (picker(name=None), "spec.endpointPickerRef.name: Required value"),
    (
        picker(failureMode="Fail"),
        'Unsupported value: "Fail": supported values: "FailOpen", "FailClose"',
    ),
    (picker(group="Bad_Group"), "spec.endpointPickerRef.group in body should match"),
    (picker(kind="9x"), "spec.endpointPickerRef.kind in body should match"),
    (pool(appProtocol="grpc"), 'Unsupported value: "grpc": supported values: "http", "kube'),
    (pool(name="Bad_Name"), "a lowercase RFC 1123 subdomain must consist of"),
    (labels(LABELS), "spec.selector.matchLabels: Too many: 65: must have at most 64 items"),
    (labels({"app": None}), "should have at least 1 properties"),
]
TAKEN = [
    pool(),
    labels({"a": "", "b": "x" * 63, "c": "A.b_c-9"}),
    labels({"bad key!": "v"}),
    labels({"app": None, "role": "decode"}),
    pool(targetPorts=PORTS[:8]),
    pool(targetPorts=[{"number": 1}, {"number": 65535}]),
    pool(targetPortNumber=8000),
    picker(),
    picker(kind="Deployment", port=None),
    picker(group="a.b-c.d", kind="K-9"),
    picker(failureMode="FailOpen"),
    pool(endpointPickerRef=None),
    pool(appProtocol="kubernetes.io/h2c"),
]


@pytest.mark.parametrize(("given", "text"), REFUSED)
def test_bad_pools_are_refused(given: dict[str, Any], text: str) -> None:
    """In the words of a real API server."""
    assert text in answer(POOL_RULES, given)


@pytest.mark.parametrize("given", TAKEN)
def test_other_pools_are_taken(given: dict[str, Any]) -> None:
    """Also some that make no sense, for the reader to see to."""
    assert answer(POOL_RULES, given) == ""


def test_rules_wait_for_a_sound_object() -> None:
    """Missing values, types, enumerations and sizes keep the rules from being checked; patterns
    and ranges do not.
    """
    twice = [{"number": 1}, {"number": 1}]
    for given in (pool(targetPorts=twice, appProtocol="x"), pool(targetPorts=twice, selector={})):
        assert UNCHECKED in answer(POOL_RULES, given)
        assert "unique" not in answer(POOL_RULES, given)
    given = pool(targetPorts=twice, selector={"matchLabels": {"a": "-"}})
    assert UNCHECKED not in answer(POOL_RULES, given)
    assert "unique" in answer(POOL_RULES, given)


def test_defaults_are_filled_in_where_something_stands() -> None:
    """Nothing is put inside a picker reference that is not there."""
    stored, _ = POOL_RULES.admit(pool())
    assert stored["spec"]["appProtocol"] == "http"
    assert "endpointPickerRef" not in stored["spec"]
    assert "status" not in stored
    stored, _ = POOL_RULES.admit(picker())
    assert stored["spec"]["endpointPickerRef"] == {
        "group": "",
        "kind": "Service",
        "name": "epp",
        "port": {"number": 9002},
        "failureMode": "FailClose",
    }
    stored, _ = POOL_RULES.admit(pool({"parents": [{"parentRef": {"name": "g"}}]}))
    (parent,) = stored["status"]["parents"]
    assert parent["parentRef"] == {
        "group": "gateway.networking.k8s.io",
        "kind": "Gateway",
        "name": "g",
    }


def test_unknown_fields_are_pruned_and_told() -> None:
    """By their paths; what stands in metadata and under free keys stays."""
    given = pool(selector={"app": "vllm", "matchLabels": {"x": "y"}}, targetPortNumber=1)
    given["spec"]["targetPorts"] = [{"number": 1, "name": "http"}]
    given["metadata"]["anything"] = {"at": "all"}
    paths = ["spec.selector.app", "spec.targetPortNumber", "spec.targetPorts[0].name"]
    assert sorted(POOL_RULES.prune(given)) == paths
    assert given["spec"]["selector"] == {"matchLabels": {"x": "y"}}
    assert given["metadata"]["anything"] == {"at": "all"}
    stored, errors = POOL_RULES.admit(labels({"app": None, "role": "decode"}))
    assert stored["spec"]["selector"]["matchLabels"] == {"role": "decode"}
    assert not errors


def parent(**fields: Any) -> dict[str, Any]:
    """An entry of a pool's status."""
    return {"parentRef": {"name": "g"}} | fields


CONDITIONS_REFUSED = [
    ([condition(), condition()], 'Duplicate value: {"type":"Accepted"}'),
    ([condition(reason="")], "should be at least 1 chars long"),
    ([condition(reason="no blanks")], "should match"),
    ([condition(status="Yes")], 'supported values: "True", "False", "Unknown"'),
    ([condition(type="-")], "should match"),
    ([condition(lastTransitionTime=LEFT_OUT)], "lastTransitionTime: Required value"),
    ([condition(lastTransitionTime="yesterday")], "must be of type date-time"),
    ([condition(lastTransitionTime="2026-02-30T00:00:00Z")], "must be of type date-time"),
    ([condition(lastTransitionTime="2026-12-31T23:59:60Z")], "must be of type date-time"),
    ([condition(message=LEFT_OUT)], "message: Required value"),
    ([condition(observedGeneration=-1)], "should be greater than or equal to 0"),
    ([condition(type=f"T{number}") for number in range(9)], "Too many: 9"),
]


@pytest.mark.parametrize(("conditions", "text"), CONDITIONS_REFUSED)
def test_conditions_are_checked_everywhere(conditions: list[Any], text: str) -> None:
    """In pools, imports, objectives and rewrites alike."""
    importing = {"controllers": [{"name": "example.net/c", "conditions": conditions}]}
    for rules, given in (
        (POOL_RULES, pool({"parents": [parent(conditions=conditions)]})),
        (IMPORT_RULES, {"metadata": {"name": "i"}, "status": importing}),
        (OBJECTIVE_RULES, objective({"conditions": conditions})),
        (REWRITE_RULES, rewrite(status={"conditions": conditions})),
    ):
        assert text in answer(rules, given)


def test_parents_are_one_value() -> None:
    """The list is atomic: the same parent may stand there twice, and 32 of them at most."""
    assert answer(POOL_RULES, pool({"parents": [parent(conditions=[condition()])] * 32})) == ""
    assert "Too many: 33" in answer(POOL_RULES, pool({"parents": [parent()] * 33}))
    assert "parentRef: Required" in answer(POOL_RULES, pool({"parents": [{}]}))
    for name, is_good in (("example.net/gateway", True), ("example.net", False), ("/x", False)):
        given = pool({"parents": [parent(controllerName=name)]})
        assert (answer(POOL_RULES, given) == "") is is_good


def test_imports_have_one_entry_for_each_controller() -> None:
    """Their status needs the list, and the names in it are unique."""

    def importing(status: Any) -> str:
        return answer(IMPORT_RULES, {"metadata": {"name": "i"}, "status": status})

    names = [{"name": f"example.net/{number}"} for number in range(9)]
    assert answer(IMPORT_RULES, {"metadata": {"name": "i"}}) == ""
    assert "status.controllers: Required value" in importing({})
    assert importing({"controllers": names[:8]}) == ""
    assert "Too many: 9" in importing({"controllers": names})
    assert "Duplicate value" in importing({"controllers": names[:1] * 2})
    assert importing({"controllers": [names[0] | {"exportingClusters": [{"name": "c"}]}]}) == ""
    assert "at least 1 chars" in importing(
        {"controllers": [names[0] | {"exportingClusters": [{"name": ""}]}]}
    )


MATCH = {"model": {"value": "m"}}
TARGET = {"modelRewrite": "t"}


@pytest.mark.parametrize(
    ("rules", "given", "text"),
    [
        (OBJECTIVE_RULES, objective(), ""),
        (OBJECTIVE_RULES, objective(priority=-(2**31)), ""),
        (OBJECTIVE_RULES, objective(priority=2**31), "with format int32"),
        (OBJECTIVE_RULES, objective(priority=3e9), "with format int32"),
        (OBJECTIVE_RULES, objective(priority=1.0), ""),
        (OBJECTIVE_RULES, objective(priority=1.5), "must be of type integer"),
        (OBJECTIVE_RULES, objective(poolRef=LEFT_OUT), "spec.poolRef: Required value"),
        (OBJECTIVE_RULES, objective(poolRef={}), "spec.poolRef.name: Required value"),
        (OBJECTIVE_RULES, objective() | {"spec": None}, ""),
        (REWRITE_RULES, rewrite({"matches": [MATCH], "targets": [TARGET]}), ""),
        (REWRITE_RULES, rewrite(), ""),
        (REWRITE_RULES, rewrite({}), ""),
        (REWRITE_RULES, rewrite({"targets": [{"modelRewrite": ""}]}), ""),
        (REWRITE_RULES, rewrite({"targets": [TARGET, TARGET | {"weight": 1}]}), ""),
        (REWRITE_RULES, rewrite({"targets": []}), "should have at least 1 items"),
        (REWRITE_RULES, rewrite({"targets": [{}]}), "modelRewrite: Required value"),
        (REWRITE_RULES, rewrite({"targets": [TARGET | {"weight": 0}]}), "than or equal to 1"),
        (REWRITE_RULES, rewrite({"targets": [TARGET | {"weight": 1_000_000}]}), ""),
        (REWRITE_RULES, rewrite({"targets": [TARGET | {"weight": 1_000_001}]}), "equal to 1000000"),
        (REWRITE_RULES, rewrite({"matches": [{}]}), "matches[0].model: Required value"),
        (REWRITE_RULES, rewrite({"matches": [{"model": {"value": ""}}]}), "at least 1 chars"),
        (
            REWRITE_RULES,
            rewrite({"matches": [{"model": {"type": "Prefix", "value": "m"}}]}),
            'supported values: "Exact"',
        ),
        (REWRITE_RULES, rewrite(rules=LEFT_OUT), "spec.rules: Required value"),
    ],
)
def test_policies_are_checked(rules: CrdRules, given: dict[str, Any], text: str) -> None:
    """Also what makes no sense is taken, as it is upstream."""
    told = answer(rules, given)
    assert text in told if text else not told


def test_policies_have_defaults() -> None:
    """Those of the pool's reference and of a match; and the first condition once somebody writes a
    status.
    """
    stored, _ = OBJECTIVE_RULES.admit(objective())
    assert stored["spec"] == {
        "poolRef": {
            "group": "inference.networking.k8s.io",
            "kind": "InferencePool",
            "name": "p",
        }
    }
    assert "status" not in stored
    for rules, given, kind in (
        (OBJECTIVE_RULES, objective({}), "Ready"),
        (REWRITE_RULES, rewrite({"matches": [MATCH]}, status={}), "Accepted"),
    ):
        stored, errors = rules.admit(given)
        assert stored["status"]["conditions"] == [
            {
                "type": kind,
                "status": "Unknown",
                "reason": "Pending",
                "message": "Waiting for controller",
                "lastTransitionTime": "1970-01-01T00:00:00Z",
            }
        ]
        assert not errors
    assert stored["spec"]["rules"][0]["matches"] == [{"model": {"type": "Exact", "value": "m"}}]


@pytest.mark.parametrize(
    ("definition", "name", "short_names", "columns"),
    [
        (POOL, "inferencepools.inference.networking.k8s.io", ["infpool"], []),
        (POOL_IMPORT, "inferencepoolimports.inference.networking.x-k8s.io", ["infpimp"], []),
        (OBJECTIVE, "inferenceobjectives.llm-d.ai", None, ["Inference Pool", "Priority", "Age"]),
        (REWRITE, "inferencemodelrewrites.llm-d.ai", None, ["Inference Pool", "Age"]),
    ],
)
def test_definitions_are_called_as_upstream(
    definition: Definition, name: str, short_names: list[str] | None, columns: list[str]
) -> None:
    """Names, short names, columns, and a status of its own."""
    document = definition.document()
    assert document["metadata"]["name"] == name
    names = document["spec"]["names"]
    assert names.get("shortNames") == short_names
    assert names["listKind"] == f"{names['kind']}List"
    (version,) = document["spec"]["versions"]
    assert [one["name"] for one in version.get("additionalPrinterColumns", [])] == columns
    assert version["subresources"] == {"status": {}}
    assert version["served"] is version["storage"] is True
    assert document["spec"]["scope"] == "Namespaced"


def test_the_group_of_pools_is_marked_as_approved() -> None:
    """An API server refuses definitions of `*.k8s.io` that do not say who approved them."""
    approved = POOL.document()["metadata"]["annotations"]["api-approved.kubernetes.io"]
    assert approved.endswith("/gateway-api-inference-extension/pull/1173")


@pytest.mark.parametrize("definition", [POOL, POOL_IMPORT])
def test_pools_are_of_the_bundle_whose_schema_they_have(definition: Definition) -> None:
    """`kubectl describe crd` shows by it which schema a cluster has."""
    found = definition.document()["metadata"]["annotations"]
    assert found["inference.networking.k8s.io/bundle-version"] == "v1.6.0"


@pytest.mark.parametrize("definition", [*INSTALLED, *LEGACY])
def test_every_schema_is_structural(definition: Definition) -> None:
    """Also those of the legacy group, which are read and not installed."""
    assert CrdRules(definition.document()).schema["type"] == "object"


def test_a_schema_that_is_not_structural_is_refused() -> None:
    """By the checker itself, for each thing that an API server asks for."""
    good = POOL.document()
    for change, text in (
        ({"oneOf": []}, "unknown keywords"),
        ({"additionalProperties": {"type": "string"}}, "both properties and additional"),
        ({"required": ["nothing"]}, "requires unknown properties"),
        ({"type": "text"}, "has no type"),
        ({"default": 7}, "a default that it does not allow"),
        ({"x-kubernetes-list-type": "map"}, "a map without keys"),
    ):
        document = copy.deepcopy(good)
        document["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"] |= change
        with pytest.raises(ValueError, match=text):
            CrdRules(document)


def test_what_is_not_checked_is_said_last() -> None:
    """As one more cause, which belongs to no field."""
    errors = POOL_RULES.admit(pool(selector=LEFT_OUT))[1]
    assert [(one.path, one.reason) for one in errors] == [
        ("spec.selector", "FieldValueRequired"),
        (NOWHERE, INVALID),
    ]


@pytest.mark.parametrize("given", TAKEN)
def test_stored_pools_are_followed_but_for_label_keys(given: dict[str, Any]) -> None:
    """Whatever an API server stores is read, except a selector that no Pod can match."""
    stored, _ = POOL_RULES.admit(given)
    reading = read_pool(stored)
    is_matchable = "bad key!" not in stored["spec"]["selector"]["matchLabels"]
    assert (reading.value is not None) is is_matchable, reading.findings
