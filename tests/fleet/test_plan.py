"""What a fleet consists of."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import yaml

from fleet.envoy.settings import Mechanism, SocketAddress
from fleet.plan import Options, Plan, Site, plan
from picker.config.pool_file import read_pool_file
from picker.types import Endpoint

SITE = Site(Path("/run/x"), (1, 2, 3), (11, 12), cores=5, envoy=Path("/bin/envoy"))
MODEL = Path("/m/model.gguf")


def flags(argv: tuple[str, ...]) -> dict[str, str]:
    """Flag → the word after it."""
    return {flag: value for flag, value in itertools.pairwise(argv) if flag[:2] == "--"}


def lay_out(**changes: object) -> Plan:
    """A fleet of two torch workers, changed."""
    return plan(Options(**changes), SITE, MODEL)


def test_workers_share_the_cores() -> None:
    """Each worker's threads are its share of the cores, at least one."""
    first, second = lay_out().workers
    assert flags(first.argv)["--num-threads"] == "2"
    assert first.environment["OMP_NUM_THREADS"] == "2"
    assert flags(second.argv)["--port"] == "12"
    crowded = plan(Options(workers=9), SITE, MODEL)
    assert flags(crowded.workers[0].argv)["--num-threads"] == "1"


def test_the_simulator_needs_no_model_and_no_threads() -> None:
    """A simulated worker is asked for neither."""
    worker = plan(Options(engine="sim"), SITE, None).workers[0]
    assert flags(worker.argv)["--engine"] == "sim"
    assert not {"--model", "--num-threads"} & set(worker.argv)


def test_workers_leave_nothing_behind() -> None:
    """Their temporary files are in the fleet's folder, which goes when the fleet does."""
    assert {worker.environment["TMPDIR"] for worker in lay_out().workers} == {"/run/x"}


def test_extra_flags_come_last() -> None:
    """What the user adds can override what we say."""
    worker = lay_out(worker_args=("--port", "7", "--enable-x"), dtype="float32").workers[0]
    assert worker.argv[-3:] == ("--port", "7", "--enable-x")
    assert flags(worker.argv)["--dtype"] == "float32"


def test_the_picker_learns_of_every_worker() -> None:
    """The endpoints file is one the picker reads, and names all workers."""
    read = read_pool_file(lay_out().endpoints.encode(), "endpoints", "default")
    assert read.findings == ()
    assert read.contents.endpoints == (
        Endpoint("worker-1", "127.0.0.1", 11),
        Endpoint("worker-2", "127.0.0.1", 12),
    )
    assert yaml.safe_load(lay_out().endpoints)["endpoints"][0]["name"] == "worker-1"


def test_the_pieces_know_each_other() -> None:
    """Envoy is told where the picker and the workers are, the picker which ports to take."""
    layout = lay_out(config=Path("c.yaml"), routing=Mechanism.ORIGINAL_DST, port=99)
    assert flags(layout.picker.argv)["--grpc-port"] == "1"
    assert flags(layout.picker.argv)["--config-file"] == "c.yaml"
    bootstrap = layout.bootstrap
    assert bootstrap.picker == SocketAddress("127.0.0.1", 1)
    assert bootstrap.picker_health == SocketAddress("127.0.0.1", 2)
    assert bootstrap.endpoints == layout.worker_addresses
    assert bootstrap.mechanism is Mechanism.ORIGINAL_DST
    assert bootstrap.listen == SocketAddress("127.0.0.1", 99)


@pytest.mark.parametrize("buffered", [True, False])
def test_envoy_keeps_request_bodies_unless_told_otherwise(buffered: bool) -> None:
    """The choice reaches the bootstrap, whose own default is the protocol's full duplex."""
    changes = {} if buffered else {"buffer_request_body": False}
    assert lay_out(**changes).bootstrap.buffer_request_body is buffered


def test_the_picker_serves_from_one_process_unless_told_otherwise() -> None:
    """The flag is the picker's own."""
    assert "--processes" not in lay_out().picker.argv
    assert flags(lay_out(picker_processes=3).picker.argv)["--processes"] == "3"


@pytest.mark.parametrize("trusted", [True, False])
def test_clients_name_no_tenants_unless_told_otherwise(trusted: bool) -> None:
    """Else anybody could give himself a priority."""
    changes = {"trust_control_headers": True} if trusted else {}
    assert lay_out(**changes).bootstrap.trust_control_headers is trusted


def test_a_recording_is_asked_of_the_picker() -> None:
    """By its own flag, and only where it is asked of the fleet."""
    assert flags(lay_out(record=Path("/tmp/r.jsonl")).picker.argv)["--record"] == "/tmp/r.jsonl"
    assert "--record" not in flags(lay_out().picker.argv)


def test_experimental_plugins_are_asked_of_the_picker() -> None:
    """Only when the user asks for them."""
    flag = "--allow-experimental-plugins"
    assert flag in lay_out(allow_experimental_plugins=True).picker.argv
    assert flag not in lay_out().picker.argv
