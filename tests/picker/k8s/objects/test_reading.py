"""Objects of the Kubernetes API become values, or it is told why they are not followed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from kubernetes_objects import (
    LEFT_OUT,
    legacy_pool,
    objective,
    pool,
    rewrite,
)

from picker.k8s.objects.findings import MAX_FINDINGS, ObjectFinding, Severity
from picker.k8s.objects.reading import read_policy, read_pool
from picker.k8s.objects.values import PickerReference
from picker.pool.policy_objects import (
    InferenceModelRewrite,
    InferenceObjective,
    rules_of,
)
from picker.pool.rewrites import RewriteTarget


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


SHARES = [{"modelRewrite": "v1", "weight": 9}, {"modelRewrite": "v2", "weight": 1}]
SHARED = (RewriteTarget("v1", 9), RewriteTarget("v2", 1))
LEGACY = {"apiVersion": "inference.networking.x-k8s.io/v1alpha2"}


@pytest.mark.parametrize(
    ("rule", "targets", "told"),
    [
        ({"split": SHARES}, SHARED, []),
        ({"targets": SHARES}, SHARED, []),
        ({"targets": SHARES, "split": [{"modelRewrite": "x"}]}, SHARED, ["spec.rules[0].split"]),
        (
            {"split": [*SHARES, {"modelRewrite": "x"}]},
            (*SHARED, RewriteTarget("x")),
            ["spec.rules[0].split[2]"],
        ),
    ],
)
def test_legacy_rewrites_may_split(
    rule: dict[str, Any], targets: tuple[RewriteTarget, ...], told: list[str]
) -> None:
    """The older name of `targets`, which count where both stand."""
    reading = read_policy(rewrite(rule) | LEGACY)
    assert isinstance(reading.value, InferenceModelRewrite)
    [read] = rules_of(reading.value)
    assert read.targets == targets
    assert [one.path for one in reading.findings] == told


def test_rewrites_of_the_current_group_do_not_split() -> None:
    """An API server would not store the key either; the rule says nothing."""
    reading = read_policy(rewrite({"split": SHARES}))
    assert isinstance(reading.value, InferenceModelRewrite)
    assert rules_of(reading.value) == ()
    paths = [one.path for one in reading.findings]
    assert paths == ["spec.rules[0].split", "spec.rules[0]"]


def test_a_legacy_split_keeps_its_limits() -> None:
    """Those of targets."""
    assert errors(read_policy(rewrite({"split": []}) | LEGACY).findings) == ["spec.rules[0].split"]


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
