"""Objects of the Kubernetes API become values, or all of their problems are reported."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count
from typing import Any

import msgspec
import pytest

from picker.k8s.object_check import ObjectProblem
from picker.k8s.object_map import MalformedObjectError
from picker.k8s.objects import MAX_PROBLEMS, ObjectReader, Pool, PoolName, read_policy, read_pool
from picker.pool.policies import InferenceModelRewrite, InferenceObjective, RewriteTarget, rules_of
from tests.support.kube.kubernetes_objects import legacy_pool, objective, pool, rewrite


def referred(found: Pool) -> tuple[Any, ...]:
    """The picker that a pool names."""
    one = found.picker
    return one.group, one.kind, one.name, one.service_port, one.failure_mode


def errors(problems: tuple[ObjectProblem, ...]) -> list[str]:
    return [one.path for one in problems if one.is_error]


def labels(selector: dict[str, Any], **metadata: Any) -> dict[str, Any]:
    """A pool that selects by these labels."""
    made = pool(selector={"matchLabels": selector})
    made["metadata"] |= metadata
    return made


def read(document: dict[str, Any]) -> Pool:
    reading = read_pool(document)
    assert reading.problems == ()
    assert reading.value is not None
    return reading.value


def test_a_pool_is_read_whole() -> None:
    """All of its spec, and of its metadata what tells it apart from others."""
    document = pool(
        targetPorts=[{"number": 8000}, {"number": 8001.0}],
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


def test_what_is_left_out_or_null_has_its_default() -> None:
    """The same that an API server would fill in."""
    for found in (read(pool()), read(pool(appProtocol=None, endpointPickerRef=None))):
        assert found.picker is None
    reference = {"name": "e", "kind": "Deployment", "group": None, "failureMode": None}
    found = read(pool(endpointPickerRef=reference))
    assert referred(found) == ("", "Deployment", "e", None, "FailClose")


def test_a_selector_takes_pods_that_have_all_labels() -> None:
    """And is asked for in the words of the API."""
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
    """One port, and 9002 as the port of a picker's Service that names none."""
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
    """The older name of `targets`, which count where both are given."""
    reading = read_policy(document)
    assert isinstance(reading.value, InferenceModelRewrite)
    assert [one.targets for one in rules_of(reading.value)] == targets
    assert [one.path for one in reading.problems] == paths


@pytest.mark.parametrize(
    ("document", "path", "fix"),
    [
        (labels({"bad key!": "v"}), 'spec.selector.matchLabels["bad key!"]', "write at most 63"),
        (labels({"x/y/z": "v"}), 'spec.selector.matchLabels["x/y/z"]', "perhaps behind a DNS name"),
        (labels({"": "v"}), 'spec.selector.matchLabels[""]', "write at most 63"),
        (labels({"a": None, "b": "v"}), "spec.selector.matchLabels.a", "write a value"),
        (labels({"a": "-"}), "spec.selector.matchLabels.a", "begin and end with a letter"),
        (labels({}), "spec.selector.matchLabels", "add what is missing"),
        (pool(selector={"app": "x"}), "spec.selector.matchLabels", "add the key 'matchLabels'"),
        (pool(targetPorts=[{"number": 0}]), "spec.targetPorts[0].number", "from 1 to 65535"),
        (pool(targetPorts=[{"number": True}]), "spec.targetPorts[0].number", "a whole number"),
        (pool(targetPorts=[{"number": n} for n in range(1, 11)]), "spec.targetPorts", "than 8"),
        (pool(targetPorts=[{"number": 1}] * 2), "spec.targetPorts", "name each port once"),
        (pool(endpointPickerRef={"name": "e"}), "spec.endpointPickerRef", "add 'port"),
        (pool(appProtocol="grpc"), "spec.appProtocol", "one of: http, kubernetes.io/h2c"),
        (pool(selector=None), "spec.selector", "add the key 'selector'"),
        (pool() | {"spec": None}, "spec", "add the key 'spec'"),
        (pool() | {"spec": []}, "spec", "write a mapping"),
        (pool() | {"apiVersion": "v2"}, "apiVersion", "one of: inference.networking.k8s.io/v1"),
        (pool() | {"kind": "Pod"}, "kind", "one of: InferencePool"),
        (pool(name="Bad_Name"), "metadata", "as an API server returns it"),
        (pool() | {"metadata": None}, "metadata", "as an API server returns it"),
        (legacy_pool(selector={}), "spec.selector", "add what is missing"),
        (legacy_pool(targetPortNumber=0), "spec.targetPortNumber", "from 1 to 65535"),
    ],
)
def test_a_bad_pool_is_reported_and_not_followed(
    document: dict[str, Any], path: str, fix: str
) -> None:
    """Where, and what to do about it."""
    reading = read_pool(document)
    assert reading.value is None
    (found,) = (one for one in reading.problems if one.is_error)
    assert found.path == path
    assert fix in found.fix
    assert str(found).startswith(f"{path}: ")


@pytest.mark.parametrize(
    ("document", "path"),
    [
        (objective(priority=2**31), "spec.priority"),
        (objective(poolRef={"name": "x" * 254}), "spec.poolRef.name"),
        (objective() | {"spec": None}, "spec"),
        (rewrite({"split": []}) | LEGACY, "spec.rules[0].split"),
        (rewrite({"matches": [{"model": {"value": ""}}]}), "spec.rules[0].matches[0].model.value"),
        ([], ""),
    ],
)
def test_a_bad_policy_is_reported_and_not_followed(document: Any, path: str) -> None:
    reading = read_policy(document)
    assert reading.value is None
    assert errors(reading.problems) == [path]
    assert str(reading.problems[0]).startswith(path or "the object: must be a mapping")


def test_everything_wrong_is_reported_at_once() -> None:
    """With the values, in one line each."""
    reading = read_pool(pool(targetPorts=[{"number": "8\n"}, {}, {"number": 2**70}]))
    assert [(one.path, one.value) for one in reading.problems] == [
        ("spec.targetPorts[0].number", r'"8\n"'),
        ("spec.targetPorts[1].number", None),
        ("spec.targetPorts[2].number", "a huge number"),
    ]


def test_reports_are_bounded() -> None:
    """Of a huge object a part is reported, errors before warnings, and long values are cut."""
    reading = read_pool(pool(targetPorts=[{"number": "x" * 1000}] * 500, **{"y" * 9: [[]] * 99}))
    assert len(reading.problems) == MAX_PROBLEMS
    assert all(len(str(one)) < 300 for one in reading.problems)
    many = {f"k{number}": number for number in range(200)}
    reading = read_pool(pool(**many, appProtocol="x"))
    assert len(reading.problems) == MAX_PROBLEMS
    assert reading.problems[0].path == "spec.appProtocol"


def test_deeply_nested_objects_do_no_harm() -> None:
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
    assert [(one.path, one.is_error, one.fix) for one in reading.problems] == [
        ("spec.targetPort", False, "write 'targetPorts'"),
        ("spec.newThing", False, "leave it out"),
    ]


def test_a_label_that_was_dropped_is_reported() -> None:
    """The API server drops a null, but the annotation of `kubectl apply` still has it."""
    applied = json.dumps({"spec": {"selector": {"matchLabels": {"role": None, "app": None}}}})
    annotations = {"kubectl.kubernetes.io/last-applied-configuration": applied}
    reading = read_pool(labels({"app": "vllm"}, annotations=annotations))
    assert reading.value is not None
    (found,) = reading.problems
    assert found.path == "spec.selector.matchLabels.role"
    assert "takes more Pods" in found.message


@pytest.mark.parametrize("status", [{"parents": 7}, [], {"conditions": [{}] * 99}])
def test_a_status_takes_nothing_away(status: Any) -> None:
    """Others write it, and the picker does not read it."""
    assert read_pool(pool(status)).problems == ()
    assert isinstance(read_policy(objective(status)).value, InferenceObjective)


# The objects of one pool


@pytest.fixture
def errors_counted() -> Iterator[int]:
    """A counter that goes up by one at each step."""
    return count()


@pytest.fixture
def reader(errors_counted: Iterator[int]) -> ObjectReader:
    """Reads what concerns the pool `p` of the namespace "ours"."""
    pool_name = PoolName("p", "ours", "inference.networking.k8s.io")
    return ObjectReader(pool_name, lambda: next(errors_counted))


def raw(document: dict[str, Any], namespace: str = "ours", **metadata: Any) -> msgspec.Raw:
    """An object of a namespace."""
    given = document.get("metadata", {"name": "a"}) | {"namespace": namespace, "uid": "u"}
    return msgspec.Raw(msgspec.json.encode(document | {"metadata": given | metadata}))


def test_only_objects_of_the_namespace_count(reader: ObjectReader) -> None:
    """Whatever path they came by, and though they name a pool of the same name."""
    for namespace, counts in (("ours", True), ("theirs", False)):
        assert (reader.read_pool(raw(pool(name="p"), namespace)) is not None) is counts
        assert (reader.read_objective(raw(objective(), namespace)) is not None) is counts
        given = rewrite({"targets": [{"modelRewrite": "m"}]})
        assert (reader.read_rewrite(raw(given, namespace)) is not None) is counts
        assert (reader.read_pod(raw({}, namespace)) is not None) is counts


def test_only_objects_that_concern_the_pool_count(reader: ObjectReader) -> None:
    """Problems of others are not reported; a pool that is being deleted is as good as gone."""
    assert reader.read_pool(raw(pool(name="other"))) is None
    ending = raw(pool(name="p", targetPorts=7), deletionTimestamp="2026-01-01T00:00:00Z")
    assert reader.read_pool(ending) is None
    assert reader.read_objective(raw(objective(poolRef={"name": "q"}, priority="x"))) is None


def test_problems_are_logged_and_counted_once_for_each_state(
    reader: ObjectReader, errors_counted: Iterator[int], caplog: pytest.LogCaptureFixture
) -> None:
    """Though the same object is listed again and again; an error is raised every time."""
    for version in ("1", "1", "2"):
        given = raw(pool(name="p", new=1), resourceVersion=version)
        assert reader.read_pool(given) is not None
    assert [one.getMessage() for one in caplog.records] == [
        "InferencePool ours/p: spec.new: is unknown and not followed, got 1: leave it out"
    ] * 2
    for version in ("3", "3"):
        with pytest.raises(MalformedObjectError, match=r"spec\.targetPorts: must be a list"):
            reader.read_pool(raw(pool(name="p", targetPorts=7), resourceVersion=version))
    assert next(errors_counted) == 1


@pytest.mark.parametrize(
    ("metadata", "keeps"), [({}, True), ({"deletionTimestamp": "2026-01-01T00:00:00Z"}, False)]
)
def test_a_malformed_pod_keeps_its_last_state_until_it_is_deleted(
    reader: ObjectReader, metadata: dict[str, str], keeps: bool
) -> None:
    """A deletion counts whatever else is wrong."""
    with pytest.raises(MalformedObjectError) as raised:
        reader.read_pod(raw({"status": {"podIP": "nowhere"}}, **metadata))
    assert raised.value.keep_last_good is keeps
