"""Objects of the Kubernetes API become values, or all of their problems are reported."""

import json
from collections.abc import Iterator
from itertools import count
from typing import Any

import msgspec
import pytest

from picker.config.findings import Finding, Severity
from picker.k8s.object_map import MalformedObjectError
from picker.k8s.objects import MAX_PROBLEMS, ObjectReader, Pool, PoolName, read_policy, read_pool
from picker.pool.policies import (
    KINDS,
    InferenceModelRewrite,
    InferenceObjective,
    RewriteTarget,
    rules_of,
)
from tests.support.kube.kubernetes_objects import legacy_pool, objective, pool, rewrite


def referred(found: Pool) -> tuple[Any, ...]:
    one = found.picker
    return one.group, one.kind, one.name, one.service_port, one.failure_mode


def errors(problems: tuple[Finding, ...]) -> list[str]:
    return [one.text for one in problems if one.severity is Severity.ERROR]


def labels(selector: dict[str, Any], **metadata: Any) -> dict[str, Any]:
    made = pool(selector={"matchLabels": selector})
    made["metadata"] |= metadata
    return made


def read(document: dict[str, Any]) -> Pool:
    reading = read_pool(document)
    assert reading.problems == ()
    assert reading.value is not None
    return reading.value


def test_a_pool_is_read_whole() -> None:
    document = pool(
        targetPorts=[{"number": 8000}, {"number": 8001}],
        appProtocol="kubernetes.io/h2c",
        endpointPickerRef={"name": "epp", "port": {"number": 9002}, "failureMode": "FailOpen"},
    )
    document["metadata"] = {
        "name": "llm",
        "namespace": "team",
        "deletionTimestamp": "2026-01-01T00:00:00Z",
        "managedFields": [{"what": "ever"}],
        "fieldOfTomorrow": 1,
    }
    found = read(document)
    assert (found.name, found.namespace, found.is_deleting) == ("llm", "team", True)
    assert dict(found.selector) == {"app": "vllm"}
    assert found.target_ports == (8000, 8001)
    assert referred(found) == ("", "Service", "epp", 9002, "FailOpen")


def test_an_absent_or_null_field_has_its_default() -> None:
    for found in (read(pool()), read(pool(appProtocol=None, endpointPickerRef=None))):
        assert found.picker is None
    reference = {"name": "e", "kind": "Deployment", "group": None, "failureMode": None}
    found = read(pool(endpointPickerRef=reference))
    assert referred(found) == ("", "Deployment", "e", None, "FailClose")


def test_a_selector_takes_pods_that_have_all_labels() -> None:
    found = read(labels({"b": "2", "a": ""}))
    assert found.selects({"a": "", "b": "2", "c": "3"})
    assert not found.selects({"b": "2"})
    assert not found.selects({"a": "1", "b": "2"})
    assert found.label_selector == "a=,b=2"


@pytest.mark.parametrize(
    ("reference", "port"),
    [
        ({"name": "e"}, 9002),
        ({"name": "e", "portNumber": 7}, 7),
        ({"name": "e", "kind": "Pod"}, None),
    ],
)
def test_the_legacy_form_is_read_to_the_same_values(
    reference: dict[str, Any], port: int | None
) -> None:
    """The port of a picker's Service defaults to 9002."""
    found = read(legacy_pool(extensionRef=reference))
    assert dict(found.selector) == {"app": "vllm"}
    assert found.target_ports == (8000,)
    kind = reference.get("kind", "Service")
    assert referred(found) == ("", kind, "e", port, "FailClose")


SHARES = [{"modelRewrite": "v1", "weight": 9}, {"modelRewrite": "v2", "weight": 1}]
SHARED = (RewriteTarget("v1", 9), RewriteTarget("v2", 1))
LEGACY = {"apiVersion": "inference.networking.x-k8s.io/v1alpha2"}


@pytest.mark.parametrize(
    ("document", "targets", "paths"),
    [
        (rewrite({"split": SHARES}) | LEGACY, [SHARED], []),
        (rewrite({"targets": SHARES}) | LEGACY, [SHARED], []),
        (
            rewrite({"targets": SHARES, "split": [{"modelRewrite": "x"}]}) | LEGACY,
            [SHARED],
            ["spec.rules[0].split"],
        ),
        (
            rewrite({"split": [*SHARES, {"modelRewrite": "x"}]}) | LEGACY,
            [(*SHARED, RewriteTarget("x"))],
            ["spec.rules[0].split[2]"],
        ),
        (rewrite({"split": SHARES}), [], ["spec.rules[0].split", "spec.rules[0]"]),
    ],
)
def test_only_legacy_rewrites_may_split(
    document: dict[str, Any], targets: list[tuple[RewriteTarget, ...]], paths: list[str]
) -> None:
    reading = read_policy(document)
    assert isinstance(reading.value, InferenceModelRewrite)
    assert [one.targets for one in rules_of(reading.value)] == targets
    assert [one.key for one in reading.problems] == paths


SELECTOR = "spec.selector.matchLabels"


@pytest.mark.parametrize(
    ("document", "text"),
    [
        (labels({"bad key!": "v"}), f"{SELECTOR}.bad key!: is no label key"),
        (labels({"x/y/z": "v"}), f"{SELECTOR}.x/y/z: is no label key"),
        (labels({"": "v"}), f"{SELECTOR}.: is no label key"),
        (labels({"a": None, "b": "v"}), f"{SELECTOR}: expected a string, got nothing"),
        (labels({"a": "-"}), f"{SELECTOR}: expected a string matching"),
        (labels({}), f"{SELECTOR}: expected a mapping of length >= 1"),
        (pool(selector={"app": "x"}), "spec.selector: the key 'matchLabels' is missing"),
        (pool(targetPorts=[{"number": 0}]), "spec.targetPorts[0].number: expected a whole number"),
        (pool(targetPorts=[{"number": True}]), "spec.targetPorts[0].number: expected a whole"),
        (
            pool(targetPorts=[{"number": n} for n in range(1, 11)]),
            "spec.targetPorts: expected a li",
        ),
        (pool(targetPorts=[{"number": 1}] * 2), "spec.targetPorts: port number must be unique"),
        (pool(endpointPickerRef={"name": "e"}), "spec.endpointPickerRef: port is required"),
        (pool(appProtocol="grpc"), "spec.appProtocol: invalid enum value 'grpc'; allowed: http, k"),
        (pool(selector=None), "spec: the key 'selector' is missing"),
        (pool() | {"spec": None}, "the key 'spec' is missing"),
        (pool() | {"spec": []}, "spec: expected a mapping, got a list"),
        (pool() | {"apiVersion": "v2"}, "apiVersion: is not known here; allowed: inference.net"),
        (pool() | {"kind": "Pod"}, "kind: is not known here; allowed: InferencePool"),
        (pool(name="Bad_Name"), "metadata.name: expected a string matching"),
        (pool() | {"metadata": None}, "metadata: the key 'name' is missing"),
        (legacy_pool(selector={}), "spec.selector: expected a mapping of length >= 1"),
        (legacy_pool(targetPortNumber=0), "spec.targetPortNumber: expected a whole number from 1"),
        (objective(priority=2**31), "spec.priority: expected a whole number from -2147483648"),
        (objective(poolRef={"name": "x" * 254}), "spec.poolRef.name: expected a string of length"),
        (objective() | {"spec": None}, "the key 'spec' is missing"),
        (rewrite({"split": []}) | LEGACY, "spec.rules[0].split: expected a list of length >= 1"),
        (
            rewrite({"matches": [{"model": {"value": ""}}]}),
            "spec.rules[0].matches[0].model.value: m",
        ),
        ([], "expected an object of Kubernetes"),
    ],
)
def test_a_bad_object_has_no_value_but_an_error_with_its_path(document: Any, text: str) -> None:
    is_policy = isinstance(document, dict) and document["kind"] in KINDS
    reading = (read_policy if is_policy else read_pool)(document)
    assert reading.value is None
    assert reading.problems[0].text.startswith(text)
    assert len(errors(reading.problems)) == 1


def test_the_number_of_problems_is_bounded_and_errors_come_first() -> None:
    many = {f"k{number}": number for number in range(200)}
    reading = read_pool(pool(**many, appProtocol="x"))
    assert reading.value is None
    assert len(reading.problems) == MAX_PROBLEMS + 1
    assert reading.problems[0].key == "spec.appProtocol"


def test_deeply_nested_objects_are_harmless() -> None:
    """Unknown values are not walked through."""
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
    assert [one.text for one in reading.problems] == [
        "spec.targetPort: unknown key, which is ignored; did you mean 'targetPorts'?",
        "spec.newThing: unknown key, which is ignored",
    ]


def test_a_label_that_was_dropped_is_reported() -> None:
    """The API server drops a null, but the annotation of `kubectl apply` still has it."""
    applied = json.dumps({"spec": {"selector": {"matchLabels": {"role": None, "app": None}}}})
    annotations = {"kubectl.kubernetes.io/last-applied-configuration": applied}
    reading = read_pool(labels({"app": "vllm"}, annotations=annotations))
    assert reading.value is not None
    (found,) = reading.problems
    assert found.key == "spec.selector.matchLabels.role"
    assert "takes more Pods" in found.message


@pytest.mark.parametrize("status", [{"parents": 7}, [], {"conditions": [{}] * 99}])
def test_a_status_changes_nothing(status: Any) -> None:
    """Others write it, and the picker does not read it."""
    assert read_pool(pool(status)).problems == ()
    assert isinstance(read_policy(objective(status)).value, InferenceObjective)


# The objects of one pool


@pytest.fixture
def errors_counted() -> Iterator[int]:
    return count()


@pytest.fixture
def reader(errors_counted: Iterator[int]) -> ObjectReader:
    pool_name = PoolName("p", "ours", "inference.networking.k8s.io")
    return ObjectReader(pool_name, lambda: next(errors_counted))


def raw(document: dict[str, Any], namespace: str = "ours", **metadata: Any) -> msgspec.Raw:
    given = document.get("metadata", {"name": "a"}) | {"namespace": namespace, "uid": "u"}
    return msgspec.Raw(msgspec.json.encode(document | {"metadata": given | metadata}))


def test_only_objects_of_the_namespace_count(reader: ObjectReader) -> None:
    for namespace, counts in (("ours", True), ("theirs", False)):
        assert (reader.read_pool(raw(pool(name="p"), namespace)) is not None) is counts
        assert (reader.read_objective(raw(objective(), namespace)) is not None) is counts
        given = rewrite({"targets": [{"modelRewrite": "m"}]})
        assert (reader.read_rewrite(raw(given, namespace)) is not None) is counts
        assert (reader.read_pod(raw({}, namespace)) is not None) is counts


def test_only_objects_that_concern_the_pool_count(reader: ObjectReader) -> None:
    assert reader.read_pool(raw(pool(name="other"))) is None
    ending = raw(pool(name="p", targetPorts=7), deletionTimestamp="2026-01-01T00:00:00Z")
    assert reader.read_pool(ending) is None
    assert reader.read_objective(raw(objective(poolRef={"name": "q"}, priority="x"))) is None


def test_problems_are_logged_and_counted_once_for_each_state(
    reader: ObjectReader, errors_counted: Iterator[int], caplog: pytest.LogCaptureFixture
) -> None:
    for version in ("1", "1", "2"):
        given = raw(pool(name="p", new=1), resourceVersion=version)
        assert reader.read_pool(given) is not None
    assert [one.getMessage() for one in caplog.records] == [
        "InferencePool ours/p: spec.new: unknown key, which is ignored"
    ] * 2
    for version in ("3", "3"):
        with pytest.raises(MalformedObjectError, match=r"spec\.targetPorts: expected a list"):
            reader.read_pool(raw(pool(name="p", targetPorts=7), resourceVersion=version))
    assert next(errors_counted) == 1


@pytest.mark.parametrize(
    ("metadata", "keeps"), [({}, True), ({"deletionTimestamp": "2026-01-01T00:00:00Z"}, False)]
)
def test_a_malformed_pod_keeps_its_last_state_until_it_is_deleted(
    reader: ObjectReader, metadata: dict[str, str], keeps: bool
) -> None:
    with pytest.raises(MalformedObjectError) as raised:
        reader.read_pod(raw({"status": {"podIP": "nowhere"}}, **metadata))
    assert raised.value.keep_last_good is keeps
