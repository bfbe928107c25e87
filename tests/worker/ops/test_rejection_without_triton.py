"""Verification works on a machine where Triton does not."""

import logging
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from worker.ops import rejection_torch
from worker.ops.drafted import AcceptedPrefixes, DraftBatch
from worker.ops.rejection import Sums, choose_sums, working_sums

CPU = torch.device("cpu")


@dataclass
class Counted:
    asked: set[str]
    fails_at: str = ""

    def _ask(self, name: str) -> None:
        self.asked.add(name)
        if name == self.fails_at:
            raise RuntimeError("Failed to find C compiler. Please specify via CC")

    def log_normalizers(self, scores: Tensor) -> Tensor:
        self._ask("log_normalizers")
        return rejection_torch.log_normalizers(scores)

    def excess(self, batch: DraftBatch, normalizers: Tensor, log_weights: Tensor) -> Tensor:
        self._ask("excess")
        return rejection_torch.excess(batch, normalizers, log_weights)

    def last_tokens(self, batch: DraftBatch, acceptance: AcceptedPrefixes, noise: Tensor) -> Tensor:
        self._ask("last_tokens")
        return rejection_torch.last_tokens(batch, acceptance, noise)


def test_sums_that_work_are_taken_once_all_of_them_have_run() -> None:
    """A kernel that cannot be compiled must not be met by a request first."""
    sums = Counted(set())
    assert working_sums(lambda: sums, CPU) is sums
    assert sums.asked == {"log_normalizers", "excess", "last_tokens"}


@pytest.mark.parametrize("fails_at", ["log_normalizers", "excess", "last_tokens", "import"])
def test_without_triton_or_a_compiler_torch_verifies(
    fails_at: str, caplog: pytest.LogCaptureFixture
) -> None:
    def load() -> Sums:
        if fails_at == "import":
            raise ModuleNotFoundError("No module named 'triton'")
        return Counted(set(), fails_at)

    with caplog.at_level(logging.WARNING):
        assert working_sums(load, CPU) is rejection_torch
    [record] = caplog.records
    assert "pip install '.[gpu]'" in record.getMessage()
    assert "C compiler" in record.getMessage()
    assert record.exc_info is not None


def test_a_cpu_takes_torch_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    assert choose_sums(CPU) is rejection_torch
    assert not caplog.records


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
        [sys.executable, "-c", script],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
