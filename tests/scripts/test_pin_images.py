"""Digests come from a registry, here one of our own, and go beside the tags."""

import hashlib
import json
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

from scripts.pin_images import RegistryError, digest_of, pin, pins, unpinned

ROOT = Path(__file__).parents[2]


def index(*machines: str) -> bytes:
    manifests = [{"platform": {"os": "linux", "architecture": one}} for one in machines]
    return json.dumps({"schemaVersion": 2, "manifests": manifests}).encode()


INDEX = index("amd64", "arm64", "s390x")
DIGEST = f"sha256:{hashlib.sha256(INDEX).hexdigest()}"


class Registry(BaseHTTPRequestHandler):
    """Gives a token to every client, and an index only to one that has it and names its type."""

    images: dict[str, bytes]

    def do_GET(self) -> None:
        host = f"http://{self.headers['Host']}"
        if self.path == "/token?service=registry&scope=repository:any:pull":
            self._answer(200, json.dumps({"token": "secret"}).encode())
        elif self.headers.get("Authorization") != "Bearer secret":
            scope = 'service="registry",scope="repository:any:pull"'
            self._answer(401, b"", {"WWW-Authenticate": f'Bearer realm="{host}/token",{scope}'})
        elif self.path in self.images and "image.index" in self.headers["Accept"]:
            self._answer(200, self.images[self.path])
        else:
            self._answer(404, b"")

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        return


@contextmanager
def registry(images: dict[str, bytes]) -> Iterator[str]:
    kind = type("Filled", (Registry,), {"images": images})
    with ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Path]:
    """The files that name images, whose registry is our own, without digests."""
    shutil.copytree(ROOT / "deploy", tmp_path / "deploy")
    for path in {one.path for one in pins(tmp_path)}:
        text = re.sub(r"digest: sha256:\w+}", 'digest: ""}', path.read_text())
        path.write_text(re.sub(r"(@|\n  digest: )sha256:\w+", "", text))
    found = {f"/v2/{one.repository}/manifests/{one.tag}" for one in pins(tmp_path)}
    with registry(dict.fromkeys(found, INDEX)) as host:
        for path in {one.path for one in pins(tmp_path)}:
            text = path.read_text()
            for one in sorted(
                (one for one in pins(tmp_path) if one.path == path), key=lambda one: -one.span[0]
            ):
                start = text.rindex(one.repository, 0, one.span[0])
                text = text[:start] + f"{host}/" + text[start:]
            path.write_text(text)
        yield tmp_path


def test_every_image_gets_its_digest_once(tree: Path) -> None:
    count = len(unpinned(tree))
    assert count == len(list(pins(tree))) >= 10
    assert pin(tree) == count
    assert unpinned(tree) == []
    assert pin(tree) == 0
    for path in (tree / "deploy" / "docker").glob("*.Dockerfile"):
        for line in re.findall(r"^FROM (?!base)(.*)$", path.read_text(), re.MULTILINE):
            assert re.search(rf":\S+@{DIGEST}( AS|$)", line)
    values = yaml.safe_load((tree / "deploy/helm/pointsman/values.yaml").read_text())
    assert values["images"]["envoy"]["digest"] == DIGEST
    assert values["images"]["picker"]["digest"] == ""
    part = tree / "deploy/k8s/components/standalone/kustomization.yaml"
    [image] = yaml.safe_load(part.read_text())["images"]
    assert (image["newTag"], image["digest"]) == ("v1.40.0", DIGEST)
    services = yaml.safe_load((tree / "deploy/compose/compose.yaml").read_text())["services"]
    assert services["grafana"]["image"].endswith(f"@{DIGEST}")
    assert "@" not in services["picker"]["image"]


def test_an_image_for_one_cpu_is_refused() -> None:
    images = {"/v2/a/manifests/1": index("amd64"), "/v2/b/manifests/1": INDEX}
    with registry(images) as host:
        assert digest_of(f"{host}/b", "1") == DIGEST
        with pytest.raises(RegistryError, match="is not for amd64, arm64"):
            digest_of(f"{host}/a", "1")
        with pytest.raises(OSError, match="404"):
            digest_of(f"{host}/b", "2")
