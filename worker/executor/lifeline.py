"""Ends a process together with its parent."""

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1  # prctl.h


def die_with_parent() -> None:
    """Have the system kill this process when its parent ends (on Linux, when the thread that
    started it ends): code that never returns, or holds the interpreter, cannot do so itself. Does
    nothing outside Linux. A parent that has already ended is not noticed.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
