"""The flags that both suites share."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from conformance.case import PROVISIONS, Case, Provision
from conformance.pickers.by_command import CONFIG, unknown_places
from conformance.pickers.picker import Implementation
from conformance.report import Report, last_line


class CannotRun(Exception):  # noqa: N818 - says what it is
    """The suite cannot be run as asked; the text says why."""


def say(line: str) -> None:
    """Print a line and flush it."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def add_choices(parser: argparse.ArgumentParser) -> None:
    """The flags of every suite."""
    names = "; ".join(f"{name.value}: {PROVISIONS[name]}" for name in Provision)
    text = f"what a picker named by a flag provides, with commas: {names}"
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


def show_cases(cases: Sequence[Case[Any]], patterns: Sequence[str]) -> int:
    """List them; gives the exit status, which is 2 where no case was meant."""
    for case in cases:
        say(f"{case.strength.value:<6} {case.id:<52} {case.text}")
    if cases:
        return 0
    say(f"no case is called {', '.join(patterns)}; see --list")
    return 2


def conclude(report: Report, path: Path | None) -> int:
    """Write the report, say how it went, and give the exit status."""
    say(last_line(report))
    if path is not None:
        report.write(path)
        say(f"report: {path}")
    return 0 if report.passed else 1


def words_of(command: str, places: Sequence[str], flag: str = "--command") -> tuple[str, ...]:
    """A command line in words, `{python}` filled in. Raises `CannotRun` for unknown `{places}`."""
    unknown = unknown_places(command, places)
    if unknown:
        raise CannotRun(f"{flag} has unknown places: {', '.join(unknown)}")
    return tuple(word.replace("{python}", sys.executable) for word in shlex.split(command))


def provisions_of(text: str) -> frozenset[Provision]:
    """The provisions of a list with commas. Raises `CannotRun` for unknown ones."""
    try:
        return frozenset(Provision(name.strip()) for name in text.split(",") if name.strip())
    except ValueError as error:
        known = ", ".join(provision.value for provision in Provision)
        raise CannotRun(f"--provides: {error}; known are {known}") from None


def implementation_of(arguments: argparse.Namespace, is_own: bool) -> Implementation:
    """The picker that the report names."""
    name, given = arguments.implementation, arguments.implementation_version
    if not is_own:
        return Implementation(name or "unnamed", given or "unknown")
    try:
        installed = version("pointsman")
    except PackageNotFoundError:
        installed = "not installed"
    return Implementation(name or "pointsman", given or installed)
