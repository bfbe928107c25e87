"""The parts of a fleet."""

import dataclasses
import itertools
import json
from pathlib import Path

import pytest
import yaml

from base.response_bodies import ResponseBodies
from fleet.envoy.settings import Mechanism, PipeAddress, SocketAddress
from fleet.envoy.tenants import AllowedTenant, Tenants
from fleet.run.layout import DISAGGREGATED_CONFIG, FleetOptions, FleetPlan, Site, endpoints_yaml
from picker.config.build import BuildOptions, check_config
from picker.config.catalog import builtin_plugins
from picker.config.pool_file import read_pool_file
from picker.types import Endpoint

SITE = Site(Path("/run/x"), 4, (1, 2, 3), (11, 12), cores=5, envoy=Path("/bin/envoy"))
MODEL = Path("/m/model.gguf")


def flags(argv: tuple[str, ...]) -> dict[str, str]:
    return {flag: value for flag, value in itertools.pairwise(argv) if flag[:2] == "--"}


def lay_out(**changes: object) -> FleetPlan:
    return FleetPlan(FleetOptions(**changes), SITE, MODEL)


def test_the_first_page_names_the_dashboards_own_port() -> None:
    """The first picker's port would end with a restart."""
    layout = lay_out(port=81)
    assert layout.picker().http.port == 3
    text = layout.envoy().bootstrap.welcome
    assert text is not None
    assert "http://127.0.0.1:4/metrics\n" in text
    assert "http://127.0.0.1:3" not in text


def test_workers_share_the_cores() -> None:
    first, second = lay_out().workers
    assert flags(first.program.argv)["--num-threads"] == "2"
    assert first.program.environment["OMP_NUM_THREADS"] == "2"
    assert flags(second.program.argv)["--port"] == "12"
    crowded = FleetPlan(FleetOptions(workers=9), SITE, MODEL)
    assert flags(crowded.workers[0].program.argv)["--num-threads"] == "1"


@pytest.mark.parametrize(("workers", "share"), [(1, None), (2, "0.25"), (9, "0.056")])
def test_workers_share_the_memory(workers: int, share: str | None) -> None:
    for worker in FleetPlan(FleetOptions(workers=workers), SITE, MODEL).workers:
        assert flags(worker.program.argv).get("--gpu-memory-utilization") == share


def test_a_share_of_memory_can_be_given() -> None:
    worker = lay_out(worker_args=("--gpu-memory-utilization", "0.1")).workers[0]
    assert flags(worker.program.argv)["--gpu-memory-utilization"] == "0.1"


def test_workers_speculate_as_a_single_one_does() -> None:
    assert "--speculative-config" not in lay_out().workers[0].program.argv
    other = lay_out(worker_args=("--speculative-config", "null")).workers[0].program.argv
    assert flags(other)["--speculative-config"] == "null"


def test_the_simulator_needs_no_model_and_no_threads() -> None:
    worker = FleetPlan(FleetOptions(engine="sim"), SITE, None).workers[0].program
    assert flags(worker.argv)["--engine"] == "sim"
    assert not {"--model", "--num-threads", "--gpu-memory-utilization"} & set(worker.argv)


def test_workers_leave_nothing_behind() -> None:
    """Their temporary files are in the fleet's folder, which is removed with the fleet."""
    assert {worker.program.environment["TMPDIR"] for worker in lay_out().workers} == {"/run/x"}


def test_extra_flags_come_last() -> None:
    worker = lay_out(worker_args=("--port", "7", "--enable-x"), dtype="float32").workers[0].program
    assert worker.argv[-3:] == ("--port", "7", "--enable-x")
    assert flags(worker.argv)["--dtype"] == "float32"


def test_the_picker_learns_of_every_worker() -> None:
    named = {one.program.name: one.address for one in lay_out().workers}
    text = endpoints_yaml(named)
    read = read_pool_file(text.encode(), "endpoints", "default")
    assert read.findings == ()
    assert read.contents.endpoints == (
        Endpoint("worker-1", "127.0.0.1", 11),
        Endpoint("worker-2", "127.0.0.1", 12),
    )
    assert yaml.safe_load(text)["endpoints"][0]["name"] == "worker-1"


def test_the_parts_have_each_others_addresses() -> None:
    layout = lay_out(config=Path("c.yaml"), routing=Mechanism.ORIGINAL_DST, port=99)
    socket = str(SITE.folder.absolute() / "picker-2.sock")
    assert flags(layout.picker().program.argv)["--bind-address"] == f"unix://{socket}"
    assert flags(layout.picker().program.argv)["--config-file"] == "c.yaml"
    bootstrap = layout.envoy().bootstrap
    assert bootstrap.picker == PipeAddress(socket)
    assert bootstrap.picker_health == SocketAddress("127.0.0.1", 2)
    assert bootstrap.endpoints == tuple(one.address for one in layout.workers)
    assert bootstrap.mechanism is Mechanism.ORIGINAL_DST
    assert bootstrap.listen == SocketAddress("127.0.0.1", 99)


def test_a_folder_with_a_long_name_has_envoy_reach_the_picker_at_a_port() -> None:
    """The system limits the path of a socket to 107 bytes."""
    layout = FleetPlan(
        FleetOptions(), dataclasses.replace(SITE, folder=Path("/" + "é" * 47)), MODEL
    )
    assert layout.picker().place == "127.0.0.1:1"
    assert flags(layout.picker().program.argv)["--grpc-port"] == "1"
    short = FleetPlan(FleetOptions(), dataclasses.replace(SITE, folder=Path("/" + "é" * 46)), MODEL)
    assert short.picker().place == f"/{'é' * 46}/picker-2.sock"


@pytest.mark.parametrize("buffered", [True, False])
def test_envoy_buffers_request_bodies_by_default(buffered: bool) -> None:
    """The bootstrap's own default is the protocol's full duplex."""
    changes = {} if buffered else {"buffer_request_body": False}
    assert lay_out(**changes).envoy().bootstrap.buffer_request_body is buffered


@pytest.mark.parametrize("trusted", [True, False])
def test_clients_name_no_tenants_by_default(trusted: bool) -> None:
    """Otherwise any client could choose its priority."""
    changes = {"trust_control_headers": True} if trusted else {}
    assert lay_out(**changes).envoy().bootstrap.trust_control_headers is trusted


@pytest.mark.parametrize(("limit", "shown"), [("5", "usage"), ("", "off")])
def test_limits_of_tokens_need_the_usage_of_responses(limit: str, shown: str) -> None:
    tenants = Tenants((AllowedTenant("acme", ("sk-0123456789abcdef",), token_limit=limit),))
    layout = lay_out(tenants=tenants)
    argv, bootstrap = layout.picker().program.argv, layout.envoy().bootstrap
    assert argv[argv.index("--response-bodies") + 1] == bootstrap.response_bodies.value == shown
    assert ("--token-limits" in argv) is bool(limit)
    assert bootstrap.tenants is tenants
    every = lay_out(tenants=tenants, response_bodies=ResponseBodies.ALL)
    assert every.envoy().bootstrap.response_bodies is ResponseBodies.ALL


def test_the_picker_gets_the_flag_of_a_recording() -> None:
    assert (
        flags(lay_out(record=Path("/tmp/r.jsonl")).picker().program.argv)["--record"]
        == "/tmp/r.jsonl"
    )
    assert "--record" not in flags(lay_out().picker().program.argv)


def test_the_picker_gets_the_flag_of_experimental_plugins() -> None:
    flag = "--allow-experimental-plugins"
    assert flag in lay_out(allow_experimental_plugins=True).picker().program.argv
    assert flag not in lay_out().picker().program.argv


def test_the_picker_gets_the_flag_of_a_decision_header() -> None:
    assert "--decision-header" in lay_out(decision_header=True).picker().program.argv
    assert "--decision-header" not in lay_out().picker().program.argv


def test_another_picker_has_ports_and_a_recording_of_its_own() -> None:
    layout = lay_out(record=Path("/tmp/r.jsonl"))
    other = layout.picker((7, 8, 9), Path("/tmp/r-2.jsonl"))
    assert other.ports == (7, 8, 9)
    assert flags(other.program.argv)["--grpc-health-port"] == "8"
    assert flags(other.program.argv)["--record"] == "/tmp/r-2.jsonl"
    assert flags(other.program.argv)["--endpoints-file"] == "/run/x/endpoints.yaml"


def test_the_next_envoy_takes_over_except_after_a_crash() -> None:
    """Number and epoch identify the previous one; after a crash they start again."""
    site = dataclasses.replace(SITE, hot_restart_id=12)
    layout = FleetPlan(FleetOptions(drain_seconds=2.5), site, MODEL)
    second = layout.envoy(2, 1)
    assert flags(second.program.argv)["--base-id"] == "12"
    assert flags(second.program.argv)["--restart-epoch"] == "1"
    assert flags(second.program.argv)["--drain-time-s"] == "3"
    assert flags(second.again.argv)["--restart-epoch"] == "0"
    assert second.admin != layout.envoy().admin
    assert second.bootstrap_path != layout.envoy().bootstrap_path
    assert layout.hot_restart_socket(4) == Path("/run/x/hot_parent_121")


def test_without_shared_memory_envoy_is_not_taken_over() -> None:
    """Without the flags that say so, Envoy would not start."""
    assert "--disable-hot-restart" in lay_out().envoy().program.argv
    assert lay_out().hot_restart_memory is None
    assert lay_out().hot_restart_socket(0) is None


def test_roles_share_the_ports() -> None:
    """A prefill worker listens itself; a sidecar listens on the port of a decode worker."""
    site = dataclasses.replace(SITE, worker_ports=(11, 12, 13), decoder_ports=(21, 22), kv_key="k")
    layout = FleetPlan(FleetOptions(workers=3, prefill=1), site, MODEL)
    first, second, third = layout.workers
    ports = [flags(one.program.argv)["--port"] for one in (first, second, third)]
    assert (ports, first.sidecar) == (["11", "21", "22"], None)
    assert second.address == SocketAddress("127.0.0.1", 12)
    assert second.sidecar is not None
    assert flags(second.sidecar.argv)["--port"] == "12"
    assert flags(second.sidecar.argv)["--decoder"] == "http://127.0.0.1:21"
    roles = [
        json.loads(flags(one.program.argv)["--kv-transfer-config"])["kv_role"]
        for one in layout.workers
    ]
    assert roles == ["kv_producer", "kv_consumer", "kv_consumer"]
    named = {one.program.name: one.address for one in layout.workers}
    read = read_pool_file(endpoints_yaml(named, roles=layout.roles).encode(), "e", "default")
    labels = [dict(one.labels) for one in read.contents.endpoints]
    assert labels == [{"llm-d.ai/role": role} for role in ("prefill", "decode", "decode")]


def test_the_picker_decides_between_roles() -> None:
    found = check_config(DISAGGREGATED_CONFIG.encode(), "c.yaml", builtin_plugins(), BuildOptions())
    assert not found
    layout = lay_out(workers=1, prefill=1)
    assert flags(layout.picker().program.argv)["--config-file"] == "/run/x/disaggregated.yaml"
    own = lay_out(workers=1, prefill=1, config=Path("c.yaml"))
    assert flags(own.picker().program.argv)["--config-file"] == "c.yaml"
    assert (own.disaggregated_path, lay_out().disaggregated_path) == (None, None)


def test_a_front_is_before_envoy() -> None:
    options = FleetOptions(front=True, host="::1", port=8080)
    assert options.num_ports == FleetOptions().num_ports + 1
    layout = FleetPlan(options, dataclasses.replace(SITE, gateway_port=77), MODEL)
    assert layout.envoy().bootstrap.listen == SocketAddress("127.0.0.1", 77)
    assert layout.front is not None
    given = flags(layout.front.argv)
    assert (given["--host"], given["--port"]) == ("::1", "8080")
    assert given["--gateway"] == "http://127.0.0.1:77"
    assert lay_out().front is None
