"""How a process ends with the one that started it."""

from __future__ import annotations

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1  # prctl.h


def die_with_parent() -> None:
    """Have the system kill this process when its parent is gone (in Linux, when the thread that
    started it is): code that never ends, or holds the interpreter, cannot see to that itself. Linux
    alone can. A parent that is gone already is not noticed.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
