"""The project's addresses and version, of pyproject.toml, and the files that repeat them.

A fork changes `[project.urls]` and `[tool.pointsman]` there, a release `version`; then
`scripts/gen_deploy.py` writes them into every file of `PLACES`. These remain files to edit by hand:
only an address or a version in them is replaced.
"""

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_IMAGE = r"pointsman-(?:picker|worker-cpu|worker-gpu)"
_URL = r"https://github\.com/[\w.-]+/[\w.-]+?"
_VERSION = r"\d+\.\d+\.\d+(?:[a-z]+\d+)?"
_CHART_VERSION = r"\d+\.\d+\.\d+(?:-[a-z]+\.\d+)?"
_PRE_RELEASE = re.compile(r"(?<=\d)(a|b|rc)(?=\d+$)")
_OWN_REGISTRY = r"(?![\w.-]+\.example\b)[\w-]+[.:][\w.:-]*(?:/[\w.-]+)*"


@dataclass(frozen=True, slots=True)
class Project:
    """`repository`: its address on GitHub. `images`: registry and owner of images and chart."""

    version: str
    repository: str
    images: str

    @property
    def chart_version(self) -> str:
        """The version as Helm demands it: `0.2.0-rc.1` for `0.2.0rc1`."""
        return _PRE_RELEASE.sub(r"-\1.", self.version)


@dataclass(frozen=True, slots=True)
class Place:
    """`pattern`: the replaced text, which is its group `old`, and what is around it."""

    files: tuple[str, ...]
    pattern: re.Pattern[str]
    attribute: str


def _place(attribute: str, pattern: str, *files: str) -> Place:
    return Place(files, re.compile(pattern, re.MULTILINE), attribute)


_MANIFESTS = ("deploy/k8s/**/kustomization.yaml",)
_CHART = "deploy/helm/pointsman"
_PAGES = ("README.md", "docs/*.md", f"{_CHART}/README.md")
PLACES = (
    _place(
        "repository",
        rf"(?P<old>{_URL})(?=/blob/main/|/?$|\]|\" *\\?$)",
        *("deploy/prometheus/rules.yaml", "deploy/grafana/*.json", "deploy/systemd/*.service"),
        *(f"{_CHART}/Chart.yaml", "deploy/docker/*.Dockerfile", "mkdocs.yml"),
        "picker/admin/page/index.html",
    ),
    _place("repository", rf"git\+(?P<old>{_URL})(?=['`\s@]|\.git)", *_PAGES),
    _place(
        "images",
        rf"(?<![\w./-])(?P<old>{_OWN_REGISTRY})/{_IMAGE}(?![\w./-])",
        *(*_MANIFESTS, "deploy/compose/compose.yaml", *_PAGES),
    ),
    _place("images", rf"oci://(?P<old>{_OWN_REGISTRY})/charts/pointsman\b", *_PAGES),
    _place("images", r"^  registry: (?P<old>\S+)$", f"{_CHART}/values.yaml"),
    _place("images", r"^\| `images\.registry` \| `(?P<old>\S+)`", f"{_CHART}/README.md"),
    _place("chart_version", rf"^version: (?P<old>{_CHART_VERSION})$", f"{_CHART}/Chart.yaml"),
    _place("version", rf"^appVersion: (?P<old>{_VERSION})$", f"{_CHART}/Chart.yaml"),
    _place(
        "version",
        rf"repository: {_IMAGE}, tag: (?P<old>{_VERSION})\b",
        *(f"{_CHART}/values.yaml", f"{_CHART}/README.md"),
    ),
    _place("version", rf"/{_IMAGE}\n\s+newTag: (?P<old>{_VERSION})$", *_MANIFESTS),
    _place("version", rf"\b{_IMAGE}:(?P<old>{_VERSION})\b", "deploy/compose/compose.yaml", *_PAGES),
    _place("version", rf"^ARG VERSION=(?P<old>{_VERSION})$", "deploy/docker/*.Dockerfile"),
    _place("version", rf"^version=(?P<old>{_VERSION})$", "RELEASING.md"),
    _place("images", r"^images=(?P<old>\S+)$", "RELEASING.md"),
    _place("repository", rf"^repository=(?P<old>{_URL})$", "RELEASING.md"),
    _place("chart_version", rf"--version (?P<old>{_CHART_VERSION})(?=[ `]|$)", *_PAGES),
)


def read_project(root: Path) -> Project:
    """Read pyproject.toml of `root`."""
    document = tomllib.loads((root / "pyproject.toml").read_text())
    project = document["project"]
    return Project(
        version=project["version"],
        repository=project["urls"]["Repository"],
        images=document["tool"]["pointsman"]["images"],
    )


def addressed(root: Path) -> dict[Path, str]:
    """Every file of `PLACES` below `root`, with the addresses and the version of its project."""
    project = read_project(root)
    texts: dict[Path, str] = {}
    for place in PLACES:
        new = getattr(project, place.attribute)
        for path in _files(root, place.files):
            text = texts.get(path) or path.read_text()
            texts[path] = _replaced(place.pattern, text, new)
    return texts


def _files(root: Path, patterns: tuple[str, ...]) -> Iterator[Path]:
    for pattern in patterns:
        yield from sorted(root.glob(pattern))


def _replaced(pattern: re.Pattern[str], text: str, new: str) -> str:
    def one(found: re.Match[str]) -> str:
        start, end = (position - found.start() for position in found.span("old"))
        return found[0][:start] + new + found[0][end:]

    return pattern.sub(one, text)
