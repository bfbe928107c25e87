"""`python -m conformance.epp`: the Endpoint Picker Protocol, case by case.

Without arguments the picker of this repository is tested. Exit status: 0 when no MUST is broken, 1
when one is, 2 when the suite cannot run.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from conformance.case import PROVISIONS, Provision
from conformance.epp.cases import ALL
from conformance.epp.cases.sources import SPEC_VERSION
from conformance.epp.suite import Asked, CannotRun, run
from conformance.pickers.by_command import CONFIG, unknown_places
from conformance.pickers.picker import Implementation
from conformance.report import Report, Result, last_line, row
from conformance.running import chosen

NAME = "conformance/epp"
OWN_COMMAND = (
    "{python} -m picker --bind-address 127.0.0.1 --secure-serving --grpc-port {grpc_port}"
    " --grpc-health-port {health_port} --metrics-port {metrics_port} --pool-name {pool_name}"
    " --endpoints-file {endpoints_file} --config-file {config_file}"
    " --endpoint-ejection-failures 0 --drain-timeout 20s --allow-experimental-plugins"
)
_OWN_PROVISIONS = "selection-header,served-header,fallback-list,shedding,tls"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the suite; gives the exit status."""
    arguments = _parser().parse_args(argv)
    cases = chosen(ALL, arguments.only)
    if arguments.list:
        for case in cases:
            _say(f"{case.strength.value:<6} {case.id:<36} {case.text}")
        return 0
    if not cases:
        _say(f"no case is called {', '.join(arguments.only)}; see --list")
        return 2
    try:
        asked = _asked(arguments)
        with tempfile.TemporaryDirectory(prefix="conformance-") as folder:
            report = asyncio.run(run(cases, asked, Path(folder), _tell))
    except CannotRun as error:
        _say(f"cannot run: {error}")
        return 2
    return conclude(report, arguments.report)


def conclude(report: Report, path: Path | None) -> int:
    """Write the report, say how it went, and give the exit status."""
    _say(last_line(report))
    if path is not None:
        report.write(path)
        _say(f"report: {path}")
    return 0 if report.passed else 1


def _tell(result: Result) -> None:
    _say(row(result))


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m conformance.epp",
        description=f"Black-box cases for the Endpoint Picker Protocol {SPEC_VERSION}.",
        epilog="provisions: "
        + "; ".join(f"{name.value}: {PROVISIONS[name]}" for name in Provision),
        allow_abbrev=False,
    )
    target = parser.add_mutually_exclusive_group()
    text = "start the picker so; {grpc_port} {health_port} {metrics_port} {endpoints_file} "
    text += "{config_file} {pool_name} are filled in (default: the picker of this repository)"
    target.add_argument("--command", metavar="LINE", help=text)
    text = "test a picker that runs already, at HOST:PORT"
    target.add_argument("--address", metavar="HOST:PORT", help=text)
    text = "gRPC health of a picker that runs already"
    parser.add_argument("--health-address", metavar="HOST:PORT", help=text)
    text = "the pool of a picker that runs already, IP:PORT,…; the suite serves these addresses"
    parser.add_argument("--endpoints", metavar="LIST", help=text, default="")
    text = "provisions of a picker named by --command or --address, with commas"
    parser.add_argument("--provides", metavar="LIST", help=text)
    text = "what {config_file} is (default: a configuration of the llm-d family)"
    parser.add_argument("--config-file", type=Path, metavar="FILE", help=text, default=CONFIG)
    text = "run these cases only; a pattern such as 'subset-*'; may be repeated"
    parser.add_argument("--only", action="append", metavar="ID", help=text, default=[])
    parser.add_argument("--list", action="store_true", help="show the cases, and run none")
    text = "write the report to FILE (.yaml or .json)"
    parser.add_argument("--report", type=Path, metavar="FILE", help=text)
    parser.add_argument("--implementation", metavar="NAME", help="name in the report")
    parser.add_argument("--implementation-version", metavar="VERSION", help="version in the report")
    text = "how long an answer of the picker may take"
    parser.add_argument("--patience", type=float, metavar="SECONDS", help=text, default=10.0)
    return parser


def _asked(arguments: argparse.Namespace) -> Asked:
    """Raises `CannotRun` for arguments that do not go together."""
    is_own = arguments.command is None and arguments.address is None
    if arguments.address is not None and not arguments.endpoints:
        raise CannotRun("--address needs --endpoints, the pool of that picker")
    command = OWN_COMMAND if is_own else arguments.command
    unknown = unknown_places(command.replace("{python}", "")) if command else []
    if unknown:
        raise CannotRun(f"--command has unknown places: {', '.join(unknown)}")
    provided = arguments.provides if arguments.provides is not None else ""
    if is_own and arguments.provides is None:
        provided = _OWN_PROVISIONS
    return Asked(
        command=_words(command) if command else None,
        address=arguments.address,
        health_address=arguments.health_address,
        endpoints=tuple(filter(None, arguments.endpoints.split(","))),
        config=arguments.config_file,
        provides=_provisions(provided),
        implementation=_implementation(arguments, is_own),
        patience_seconds=arguments.patience,
    )


def _words(command: str) -> tuple[str, ...]:
    return tuple(word.replace("{python}", sys.executable) for word in shlex.split(command))


def _provisions(text: str) -> frozenset[Provision]:
    try:
        return frozenset(Provision(name.strip()) for name in text.split(",") if name.strip())
    except ValueError as error:
        known = ", ".join(provision.value for provision in Provision)
        raise CannotRun(f"--provides: {error}; known are {known}") from None


def _implementation(arguments: argparse.Namespace, is_own: bool) -> Implementation:
    name, told = arguments.implementation, arguments.implementation_version
    if is_own:
        try:
            installed = version("pointsman")
        except PackageNotFoundError:
            installed = "not installed"
        return Implementation(name or "pointsman", told or installed)
    return Implementation(name or "unnamed", told or "unknown")


if __name__ == "__main__":
    sys.exit(main())
