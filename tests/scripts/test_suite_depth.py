"""The options of the suite itself: which tests `make test-all` adds, and which are too slow."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests import durations
from tests.durations import Duration, Record, encoded, read, too_slow

ROOT = Path(__file__).parents[2]
SUITE = """
import pytest, subprocess, sys
from hypothesis import given, strategies as st
from tests.depth import worlds

@pytest.mark.full
def test_marked(): pass

@given(st.integers())
def test_property(number): pass

SEEDS = range(worlds(30))

@pytest.mark.parametrize("seed", SEEDS)
def test_walk(seed): pass

@pytest.fixture
def size(): return worlds(30)

@pytest.fixture
def sizes(size): return [size]

def test_with_a_fixture(sizes): pass

class TestClass:
    def test_method(self): return SEEDS

def test_shallow(): pass
"""
PLAIN = """
import subprocess, sys

def test_plain(): pass

def test_child():
    subprocess.run([sys.executable, "-c", "sum(range(10_000_000))"], check=True)
"""


def run_suite(folder: Path, *options: str, depth: str = "") -> str:
    (folder / "test_deep.py").write_text(SUITE)
    (folder / "test_plain.py").write_text(PLAIN)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "DEPTH": depth}
    environment.pop("PYTEST_ADDOPTS", None)
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider"]
    command += ["-c", "/dev/null", "--rootdir", str(folder), "-v", *options, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_rest_of_the_suite_is_what_is_marked_and_what_depends_on_depth(tmp_path: Path) -> None:
    printed = run_suite(tmp_path, "--beyond-default", depth="full")
    assert "test_plain.py" not in printed
    assert "34 passed, 3 deselected" in printed


def test_a_tenth_of_the_seeds_runs_by_default(tmp_path: Path) -> None:
    assert "9 passed, 1 deselected" in run_suite(tmp_path, "-m", "not full")


@pytest.mark.parametrize("processes", [(), ("-n", "2")], ids=["one-process", "two-processes"])
def test_a_record_has_every_item_with_the_time_of_its_children(
    processes: tuple[str, ...], tmp_path: Path
) -> None:
    path = tmp_path / "records" / "test.jsonl"
    run_suite(tmp_path, "-m", "not full", "--record-durations", str(path), *processes)
    record = read(path)
    found = {each.item.partition("::")[2]: each for each in record.durations}
    assert len(found) == 9
    assert found["test_child"].cpu_seconds > 10 * found["test_plain"].cpu_seconds
    assert record.loop_seconds > 0


def test_the_bound_grows_with_the_time_of_the_calibration_loop() -> None:
    items = (Duration("tests/a.py::test_a", 9.0, 3.0), Duration("tests/b.py::test_b[1]", 9.0, 5.0))
    usual = durations.REFERENCE_LOOP_SECONDS
    assert [each.cpu_seconds for each in too_slow(Record(usual / 3, items), {})] == [5.0, 3.0]
    assert [each.cpu_seconds for each in too_slow(Record(usual * 2, items), {})] == [5.0]
    assert too_slow(Record(usual * 3, items), {}) == []


@pytest.mark.parametrize(
    "name", ["tests", "tests/b.py", "tests/b.py::test_b", "tests/b.py::test_b[1]"]
)
def test_an_exempt_name_covers_its_items_and_no_others(name: str) -> None:
    items = (Duration("tests/b.py::test_b[1]", 9.0, 5.0), Duration("tests_/b.py_::x", 9.0, 5.0))
    found = too_slow(Record(durations.REFERENCE_LOOP_SECONDS, items), {name: "a reason"})
    assert [each.item for each in found] == ["tests_/b.py_::x"]


def test_an_exemption_that_covers_no_item_is_stale() -> None:
    record = Record(0.05, (Duration("tests/a.py::test_a", 9.0, 3.0),))
    assert durations.stale(record, {"tests/a.py": "", "tests/b.py": ""}) == ["tests/b.py"]


@pytest.mark.parametrize(("cpu_seconds", "status"), [(4.9, 0), (5.1, 1)])
def test_the_check_lists_items_above_the_bound_and_fails_on_those_far_above(
    cpu_seconds: float, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "test.jsonl"
    item = Duration("tests/b.py::test_b", 6.0, cpu_seconds)
    exempt = tomllib.loads(durations.EXEMPT.read_text())
    ran = (Duration(name, 1.0, 1.0) for name in exempt)
    path.write_text(encoded(Record(0.01, (item, *ran))))
    assert durations.main(["check", str(path)]) == status
    printed = capsys.readouterr().out
    assert f"tests/b.py::test_b: {cpu_seconds} CPU seconds, above 2.0" in printed
    assert "slow.toml" in printed
    assert durations.main(["check", str(tmp_path / "absent.jsonl")]) == 2
