"""The last one out: ends a fleet's processes when the process that started them is gone.

Run as a script with nothing but the standard library, so that it is small and up in no time. It
reads lines `+GROUP` and `-GROUP` from its standard input, which only the fleet holds open. At the
end of input, however that came about, every process group still on the list is terminated, and
killed if it does not go.
"""

from __future__ import annotations

import os
import signal
import sys
import time

GRACE_SECONDS = 3.0


def signal_group(group: int, number: int) -> bool:
    """Send a signal to a process group; False when nobody is left in it."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def read_groups() -> set[int]:
    """Follow standard input to its end; the groups that are still alive by its account."""
    groups: set[int] = set()
    for line in sys.stdin:
        group = int(line[1:])
        if line.startswith("+"):
            groups.add(group)
        else:
            groups.discard(group)
    return groups


def main() -> int:
    """Wait for the end of input, then leave nothing behind."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups = read_groups()
    alive = {group for group in groups if signal_group(group, signal.SIGTERM)}
    deadline = time.monotonic() + GRACE_SECONDS
    while alive and time.monotonic() < deadline:
        time.sleep(0.05)
        alive = {group for group in alive if signal_group(group, 0)}
    for group in alive:
        signal_group(group, signal.SIGKILL)
    return 0


if __name__ == "__main__":
    sys.exit(main())
