"""Install a part of this project into the environment that runs this, with one line of progress.

`python scripts/install.py fleet` installs `.[fleet]`, editable, in the versions of constraints.txt.
Where there is no NVIDIA GPU, torch comes from its index of CPU builds, a twentieth of the size; the
variable TORCH_INDEX names another one. On failure pip's own words are printed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
WITH_TORCH = ("worker", "fleet", "dev")
_GPUS = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
_PIP = (
    *(sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar=off"),
    "--no-compile",  # what is used is compiled when it is; of torch that is little
)
_PACKAGE = re.compile(r"\s*(Collecting|Requirement already satisfied:|Building|Installing) (\S+)")


def main(extra: str) -> int:
    """Install; returns the exit status of pip."""
    constrained = ("-c", str(ROOT / "constraints.txt"))
    begun = time.monotonic()
    if extra in WITH_TORCH and not any(path.exists() for path in _GPUS):
        index = os.environ.get("TORCH_INDEX", TORCH_INDEX)
        # Where that index cannot be reached the usual one has to do.
        once = ("--retries", "0", "--timeout", "10", "--index-url", index)
        status, _ = _run((*_PIP, *constrained, *once, "torch"), "torch for CPUs", begun, {})
        if status:
            print(f"{index} has no torch for us; taking that of the usual index", flush=True)
    command = (*_PIP, *constrained, "--editable", f"{ROOT}[{extra}]")
    # Kernels are for models: without a compiler the package installs without them.
    no_compiler = {} if extra in WITH_TORCH else {"CC": "false", "CXX": "false"}
    status, said = _run(command, f"pointsman[{extra}]", begun, no_compiler)
    if status:
        print(said, file=sys.stderr)
    else:
        print(f"installed pointsman[{extra}] in {time.monotonic() - begun:.0f} s")
    return status


def _run(
    command: Iterable[str], what: str, begun: float, environment: Mapping[str, str]
) -> tuple[int, str]:
    """Run pip, with `environment` added to ours; its exit status and all that it said."""
    said = []
    with subprocess.Popen(
        tuple(command),
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as pip:
        for line in pip.stdout or ():
            said.append(line)
            step = _PACKAGE.match(line)
            if step is not None and sys.stdout.isatty():
                text = f"{what}: {time.monotonic() - begun:.0f} s, {step[1].lower()} {step[2]}"
                print(f"\r\x1b[K{text[:78]}", end="", flush=True)
    if sys.stdout.isatty():
        print("\r\x1b[K", end="")
    return pip.returncode, "".join(said)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
