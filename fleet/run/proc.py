"""Facts from the system about its processes: CPUs, open files, sockets and command lines."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_LISTENING = "0A"  # TCP_LISTEN, in the tables of /proc
_LIMIT = "Max open files"
_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Listener:
    files: tuple[int, int]
    words: tuple[str, ...]


def cores() -> int:
    """Count the CPUs that this process may use; all of them where the system sets no limit."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def connections(pid: int, port: int) -> int:
    """Count a process's connections on that local port; 0 once it has ended."""
    opened = _open_files(_PROC / str(pid))
    at_port = _sockets(str(pid), port)
    return sum(name in opened for name, state in at_port if state != _LISTENING)


def listener_at(port: int) -> Listener | None:
    """Find the process that listens on a TCP port; None if it belongs to another user."""
    wanted = {name for name, state in _sockets("self", port) if state == _LISTENING}
    for folder in _PROC.glob("[0-9]*") if wanted else ():
        with contextlib.suppress(OSError):  # ended, or of another user
            opened = _open_files(folder)
            limit = _limit((folder / "limits").read_text())
            if limit is not None and wanted.intersection(opened):
                line = (folder / "cmdline").read_bytes().decode(errors="replace")
                return Listener((len(opened), limit), tuple(line.split("\0")[:-1]))
    return None


def writers(folder: Path) -> Iterator[tuple[Path, int, int]]:
    """Yield the log file, process id and memory in bytes of processes that write in `folder`."""
    for process in _PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):  # ended, or of another user
            path = Path(os.readlink(process / "fd" / "1"))
            if path.parent == folder:
                pages = int((process / "statm").read_text().split()[1])
                yield path, int(process.name), pages * os.sysconf("SC_PAGE_SIZE")


def _open_files(process: Path) -> list[str]:
    found: list[str] = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(process / "fd"):
            with contextlib.suppress(OSError):  # closed in the meantime
                found.append(os.readlink(entry.path))
    return found


def _sockets(process: str, port: int) -> Iterator[tuple[str, str]]:
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in (_PROC / process / "net" / table).read_text().splitlines()[1:]:
                words = line.split()
                if int(words[1].rpartition(":")[2], 16) == port:
                    yield f"socket:[{words[9]}]", words[3]


def _limit(text: str) -> int | None:
    for line in text.splitlines():
        if line.startswith(_LIMIT):
            word = line.removeprefix(_LIMIT).split()[0]
            return int(word) if word.isdigit() else None
    return None
