"""`python -m conformance.epp`: the Endpoint Picker Protocol, case by case.

Without arguments the picker of this repository is tested. Exit status: 0 when no MUST is broken, 1
when one is, 2 when the suite cannot run.
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from conformance.command_line import (
    CannotRun,
    add_choices,
    conclude,
    implementation_of,
    provisions_of,
    say,
    show_cases,
    words_of,
)
from conformance.epp.cases import ALL
from conformance.epp.cases.sources import SPEC_VERSION
from conformance.epp.suite import Asked, run
from conformance.report import row
from conformance.running import chosen

OWN_COMMAND = (
    "{python} -m picker --bind-address 127.0.0.1 --secure-serving --grpc-port {grpc_port}"
    " --grpc-health-port {health_port} --metrics-port {metrics_port} --pool-name {pool_name}"
    " --endpoints-file {endpoints_file} --config-file {config_file}"
    " --endpoint-ejection-failures 0 --drain-timeout 20s --allow-experimental-plugins"
)
PLACES = (
    "python",
    "grpc_port",
    "health_port",
    "metrics_port",
    "endpoints_file",
    "config_file",
    "pool_name",
)
_OWN_PROVISIONS = "selection-header,served-header,fallback-list,shedding,tls"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the suite; gives the exit status."""
    arguments = _parser().parse_args(argv)
    cases = chosen(ALL, arguments.only)
    if arguments.list or not cases:
        return show_cases(cases, arguments.only)
    try:
        asked = _asked(arguments)
        with tempfile.TemporaryDirectory(prefix="conformance-") as folder:
            report = asyncio.run(run(cases, asked, Path(folder), lambda one: say(row(one))))
    except CannotRun as error:
        say(f"cannot run: {error}")
        return 2
    return conclude(report, arguments.report)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m conformance.epp",
        description=f"Black-box cases for the Endpoint Picker Protocol {SPEC_VERSION}.",
        allow_abbrev=False,
    )
    target = parser.add_mutually_exclusive_group()
    places = " ".join("{" + place + "}" for place in PLACES[1:])
    text = f"start the picker so; {places} are filled in (default: the picker of this repository)"
    target.add_argument("--command", metavar="LINE", help=text)
    text = "test a picker that runs already, at HOST:PORT"
    target.add_argument("--address", metavar="HOST:PORT", help=text)
    text = "gRPC health of a picker that runs already"
    parser.add_argument("--health-address", metavar="HOST:PORT", help=text)
    text = "the pool of a picker that runs already, IP:PORT,…; the suite serves these addresses"
    parser.add_argument("--endpoints", metavar="LIST", help=text, default="")
    add_choices(parser)
    return parser


def _asked(arguments: argparse.Namespace) -> Asked:
    """Raises `CannotRun` for arguments that do not go together."""
    is_own = arguments.command is None and arguments.address is None
    if arguments.address is not None and not arguments.endpoints:
        raise CannotRun("--address needs --endpoints, the pool of that picker")
    command = OWN_COMMAND if is_own else arguments.command
    provided = arguments.provides
    if provided is None:
        provided = _OWN_PROVISIONS if is_own else ""
    return Asked(
        command=words_of(command, PLACES) if command else None,
        address=arguments.address,
        health_address=arguments.health_address,
        endpoints=tuple(filter(None, arguments.endpoints.split(","))),
        config=arguments.config_file,
        provides=provisions_of(provided),
        implementation=implementation_of(arguments, is_own),
        patience_seconds=arguments.patience,
    )


if __name__ == "__main__":
    sys.exit(main())
