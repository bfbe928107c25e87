"""The files by which parts of a fleet enter and leave service."""

import json
from pathlib import Path

import yaml

from fleet.envoy.settings import SocketAddress
from fleet.run.layout import FleetOptions, FleetPlan, Site
from fleet.run.members import Rotation

WORKERS = {f"worker-{n}": SocketAddress("127.0.0.1", 10 + n) for n in (1, 2)}


def layout(folder: Path, **changes: object) -> FleetPlan:
    site = Site(folder, 4, (1, 2, 3), (11, 12), cores=2, envoy=Path("/bin/envoy"))
    return FleetPlan(FleetOptions(**changes), site, None)


def members(path: Path) -> list[dict]:
    (resource,) = json.loads(path.read_text())["resources"]
    return [one["endpoint"] for one in resource["endpoints"][0].get("lb_endpoints", [])]


def test_the_pickers_file_has_the_workers_and_the_objectives(tmp_path: Path) -> None:
    plan = layout(tmp_path, objectives="kind: InferenceObjective\n")
    rotation = Rotation(plan)
    for names in (["worker-1", "worker-2"], ["worker-2"], []):
        rotation.endpoints({name: WORKERS[name] for name in names})
        pool, objectives = yaml.safe_load_all(plan.endpoints_path.read_text())
        assert [one["name"] for one in pool["endpoints"]] == names
        assert objectives == {"kind": "InferenceObjective"}


def test_envoys_file_has_the_workers(tmp_path: Path) -> None:
    """Envoy sees a rename, and no unfinished file remains."""
    plan = layout(tmp_path)
    rotation = Rotation(plan)
    rotation.pool(WORKERS.values())
    first = plan.pool_path.stat().st_ino
    rotation.pool([WORKERS["worker-2"]])
    assert plan.pool_path.stat().st_ino != first
    (member,) = members(plan.pool_path)
    assert member["address"]["socket_address"]["port_value"] == 12
    assert {path.name for path in tmp_path.iterdir()} == {plan.pool_path.name}


def test_envoys_file_has_the_health_address_of_each_picker(tmp_path: Path) -> None:
    """During a restart there are two."""
    plan = layout(tmp_path)
    Rotation(plan).pickers([plan.picker((7, 8, 9)), plan.picker()])
    found = [
        (
            Path(one["address"]["pipe"]["path"]).name,
            one["health_check_config"]["address"]["socket_address"]["port_value"],
        )
        for one in members(plan.pickers_path)
    ]
    assert found == [("picker-8.sock", 8), ("picker-2.sock", 2)]
