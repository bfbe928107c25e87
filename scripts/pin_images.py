"""Write the digests of images of others: those that ours are built on, Envoy, Prometheus, Grafana.

Tags remain as they are and name what is meant; the digest beside one is what its registry has now,
for every CPU at once. Needs the network. `--check` needs none: it fails for images without digests.
"""

import argparse
import hashlib
import json
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
MACHINES = {"amd64", "arm64"}
_DIGEST = r"sha256:[0-9a-f]{64}"
_NAME = r"(?P<repository>(?!\S*pointsman-)[\w./:-]+)"
_TAG = r"(?P<tag>[\w.-]+)"
# The files, what an image is in them, and the text of its digest.
PLACES = (
    ("deploy/docker/*.Dockerfile", rf"^FROM {_NAME}:{_TAG}(?P<old>@{_DIGEST})?(?= AS|$)", "@{}"),
    ("deploy/compose/compose.yaml", rf"^    image: {_NAME}:{_TAG}(?P<old>@{_DIGEST})?$", "@{}"),
    (
        "deploy/k8s/components/*/kustomization.yaml",
        rf"^- name: {_NAME}\n  newTag: {_TAG}(?P<old>\n  digest: {_DIGEST})?$",
        "\n  digest: {}",
    ),
    (
        "deploy/helm/pointsman/values.yaml",
        rf'{{repository: {_NAME}, tag: {_TAG}, digest: (?P<old>""|{_DIGEST})}}',
        "{}",
    ),
)
# A registry answers with the index of all CPUs only to a client that names its types.
ACCEPTED = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)


class RegistryError(Exception): ...


@dataclass(frozen=True, slots=True)
class Pin:
    """An image in a file; `old`: the text of its digest, None or `""` without one."""

    path: Path
    repository: str
    tag: str
    old: str | None
    span: tuple[int, int]
    form: str


def pins(root: Path) -> Iterator[Pin]:
    """Yield every image of others in the files below `root`."""
    for pattern, image, form in PLACES:
        for path in sorted(root.glob(pattern)):
            for found in re.finditer(image, path.read_text(), re.MULTILINE):
                start, end = found.span("old")
                span = (start, end) if start >= 0 else (found.end("tag"), found.end("tag"))
                yield Pin(path, found["repository"], found["tag"], found["old"], span, form)


def digest_of(repository: str, tag: str) -> str:
    """Ask the registry for the digest of all CPUs' index. Raises RegistryError, OSError."""
    host, name = _located(repository)
    scheme = "http" if host.startswith(("127.0.0.1:", "localhost:")) else "https"
    url = f"{scheme}://{host}/v2/{name}/manifests/{tag}"
    try:
        body = _fetched(url, {})
    except urllib.error.HTTPError as error:
        if error.code != 401:
            raise RegistryError(f"{repository}:{tag}: {error}") from error
        challenge = error.headers.get("WWW-Authenticate", "")
        body = _fetched(url, {"Authorization": f"Bearer {_token(challenge)}"})
    index: dict[str, Any] = json.loads(body)
    machines = {one["platform"]["architecture"] for one in index.get("manifests", ())}
    if not machines >= MACHINES:
        raise RegistryError(f"{repository}:{tag} is not for {', '.join(sorted(MACHINES))}")
    return f"sha256:{hashlib.sha256(body).hexdigest()}"


def _located(repository: str) -> tuple[str, str]:
    """The host of a repository, and its name there, as docker reads it."""
    host, _, name = repository.partition("/")
    if not name or not re.search(r"[.:]|^localhost$", host):
        host, name = "docker.io", repository
    if host != "docker.io":
        return host, name
    return "registry-1.docker.io", name if "/" in name else f"library/{name}"


def _token(challenge: str) -> str:
    """Fetch the token for readers without an account that a registry's 401 leads to."""
    fields = dict(re.findall(r'(\w+)="([^"]*)"', challenge))
    if not challenge.startswith("Bearer ") or "realm" not in fields:
        raise RegistryError(f"the registry wants {challenge or 'credentials'}")
    query = "&".join(f"{key}={fields[key]}" for key in ("service", "scope") if key in fields)
    answer = json.loads(_fetched(f"{fields['realm']}?{query}", {}))
    return str(answer.get("token") or answer["access_token"])


def _fetched(url: str, headers: dict[str, str]) -> bytes:
    headers = {"Accept": ", ".join(ACCEPTED), **headers}
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60) as answer:
        content: bytes = answer.read()
        return content


def pin(root: Path) -> int:
    """Write all digests below `root`; returns the number of changed ones."""
    found = list(pins(root))
    images = sorted({(one.repository, one.tag) for one in found})
    digests = {image: digest_of(*image) for image in images}
    changed = 0
    for path in sorted({one.path for one in found}):
        text = path.read_text()
        for one in sorted((one for one in found if one.path == path), key=lambda one: -one.span[0]):
            new = one.form.format(digests[one.repository, one.tag])
            changed += new != one.old
            text = text[: one.span[0]] + new + text[one.span[1] :]
        path.write_text(text)
    for (repository, tag), digest in digests.items():
        print(f"{repository}:{tag}@{digest}")
    return changed


def unpinned(root: Path) -> list[str]:
    """Every image without a digest, and its file."""
    return [
        f"{one.path.relative_to(root)}: {one.repository}:{one.tag} has no digest"
        for one in pins(root)
        if one.old in (None, '""')
    ]


def main(arguments: list[str] | None = None) -> int:
    """Write, or check; 1 when a check finds an image without a digest."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only name images without a digest")
    if parser.parse_args(arguments).check:
        missing = unpinned(ROOT)
        for line in missing:
            print(line, file=sys.stderr)
        return 1 if missing else 0
    try:
        print(f"{pin(ROOT)} changed")
    except (RegistryError, OSError) as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from error
    return 0


if __name__ == "__main__":
    sys.exit(main())
