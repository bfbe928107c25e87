"""The workflows are sound, pinned and of few rights; tests run what their steps run."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.project import read_project

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".github" / "workflows"
BIN = Path(sys.executable).parent
WORKFLOWS: dict[str, dict[Any, Any]] = {
    path.stem: yaml.safe_load(path.read_text()) for path in sorted(FOLDER.glob("*.yml"))
}
JOBS = {
    f"{name}/{key}": job for name, flow in WORKFLOWS.items() for key, job in flow["jobs"].items()
}
TEXT = "\n".join(path.read_text() for path in sorted(FOLDER.glob("*.yml")))
USES = re.compile(r"uses: (?P<action>\S+)@(?P<commit>\S+) # (?P<version>\S+)$", re.MULTILINE)
# All rights beyond reading the sources, and to what end.
RIGHTS = {
    "docs/publish": {"contents": "write"},
    "renew/renew": {"contents": "write", "pull-requests": "write"},
    "release/images": {"packages": "write"},
    "release/tags": {"packages": "write", "id-token": "write", "attestations": "write"},
    "release/chart": {"packages": "write", "id-token": "write", "attestations": "write"},
    "release/pypi": {"id-token": "write"},
    "release/github": {"contents": "write", "id-token": "write", "attestations": "write"},
}
CHECK = 'make release-check TAG="$GITHUB_REF_NAME"'
NAMES = 'python3 scripts/release.py names >> "$GITHUB_OUTPUT"'
PUSH = 'scripts/push-chart.sh dist "$CHARTS" >> "$GITHUB_OUTPUT"'
DIGEST = 'mkdir digests && echo "$DIGEST" > "digests/$RUNNER_ARCH"'
TAG = 'scripts/tag-image.sh digests "$IMAGE" "$VERSION" >> "$GITHUB_OUTPUT"'
DOCS = 'scripts/publish-docs.sh "$GITHUB_REF_NAME" .venv/bin/mike'
PROPOSE = 'scripts/propose.sh renew-images "Renew the digests of images and the locks"'
SUITE = "it runs the tests; make -n below resolves it"
# What no test of this file runs, and why.
ELSEWHERE = {
    "make check": "it lints the tree in which the tests run; make -n below resolves it",
    "make test": SUITE,
    "make test-budget": SUITE,
    "make test-rest": SUITE,
    "make test-avx2": SUITE,
    "make fuzz": SUITE,
    "make conformance": "tests/integration/test_conformance.py runs both suites",
    "make docs": "tests/test_documentation.py builds the site",
    "make release-dry": "tests/scripts/test_release.py, at full depth",
    "make release-parts": "tests/scripts/test_release.py, at full depth, as a part of the dry run",
    "python3 scripts/release.py sums": "tests/scripts/test_release.py",
    "make renew": "needs registries; tests/scripts/test_pin_images.py has one of its own",
    "python3 -m pip install --constraint constraints.txt pyyaml": "needs the package index",
    "conformance/kind/run.sh": "needs docker; tests/conformance/test_kind.py has its parts",
    "sudo rm -rf /usr/local/lib/android /usr/share/dotnet": "makes room on a runner",
    "cosign sign-blob --yes --bundle dist/SHA256SUMS.sigstore.json dist/SHA256SUMS": "needs OIDC",
    'gh release create "$GITHUB_REF_NAME" --verify-tag --notes-file dist/notes.md dist/*': (
        "needs GitHub"
    ),
}
GIT = ("git", "-c", "user.name=a", "-c", "user.email=a@b.example", "-c", "init.defaultBranch=main")


def steps() -> Iterator[dict[str, Any]]:
    for job in JOBS.values():
        yield from job.get("steps", ())


def run_lines() -> set[str]:
    return {line for step in steps() for line in step.get("run", "").splitlines()}


_OUTSIDE = {name: v for name, v in os.environ.items() if not name.startswith("MAKE")}


def execute(line: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a line as a runner's shell does; `make` takes this environment for its own. It knows
    nothing of a `make` that runs these tests.
    """
    line = line.replace("make ", f"make -o .venv/ready BIN={BIN} ", 1)
    path = f"{environment.pop('PATH', BIN)}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-e", "-c", line],
        cwd=folder,
        env={**_OUTSIDE, "PATH": path, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def stub(folder: Path, name: str, body: str) -> None:
    """Write a program that notes how it was called, and answers as `body` does."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f'#!/usr/bin/env bash\necho "{name} $*" >> {folder}/calls\n{body}\n')
    path.chmod(0o755)


def cloned(folder: Path) -> tuple[Path, Path]:
    """Make a repository with our scripts and a file `lock`, and the one that it was cloned from."""
    here, origin = folder / "here", folder / "origin"
    subprocess.run([*GIT, "init", "--quiet", "--bare", origin], check=True)
    subprocess.run([*GIT, "clone", "--quiet", origin, here], check=True, capture_output=True)
    (here / "lock").write_text("1\n")
    (here / "scripts").mkdir()
    for path in (ROOT / "scripts").glob("*.sh"):
        shutil.copy(path, here / "scripts")
    subprocess.run([*GIT, "add", "."], cwd=here, check=True)
    subprocess.run([*GIT, "commit", "--quiet", "-m", "begin"], cwd=here, check=True)
    return here, origin


def test_every_step_is_run_here_or_cannot_be() -> None:
    here = {CHECK, NAMES, DIGEST, TAG, PUSH, DOCS, PROPOSE}
    assert run_lines() == here | ELSEWHERE.keys()
    assert not here & ELSEWHERE.keys()


@pytest.mark.parametrize("line", sorted(line for line in run_lines() if line.startswith("make ")))
def test_make_knows_every_target(line: str) -> None:
    done = execute(f"{line} -n", ROOT, GITHUB_REF_NAME="v1.0.0")
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_every_action_is_pinned_by_commit_and_names_its_version() -> None:
    pinned = list(USES.finditer(TEXT))
    called = [
        one["uses"]
        for one in (*JOBS.values(), *steps())
        if str(one.get("uses", "")).startswith(".")
    ]
    assert len(pinned) + len(called) == TEXT.count("uses: ")
    assert all((ROOT / path).is_file() for path in called)
    commits: dict[str, set[tuple[str, str]]] = {}
    for one in pinned:
        assert re.fullmatch("[0-9a-f]{40}", one["commit"]), one[0]
        assert re.fullmatch(r"v\d+\.\d+\.\d+", one["version"]), one[0]
        commits.setdefault(one["action"], set()).add((one["commit"], one["version"]))
    assert {action for action, found in commits.items() if len(found) > 1} == set()


def test_jobs_have_the_rights_that_they_need() -> None:
    assert {flow.get("permissions") == {} for flow in WORKFLOWS.values()} == {True}
    rights = {name: dict(job["permissions"]) for name, job in JOBS.items()}
    beyond = {
        name: {key: value for key, value in one.items() if (key, value) != ("contents", "read")}
        for name, one in rights.items()
    }
    assert {name: one for name, one in beyond.items() if one} == RIGHTS
    for name, job in JOBS.items():
        assert "uses" in job or job["timeout-minutes"] <= 120, name


def test_the_linter_of_workflows_finds_nothing() -> None:
    zizmor = BIN / "zizmor"
    if not zizmor.exists():
        pytest.skip("zizmor is not installed: pip install '.[dev]'")
    command = [zizmor, "--offline", "--no-progress", "--quiet", "--min-severity=medium"]
    done = subprocess.run([*command, FOLDER.parent], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(("schema", "files"), [("github-workflows", FOLDER), ("dependabot", None)])
def test_files_have_the_form_that_github_reads(schema: str, files: Path | None) -> None:
    program = BIN / "check-jsonschema"
    if not program.exists():
        pytest.skip("check-jsonschema is not installed: pip install '.[dev]'")
    paths = sorted(files.glob("*.yml")) if files else [FOLDER.parent / "dependabot.yml"]
    command = [program, "--builtin-schema", f"vendor.{schema}", *paths]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_a_tag_of_another_version_is_refused() -> None:
    done = execute(CHECK, ROOT, GITHUB_REF_NAME="v0.0.1")
    assert done.returncode != 0
    version = read_project(ROOT).version
    found = done.stdout.splitlines()
    assert found[0] == f"the tag is v0.0.1, but pyproject.toml's version is {version}"
    assert all(re.search("has no (digest|section)", line) for line in found[1:])


def test_steps_read_the_names_that_the_check_writes(tmp_path: Path) -> None:
    done = execute(NAMES, ROOT, GITHUB_OUTPUT=str(tmp_path / "output"))
    assert done.returncode == 0, done.stderr
    found = dict(line.split("=") for line in (tmp_path / "output").read_text().splitlines())
    assert found.keys() == JOBS["release/check"]["outputs"].keys()
    read = set(re.findall(r"needs\.check\.outputs\.(\w+)", TEXT))
    assert read == found.keys()
    assert found["images"].startswith(found["registry"] + "/")


def test_images_of_both_cpus_get_one_tag_and_one_signature(tmp_path: Path) -> None:
    digests = {"X64": f"sha256:{'1' * 64}", "ARM64": f"sha256:{'2' * 64}", "": f"sha256:{'3' * 64}"}
    stub(tmp_path / "bin", "docker", f"[ $3 = create ] || echo {digests['']}")
    stub(tmp_path / "bin", "cosign", "echo signed")
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    names = {"PATH": str(tmp_path / "bin"), "IMAGE": "reg.example/o/pointsman-picker"}
    names |= {"VERSION": "1.0.0", "GITHUB_OUTPUT": str(tmp_path / "output")}
    for machine in ("ARM64", "X64"):
        tags = execute(TAG, tmp_path, **names)
        assert (tags.returncode, tags.stderr) == (2, "digests has not the digests of two images\n")
        shutil.rmtree(tmp_path / "digests", ignore_errors=True)
        done = execute(DIGEST, tmp_path, DIGEST=digests[machine], RUNNER_ARCH=machine)
        assert done.returncode == 0, done.stderr
    (tmp_path / "digests" / "ARM64").write_text(digests["ARM64"] + "\n")
    done = execute(TAG, tmp_path, **names)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "output").read_text() == f"digest={digests['']}\n"
    image = names["IMAGE"]
    both = f"{image}@{digests['ARM64']} {image}@{digests['X64']}"
    assert (tmp_path / "bin" / "calls").read_text().splitlines() == [
        f"docker buildx imagetools create --tag {image}:1.0.0 {both}",
        f"docker buildx imagetools inspect {image}:1.0.0 --format {{{{.Manifest.Digest}}}}",
        f"cosign sign --yes {image}@{digests['']}",
    ]


def test_the_chart_is_pushed_and_signed_by_its_digest(tmp_path: Path) -> None:
    digest = f"sha256:{'0a' * 32}"
    stub(tmp_path / "bin", "helm", f'echo "Pushed: x"; echo "Digest: {digest}" >&2')
    stub(tmp_path / "bin", "cosign", "echo signed")
    (tmp_path / "dist").mkdir()
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    names = {"PATH": str(tmp_path / "bin"), "CHARTS": "reg.example/o/charts"}
    names["GITHUB_OUTPUT"] = str(tmp_path / "output")
    done = execute(PUSH, tmp_path, **names)
    assert (done.returncode, done.stderr) == (2, "dist has not one chart\n")
    (tmp_path / "dist" / "pointsman-1.0.0.tgz").touch()
    done = execute(PUSH, tmp_path, **names)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "output").read_text() == f"digest={digest}\n"
    assert (tmp_path / "bin" / "calls").read_text().splitlines() == [
        "helm push dist/pointsman-1.0.0.tgz oci://reg.example/o/charts",
        f"cosign sign --yes reg.example/o/charts/pointsman@{digest}",
    ]


def test_changes_are_proposed_once(tmp_path: Path) -> None:
    here, origin = cloned(tmp_path)
    stub(
        tmp_path / "bin",
        "gh",
        f"[ $2 = create ] && touch {tmp_path}/open; cat {tmp_path}/open || :",
    )
    for text in ("1\n", "2\n", "3\n"):
        (here / "lock").write_text(text)
        done = execute(PROPOSE, here, PATH=str(tmp_path / "bin"))
        assert done.returncode == 0, done.stderr
    calls = (tmp_path / "bin" / "calls").read_text()
    assert calls.count("gh pr create --head renew-images") == 1 + calls.count("gh pr list") - 1
    shown = ["git", "-C", origin, "show", "renew-images:lock"]
    assert subprocess.run(shown, capture_output=True, check=True).stdout == b"3\n"


def test_sites_of_versions_replace_those_of_their_patches(tmp_path: Path) -> None:
    here, _ = cloned(tmp_path)
    stub(here / ".venv" / "bin", "mike", "git push --quiet origin HEAD:gh-pages")
    for name in ("main", "v0.2.0rc1", "v0.2.11"):
        done = execute(DOCS, here, GITHUB_REF_NAME=name)
        assert done.returncode == 0, done.stderr
    calls = (here / ".venv" / "bin" / "calls").read_text().splitlines()
    assert calls == [
        "mike deploy --push main",
        "mike deploy --push 0.2",
        "mike deploy --push --update-aliases 0.2 latest",
        "mike set-default --push latest",
    ]


def test_every_uploaded_path_is_downloaded_by_a_later_job() -> None:
    up = {
        step["with"]["name"]: name
        for name, job in JOBS.items()
        for step in job.get("steps", ())
        if name.startswith("release/") and "upload-artifact" in step.get("uses", "")
    }
    assert set(up.values()) == {"release/wheels", "release/parts", "release/images"}
    needed = {
        name: set(job.get("needs") if isinstance(job.get("needs"), list) else [job.get("needs")])
        for name, job in JOBS.items()
        if name.startswith("release/")
    }
    assert {"wheels", "parts", "tags", "chart"} <= needed["release/pypi"]
    assert "images" in needed["release/tags"]
    down = {"release/pypi": "python-*", "release/github": "p*", "release/tags": "digest-*-*"}
    for name, pattern in down.items():
        text = re.sub(r"\$\{\{[^}]*\}\}", "*", json.dumps(JOBS[name]))
        assert text.replace("**", "*").count(f'"{pattern}"') == 1
        of = {up[one] for one in up if fnmatch(re.sub(r"\$\{\{[^}]*\}\}", "x", one), pattern)}
        assert of == (
            {"release/images"} if pattern[0] == "d" else {"release/wheels", "release/parts"}
        )
