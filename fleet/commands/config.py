"""`pointsman config`: create, check and show a picker's configuration, and its JSON Schema."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from picker.config.build import DEFAULT_CONFIG, BuildOptions, assemble, check_config
from picker.config.catalog import builtin_plugins
from picker.config.findings import Finding, InvalidConfigError, Severity
from picker.config.load import MAX_CONFIG_BYTES
from picker.config.pool_file import PoolFile, read_policies, read_pool_file
from picker.config.schema import EndpointPickerConfig, PluginSpec
from picker.config.show import aligned, effective_lines
from picker.config.watch import read_config_file
from picker.errors import ConfigError

FINE, WRONG, UNREADABLE = 0, 1, 2

_WAYS = {
    "check": "a file, --config-text, --endpoints-file or --objectives",
    "show": "a file or --config-text",
}

_INIT = """\
# What the picker does without a configuration. A scorer rates every endpoint from 0 to 1; the
# endpoint with the highest weighted sum gets the request. Plugins: docs/configuration.md.
# After a change: pointsman config check FILE
# For an editor with a YAML language server: pointsman config schema > pointsman.schema.json
# yaml-language-server: $schema=pointsman.schema.json
"""

Print = Callable[[str], None]
ReadPool = Callable[[bytes, str, str], PoolFile]


def config_command(options: argparse.Namespace, out: Print, err: Print) -> int:
    """Return the exit status: 1 if the configuration has errors, 2 if it cannot be read."""
    if options.command == "schema":
        out(json.dumps(schema(), indent=2))
        return FINE
    if options.command == "init":
        return _init(options.file, out, err)
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
    return _show(content, name, allow, options.origin, out, err)


def _show(
    content: bytes, name: str, allow: BuildOptions, with_origin: bool, out: Print, err: Print
) -> int:
    try:
        loaded, assembly = assemble(content, name, builtin_plugins(), allow)
    except InvalidConfigError as error:
        for finding in error.findings:
            err(_line(finding))
        return WRONG
    out(aligned(effective_lines(loaded, assembly), with_origin=with_origin).rstrip("\n"))
    return FINE


def schema() -> dict[str, Any]:
    types = list(builtin_plugins())
    kinds = [EndpointPickerConfig, *(one.parameters for one in types)]
    template = "#/$defs/{name}"
    (root, *parameters), parts = msgspec.json.schema_components(kinds, ref_template=template)
    names = [(one.name, *one.deprecated_aliases) for one in types]
    plugin = parts[PluginSpec.__name__]
    plugin["properties"]["type"]["enum"] = sorted(name for group in names for name in group)
    plugin["allOf"] = [
        {
            "if": {"properties": {"type": {"enum": list(group)}}},
            # An empty `parameters:` is null in YAML.
            "then": {"properties": {"parameters": {"anyOf": [own, {"type": "null"}]}}},
        }
        for group, own in zip(names, parameters, strict=True)
    ]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "EndpointPickerConfig",
        **root,
        "$defs": parts,
    }


def _init(path: Path | None, out: Print, err: Print) -> int:
    if path is None:
        out((_INIT + DEFAULT_CONFIG.decode()).rstrip("\n"))
        return FINE
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(_INIT + DEFAULT_CONFIG.decode())
    except OSError as error:
        err(f"pointsman: cannot write {path}: {error.strerror or error}")
        return UNREADABLE
    out(f"wrote {path}: change weights, then `pointsman up --config {path}`")
    return FINE


def _content(options: argparse.Namespace) -> tuple[bytes, str]:
    is_check = options.command == "check"
    endpoints_file = options.endpoints_file if is_check else None
    objectives = options.objectives if is_check else None
    given = (options.config_text, options.file, endpoints_file, objectives)
    if sum(one is not None for one in given) > 1:
        raise ConfigError(f"give one of these: {_WAYS[options.command]}")
    if options.config_text is not None:
        return options.config_text.encode(errors="surrogatepass"), "--config-text"
    if options.file == "-":
        return sys.stdin.buffer.read(MAX_CONFIG_BYTES + 1), "standard input"  # more is refused
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
