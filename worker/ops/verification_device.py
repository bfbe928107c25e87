"""Which implementation of verification's sums works on this machine's device.

Triton's kernels need Triton, and a C compiler when they are first run. Whether both are there is
found out when a worker starts, not at the first draft of a request that samples.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib import import_module
from typing import cast

import torch

from worker.ops import rejection_torch
from worker.ops.drafted import DraftBatch
from worker.ops.rejection import BLOCK, Sums, certain, verify_batch

logger = logging.getLogger(__name__)


def choose_sums(device: torch.device) -> Sums:
    """What verifies drafts by rejection on `device`: kernels on a GPU if they work, else torch."""
    return rejection_torch if device.type == "cpu" else working_sums(_kernels, device)


def working_sums(load: Callable[[], Sums], device: torch.device) -> Sums:
    """What `load` gives if a small batch on `device` can be verified with it; else, after a line in
    the log, its torch twin, which gives the same answers and takes longer.
    """
    try:
        sums = load()
        _try_out(sums, device)
    except Exception:
        logger.warning(
            "Triton does not work here (it takes `pip install 'pointsman[gpu]'` and a C compiler):"
            " drafts are verified with torch",
            exc_info=True,
        )
        return rejection_torch
    return sums


def _kernels() -> Sums:
    return cast(Sums, import_module("worker.ops.rejection_triton"))


def _try_out(sums: Sums, device: torch.device) -> None:
    """Verify two drafts by block, which takes all of the sums, and wait for the result."""
    drafts = torch.tensor([[1, 2]], device=device)
    scores = torch.zeros(1, 3, 4, device=device)
    batch = DraftBatch(drafts, scores, certain(drafts, 4), torch.tensor([2], device=device))
    verify_batch(batch, [0], [0], BLOCK, sums)
