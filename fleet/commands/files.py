"""`pointsman files`: the files of deploy/ that an installation without a clone needs."""

import argparse
from collections.abc import Callable
from pathlib import Path

from base.flags import near
from fleet.errors import FleetError, UsageError

FOLDERS = ("envoy", "grafana", "prometheus", "systemd")
_HERE = Path(__file__).parents[1]
_SUFFIXES = (".yaml", ".json", ".service")

Print = Callable[[str], None]


def source() -> Path:
    """Return their folder: a wheel's copy (`scripts/one_package.py`), else the clone's."""
    copy = _HERE / "deploy"
    return copy if copy.is_dir() else _HERE.parent / "deploy"


def known() -> list[str]:
    root = source()
    paths = (path for folder in FOLDERS for path in (root / folder).iterdir())
    return sorted(str(path.relative_to(root)) for path in paths if path.suffix in _SUFFIXES)


def files_command(given: argparse.Namespace, out: Print) -> int:
    """Write the files at or below the names; without names list all. Raises `FleetError`."""
    every, names, into = known(), given.names, given.into
    if not names:
        for name in every:
            out(name)
        return 0
    chosen: dict[Path, str] = {}
    for name in names:
        found = [one for one in every if one == name or one.startswith(f"{name.rstrip('/')}/")]
        if not found:
            hint = near(name, [*every, *FOLDERS])
            raise UsageError(f"there is no file {name}{hint} (`pointsman files` lists them)")
        chosen |= {into / Path(one).name: one for one in found}
    there = next((path for path in chosen if path.exists()), None)
    if there is not None:
        raise FleetError(f"{there} is there already: remove it, or write elsewhere with --into")
    if into.exists() and not into.is_dir():
        raise FleetError(f"{into} is not a folder: give another with --into")
    for path, name in chosen.items():
        try:
            into.mkdir(parents=True, exist_ok=True)
            path.write_bytes((source() / name).read_bytes())
        except OSError as error:
            raise FleetError(f"cannot write {path}: {error.strerror or error}") from error
        out(f"{path}")
    return 0
