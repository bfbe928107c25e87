"""The benchmark of a GPU checks what it is going to measure, without a GPU too."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.full


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_its_checks_pass() -> None:
    """Of every kernel, and of graphs, on a toy."""
    interpret = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--check"],
        env={**os.environ, **interpret, "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": as torch") == 9
    assert "decoding by graphs: as launched anew" in done.stdout
