"""`pointsman restart`: have the fleet that runs here restart its parts, at no request's cost."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence

from fleet.control import Order, Part, give
from fleet.errors import FleetError
from fleet.running_picker import RunningFleet, running_fleets

ALL = "all"


def restart_command(
    argv: Sequence[str], environment: Mapping[str, str], say: Callable[[str], None]
) -> int:
    """Returns the exit status: 0 once everything that was asked for is back.

    Raises `FleetError` when something is not, or nobody is there to ask.
    """
    arguments = build_parser().parse_args(argv)
    fleet = _meant(running_fleets(environment), arguments.port)
    parts = tuple(Part) if arguments.part == ALL else (Part(arguments.part),)
    if fleet.control is None:
        raise FleetError("that fleet takes no orders")
    give(Order(parts), fleet.control, say)
    return 0


def build_parser() -> argparse.ArgumentParser:
    """The flags of `pointsman restart`."""
    parser = argparse.ArgumentParser(
        prog="pointsman restart",
        description="Restart parts of the fleet that `pointsman up` runs here, without a failed "
        "request: one after the other, each once its successor serves.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "part",
        nargs="?",
        choices=[*(part.value for part in Part), ALL],
        default=ALL,
        help="default: %(default)s, in this order",
    )
    parser.add_argument("--port", type=int, help="of the fleet's Envoy, where several fleets run")
    return parser


def _meant(running: Sequence[RunningFleet], port: int | None) -> RunningFleet:
    found = [fleet for fleet in running if port in (None, fleet.port)]
    if not found:
        where = "" if port is None else f" on port {port}"
        raise FleetError(f"no fleet runs here{where}: `pointsman up` starts one")
    if len(found) > 1:
        ports = ", ".join(str(fleet.port) for fleet in found)
        raise FleetError(f"{len(found)} fleets run here; choose one with --port ({ports})")
    return found[0]
