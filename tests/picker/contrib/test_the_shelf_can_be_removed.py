"""Deleting `picker/contrib` removes its plugin types and breaks nothing else."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from picker.config.catalog import modules_of

ROOT = Path(__file__).parents[3]
SCRIPT = """
import sys
# The finder of an editable installation would find the shelf in the repository.
sys.meta_path[:] = [one for one in sys.meta_path if "editable" not in one.__module__]
from picker.app.picker import compose
from picker.cli.options import Options
from picker.errors import ConfigError

compose(Options(endpoints_file=sys.argv[1]))
print("composed")
try:
    compose(Options(endpoints_file=sys.argv[1], config_text=sys.argv[2]))
except ConfigError as error:
    print(error)
"""
CONFIG = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins: [{type: dynamo-cost-scorer}]
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> str:
    copy = tmp_path_factory.mktemp("repository")
    for package in ("base", "picker"):
        skipped = shutil.ignore_patterns("contrib", "__pycache__")
        shutil.copytree(ROOT / package, copy / package, ignore=skipped)
    endpoints = copy / "endpoints.yaml"
    endpoints.write_text("endpoints: []\n")
    command = [sys.executable, "-c", SCRIPT, str(endpoints), CONFIG]
    environment = os.environ | {"PYTHONPATH": str(copy)}
    return subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, cwd=copy, env=environment
    ).stdout


def test_a_picker_composes_with_the_default_configuration(printed: str) -> None:
    assert printed.startswith("composed\n")


def test_a_shelved_type_is_unknown(printed: str) -> None:
    assert "unknown plugin type 'dynamo-cost-scorer'" in printed


def test_the_shelf_is_found_where_it_is() -> None:
    found = {row.name for _, rows in modules_of("picker.contrib") for row in rows}
    assert {"dynamo-cost-scorer", "predicted-latency-producer", "vllmgrpc-parser"} <= found
