"""Benchmarks run from a fresh clone, where the folder of their results does not exist."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "benchmarks").glob("*.py"))


def test_a_benchmark_makes_the_folder_of_its_results(tmp_path: Path) -> None:
    """A copy of the folder as a clone has it: the scripts alone."""
    for script in SCRIPTS:
        shutil.copy(script, tmp_path)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "kv_trace.py")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "results" / "kv_trace.json").is_file()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_results_are_written_in_one_place(script: Path) -> None:
    """Each script that promises results leaves it to `write_results` to write them."""
    source = script.read_text(encoding="utf-8")
    assert ("benchmarks/results/" in source) <= ("write_results(" in source)
