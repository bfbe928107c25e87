"""`pointsman tenants`: check a file of tenants, and add them to a bootstrap of Envoy."""

import argparse
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml
from google.protobuf import json_format

from fleet.envoy.bootstrap import parsed, to_yaml
from fleet.envoy.identity import with_tenants
from fleet.envoy.tenants import Tenants, read_tenants
from fleet.errors import FleetError, UsageError

Print = Callable[[str], None]


def tenants_command(given: argparse.Namespace, environment: Mapping[str, str], out: Print) -> int:
    """Report the tenants, or write the bootstrap. Raises `FleetError`."""
    tenants = read_tenants(given.file, environment)
    if given.bootstrap is None:
        if given.into is not None:
            raise UsageError("--into needs --bootstrap, the bootstrap to add the tenants to")
        out(_summary(tenants))
        return 0
    text = to_yaml(parsed(_added(given.bootstrap, tenants)), "Contains keys: keep it secret.")
    if given.into is None:
        out(text.rstrip("\n"))
        return 0
    try:
        # Created for its owner only, and replaced as a whole.
        unfinished = given.into.with_name(f"{given.into.name}.new")
        with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(text)
        unfinished.replace(given.into)
    except OSError as error:
        raise FleetError(f"cannot write {given.into}: {error.strerror or error}") from error
    return 0


def _added(path: Path, tenants: Tenants) -> dict[str, Any]:
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
        parsed(document)
        return with_tenants(document, tenants)
    except OSError as error:
        raise UsageError(f"--bootstrap: cannot read {path}: {error.strerror or error}") from error
    except (ValueError, TypeError, KeyError, yaml.YAMLError, json_format.ParseError) as error:
        text = " ".join(str(error).split())
        raise UsageError(
            f"--bootstrap: {path} is no bootstrap that asks a picker: {text}"
        ) from error


def _summary(tenants: Tenants) -> str:
    keys = sum(len(one.keys) for one in tenants.tenants)
    tokens = "" if tenants.tokens is None else f", tokens of {tenants.tokens.issuer}"
    return f"ok: {len(tenants.tenants)} tenants, {keys} keys{tokens}"
