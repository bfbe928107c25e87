"""Objectives and rewrites that the user gives `pointsman up` in a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fleet.errors import FleetError
from picker.config.findings import Severity
from picker.config.pool_file import read_policies
from picker.errors import ConfigError

POOL_NAME = "default"  # of a fleet's picker


def read_objectives(path: Path, say: Callable[[str], None], *, clients_may_name: bool) -> str:
    """The documents of a file, to be put behind the fleet's endpoints.

    `say` gets what the user should know of them, also where clients may not name objectives. Raises
    `FleetError` when the file cannot be read or anything in it would be skipped.
    """
    try:
        content = path.read_bytes()
        read = read_policies(content, str(path), POOL_NAME)
    except OSError as error:
        raise FleetError(f"cannot read {path}: {error.strerror or error}") from error
    except ConfigError as error:
        raise FleetError(str(error)) from error
    errors = [str(one) for one in read.findings if one.severity is Severity.ERROR]
    if errors:
        raise FleetError("\n".join(errors))
    for finding in read.findings:
        say(f"warning: {finding}")
    if read.contents.rules.objectives and not clients_may_name:
        say("warning: Envoy strips the header that names an objective; see --trust-control-headers")
    return content.decode("utf-8-sig")
