"""Objects of the Kubernetes API become values, or it is told why they are not followed."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from crd_rules import CrdRules
from hypothesis import given, settings
from hypothesis import strategies as st
from kubernetes_objects import (
    LEFT_OUT,
    OBJECTIVE_RULES,
    POOL_RULES,
    REWRITE_RULES,
    legacy_pool,
    objective,
    pool,
    rewrite,
)

from picker.datalayer.policy_objects import InferenceObjective
from picker.k8s.objects.definitions import LEGACY_POOL
from picker.k8s.objects.findings import MAX_FINDINGS, ObjectFinding, Severity
from picker.k8s.objects.reading import read_policy, read_pool
from picker.k8s.objects.values import PickerReference

LEGACY_POOL_RULES = CrdRules(LEGACY_POOL.document())


def errors(findings: tuple[ObjectFinding, ...]) -> list[str]:
    """The paths of what keeps an object from being followed."""
    return [one.path for one in findings if one.severity is Severity.ERROR]


def labels(selector: dict[str, Any], **metadata: Any) -> dict[str, Any]:
    """A pool that selects by these labels."""
    made = pool(selector={"matchLabels": selector})
    made["metadata"] |= metadata
    return made


def test_a_pool_is_read_whole() -> None:
    """All that its spec says, and of its metadata what tells it apart from others."""
    document = pool(
        targetPorts=[{"number": 8000}, {"number": 8001.0}],
        appProtocol="kubernetes.io/h2c",
        endpointPickerRef={"name": "epp", "port": {"number": 9002}, "failureMode": "FailOpen"},
    )
    document["metadata"] = {
        "name": "llm",
        "namespace": "team",
        "uid": "u",
        "resourceVersion": "7",
        "generation": 2,
        "deletionTimestamp": "2026-01-01T00:00:00Z",
        "managedFields": [{"what": "ever"}],
        "fieldOfTomorrow": 1,
    }
    reading = read_pool(document)
    assert reading.findings == ()
    read = reading.value
    assert read is not None
    assert (read.name, read.namespace, read.uid, read.resource_version) == ("llm", "team", "u", "7")
    assert (read.generation, read.is_deleting) == (2, True)
    assert read.api_version == "inference.networking.k8s.io/v1"
    assert dict(read.spec.selector) == {"app": "vllm"}
    assert read.spec.target_ports == (8000, 8001)
    assert read.spec.app_protocol == "kubernetes.io/h2c"
    assert read.spec.picker == PickerReference("", "Service", "epp", 9002, "FailOpen")


def test_what_is_left_out_has_its_default() -> None:
    """The same that an API server would fill in."""
    read = read_pool(pool()).value
    assert read is not None
    assert read.spec.app_protocol == "http"
    assert read.spec.picker is None
    read = read_pool(pool(appProtocol=None, endpointPickerRef=None)).value
    assert read is not None
    assert read.spec.app_protocol == "http"
    reference = {"name": "e", "kind": "Deployment", "group": None, "failureMode": None}
    read = read_pool(pool(endpointPickerRef=reference)).value
    assert read is not None
    assert read.spec.picker == PickerReference("", "Deployment", "e", None, "FailClose")


def test_a_selector_takes_pods_that_have_all_labels() -> None:
    """And is asked for in the words of the API."""
    read = read_pool(labels({"b": "2", "a": ""})).value
    assert read is not None
    assert read.spec.selects({"a": "", "b": "2", "c": "3"})
    assert not read.spec.selects({"b": "2"})
    assert not read.spec.selects({"a": "1", "b": "2"})
    assert read.spec.label_selector == "a=,b=2"


def test_the_legacy_form_is_read_to_the_same_values() -> None:
    """One port, and 9002 as the port of a picker's Service that names none."""
    read = read_pool(legacy_pool()).value
    assert read is not None
    assert dict(read.spec.selector) == {"app": "vllm"}
    assert read.spec.target_ports == (8000,)
    assert read.spec.app_protocol == "http"
    assert read.spec.picker == PickerReference("", "Service", "epp", 9002, "FailClose")
    for reference, port in (
        ({"name": "e", "portNumber": 7}, 7),
        ({"name": "e", "kind": "Pod"}, None),
    ):
        read = read_pool(legacy_pool(extensionRef=reference)).value
        assert read is not None
        assert read.spec.picker is not None
        assert read.spec.picker.port == port
    assert errors(read_pool(legacy_pool(selector={})).findings) == ["spec.selector"]
    assert errors(read_pool(legacy_pool(targetPortNumber=0)).findings) == ["spec.targetPortNumber"]


REFUSED = [
    (labels({"bad key!": "v"}), 'spec.selector.matchLabels["bad key!"]', "write at most 63"),
    (labels({"x/y/z": "v"}), 'spec.selector.matchLabels["x/y/z"]', "perhaps behind a DNS name"),
    (labels({"": "v"}), 'spec.selector.matchLabels[""]', "write at most 63"),
    (labels({"a": None, "b": "v"}), "spec.selector.matchLabels.a", "write a value"),
    (labels({"a": "-"}), "spec.selector.matchLabels.a", "begin and end with a letter"),
    (labels({}), "spec.selector.matchLabels", "add what is missing"),
    (pool(selector={"app": "x"}), "spec.selector.matchLabels", "add the key 'matchLabels'"),
    (pool(targetPorts=[{"number": 0}]), "spec.targetPorts[0].number", "from 1 to 65535"),
    (pool(targetPorts=[{"number": True}]), "spec.targetPorts[0].number", "a whole number"),
    (
        pool(targetPorts=[{"number": number} for number in range(1, 11)]),
        "spec.targetPorts",
        "leave no more than 8",
    ),
    (pool(targetPorts=[{"number": 1}] * 2), "spec.targetPorts", "name each port once"),
    (pool(endpointPickerRef={"name": "e"}), "spec.endpointPickerRef", "add 'port"),
    (pool(appProtocol="grpc"), "spec.appProtocol", "one of: http, kubernetes.io/h2c"),
    (pool(selector=None), "spec.selector", "add the key 'selector'"),
    (pool() | {"spec": None}, "spec", "add the key 'spec'"),
    (pool() | {"spec": []}, "spec", "write a mapping"),
    (pool() | {"apiVersion": "v2"}, "apiVersion", "one of: inference.networking.k8s.io/v1"),
    (pool() | {"kind": "Pod"}, "kind", "one of: InferencePool"),
    (pool(name="Bad_Name"), "metadata", "as an API server hands it out"),
    (pool() | {"metadata": None}, "metadata", "as an API server hands it out"),
]


@pytest.mark.parametrize(("document", "path", "fix"), REFUSED)
def test_a_bad_pool_is_told_and_not_followed(document: dict[str, Any], path: str, fix: str) -> None:
    """Where, and what to do about it."""
    reading = read_pool(document)
    assert reading.value is None
    (found,) = (one for one in reading.findings if one.severity is Severity.ERROR)
    assert found.path == path
    assert fix in found.fix
    assert str(found).startswith(f"{path}: ")


def test_everything_wrong_is_told_at_once() -> None:
    """With the values, in one line each."""
    reading = read_pool(pool(targetPorts=[{"number": "8\n"}, {}, {"number": 70000}]))
    assert [(one.path, one.value) for one in reading.findings] == [
        ("spec.targetPorts[0].number", r'"8\n"'),
        ("spec.targetPorts[1].number", None),
        ("spec.targetPorts[2].number", "70000"),
    ]


def test_there_is_an_end_to_telling() -> None:
    """Of a huge object a part is told, errors before warnings, and long values are cut."""
    reading = read_pool(pool(targetPorts=[{"number": "x" * 1000}] * 5000, **{"y" * 9: [[]] * 99}))
    assert len(reading.findings) == MAX_FINDINGS
    assert all(len(str(one)) < 300 for one in reading.findings)
    many = {f"k{number}": number for number in range(200)}
    reading = read_pool(pool(**many, appProtocol="x"))
    assert len(reading.findings) == MAX_FINDINGS
    assert reading.findings[0].path == "spec.appProtocol"


def test_deeply_nested_objects_do_no_harm() -> None:
    """What the schema does not know is not walked through."""
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    assert read_pool(pool(selector=deep)).value is None
    assert read_pool(pool(unknown=deep)).value is not None
    applied = {"kubectl.kubernetes.io/last-applied-configuration": "[" * 100_000}
    assert read_pool(labels({"a": "b"}, annotations=applied)).value is not None


def test_unknown_fields_are_only_a_warning() -> None:
    """They may be those of a newer schema."""
    reading = read_pool(pool(targetPort=1, newThing={}))
    assert reading.value is not None
    assert [(one.path, one.severity, one.fix) for one in reading.findings] == [
        ("spec.targetPort", Severity.WARNING, "write 'targetPorts'"),
        ("spec.newThing", Severity.WARNING, "leave it out"),
    ]


def test_a_label_that_was_dropped_is_told() -> None:
    """The API server keeps a null no longer, but what was applied is known."""
    applied = json.dumps({"spec": {"selector": {"matchLabels": {"role": None, "app": None}}}})
    annotations = {"kubectl.kubernetes.io/last-applied-configuration": applied}
    reading = read_pool(labels({"app": "vllm"}, annotations=annotations))
    assert reading.value is not None
    (found,) = reading.findings
    assert found.path == "spec.selector.matchLabels.role"
    assert "takes more Pods" in found.message


@pytest.mark.parametrize("status", [{"parents": 7}, [], {"conditions": [{}] * 99}])
def test_a_status_takes_nothing_away(status: Any) -> None:
    """Others write it, and the picker does not read it."""
    assert read_pool(pool(status)).findings == ()
    assert read_policy(objective(status)).findings == ()


@pytest.mark.parametrize("document", [None, 7, [], "pool", {}])
def test_what_is_no_object_is_told(document: Any) -> None:
    """Whatever it is instead."""
    for reading in (read_pool(document), read_policy(document)):
        assert reading.value is None
        assert len(errors(reading.findings)) == 1


def test_policies_are_read_from_both_groups() -> None:
    """With their doubts as warnings; without a spec they say nothing."""
    document = objective(priority=-3)
    for version in ("llm-d.ai/v1alpha2", "inference.networking.x-k8s.io/v1alpha2"):
        read = read_policy(document | {"apiVersion": version}).value
        assert isinstance(read, InferenceObjective)
        assert read.api_version == version
        assert read.spec.priority == -3
    assert errors(read_policy(document | {"spec": None}).findings) == ["spec"]
    reading = read_policy(rewrite())
    assert reading.value is not None
    assert [one.path for one in reading.findings] == ["spec.rules"]
    assert errors(read_policy(objective(priority=2**31)).findings) == ["spec.priority"]
    wrong = rewrite({"targets": [{"weight": 0}]}, poolRef=LEFT_OUT)
    assert set(errors(read_policy(wrong).findings)) == {
        "spec.poolRef",
        "spec.rules[0].targets[0].modelRewrite",
        "spec.rules[0].targets[0].weight",
    }


# Valid objects, of which a few values are then left out or replaced by others of any type.
ODD = st.sampled_from([LEFT_OUT, None, True, 1.0, 1.5, 7, 2**70, "", "x", "x\n", [], {}, [{}]])
NAMES = st.sampled_from(["a", "A.b", "-a", "a-", "é", "x" * 63, "x" * 64, "x" * 254, "9x", "a..b"])
NUMBERS = st.sampled_from([-1, 0, 1, 65535, 65536, 1_000_000, 1_000_001, -(2**31), 2**31])
WORDS = st.sampled_from(["Service", "Deployment", "FailOpen", "http", "h2", "Exact", "Prefix"])


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all that stands in a value."""
    below = value.items() if isinstance(value, dict) else enumerate(value)
    found = [at] if at else []
    if isinstance(value, dict | list):
        for key, one in below:
            is_inner = isinstance(one, dict | list)
            found += places(one, (*at, key)) if is_inner else [(*at, key)]
    return found


@st.composite
def nearly(draw: st.DrawFn, valid: st.SearchStrategy[dict[str, Any]]) -> dict[str, Any]:
    """A valid mapping with up to two changes."""
    value = draw(valid)
    for _ in range(draw(st.integers(0, 2))):
        around: Any = value
        if not (found := places(value)):
            break
        *path, last = draw(st.sampled_from(found))
        for step in path:
            around = around[step]
        around[last] = draw(_instead_of(around[last]))
        if around[last] is LEFT_OUT:
            del around[last]
    return value


def _instead_of(value: Any) -> st.SearchStrategy[Any]:
    """What may stand in place of a value: mostly something of its type."""
    alike: st.SearchStrategy[Any] = st.just(LEFT_OUT)
    if isinstance(value, int):
        alike = NUMBERS | st.just(float(value))
    elif isinstance(value, str):
        alike = NAMES | WORDS | st.just(f"{value}\n")
    elif isinstance(value, list) and value:
        alike = st.sampled_from([[*value, value[0]], value * 9])
    return alike | st.just(LEFT_OUT) | ODD.map(copy.deepcopy)


def maybe(**kinds: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Mappings in which any of these fields may stand."""
    return st.fixed_dictionaries({}, optional=kinds)


def both(*parts: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """Mappings with the fields of all."""
    return st.tuples(*parts).map(lambda all_of: {k: v for one in all_of for k, v in one.items()})


def having(**kinds: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Mappings with these fields."""
    return st.fixed_dictionaries(kinds)


LABEL_KEYS = st.sampled_from(["app", "example.com/role", "A_b", "k" * 63])
LABELS = st.dictionaries(LABEL_KEYS, st.sampled_from(["", "v", "x" * 63]), min_size=1)
NUMBER = st.integers(1, 65535)
GROUP = st.sampled_from(["", "a.b", "inference.networking.k8s.io"])
KIND = st.sampled_from(["Service", "Deployment"])
NAME = st.sampled_from(["a", "b.c", "x" * 253])
FAILURE_MODE = st.sampled_from(["FailOpen", "FailClose"])
REFERENCE = both(
    having(name=NAME, port=having(number=NUMBER)),
    maybe(group=GROUP, kind=KIND, failureMode=FAILURE_MODE),
)
POOLS = both(
    having(
        selector=having(matchLabels=LABELS),
        targetPorts=st.lists(NUMBER, min_size=1, max_size=8, unique=True).map(
            lambda numbers: [{"number": number} for number in numbers]
        ),
    ),
    maybe(appProtocol=st.sampled_from(["http", "kubernetes.io/h2c"]), endpointPickerRef=REFERENCE),
)
EXTENSION = both(
    having(name=NAME),
    maybe(group=GROUP, kind=KIND, portNumber=NUMBER, failureMode=FAILURE_MODE),
)
LEGACY_POOLS = having(selector=LABELS, targetPortNumber=NUMBER, extensionRef=EXTENSION)
POOL_REFERENCE = both(having(name=NAME), maybe(group=GROUP, kind=KIND))
OBJECTIVES = both(having(poolRef=POOL_REFERENCE), maybe(priority=st.integers(-(2**31), 2**31 - 1)))
MODEL = both(having(value=NAME), maybe(type=st.just("Exact")))
TARGET = both(having(modelRewrite=NAME), maybe(weight=st.integers(1, 1_000_000)))
RULE = maybe(
    matches=st.lists(having(model=MODEL), max_size=2),
    targets=st.lists(TARGET, min_size=1, max_size=2),
)
REWRITES = having(poolRef=POOL_REFERENCE, rules=st.lists(RULE, max_size=2))


def is_out_of_schema(spec: dict[str, Any]) -> bool:
    """Whether a pool's reader is stricter than its schema: a selector that is empty, or has a null
    or something else that is no label.
    """
    selector = spec.get("selector")
    if isinstance(selector, dict) and "matchLabels" in selector:
        selector = selector["matchLabels"]
    return isinstance(selector, dict) and (not selector or None in selector.values())


@settings(max_examples=300, deadline=None)
@given(nearly(POOLS))
def test_pools_are_followed_that_their_schema_takes(spec: dict[str, Any]) -> None:
    """No object is taken by one and refused by the other."""
    document = pool(**{"selector": LEFT_OUT, "targetPorts": LEFT_OUT} | spec)
    takes = not POOL_RULES.admit(document)[1]
    assert (read_pool(document).value is not None) is (takes and not is_out_of_schema(spec))


@settings(max_examples=150, deadline=None)
@given(nearly(LEGACY_POOLS))
def test_legacy_pools_are_followed_that_their_schema_takes(spec: dict[str, Any]) -> None:
    """No object is taken by one and refused by the other."""
    left_out = dict.fromkeys(("selector", "targetPortNumber", "extensionRef"), LEFT_OUT)
    document = legacy_pool(**left_out | spec)
    takes = not LEGACY_POOL_RULES.admit(document)[1]
    assert (read_pool(document).value is not None) is (takes and not is_out_of_schema(spec))


@settings(max_examples=150, deadline=None)
@given(nearly(OBJECTIVES))
def test_objectives_are_followed_that_their_schema_takes(spec: dict[str, Any]) -> None:
    """No object is taken by one and refused by the other."""
    document = objective() | {"spec": spec}
    takes = not OBJECTIVE_RULES.admit(document)[1]
    assert (read_policy(document).value is not None) is takes


@settings(max_examples=250, deadline=None)
@given(nearly(REWRITES))
def test_rewrites_are_followed_that_their_schema_takes(spec: dict[str, Any]) -> None:
    """No object is taken by one and refused by the other."""
    document = rewrite() | {"spec": spec}
    takes = not REWRITE_RULES.admit(document)[1]
    assert (read_policy(document).value is not None) is takes


LABEL_VALUE = st.from_regex(r"\A(([A-Za-z0-9][-A-Za-z0-9_.]{0,61})?[A-Za-z0-9])?\Z")
DNS_LABEL = st.from_regex(r"\A[a-z0-9]([-a-z0-9]{0,20}[a-z0-9])?\Z")


@settings(max_examples=100, deadline=None)
@given(
    selector=st.dictionaries(LABEL_VALUE.filter(bool), LABEL_VALUE, min_size=1, max_size=64),
    ports=st.lists(st.integers(1, 65535), min_size=1, max_size=8, unique=True),
    protocol=st.sampled_from(["http", "kubernetes.io/h2c"]),
    picker=st.none() | st.tuples(DNS_LABEL, st.integers(1, 65535)),
)
def test_valid_pools_come_through_unchanged(
    selector: dict[str, str], ports: list[int], protocol: str, picker: tuple[str, int] | None
) -> None:
    """What was said is what is read, and the schema takes it too."""
    reference = None if picker is None else {"name": picker[0], "port": {"number": picker[1]}}
    document = pool(
        selector={"matchLabels": selector},
        targetPorts=[{"number": port} for port in ports],
        appProtocol=protocol,
        endpointPickerRef=reference,
    )
    assert not POOL_RULES.admit(document)[1]
    reading = read_pool(document)
    assert reading.findings == ()
    assert reading.value is not None
    spec = reading.value.spec
    assert dict(spec.selector) == selector
    assert spec.target_ports == tuple(ports)
    assert spec.app_protocol == protocol
    assert (spec.picker and (spec.picker.name, spec.picker.port)) == picker
