"""Write deploy/docker/*.lock: every package of an image, with its version and its wheels' digests.

Needs `uv` (`pip install uv`) and the package index. Versions are those of constraints.txt; what it
does not name is resolved anew, so that running this renews it. Run from anywhere:
`python scripts/lock_images.py`.
"""

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packaging.markers import Marker
from packaging.tags import Tag
from packaging.utils import parse_wheel_filename

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "deploy" / "docker"
MINOR = 12
PYTHON = f"3.{MINOR}"
MACHINES = ("aarch64", "x86_64")
IMAGES = {
    "picker": ("k8s", "cel", "otel"),
    "worker-cpu": ("worker", "otel"),
    "worker-gpu": ("worker", "gpu", "otel"),
}
BUILD = "build"
# Another index has torch for CPUs, under the same version, with other digests and without CUDA.
NOT_ON_CPUS = re.compile(r"torch|triton|nvidia-.*|cuda-.*")
_PLATFORM = re.compile(r"any|(?:manylinux\w*|linux)_(?:aarch64|x86_64)")


def _compiled(*words: str, given: str | None = None) -> list[dict[str, Any]]:
    """The packages that uv resolves, as a lock file of PEP 751 has them."""
    command = ["uv", "pip", "compile", "--quiet", "--universal", "--python-version", PYTHON]
    command += ["--only-binary", ":all:", "--constraint", str(ROOT / "constraints.txt")]
    command += ["--format", "pylock.toml", *words]
    if shutil.which("uv") is None:
        raise SystemExit("there is no `uv`: pip install uv")
    done = subprocess.run(command, cwd=ROOT, input=given, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise SystemExit(done.returncode)
    packages: list[dict[str, Any]] = tomllib.loads(done.stdout)["packages"]
    return packages


def _marker(package: dict[str, Any]) -> str | None:
    """For which machines a package is; None for those that an image is never built for."""
    environment = {"sys_platform": "linux", "platform_system": "Linux", "os_name": "posix"}
    environment |= {"implementation_name": "cpython", "platform_python_implementation": "CPython"}
    environment |= {"python_version": PYTHON, "python_full_version": f"{PYTHON}.0"}
    marker = package.get("marker")
    machines = [
        one
        for one in MACHINES
        if marker is None or Marker(marker).evaluate(environment | {"platform_machine": one})
    ]
    if len(machines) == len(MACHINES):
        return ""
    return f" ; platform_machine == '{machines[0]}'" if machines else None


def _digests(package: dict[str, Any]) -> list[str]:
    """The digests of the wheels that the images' Python can install."""
    found = set()
    for wheel in package["wheels"]:
        *_, tags = parse_wheel_filename(wheel["url"].rpartition("/")[2])
        if any(_fits(tag) for tag in tags):
            found.add(wheel["hashes"]["sha256"])
    return sorted(found)


def _fits(tag: Tag) -> bool:
    if not _PLATFORM.fullmatch(tag.platform):
        return False
    if tag.abi == f"cp3{MINOR}" or tag.interpreter == "py3":
        return True
    since = re.fullmatch(r"cp3(\d+)", tag.interpreter)
    return tag.abi == "abi3" and since is not None and int(since[1]) <= MINOR


def _lines(packages: list[dict[str, Any]]) -> Iterator[str]:
    for package in sorted(packages, key=lambda one: one["name"]):
        marker, digests = _marker(package), _digests(package)
        if marker is None:
            continue
        if not digests:
            raise SystemExit(f"{package['name']} {package['version']} has no wheel for the images")
        pinned = f"{package['name']}=={package['version']}{marker}"
        yield " \\\n".join((pinned, *(f"    --hash=sha256:{one}" for one in digests)))


def wanted() -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each lock."""
    head = "# Written by scripts/lock_images.py; edits are lost.\n"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = "\n".join(project["build-system"]["requires"])
    yield BUILD, head + "\n".join(_lines(_compiled("-", given=needed))) + "\n"
    for name, extras in IMAGES.items():
        packages = _compiled("pyproject.toml", *(f"--extra={one}" for one in extras))
        if name == "worker-cpu":
            packages = [one for one in packages if not NOT_ON_CPUS.fullmatch(one["name"])]
        yield name, head + "\n".join(_lines(packages)) + "\n"


def main() -> int:
    """Write all of them."""
    for name, text in wanted():
        (FOLDER / f"{name}.lock").write_text(text)
        print(f"wrote deploy/docker/{name}.lock")
    return 0


if __name__ == "__main__":
    sys.exit(main())
