"""What Linux says of a process of this machine: its open files, and how it was started."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

_LISTENING = "0A"
_LIMIT = "Max open files"
_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Listener:
    """A process: how many files it has open and may open, and its command line."""

    files: tuple[int, int]
    words: tuple[str, ...]


def listener_at(port: int) -> Listener | None:
    """The process that listens at a TCP port here; None where it is not found, or belongs to
    somebody else.
    """
    inodes = _inodes(port)
    for folder in _PROC.glob("[0-9]*") if inodes else ():
        with contextlib.suppress(OSError):  # gone, or not ours to look at
            names = [_target(one) for one in (folder / "fd").iterdir()]
            limit = _limit((folder / "limits").read_text())
            if limit is not None and any(f"socket:[{one}]" in names for one in inodes):
                line = (folder / "cmdline").read_bytes().decode(errors="replace")
                return Listener((len(names), limit), tuple(line.split("\0")[:-1]))
    return None


def _target(link: Path) -> str:
    with contextlib.suppress(OSError):  # closed since
        return os.readlink(link)
    return ""


def _inodes(port: int) -> set[str]:
    found: set[str] = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in (_PROC / "net" / table).read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == _LISTENING and int(words[1].rpartition(":")[2], 16) == port:
                    found.add(words[9])
    return found


def _limit(text: str) -> int | None:
    """The soft limit; None where there is none."""
    for line in text.splitlines():
        if line.startswith(_LIMIT):
            word = line.removeprefix(_LIMIT).split()[0]
            return int(word) if word.isdigit() else None
    return None
