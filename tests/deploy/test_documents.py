"""The commands of docs/deploying.md run here, as far as they need no cluster."""

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.support.kube.manifests import BUILDS, NAMESPACE, ROOT, kustomized, name_of

pytestmark = pytest.mark.usefixtures("kubectl")
PAGE = (ROOT / "docs" / "deploying.md").read_text()
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def commands(program: str) -> Iterator[list[str]]:
    lines = [
        line for kind, text in FENCE.findall(PAGE) if kind == "bash" for line in text.split("\n")
    ]
    lines += re.findall(rf"`({program} [^`]+)`", PAGE)
    for line in lines:
        words = shlex.split(line, comments=True)
        if words[:1] == [program] and len(words) > 2:
            yield words[1:]


@pytest.mark.parametrize("words", list(commands("helm")), ids=" ".join)
def test_helm_commands_work(helm: Path, words: list[str]) -> None:
    done = subprocess.run([helm, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_folders_that_are_applied_render() -> None:
    applied, asked = [], set()
    for words in commands("kubectl"):
        if words[0] == "apply":
            *flags, last, folder = words[1:]
            assert last == "-k"
            assert flags in ([], ["--server-side"])
            applied += kustomized(folder)
        else:
            assert words[:2] == ["-n", NAMESPACE]
            asked |= {word for word in words[3:] if "pointsman" in word}
    assert len(applied) > 20
    names = {f"{kind.lower()}/{name}" for kind, name in map(name_of, applied)}
    assert {word if "/" in word else f"gateway/{word}" for word in asked} <= names
    assert asked


@pytest.mark.parametrize("words", list(commands("docker")), ids=lambda words: words[2])
def test_dockerfiles_are_there(words: list[str]) -> None:
    assert words[:2] in (["build", "-f"], ["compose", "-f"])
    assert (ROOT / words[2]).is_file()
    assert words[-1] == ("." if words[0] == "build" else "--build")


def test_the_example_of_an_overlay_builds(kubectl: Path, tmp_path: Path) -> None:
    [text] = [text for kind, text in FENCE.findall(PAGE) if kind == "yml"]
    shutil.copytree(ROOT / "deploy" / "k8s", tmp_path / "deploy" / "k8s")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "kustomization.yaml").write_text(text)
    done = subprocess.run(
        [kubectl, "kustomize", tmp_path / "mine"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    objects = list(yaml.safe_load_all(done.stdout))
    images = re.findall(r"image: (\S+)", done.stdout)
    assert images
    assert all(image.startswith("registry.example/") for image in images)
    [gateway] = [one for one in objects if one["kind"] == "Gateway"]
    assert gateway["spec"]["gatewayClassName"] == "kgateway"


def test_every_folder_is_documented() -> None:
    for group in ("overlays", "addons", "gateways"):
        [row] = [line for line in PAGE.splitlines() if f"| `deploy/k8s/{group}/` |" in line]
        documented = set(re.findall(r"`([a-z-]+)`", row.split("|")[2]))
        there = {folder.split("/")[-1] for folder in BUILDS if f"/{group}/" in folder}
        assert documented == there
