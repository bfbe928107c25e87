"""Which fleet a command is about: the one that runs on this machine, unless one is named.

`pointsman up` takes free ports, so while it runs it keeps a small file that says where its picker
answers and where it takes orders, with a lock on it: a file without a lock is of a
fleet that is gone, however it ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from fleet.errors import FleetError

DEFAULT_PICKER = "http://127.0.0.1:9090"
_PATTERN = "fleet-*.json"


class RunningFleet(msgspec.Struct, frozen=True):
    """What the file says. `port` is Envoy's, `url` where clients get in by it, `control` the socket
    for orders (see `control`).
    """

    pid: int
    picker: str
    port: int | None = None
    control: str | None = None
    url: str | None = None


def picker_url(named: str | None, environment: Mapping[str, str]) -> str:
    """Where the picker's HTTP port is, without a slash at the end.

    What was `named`, else that of the fleet on this machine that was started last, else the default
    of `pointsman picker`.
    """
    if named:
        url = named if "://" in named else f"http://{named}"
        return url.rstrip("/")
    running = running_fleets(environment)
    return running[0].picker if running else DEFAULT_PICKER


def picker_behind(url: str, environment: Mapping[str, str]) -> str:
    """The picker of the fleet on this machine that serves `url`. Raises `FleetError`."""
    running, port = running_fleets(environment), urlsplit(url).port
    for fleet in running:
        if port in (fleet.port, urlsplit(fleet.url or "").port):
            return fleet.picker
    if running:
        raise FleetError(f"no fleet of this machine serves {url}: name its picker with --picker")
    return DEFAULT_PICKER


def which_of_several(named: str | None, environment: Mapping[str, str]) -> str | None:
    """A line that says which picker is meant, where more than one runs here and none was named."""
    running = [] if named else [fleet.picker for fleet in running_fleets(environment)]
    if len(running) < 2:
        return None
    others = ", ".join(running[1:])
    return f"{len(running)} fleets run here; this is {running[0]} (others: --picker {others})"


def running_fleets(environment: Mapping[str, str]) -> list[RunningFleet]:
    """All that run here, the last one started first."""
    found: list[tuple[int, RunningFleet]] = []
    for path in _folder(environment).glob(_PATTERN):
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            with path.open("rb") as file:
                if _is_held(file.fileno()):
                    fleet = msgspec.json.decode(file.read(), type=RunningFleet)
                    found.append((path.stat().st_mtime_ns, fleet))
                    continue
            path.unlink()
    return [fleet for _, fleet in sorted(found, key=lambda one: one[0], reverse=True)]


def the_fleet(environment: Mapping[str, str], port: int | None) -> RunningFleet:
    """The fleet that runs here, of several the one whose Envoy has the `port`. Raises `FleetError`
    where there is none, or more than one could be meant.
    """
    found = [fleet for fleet in running_fleets(environment) if port in (None, fleet.port)]
    if not found:
        where = "" if port is None else f" on port {port}"
        raise FleetError(f"no fleet runs here{where}: `pointsman up` starts one")
    if len(found) > 1:
        ports = ", ".join(str(fleet.port) for fleet in found)
        raise FleetError(f"{len(found)} fleets run here; choose one with --port ({ports})")
    return found[0]


@contextlib.contextmanager
def shown(fleet: RunningFleet, environment: Mapping[str, str]) -> Iterator[None]:
    """Keep the file of a fleet for as long as the block runs.

    A folder that cannot be written only costs the convenience: then commands need `--picker`.
    """
    path = _folder(environment) / f"fleet-{os.getpid()}.json"
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            unfinished = path.with_suffix(".new")  # a name that no command reads
            file = stack.enter_context(unfinished.open("wb"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.write(msgspec.json.encode(fleet))
            file.flush()
            unfinished.rename(path)
            stack.callback(path.unlink, missing_ok=True)
        yield


def _folder(environment: Mapping[str, str]) -> Path:
    runtime = environment.get("XDG_RUNTIME_DIR")
    if runtime:
        return Path(runtime) / "pointsman"
    cache = environment.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "pointsman" / "run"


def _is_held(descriptor: int) -> bool:
    """Whether another process holds a lock on the file."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False
