"""Documents with anything anywhere are judged or reported, and never crash."""

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fleet.doctor.cluster_look import ClusterFacts, lease_of
from fleet.doctor.command import diagnose
from fleet.doctor.diagnosis import Facts
from fleet.doctor.envoy_look import EnvoyFacts, read_envoy_file, read_setup
from fleet.doctor.picker_look import PickerFacts
from picker.k8s.api import LEGACY_POOLS, OBJECTIVES, POOLS, REWRITES
from tests.support.fleet.spoilt_bootstraps import bootstrap
from tests.support.kube.doctor_cluster import (
    NOW,
    PICKERS,
    WORKERS,
    lease,
    objective,
    pool,
    running,
    service,
    slices,
)
from tests.support.kube.nearly_valid_objects import places

ODD = [None, 2**70, "x", [None], {"x": 1}]
PICKER = PickerFacts(
    "http://it", metrics={"pointsman_peers_connected": 0.0, "pointsman_peers_heard": 0.0}
)
ENVOY = EnvoyFacts("it", read_setup(bootstrap()))


def _cluster() -> dict[str, Any]:
    flags = ("--pool=other", "--pool", "it:9013", "--ha-enable-leader-election", "--peers=a,b")
    picker = running("picker-1", PICKERS, *flags, "--drain-timeout=20", port=9002)
    picker["spec"]["containers"][0] |= {
        "command": ["pointsman", "picker"],
        "env": [{"name": "X", "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}}}],
        "lifecycle": {"preStop": {"sleep": {"seconds": 10}}},
    }
    made = pool()
    condition = {"type": "Accepted", "status": "False", "reason": "No", "message": "no"}
    made["status"] = {"parents": [{"parentRef": {"name": "gw"}, "conditions": [condition]}]}
    return {
        "pool": made,
        "pods": [running("worker-1", WORKERS), picker, running("picker-2", PICKERS)],
        "service": service(),
        "slices": [slices()],
        "policies": [objective()],
        "lease": lease(),
    }


def _spoilt(document: Any) -> Iterator[tuple[str, Any]]:
    """Yield the document with an odd value in every place, one at a time."""
    made = copy.deepcopy(document)
    for path in places(document):
        around = made
        for step in path[:-1]:
            around = around[step]
        before = around[path[-1]]
        for odd in ODD:
            around[path[-1]] = copy.deepcopy(odd)
            yield f"{path} = {odd}", made
        around[path[-1]] = before


@pytest.mark.parametrize("part", ["pool", "pods", "service", "slices", "policies", "lease"])
def test_odd_objects_of_a_cluster(part: str) -> None:
    """An API server validates only kinds whose definitions have rules."""
    whole = _cluster()
    for where, spoilt in _spoilt(whole[part]):
        found = whole | {part: spoilt}
        given: dict[str, Any] = {
            name: tuple(one) if isinstance(one, list) else one for name, one in found.items()
        }
        facts = ClusterFacts(
            "default",
            "it",
            served=dict.fromkeys((POOLS, LEGACY_POOLS, OBJECTIVES, REWRITES), True),
            now=NOW,
            **given,
        )
        try:
            facts = replace(facts, lease_name=lease_of(facts))
            found = diagnose(Facts(picker=PICKER, cluster=facts, envoys=(ENVOY,)))
        except Exception as error:
            raise AssertionError(where) from error
        assert all(one.fix for one in found)


def test_odd_bootstraps() -> None:
    for where, spoilt in _spoilt(bootstrap()):
        try:
            diagnose(Facts(envoys=(EnvoyFacts("it", read_setup(spoilt)),)))
        except Exception as error:
            raise AssertionError(where) from error


@pytest.mark.parametrize("text", ["[" * 3_000, '{"node":' + '{"a":' * 800 + "1" + "}" * 801])
def test_files_that_nest_too_deeply_are_findings(tmp_path: Path, text: str) -> None:
    path = tmp_path / "it"
    path.write_text(text)
    assert read_envoy_file(path).problem is not None
