"""Mixed load on a worker with too small a pool: everything ends once and nothing leaks."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.full

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "worker_soak.py"


@pytest.mark.soak
def test_twenty_seconds_of_mixed_load_leave_nothing_behind(tmp_path: Path) -> None:
    results = tmp_path / "soak.json"
    command = [sys.executable, str(SCRIPT), "--engine", "sim", "--minutes", "0.33"]
    done = subprocess.run(
        [*command, "--json", str(results)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    report = json.loads(results.read_text())
    assert report["violations"] == []
    figures = report["figures"]
    assert figures["requests"] > 100
    assert set(figures["by kind"]) == {
        *("abort", "bad", "leave-stream", "leave-whole", "stream", "whole")
    }
    assert figures["ended for the worker"]["abort"] > 0
