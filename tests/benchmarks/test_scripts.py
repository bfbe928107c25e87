"""Benchmark scripts import, and pages name exactly those that exist."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fleet.sim.scenarios import ELSEWHERE

ROOT = Path(__file__).parents[2]
MODULES = sorted((ROOT / "benchmarks").glob("*.py"))
SCRIPTS = {path.name for path in MODULES if '__name__ == "__main__"' in path.read_text()}
INDEX = ROOT / "benchmarks" / "README.md"
PAGES = (ROOT / "README.md", INDEX, *sorted((ROOT / "docs").rglob("*.md")))
PATH = re.compile(r"(?<!tests/)\bbenchmarks[/.](?!README|results)([a-z_]+)(?:\.py)?\b")
ROW = re.compile(r"^\| `(\w+\.py)", re.MULTILINE)


def test_every_script_imports(tmp_path: Path) -> None:
    """In one process of their own: some change their process when they are imported. Each has no
    more in its path than when it is started by itself.
    """
    names = [path.stem for path in MODULES]
    program = """
import importlib, sys
path = list(sys.path)
for name in sys.argv[1:]:
    sys.path[:] = path
    for other in [each for each in sys.modules if each in sys.argv or each.startswith("tests")]:
        del sys.modules[other]
    importlib.import_module(name)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, *names],
        env={**os.environ, "PYTHONPATH": str(ROOT / "benchmarks")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_table_of_scripts_lists_those_that_exist() -> None:
    table = INDEX.read_text(encoding="utf-8").partition("```")[0]
    assert set(ROW.findall(table)) == SCRIPTS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_names_no_script_that_is_missing(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = {f"{name}.py" for name in PATH.findall(text)}
    if page.name == "README.md":
        named |= set(re.findall(r"`(\w+\.py)\b", text))
    assert named <= SCRIPTS


def test_simulate_names_no_script_that_is_missing() -> None:
    named = {f"{name}.py" for text in ELSEWHERE.values() for name in PATH.findall(text)}
    assert named
    assert named <= SCRIPTS


def test_a_script_makes_the_folder_of_its_results(tmp_path: Path) -> None:
    for module in MODULES:
        shutil.copy(module, tmp_path)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "kv_trace.py")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "results" / "kv_trace.json").is_file()


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.stem)
def test_results_are_written_in_one_place(module: Path) -> None:
    source = module.read_text(encoding="utf-8")
    assert ("benchmarks/results/" in source) <= ("write_results(" in source)
