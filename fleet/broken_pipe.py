"""Ends a command whose output is not read to its end (`pointsman doctor | head`)."""

import contextlib
import io
import os
import select
import signal
import sys
from collections.abc import Callable

STATUS = 128 + signal.SIGPIPE  # as a shell reports programs that a broken pipe ends


def status_of(command: Callable[[], int]) -> int:
    """Run a command; return `STATUS`, silently, if the reader of its output has disconnected."""
    before = _output()
    try:
        try:
            return command()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except (BrokenPipeError, SystemExit) as error:
        if before is None or not (_was_replaced(before) or _has_no_reader(error)):
            raise
    # The interpreter writes the rest of the output when it ends.
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)
    return STATUS


def _output() -> os.stat_result | None:
    with contextlib.suppress(OSError, AttributeError, io.UnsupportedOperation, ValueError):
        return os.fstat(sys.stdout.fileno())
    return None


def _was_replaced(before: os.stat_result) -> bool:
    """Check for the null device, by which the table library replaces a broken pipe as it exits."""
    now = _output()
    return now is not None and not os.path.samestat(before, now)


def _has_no_reader(error: BaseException) -> bool:
    if not isinstance(error, BrokenPipeError):
        return False
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)  # errors are reported with any mask
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
