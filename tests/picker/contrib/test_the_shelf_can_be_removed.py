"""Deleting `picker/contrib` removes its plugin types and breaks nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from picker.config.catalog import modules_of

ROOT = Path(__file__).parents[3]
COMPOSE = """
import sys
# The finder of an editable installation would find the shelf in the repository.
sys.meta_path[:] = [one for one in sys.meta_path if "editable" not in one.__module__]
from picker.app.picker import compose
from picker.cli.options import Options

endpoints, config = sys.argv[1:]
compose(Options(endpoints_file=endpoints, config_text=config or None))
"""
CONFIG = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nplugins: [{type: %s}]\n"


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the packages without the shelf, and a file of endpoints."""
    copy = tmp_path_factory.mktemp("repository")
    skipped = shutil.ignore_patterns("contrib", "__pycache__")
    for package in ("base", "picker"):
        if (ROOT / package).exists():
            shutil.copytree(ROOT / package, copy / package, ignore=skipped)
    (copy / "endpoints.yaml").write_text("endpoints: []\n")
    return copy


def compose(repository: Path, config: str = "") -> tuple[int, str]:
    """Compose a picker of the copy; the exit status and the last line of standard error."""
    environment = os.environ | {"PYTHONPATH": str(repository)}
    command = [sys.executable, "-c", COMPOSE, str(repository / "endpoints.yaml"), config]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=repository, env=environment
    )
    return done.returncode, done.stderr.strip().rpartition("\n")[2]


def test_a_picker_composes_with_the_default_configuration(repository: Path) -> None:
    assert compose(repository) == (0, "")


def test_a_shelved_type_is_unknown(repository: Path) -> None:
    """By the error of any type that does not exist, which names it."""
    status, error = compose(repository, CONFIG % "dynamo-cost-scorer")
    assert status == 1
    assert "unknown plugin type 'dynamo-cost-scorer'" in error


def test_the_shelf_is_found_where_it_is() -> None:
    found = {row.name for _, rows in modules_of("picker.contrib") for row in rows}
    assert {"dynamo-cost-scorer", "predicted-latency-producer", "vllmgrpc-parser"} <= found
