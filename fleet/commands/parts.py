"""`pointsman ps` and `pointsman logs`: the processes of the fleets here, and their logs."""

import argparse
import subprocess
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path

from fleet.errors import FleetError
from fleet.run.proc import writers
from fleet.run.running_picker import RunningFleet, running_fleets, the_fleet

Print = Callable[[str], None]


def ps_command(_given: argparse.Namespace, environment: Mapping[str, str], out: Print) -> int:
    """Print the processes of all fleets here. Raises `FleetError` if there is none."""
    fleets = running_fleets(environment)
    if not fleets:
        raise FleetError("no fleet runs here: `pointsman up` starts one")
    for fleet in fleets:
        out(f"port {fleet.port}, pid {fleet.pid}, dashboard {fleet.picker}")
        pids: dict[str, list[int]] = defaultdict(list)
        memory: dict[str, int] = defaultdict(int)
        for log, pid, size in writers(_folder(fleet)):
            pids[log.stem].append(pid)
            memory[log.stem] += size
        for name in sorted(pids):
            listed = ", ".join(map(str, sorted(pids[name])))
            out(f"  {name:<12}{memory[name] / 1e6:8.0f} MB   pid {listed}")
    return 0


def logs_command(options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    folder = _folder(the_fleet(environment, options.port))
    logs = sorted(folder.glob("*.log"))
    named = [log for log in logs if options.part in (None, log.stem)]
    if not named:
        there = ", ".join(log.stem for log in logs)
        raise FleetError(f"no part {options.part!r} has a log here; there are {there}")
    command = ["tail", "-n", str(options.lines), *(["-F"] if options.follow else [])]
    return subprocess.run([*command, "--", *map(str, named)], check=False).returncode


def _folder(fleet: RunningFleet) -> Path:
    if fleet.control is None:
        raise FleetError("that fleet does not say where it keeps its logs")
    return Path(fleet.control).parent
