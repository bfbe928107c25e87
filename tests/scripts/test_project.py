"""A fork, and a release, change pyproject.toml alone."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.project import PLACES, read_project

ROOT = Path(__file__).parents[2]
FOLDERS = ("base", "crds", "deploy", "docs", "fleet", "picker", "scripts", ".github")
PAGES = ("CONTRIBUTING.md", "RELEASING.md", "SECURITY.md")
FILES = ("mkdocs.yml", "pyproject.toml", "README.md", *PAGES)
OWN = {"repository": "https://github.com/fork/points", "images": "registry.fork.net:5000/ai"}
VERSION = "1.22.3rc1"
IMAGE = re.compile(r"([\w.:/-]*)pointsman-(?:picker|worker-[cg]pu):(\d[\w.]*)")


@pytest.fixture(scope="module")
def fork(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("fork")
    for name in FOLDERS:
        skipped = shutil.ignore_patterns("__pycache__")
        if (ROOT / name).exists():
            shutil.copytree(ROOT / name, root / name, ignore=skipped)
    for name in FILES:
        shutil.copy(ROOT / name, root / name)
    old = read_project(ROOT)
    text = (root / "pyproject.toml").read_text().replace(old.repository, OWN["repository"])
    text = text.replace(f'"{old.images}"', f'"{OWN["images"]}"')
    text = text.replace(f'version = "{old.version}"', f'version = "{VERSION}"')
    (root / "pyproject.toml").write_text(text)
    command = [sys.executable, root / "scripts" / "gen_deploy.py"]
    subprocess.run(command, check=True, capture_output=True, env={"PYTHONPATH": str(root)})
    return root


def texts(root: Path) -> dict[str, str]:
    found = {}
    for path in root.rglob("*"):
        if path.is_file() and path.suffix not in (".pyc", ".png"):
            found[str(path.relative_to(root))] = path.read_text()
    return found


def test_no_file_of_a_fork_names_the_first_owner(fork: Path) -> None:
    old = read_project(ROOT)
    for name, text in texts(fork).items():
        for line in text.splitlines():
            assert old.repository not in line, f"{name}: {line}"
            assert old.images not in line, f"{name}: {line}"


def test_every_image_and_the_chart_of_a_fork_are_of_its_version(fork: Path) -> None:
    found = texts(fork)
    versions = {
        match.groups()
        for name, text in found.items()
        if name.startswith("deploy/compose")
        for match in IMAGE.finditer(text)
    }
    assert versions == {(f"{OWN['images']}/", VERSION)}
    chart = found["deploy/helm/pointsman/Chart.yaml"]
    assert f"\nversion: 1.22.3-rc.1\nappVersion: {VERSION}\n" in chart
    assert "--version 1.22.3-rc.1 " in found["deploy/helm/pointsman/README.md"]
    assert chart.count(OWN["repository"]) == 5
    assert found["deploy/helm/pointsman/values.yaml"].count(f"tag: {VERSION}, ") == 3
    images = [t for name, t in found.items() if name.endswith("kustomization.yaml")]
    old = read_project(ROOT).version
    assert sum(text.count(f"newTag: {VERSION}") for text in images) == 6
    assert not any(f"newTag: {old}" in text for text in images)


def test_every_place_is_in_use() -> None:
    for place in PLACES:
        files = [path for pattern in place.files for path in ROOT.glob(pattern)]
        assert any(place.pattern.search(path.read_text()) for path in files), place
