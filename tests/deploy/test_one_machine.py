"""The compose file and the systemd units: what they name is there, and programs take the flags."""

import configparser
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from fleet.command_lines import parser_of
from fleet.envoy.binary import find_envoy
from picker.config.pool_file import read_pool_file

DEPLOY = Path(__file__).parents[2] / "deploy"
FOLDER = DEPLOY / "compose"
COMPOSE: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
OURS = {"picker": ["picker"], "worker-1": ["worker"], "worker-2": ["worker"]}


def flags_of(service: str) -> Any:
    return parser_of(OURS[service][0]).parse_args(SERVICES[service]["command"])


@pytest.mark.parametrize("service", SERVICES.values(), ids=SERVICES)
def test_images_are_pinned_and_files_are_there(service: dict[str, Any]) -> None:
    assert re.fullmatch(
        r"[\w./-]+:v?\d+\.\d+\.\d+(rc\d+)?(@sha256:[0-9a-f]{64})?", service["image"]
    )
    if "build" in service:
        assert (FOLDER / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
    for mount in service.get("configs", ()):
        assert (FOLDER / COMPOSE["configs"][mount["source"]]["file"]).is_file()


def test_no_port_is_open_to_other_machines() -> None:
    published = [port for service in SERVICES.values() for port in service.get("ports", ())]
    assert len(published) == 4
    assert all(port.startswith("127.0.0.1:") for port in published)
    others = {name: one.get("network_mode") for name, one in SERVICES.items() if name != "envoy"}
    assert set(others.values()) == {"service:envoy"}


def test_the_picker_and_prometheus_know_both_workers() -> None:
    read = read_pool_file((FOLDER / "endpoints.yaml").read_bytes(), "endpoints.yaml", "default")
    assert not read.findings
    known = {f"{one.address}:{one.port}" for one in read.contents.endpoints}
    served = {f"127.0.0.1:{flags_of(name).port}" for name in OURS if name != "picker"}
    jobs = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())["scrape_configs"]
    scraped = {job["job_name"]: set(job["static_configs"][0]["targets"]) for job in jobs}
    assert known == served == scraped["pointsman-worker"]
    assert scraped["pointsman-picker"] == {f"127.0.0.1:{flags_of('picker').metrics_port}"}


def test_grafana_finds_its_dashboards() -> None:
    provider = yaml.safe_load((FOLDER / "grafana/dashboards.yaml").read_text())["providers"][0]
    mounts = [one for one in SERVICES["grafana"]["configs"] if one["target"].endswith(".json")]
    assert len(mounts) == 2
    for mount in mounts:
        assert Path(mount["target"]).parent == Path(provider["options"]["path"])
        board = json.loads((FOLDER / COMPOSE["configs"][mount["source"]]["file"]).read_text())
        assert board["uid"]


@pytest.mark.envoy
def test_envoy_takes_its_bootstrap() -> None:
    command = [str(find_envoy()), "--mode", "validate", "-c", str(FOLDER / "envoy.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_units_start_what_they_say(path: Path, tmp_path: Path) -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(path)
    program, name, *flags = shlex.split(unit["Service"]["ExecStart"])
    assert (Path(program).name, f"pointsman-{name}") == ("pointsman", path.stem)
    options = parser_of(name).parse_args([one for one in flags if not one.startswith("$")])
    drain = {"picker": "drain_timeout_seconds", "worker": "shutdown_timeout_seconds"}[name]
    assert getattr(options, drain) < float(unit["Service"]["TimeoutStopSec"])
    if shutil.which("systemd-analyze") is not None:
        installed = tmp_path / path.name
        installed.write_text(path.read_text().replace(program, "/bin/true"))
        command = ("systemd-analyze", "verify", "--man=no", str(installed))
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
