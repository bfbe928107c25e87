"""Which picker a command is about: of the fleet that runs on this machine, unless one is named.

`pointsman up` takes free ports, so while it runs it keeps a small file that says where its picker
answers, with a lock on it: a file that nobody holds a lock on is of a fleet that is gone, however
it ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

DEFAULT_PICKER = "http://127.0.0.1:9090"
_PATTERN = "fleet-*.json"


def picker_url(named: str | None, environment: Mapping[str, str]) -> str:
    """Where the picker's HTTP port is, without a slash at the end.

    What was `named`, else that of the fleet on this machine that was started last, else the default
    of `pointsman picker`.
    """
    if named:
        url = named if "://" in named else f"http://{named}"
        return url.rstrip("/")
    running = running_pickers(environment)
    return running[0] if running else DEFAULT_PICKER


def which_of_several(named: str | None, environment: Mapping[str, str]) -> str | None:
    """A line that says which picker is meant, where more than one runs here and none was named."""
    running = [] if named else running_pickers(environment)
    if len(running) < 2:
        return None
    others = ", ".join(running[1:])
    return f"{len(running)} fleets run here; this is of {running[0]} (--picker names {others})"


def running_pickers(environment: Mapping[str, str]) -> list[str]:
    """Of all fleets that run here, the last one started first."""
    found: list[tuple[float, str]] = []
    for path in _folder(environment).glob(_PATTERN):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            with path.open(encoding="utf-8") as file:
                if _is_held(file.fileno()):
                    found.append((path.stat().st_mtime, str(json.load(file)["picker"])))
                    continue
            path.unlink()
    return [url for _, url in sorted(found, reverse=True)]


@contextlib.contextmanager
def shown_as_running(url: str, environment: Mapping[str, str]) -> Iterator[None]:
    """Meanwhile `picker_url` finds the picker at `url`.

    A folder that cannot be written only costs the convenience: then commands need `--picker`.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            folder = _folder(environment)
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = folder / f"fleet-{os.getpid()}.json"
            # Under a name that nobody looks at until it is locked.
            unfinished = path.with_suffix(".new")
            file = stack.enter_context(unfinished.open("w", encoding="utf-8"))
            stack.callback(path.unlink, missing_ok=True)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            json.dump({"pid": os.getpid(), "picker": url}, file)
            file.flush()
            unfinished.rename(path)
        yield


def _folder(environment: Mapping[str, str]) -> Path:
    runtime = environment.get("XDG_RUNTIME_DIR")
    if runtime:
        return Path(runtime) / "pointsman"
    cache = environment.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "pointsman" / "run"


def _is_held(descriptor: int) -> bool:
    """Whether somebody has a lock on the file."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False
