"""The Triton kernels of verification are the torch ones: on a GPU, or in Triton's interpreter."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.depth import by_depth

ROOT = Path(__file__).parents[3]
PARITY = Path(__file__).with_name("parity_rejection_triton.py")
SOME = by_depth(("-k", "(verification and 1024) or fall_back"), ())


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_kernels_agree_with_their_twins() -> None:
    """The interpreter must be chosen before Triton is imported, so the tests have their own
    process.
    """
    interpret = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *SOME, str(PARITY)],
        env={**os.environ, **interpret, "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "passed" in done.stdout


def test_a_cpu_needs_no_triton() -> None:
    script = """
import sys
sys.modules["triton"] = None
import torch
from worker.executor import answers
from worker.ops.drafted import DraftBatch
from worker.ops.rejection import certain, verify_batch
drafts = torch.zeros(1, 1, dtype=torch.int64)
batch = DraftBatch(drafts, torch.zeros(1, 2, 3), certain(drafts, 3), torch.tensor([1]))
assert verify_batch(batch, [1], [1], "block")[0].token_ids
assert "worker.ops.rejection_triton" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
