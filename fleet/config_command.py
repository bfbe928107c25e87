# Apart: a subcommand, imported only when it runs.
"""`pointsman config`: check a picker's files, or show the configuration that is in effect."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from fleet.command_line import Parser
from picker.config.build import DEFAULT_CONFIG, BuildOptions
from picker.config.catalog import builtin_plugins
from picker.config.check import assemble, check_config
from picker.config.findings import Finding, InvalidConfigError, Severity
from picker.config.pool_file import PoolFile, read_policies, read_pool_file
from picker.config.show import aligned, effective_lines
from picker.config.watch import read_config_file
from picker.errors import ConfigError

FINE, WRONG, UNREADABLE = 0, 1, 2

_WAYS = {
    "check": "a file, --config-text, --endpoints-file or --objectives",
    "show": "a file or --config-text",
}

Print = Callable[[str], None]
ReadPool = Callable[[bytes, str, str], PoolFile]


def config_command(argv: Sequence[str], out: Print, err: Print) -> int:
    """Run `pointsman config …`; returns the exit status.

    0: the configuration can be used. 1: it has errors. 2: it cannot be read, or the command line
    cannot be understood (`SystemExit`).
    """
    options = build_parser().parse_args(argv)
    try:
        content, name = _content(options)
    except ConfigError as error:
        err(f"pointsman: {error}")
        return UNREADABLE
    if options.command == "check":
        read = _reader(options)
        if read is not None:
            findings = _findings_of(read, content, name, options.pool_name)
            return _report(findings, name, out, as_json=options.json)
    allow = BuildOptions(allow_experimental=options.allow_experimental_plugins)
    if options.command == "check":
        findings = check_config(content, name, builtin_plugins(), allow)
        return _report(findings, name, out, as_json=options.json)
    try:
        loaded, assembly = assemble(content, name, builtin_plugins(), allow)
    except InvalidConfigError as error:
        for finding in error.findings:
            err(_line(finding))
        return WRONG
    out(aligned(effective_lines(loaded, assembly), with_origin=options.origin).rstrip("\n"))
    return FINE


def build_parser() -> Parser:
    parser = Parser(
        prog="pointsman config",
        description="Work on an EndpointPickerConfig without starting a picker.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    check = commands.add_parser("check", help="say everything that is wrong with a file")
    check.add_argument("--json", action="store_true", help="findings as JSON")
    text = "check this endpoints file instead, with its objectives and rewrites"
    check.add_argument("--endpoints-file", metavar="FILE", help=text)
    text = "check this file of objectives and rewrites instead, as for `pointsman up`"
    check.add_argument("--objectives", metavar="FILE", help=text)
    check.add_argument(
        "--pool-name", default="default", metavar="NAME", help="the picker's, for --endpoints-file"
    )
    show = commands.add_parser("show", help="print the configuration in effect, defaults included")
    show.add_argument("--origin", action="store_true", help="say where each line is from")
    for command in (check, show):
        command.add_argument(
            "file", nargs="?", metavar="FILE", help="show: without it the built-in configuration"
        )
        command.add_argument("--config-text", metavar="YAML", help="the configuration as text")
        command.add_argument(
            "--allow-experimental-plugins", action="store_true", help="as the picker's flag"
        )
    return parser


def _content(options: argparse.Namespace) -> tuple[bytes, str]:
    is_check = options.command == "check"
    endpoints_file = options.endpoints_file if is_check else None
    objectives = options.objectives if is_check else None
    given = (options.config_text, options.file, endpoints_file, objectives)
    if sum(one is not None for one in given) > 1:
        raise ConfigError(f"give one of these: {_WAYS[options.command]}")
    if options.config_text is not None:
        return options.config_text.encode(errors="surrogatepass"), "--config-text"
    if options.file is not None:
        return read_config_file(Path(options.file), "config"), options.file
    if endpoints_file is not None:
        return read_config_file(Path(endpoints_file), "--endpoints-file"), endpoints_file
    if objectives is not None:
        return read_config_file(Path(objectives), "--objectives"), objectives
    if is_check:
        raise ConfigError(f"there is nothing to check: give {_WAYS['check']}")
    return DEFAULT_CONFIG, "built-in configuration"


def _reader(options: argparse.Namespace) -> ReadPool | None:
    """What reads the file, where it is not a configuration."""
    if options.endpoints_file is not None:
        return read_pool_file
    return read_policies if options.objectives is not None else None


def _findings_of(read: ReadPool, content: bytes, name: str, pool: str) -> tuple[Finding, ...]:
    try:
        return read(content, name, pool).findings
    except InvalidConfigError as error:
        return error.findings


def _report(findings: Sequence[Finding], name: str, out: Print, *, as_json: bool) -> int:
    errors = sum(one.severity is Severity.ERROR for one in findings)
    if as_json:
        report = {
            "file": name,
            "valid": not errors,
            "findings": [one.as_dict() for one in findings],
        }
        out(json.dumps(report, indent=2, ensure_ascii=False))
        return WRONG if errors else FINE
    for finding in findings:
        out(_line(finding))
    if not findings:
        out(f"{name}: nothing wrong")
    else:
        out(f"{name}: {_counted(errors, 'error')}, {_counted(len(findings) - errors, 'warning')}")
    return WRONG if errors else FINE


def _line(finding: Finding) -> str:
    head = f"{finding.where}: "
    return f"{head}{finding.severity.value}: {str(finding).removeprefix(head)}"


def _counted(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"
