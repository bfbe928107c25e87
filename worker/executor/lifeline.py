"""Ends a process together with its parent."""

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1  # prctl.h


def die_with_parent() -> None:
    """Have the system kill this process when its parent (on Linux, the thread that started it)
    ends: code that never returns cannot end the process itself. Outside Linux nothing happens.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
