"""The fleet that a command is about: the one on this machine, unless another is named.

`pointsman up` takes free ports, so while it runs it holds a small locked file with the addresses of
its picker and of its control socket: a file without a lock belongs to a fleet that has ended.
"""

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
    """A fleet. `port` is Envoy's, `url` the address for clients, `control` a socket for orders."""

    pid: int
    picker: str
    port: int | None = None
    control: str | None = None
    url: str | None = None


def picker_url(named: str | None, environment: Mapping[str, str]) -> str:
    """Find the picker that was `named`, else that of the newest fleet, else the default."""
    if named:
        url = named if "://" in named else f"http://{named}"
        return url.rstrip("/")
    running = running_fleets(environment)
    return running[0].picker if running else DEFAULT_PICKER


def picker_behind(url: str, environment: Mapping[str, str]) -> str:
    """Find the picker of the fleet on this machine that serves `url`. Raises `FleetError`."""
    running, port = running_fleets(environment), urlsplit(url).port
    for fleet in running:
        if port in (fleet.port, urlsplit(fleet.url or "").port):
            return fleet.picker
    if running:
        raise FleetError(f"no fleet of this machine serves {url}: name its picker with --picker")
    return DEFAULT_PICKER


def which_of_several(named: str | None, environment: Mapping[str, str]) -> str | None:
    """Return a line that says which picker is used, if several run here and none was named."""
    running = [] if named else [fleet.picker for fleet in running_fleets(environment)]
    if len(running) < 2:
        return None
    others = ", ".join(running[1:])
    return f"{len(running)} fleets run here; this is {running[0]} (others: --picker {others})"


def running_fleets(environment: Mapping[str, str]) -> list[RunningFleet]:
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
    """Find the fleet that runs here; of several, the one at `port`. Raises `FleetError`."""
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
    """Publish a fleet's file; without it, commands only lose the default of `--picker`."""
    path = _folder(environment) / f"fleet-{os.getpid()}.json"
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            unfinished = path.with_suffix(".new")  # a name that no command looks for
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
    try:
        # Shared, so that two commands that look at once do not take each other for a fleet.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False
