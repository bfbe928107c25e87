"""Sees to it that no child outlives its parent, however that ended."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # prctl.h


def die_with(parent: int) -> None:
    """Have the system kill this process when `parent` is gone; at once if it is already.

    Systems other than Linux cannot do that; there the end of the channel has to do.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        raise SystemExit(1)
