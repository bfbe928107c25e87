"""A release without pushing it: notes, checks, bills of materials, and the files themselves."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from scripts.project import Project, read_project
from scripts.release import IMAGES, mismatches, notes, sums
from scripts.sbom import bill

ROOT = Path(__file__).parents[2]
CHANGELOG = """# Changelog

## Unreleased

- c

## [0.2.0rc1] - 2026-12-01

### Added
- b ([why](docs/b.md#c), [it](https://b.example))

## [0.1.0] - 2026-11-01

- a
"""
LOCK = """# Written.
aiohttp==3.14.5 \\
    --hash=sha256:20 \\
    --hash=sha256:10
uvloop==0.23.0+x ; platform_machine == 'x86_64' \\
    --hash=sha256:30
"""


def test_notes_are_the_section_of_the_version() -> None:
    added = (
        "### Added\n- b ([why](https://r/blob/v0.2.0rc1/docs/b.md#c), [it](https://b.example))\n"
    )
    assert notes(CHANGELOG, "0.2.0rc1", "https://r") == added
    assert notes(CHANGELOG, "0.1.0", "https://r") == "- a\n"
    assert notes(CHANGELOG, "Unreleased", "https://r") == "- c\n"
    with pytest.raises(LookupError, match=r"no section 0\.2\.0"):
        notes(CHANGELOG, "0.2.0", "https://r")


def test_a_version_has_a_tag_and_a_dated_section_of_its_own() -> None:
    project = Project("0.1.0", "https://r", "reg.example/o")
    assert mismatches(project, CHANGELOG, "v0.1.0") == mismatches(project, CHANGELOG, None) == []
    assert mismatches(replace(project, version="0.2.0rc1"), CHANGELOG, "v0.1.0") == [
        "the tag is v0.1.0, but pyproject.toml's version is 0.2.0rc1"
    ]
    undated = CHANGELOG.replace(" - 2026-11-01", "")
    assert mismatches(project, undated, "v0.1.0") == [
        "CHANGELOG.md has no section `## [0.1.0] - YYYY-MM-DD`"
    ]


def test_a_bill_lists_every_package_of_the_lock() -> None:
    text = bill("worker-cpu", "1.0.0", LOCK, "torch==2.13.0\n", "https://r")
    assert text == bill("worker-cpu", "1.0.0", LOCK, "torch==2.13.0\n", "https://r")
    document = json.loads(text)
    found = {one["purl"]: one for one in document["components"]}
    assert list(found) == [
        "pkg:pypi/pointsman@1.0.0",
        "pkg:pypi/aiohttp@3.14.5",
        "pkg:pypi/torch@2.13.0",
        "pkg:pypi/uvloop@0.23.0+x",
    ]
    [reference] = found["pkg:pypi/aiohttp@3.14.5"]["externalReferences"]
    assert [one["content"] for one in reference["hashes"]] == ["20", "10"]
    assert set(document["dependencies"][0]["dependsOn"]) == found.keys()
    assert "torch" not in bill("picker", "1.0.0", LOCK, "torch==2.13.0\n", "https://r")


@pytest.mark.parametrize("image", IMAGES)
def test_a_bill_of_an_image_has_as_many_packages_as_its_lock(image: str) -> None:
    lock = (ROOT / "deploy" / "docker" / f"{image}.lock").read_text()
    constraints = (ROOT / "constraints.txt").read_text()
    components = json.loads(bill(image, "1", lock, constraints, "https://r"))["components"]
    extra = 1 + (image == "worker-cpu")  # ourselves; torch of another index
    assert len(components) == len(re.findall(r"^[\w.-]+==", lock, re.MULTILINE)) + extra
    assert len({one["bom-ref"] for one in components}) == len(components)


def test_sums_are_those_that_sha256sum_checks(tmp_path: Path) -> None:
    (tmp_path / "a b.txt").write_text("x" * 2000)
    for _ in range(2):
        assert "       2,000  " in sums(tmp_path)
    command = ["sha256sum", "--check", "--strict", "SHA256SUMS"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "a b.txt: OK\n")


@pytest.mark.full
def test_a_dry_run_makes_all_that_a_release_uploads(tmp_path: Path) -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    for name in listed.stdout.decode().split("\0"):
        if (ROOT / name).is_file():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / name)
    # `make` would install into a new environment, and compile for minutes.
    command = ["make", "-o", ".venv/ready", f"BIN={Path(sys.executable).parent}", "release-dry"]
    environment = {**os.environ, "CC": "false", "CXX": "false", "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    dist = tmp_path / "dist"
    version = read_project(ROOT).version
    [chart] = dist.glob("*.tgz")
    with tarfile.open(chart) as file:
        about = file.extractfile("pointsman/Chart.yaml")
        assert about is not None
        assert yaml.safe_load(about.read())["appVersion"] == version
    flow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    uploaded = {
        path
        for job in ("wheels", "parts")
        for step in flow["jobs"][job]["steps"]
        if "upload-artifact" in step.get("uses", "")
        for pattern in step["with"]["path"].split()
        for path in tmp_path.glob(pattern)
    }
    assert uploaded == {path for path in dist.iterdir() if path.name != "SHA256SUMS"}
    assert len(uploaded) == 7
    for path in uploaded:
        assert f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" in done.stdout
