"""docs/configuration.md says what the plugin files say."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(not find_spec("picker.contrib"), reason="its shelf was removed")
def test_the_documented_plugin_types_are_those_there_are() -> None:
    """`scripts/document_plugins.py --write` repairs a difference."""
    script = ROOT / "scripts" / "document_plugins.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr
