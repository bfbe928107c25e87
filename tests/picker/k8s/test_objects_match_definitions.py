"""The definitions under `crds/`: the effect on objects, and their agreement with the structs."""

import copy
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from msgspec import inspect

from picker.k8s.objects import InferencePoolSpec, read_policy, read_pool
from picker.pool.object_parts import END
from picker.pool.policies import ObjectiveSpec, RewriteSpec
from tests.depth import examples
from tests.support.kube.crd_rules import CrdRules
from tests.support.kube.kubernetes_objects import (
    CRDS,
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
from tests.support.kube.nearly_valid_objects import OBJECTIVES, POOLS, REWRITES, nearly

# What a schema calls the limits of each kind of types.
LIMITS: dict[type[inspect.Type], dict[str, str]] = {
    inspect.StrType: {"minLength": "min_length", "maxLength": "max_length", "pattern": "pattern"},
    inspect.VarTupleType: {"minItems": "min_length", "maxItems": "max_length"},
    inspect.DictType: {"minProperties": "min_length", "maxProperties": "max_length"},
    inspect.IntType: {"minimum": "ge", "maximum": "le"},
}
RANGES = {"int32": {"minimum": -(2**31), "maximum": 2**31 - 1}}


def differences(schema: dict[str, Any], kind: inspect.Type, at: str = "spec") -> Iterator[str]:
    while isinstance(kind, inspect.Metadata | inspect.UnionType):
        kind = kind.type if isinstance(kind, inspect.Metadata) else kind.types[0]
    schema = RANGES.get(schema.get("format", ""), {}) | schema
    for name, attribute in LIMITS.get(type(kind), {}).items():
        limit = getattr(kind, attribute)
        if schema.get(name) != (limit.replace(END, "$") if isinstance(limit, str) else limit):
            yield f"{at}: {name}"
    if isinstance(kind, inspect.LiteralType) and set(schema["enum"]) != set(kind.values):
        yield f"{at}: enum"
    elif isinstance(kind, inspect.DictType):
        yield from differences(schema["additionalProperties"], kind.value_type, f"{at}.*")
    elif isinstance(kind, inspect.VarTupleType):
        yield from differences(schema["items"], kind.item_type, f"{at}[]")
    elif isinstance(kind, inspect.StructType):
        yield from _struct_differences(schema, kind, at)


def _struct_differences(schema: dict[str, Any], kind: inspect.StructType, at: str) -> Iterator[str]:
    fields = {one.encode_name: one for one in kind.fields}
    if fields.keys() != schema["properties"].keys():
        yield f"{at}: properties"
    if {name for name, one in fields.items() if one.required} != set(schema.get("required", ())):
        yield f"{at}: required"
    for name in fields.keys() & schema["properties"].keys():
        below, default = schema["properties"][name], fields[name].default
        if below.get("default") != (default if isinstance(default, str) else None):
            yield f"{at}.{name}: default"
        yield from differences(below, fields[name].type, f"{at}.{name}")


SPECS = [
    (POOL_RULES, InferencePoolSpec),
    (OBJECTIVE_RULES, ObjectiveSpec),
    (REWRITE_RULES, RewriteSpec),
]


@pytest.mark.parametrize(("rules", "shape"), SPECS)
def test_structs_have_the_fields_and_limits_of_their_definition(
    rules: CrdRules, shape: type[msgspec.Struct]
) -> None:
    assert list(differences(rules.schema["properties"]["spec"], inspect.type_info(shape))) == []


@pytest.mark.parametrize(
    ("place", "change"),
    [
        ((), {"required": ["targetPorts"]}),
        (("properties", "appProtocol"), {"enum": ["http"]}),
        (("properties", "appProtocol"), {"default": "h2"}),
        (("properties", "targetPorts"), {"maxItems": 9}),
        (("properties", "targetPorts", "items", "properties", "number"), {"maximum": 9}),
        (("properties", "endpointPickerRef", "properties", "name"), {"minLength": 0}),
        (("properties", "endpointPickerRef", "properties", "group"), {"pattern": "^a$"}),
        (("properties",), {"another": {"type": "string"}}),
    ],
)
def test_every_kind_of_difference_is_found(place: tuple[str, ...], change: dict[str, Any]) -> None:
    """The check above can fail."""
    schema = copy.deepcopy(POOL_RULES.schema["properties"]["spec"])
    part = schema
    for step in place:
        part = part[step]
    part |= change
    assert len(list(differences(schema, inspect.type_info(InferencePoolSpec)))) == 1


def is_out_of_schema(spec: dict[str, Any]) -> bool:
    """Return whether the picker is stricter: for a selector that is empty or has a null."""
    selector = spec.get("selector")
    labels = selector.get("matchLabels") if isinstance(selector, dict) else None
    return isinstance(labels, dict) and (not labels or None in labels.values())


def as_encoded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: as_encoded(one) for key, one in value.items()}
    if isinstance(value, list):
        return [as_encoded(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


SPEC = st.one_of(
    nearly(POOLS).map(
        lambda spec: (POOL_RULES, pool(**{"selector": LEFT_OUT, "targetPorts": LEFT_OUT} | spec))
    ),
    nearly(OBJECTIVES).map(lambda spec: (OBJECTIVE_RULES, objective() | {"spec": spec})),
    nearly(REWRITES).map(lambda spec: (REWRITE_RULES, rewrite() | {"spec": spec})),
)


@examples(300)
@given(SPEC)
def test_objects_are_followed_that_their_definition_accepts(
    drawn: tuple[CrdRules, dict[str, Any]],
) -> None:
    rules, document = drawn
    accepts = not rules.admit(document)[1] and not is_out_of_schema(document["spec"])
    value = (read_pool if rules is POOL_RULES else read_policy)(as_encoded(document)).value
    assert (value is not None) is accepts


def answer(rules: CrdRules, given: dict[str, Any]) -> str:
    return "; ".join(str(one) for one in rules.admit(given)[1])


REFERENCE = {"name": "epp", "port": {"number": 9002}}


def picker(**reference: Any) -> dict[str, Any]:
    return pool(endpointPickerRef=REFERENCE | reference)


def test_a_stored_object_has_defaults_and_no_unknown_fields() -> None:
    stored, _ = POOL_RULES.admit(pool())
    assert stored["spec"]["appProtocol"] == "http"
    assert "endpointPickerRef" not in stored["spec"]
    stored, _ = POOL_RULES.admit(picker())
    reference = stored["spec"]["endpointPickerRef"]
    assert reference == REFERENCE | {"group": "", "kind": "Service", "failureMode": "FailClose"}
    given_ = pool(selector={"app": "vllm", "matchLabels": {"x": "y"}}, targetPortNumber=1)
    given_["metadata"]["anything"] = {"at": "all"}
    assert sorted(POOL_RULES.prune(given_)) == ["spec.selector.app", "spec.targetPortNumber"]
    assert given_["metadata"]["anything"] == {"at": "all"}


@pytest.mark.parametrize(
    ("conditions", "text"),
    [
        ([condition(), condition()], 'Duplicate value: {"type":"Accepted"}'),
        ([condition(reason="no blanks")], "should match"),
        ([condition(status="Yes")], 'supported values: "True", "False", "Unknown"'),
        ([condition(type="-")], "should match"),
        ([condition(lastTransitionTime=LEFT_OUT)], "lastTransitionTime: Required value"),
        ([condition(lastTransitionTime="2026-02-30T00:00:00Z")], "must be of type date-time"),
        ([condition(observedGeneration=-1)], "should be greater than or equal to 0"),
        ([condition(type=f"T{number}") for number in range(9)], "Too many: 9"),
        ([condition()], ""),
    ],
)
def test_conditions_are_checked_everywhere(conditions: list[Any], text: str) -> None:
    importing = {"controllers": [{"name": "example.net/c", "conditions": conditions}]}
    parent = {"parentRef": {"name": "g"}, "conditions": conditions}
    for rules, given_ in (
        (POOL_RULES, pool({"parents": [parent]})),
        (IMPORT_RULES, {"metadata": {"name": "i"}, "status": importing}),
        (OBJECTIVE_RULES, objective({"conditions": conditions})),
        (REWRITE_RULES, rewrite(status={"conditions": conditions})),
    ):
        said = answer(rules, given_)
        assert text in said if text else not said


def test_statuses_have_their_limits_and_defaults() -> None:
    parent = {"parentRef": {"name": "g"}}
    assert answer(POOL_RULES, pool({"parents": [parent] * 32})) == ""
    assert "Too many: 33" in answer(POOL_RULES, pool({"parents": [parent] * 33}))
    assert "should match" in answer(
        POOL_RULES, pool({"parents": [parent | {"controllerName": "/x"}]})
    )
    names = [{"name": f"example.net/{number}"} for number in range(9)]
    for status, text in (
        ({}, "status.controllers: Required value"),
        ({"controllers": names}, "Too many: 9"),
        ({"controllers": names[:1] * 2}, "Duplicate value"),
    ):
        assert text in answer(IMPORT_RULES, {"metadata": {"name": "i"}, "status": status})
    for rules, given_, kind in (
        (OBJECTIVE_RULES, objective({}), "Ready"),
        (REWRITE_RULES, rewrite({}, status={}), "Accepted"),
    ):
        stored, errors = rules.admit(given_)
        (waiting,) = stored["status"]["conditions"]
        assert (waiting["type"], waiting["status"]) == (kind, "Unknown")
        assert not errors


TARGET = {"modelRewrite": "t"}


@pytest.mark.parametrize(
    ("rules", "given", "text"),
    [
        (OBJECTIVE_RULES, objective(priority=2**31), "with format int32"),
        (OBJECTIVE_RULES, objective(priority=1.5), "must be of type integer"),
        (OBJECTIVE_RULES, objective() | {"spec": None}, ""),
        (REWRITE_RULES, rewrite({}), ""),
        (REWRITE_RULES, rewrite({"targets": [{"modelRewrite": ""}]}), ""),
        (REWRITE_RULES, rewrite({"targets": []}), "should have at least 1 items"),
        (REWRITE_RULES, rewrite({"targets": [TARGET | {"weight": 1_000_001}]}), "equal to 1000000"),
        (REWRITE_RULES, rewrite({"matches": [{}]}), "matches[0].model: Required value"),
    ],
)
def test_policies_are_checked(rules: CrdRules, given: dict[str, Any], text: str) -> None:
    said = answer(rules, given)
    assert text in said if text else not said


@pytest.mark.parametrize(
    ("plural", "short_names", "columns"),
    [
        ("inferencepools.inference.networking.k8s.io", ["infpool"], []),
        ("inferencepoolimports.inference.networking.x-k8s.io", ["infpimp"], []),
        ("inferenceobjectives.llm-d.ai", None, ["Inference Pool", "Priority", "Age"]),
        ("inferencemodelrewrites.llm-d.ai", None, ["Inference Pool", "Age"]),
    ],
)
def test_definitions_are_those_of_upstream(
    plural: str, short_names: list[str] | None, columns: list[str]
) -> None:
    name, _, group = plural.partition(".")
    document = yaml.safe_load((CRDS / f"{group}_{name}.yaml").read_text())
    assert document["metadata"]["name"] == plural
    names = document["spec"]["names"]
    assert names.get("shortNames") == short_names
    assert names["listKind"] == f"{names['kind']}List"
    (version,) = document["spec"]["versions"]
    assert [one["name"] for one in version.get("additionalPrinterColumns", [])] == columns
    assert version["subresources"] == {"status": {}}
    assert version["served"] is version["storage"] is True
    assert document["spec"]["scope"] == "Namespaced"
    notes = document["metadata"]["annotations"]
    if group == "inference.networking.k8s.io":
        approved = notes["api-approved.kubernetes.io"]
        assert approved.endswith("/gateway-api-inference-extension/pull/1173")
        assert notes["inference.networking.k8s.io/bundle-version"] == "v1.6.0"


def test_a_schema_that_is_not_structural_is_refused() -> None:
    for change, text in (
        ({"oneOf": []}, "unknown keywords"),
        ({"additionalProperties": {"type": "string"}}, "both properties and additional"),
        ({"required": ["nothing"]}, "requires unknown properties"),
        ({"type": "text"}, "has no type"),
        ({"default": 7}, "a default that it does not allow"),
        ({"x-kubernetes-list-type": "map"}, "a map without keys"),
    ):
        document = copy.deepcopy(POOL_RULES.document)
        document["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"] |= change
        with pytest.raises(ValueError, match=text):
            CrdRules(document)
