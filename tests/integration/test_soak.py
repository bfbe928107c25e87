"""Long runs: a worker under mixed load leaks nothing, and streams outlive a minute of kills."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.fleet.running_fleet import free_base_port

pytestmark = [pytest.mark.full, pytest.mark.soak]

SCRIPTS = Path(__file__).parents[2] / "benchmarks"


def report_of(folder: Path, script: str, *flags: str) -> dict[str, Any]:
    results = folder / "results.json"
    command = [sys.executable, str(SCRIPTS / script), *flags, "--json", str(results)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, Any] = json.loads(results.read_text())
    return report


def test_twenty_seconds_of_mixed_load_leave_nothing_behind(tmp_path: Path) -> None:
    report = report_of(tmp_path, "worker_soak.py", "--engine", "sim", "--minutes", "0.33")
    assert report["violations"] == []
    figures = report["figures"]
    assert figures["requests"] > 100
    assert set(figures["by kind"]) == {
        *("abort", "bad", "leave-stream", "leave-whole", "stream", "whole")
    }
    assert figures["ended for the worker"]["abort"] > 0


@pytest.mark.envoy
def test_a_minute_of_kills(tmp_path: Path) -> None:
    port = str(free_base_port())
    report = report_of(tmp_path, "resume.py", "--streams", "300", "--port", port)
    assert report["figures"]["streams that ran there"] > 10
