"""Pods as JSON become the picker's records."""

import json
from pathlib import Path
from typing import Any

import pytest

from picker.k8s.pods import ACTIVE_PORTS, LEGACY_ACTIVE_PORTS, Phase, PodError, read_pod
from tests.support.kube.pod_records import pod_document, record

FOLDER = Path(__file__).parents[3] / "tests/data/kubernetes"


def changed(path: str, value: Any) -> bytes:
    document = pod_document("a")
    *steps, last = path.split(".")
    part = document
    for step in steps:
        part = part[step]
    part[last] = value
    return json.dumps(document).encode()


def test_a_pod_is_read_whole() -> None:
    read = record("a", "10.0.0.7", labels={"app": "x"}, node="n")
    assert (read.key, read.uid, read.address) == (("default", "a"), "uid-a", "10.0.0.7")
    assert (read.node, read.node_address) == ("n", "192.168.0.1")
    assert (read.phase, read.is_ready, read.is_deleting) == (Phase.RUNNING, True, False)
    assert read.labels == {"app": "x"}
    assert read.could_serve()


def test_every_recorded_pod_can_be_read() -> None:
    for path in sorted(FOLDER.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            given = json.loads(line)["object"]
            read = read_pod(json.dumps(given).encode())
            assert read.uid == given["metadata"]["uid"]
            assert read.address == given["status"].get("podIP")
            assert read.is_deleting == ("deletionTimestamp" in given["metadata"])
            assert read.phase.value == given["status"]["phase"]


@pytest.mark.parametrize(
    ("how", "could_serve"),
    [
        ({"ready": False}, True),
        ({"deleting": True}, False),
        ({"phase": "Failed"}, False),
        ({"phase": "Succeeded"}, False),
        ({"phase": "Pending"}, False),
        ({"phase": "Sleeping"}, False),
        ({"ip": None}, False),
    ],
)
def test_phase_conditions_and_deletion_decide_whether_a_pod_serves(
    how: dict[str, Any], could_serve: bool
) -> None:
    """Readiness is judged by the view, as it may be missing for a moment only."""
    assert record("a", **how).could_serve() is could_serve


def test_the_first_ip_of_a_pod_with_two_is_its_address() -> None:
    ips = [{"ip": "FD00:0:0::1"}, {"ip": "10.0.0.1"}]
    document = pod_document("a")
    document["status"] |= {"podIP": "fd00::1", "podIPs": ips}
    assert read_pod(json.dumps(document).encode()).address == "fd00::1"
    del document["status"]["podIP"]
    assert read_pod(json.dumps(document).encode()).address == "fd00::1"


@pytest.mark.parametrize(
    ("annotations", "ports"),
    [
        ({}, None),
        ({ACTIVE_PORTS: "8000, 8002"}, {8000, 8002}),
        ({LEGACY_ACTIVE_PORTS: "8001"}, {8001}),
        ({ACTIVE_PORTS: "8000", LEGACY_ACTIVE_PORTS: "8001"}, {8000}),
        ({ACTIVE_PORTS: "x,,-1,0,1,65535,65536,8003"}, {1, 65535, 8003}),
        ({ACTIVE_PORTS: ""}, set()),
    ],
)
def test_active_ports_are_those_of_the_annotation(
    annotations: dict[str, str], ports: set[int] | None
) -> None:
    assert record("a", annotations=annotations).active_ports == ports


def test_an_incarnation_is_of_the_containers_that_declare_the_port() -> None:
    """A restarted sidecar does not affect the server's cache."""
    two = {"server": {"ports": [8000]}, "proxy": {"ports": [15090]}}
    before = record("a", containers=two).incarnation(8000)
    restarted = {**two, "proxy": {"ports": [15090], "restarts": 1}}
    assert record("a", containers=restarted).incarnation(8000) == before
    restarted = {**two, "server": {"ports": [8000], "restarts": 1}}
    assert record("a", containers=restarted).incarnation(8000) != before


def test_without_declared_ports_every_container_may_be_the_server() -> None:
    """Ports need not be declared; any restart may then have emptied the cache."""
    two: dict[str, Any] = {"server": {}, "proxy": {}}
    before = record("a", containers=two).incarnation(8000)
    assert record("a", containers={**two, "proxy": {"restarts": 1}}).incarnation(8000) != before


def test_another_pod_of_the_same_name_is_another_incarnation() -> None:
    """A StatefulSet reuses its names."""
    assert record("a", uid="1").incarnation(1) != record("a", uid="2").incarnation(1)


@pytest.mark.parametrize(
    "document",
    [
        b"{}",
        b"[]",
        b"not json",
        changed("metadata", None),
        changed("metadata.name", ""),
        changed("metadata.uid", ""),
        changed("metadata.uid", 7),
        changed("metadata.labels", {"app": 1}),
        changed("status.podIP", "10.0.0"),
        changed("status.podIP", "pod.example"),
        changed("status.conditions", [{"type": "Ready"}]),
        changed("spec.containers", [{"name": "s", "ports": [{"containerPort": "http"}]}]),
    ],
)
def test_a_document_that_is_no_pod_is_refused(document: bytes) -> None:
    """No API server sends such documents; they are refused all the same."""
    with pytest.raises(PodError):
        read_pod(document)


def test_states_that_make_no_difference_are_equal() -> None:
    """Annotations, managed fields and the like change all the time."""
    document = pod_document("a")
    document["metadata"] |= {"managedFields": [{"manager": "x"}], "annotations": {"seen": "now"}}
    assert read_pod(json.dumps(document).encode()) == record("a")
