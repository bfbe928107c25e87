"""How much memory this process may still take: what the machine has available, and what every
cgroup that the process is in leaves of its limit. Page cache counts as available in both: the
kernel gives it up before it runs short.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

Read = Callable[[str], str | None]

_AVAILABLE = re.compile(r"^MemAvailable:\s+(\d+) kB$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class _Accounting:
    """What a version of cgroups calls the files of a folder, and the page cache in memory.stat."""

    limits: tuple[str, ...]
    usage: str
    page_cache: re.Pattern[str]


_V1 = _Accounting(
    ("memory.limit_in_bytes",),
    "memory.usage_in_bytes",
    re.compile(r"^total_(?:in)?active_file (\d+)$", re.MULTILINE),
)
_V2 = _Accounting(
    ("memory.max", "memory.high"),
    "memory.current",
    re.compile(r"^(?:in)?active_file (\d+)$", re.MULTILINE),
)


def available_bytes(read: Read) -> int | None:
    """Bytes that can be taken without swapping or being killed for it; None where nothing says.

    `read` gives the text of a file by its path, or None where there is no such file.
    """
    machine = _AVAILABLE.search(read("/proc/meminfo") or "")
    bounds = [int(machine[1]) << 10] if machine else []
    bounds += [
        bound
        for accounting, folder in _folders(read)
        if (bound := _left(accounting, folder, read)) is not None
    ]
    return max(0, min(bounds)) if bounds else None


def read_file(path: str) -> str | None:
    """The text of a file; None where it cannot be read."""
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return None


def _left(accounting: _Accounting, folder: PurePosixPath, read: Read) -> int | None:
    """What a cgroup leaves of its limit; None without a limit."""
    limits = [_number(read(f"{folder}/{name}")) for name in accounting.limits]
    known = [limit for limit in limits if limit is not None]
    usage = _number(read(f"{folder}/{accounting.usage}"))
    if not known or usage is None:
        return None
    page_cache = accounting.page_cache.findall(read(f"{folder}/memory.stat") or "")
    return min(known) - usage + sum(map(int, page_cache))


def _number(text: str | None) -> int | None:
    """None for what is missing, and for "max"."""
    return int(text) if text is not None and text.strip().isdecimal() else None


def _folders(read: Read) -> Iterator[tuple[_Accounting, PurePosixPath]]:
    """Folders of this process's cgroups that account for memory, with all above as far as they can
    be seen: a container sees its own folder as the highest.
    """
    paths: dict[_Accounting, PurePosixPath] = {}
    for line in (read("/proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            paths[_V2] = PurePosixPath(path)
        elif "memory" in controllers.split(","):
            paths[_V1] = PurePosixPath(path)
    for line in (read("/proc/self/mountinfo") or "").splitlines():
        fields, _, kind = line.partition(" - ")
        accounting = _accounting(kind.split())
        if accounting is None or accounting not in paths:
            continue
        root, top = (PurePosixPath(field) for field in fields.split()[3:5])
        own, below = paths[accounting], PurePosixPath()
        if own.is_relative_to(root) and ".." not in own.parts:
            below = own.relative_to(root)
        for folder in (below, *below.parents):
            yield accounting, top / folder


def _accounting(kind: list[str]) -> _Accounting | None:
    """Of a mount, by its file system, its source and its options."""
    if kind[0] == "cgroup2":
        return _V2
    return _V1 if kind[0] == "cgroup" and "memory" in kind[-1].split(",") else None
