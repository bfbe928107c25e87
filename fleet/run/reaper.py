"""The reaper: ends a fleet's processes after the process that started them has ended.

It runs as a script with only the standard library, so that it is small and starts fast. It reads
lines `+GROUP`, `-GROUP` and `/PATH` from its standard input, which only the fleet holds open. At
the end of input every process group still on the list is terminated, and killed if it does not end;
then files are removed, and folders too unless a line `.` said that the fleet removes them itself.

With a command line as its arguments, the script starts a process of that fleet: it becomes the
program once its group is on the list, or ends if the fleet is killed before that.
"""

import os
import signal
import sys
import time

GRACE_SECONDS = 3.0


def signal_group(group: int, number: int) -> bool:
    """Send a signal to a process group; return False if it has no process left."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    except PermissionError:  # the group has a process of another user
        return True
    return True


def read_input() -> tuple[set[int], list[str], list[str]]:
    """Return the groups that live at the end of input, and the files and folders to remove."""
    groups: set[int] = set()
    files: list[str] = []
    folders: list[str] = []
    for line in sys.stdin:
        if line.startswith("/"):
            path = line[1:-1]
            (folders if os.path.isdir(path) else files).append(path)
        elif line == ".\n":
            folders.clear()
        elif line.startswith("+"):
            groups.add(int(line[1:]))
        else:
            groups.discard(int(line[1:]))
    return groups, files, folders


def begin(argv: list[str]) -> int:
    """Become the program `argv` as soon as standard input has a byte, which the fleet writes when
    the reaper knows of this process. Returns at the end of input instead.
    """
    if not os.read(0, 1):
        return 1
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    # Python ignores these signals, and the program would inherit that.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        sys.exit(f"cannot run {argv[0]}: {error.strerror}")


def end() -> int:
    # It has to outlive the fleet, so only the end of input ends it.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups, files, folders = read_input()
    alive = {group for group in groups if signal_group(group, signal.SIGTERM)}
    deadline = time.monotonic() + GRACE_SECONDS
    while alive and time.monotonic() < deadline:
        time.sleep(0.05)
        alive = {group for group in alive if signal_group(group, 0)}
    for group in alive:
        signal_group(group, signal.SIGKILL)
    for name in files:
        if os.path.exists(name):
            os.unlink(name)
    if folders:
        import shutil  # noqa: PLC0415 (every process of a fleet begins as this script)

        for name in folders:
            shutil.rmtree(name, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(begin(sys.argv[1:]) if sys.argv[1:] else end())
