"""A client for tests that run against the fake server or a real one.

With `KUBECONFIG` set, the API server of its current context is used, in a namespace that is
created for the test and deleted after it. Missing CRDs are created and remain.
"""

import asyncio
import base64
import json
import os
import ssl
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from tests.fakes.kube_api.resources import Object
from tests.fakes.kube_api.server import KubeApi, running_kube_api

MERGE = "application/merge-patch+json"
_PATIENCE_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Answer:
    code: int
    body: Any
    headers: dict[str, str]

    @property
    def reason(self) -> str | None:
        refused = isinstance(self.body, dict) and self.body.get("kind") == "Status"
        return self.body.get("reason") if refused else None

    @property
    def short(self) -> tuple[int, str | None]:
        return self.code, self.reason

    @property
    def version(self) -> str:
        return str(self.body["metadata"]["resourceVersion"])


@dataclass(frozen=True, slots=True)
class Address:
    url: str
    headers: dict[str, str] = field(default_factory=dict)
    tls: ssl.SSLContext | None = None


@dataclass(frozen=True, slots=True)
class Cluster:
    session: aiohttp.ClientSession
    address: Address
    namespace: str
    fake: KubeApi | None = None

    def path(self, plural: str, name: str = "", *, group: str = "") -> str:
        root = f"/apis/{group}" if group else "/api/v1"
        return f"{root}/namespaces/{self.namespace}/{plural}" + (f"/{name}" if name else "")

    async def call(
        self, method: str, path: str, body: Any = None, *, kind: str = "", **query: str
    ) -> Answer:
        kind = kind or (MERGE if method == "PATCH" else "application/json")
        data = None if body is None else json.dumps(body).encode()
        headers = self.address.headers | {"Content-Type": kind}
        async with self.session.request(
            method,
            self.address.url + path,
            data=data,
            headers=headers,
            params=query,
            ssl=self.address.tls or True,
        ) as reply:
            text = await reply.text()
            return Answer(reply.status, _parsed(text), dict(reply.headers))

    async def watch(
        self, path: str, *, events: int | None = None, **query: str
    ) -> list[dict[str, Any]]:
        """Return the first events of a watch, or all until its end, marked by `{"type": "EOF"}`."""
        found: list[dict[str, Any]] = []
        async with (
            asyncio.timeout(_PATIENCE_SECONDS),
            self.session.get(
                self.address.url + path,
                headers=self.address.headers,
                params={"watch": "1"} | query,
                ssl=self.address.tls or True,
            ) as reply,
        ):
            async for line in reply.content:
                found.append(json.loads(line))
                if events is not None and len(found) >= events:
                    return found
        return [*found, {"type": "EOF"}]


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


@asynccontextmanager
async def open_cluster(*definitions: Path, first_version: int = 1000) -> AsyncIterator[Cluster]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        config = os.environ.get("KUBECONFIG")
        if config:
            address = address_in(Path(config.split(os.pathsep)[0]))
            async with _real(session, address, definitions) as cluster:
                yield cluster
            return
        async with running_kube_api(None, *definitions, first_version=first_version) as fake:
            yield Cluster(session, Address(fake.url), "default", fake)


@asynccontextmanager
async def _real(
    session: aiohttp.ClientSession, address: Address, definitions: Sequence[Path]
) -> AsyncIterator[Cluster]:
    cluster = Cluster(session, address, "default")
    for definition in definitions:
        await _established(cluster, yaml.safe_load(definition.read_text()))
    space = {"metadata": {"generateName": "pointsman-test-"}}
    made = await cluster.call("POST", "/api/v1/namespaces", space)
    name = made.body["metadata"]["name"]
    try:
        yield Cluster(session, address, name)
    finally:
        await cluster.call("DELETE", f"/api/v1/namespaces/{name}")


async def _established(cluster: Cluster, definition: Object) -> None:
    root = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    name = definition["metadata"]["name"]
    await cluster.call("POST", root, definition)
    async with asyncio.timeout(_PATIENCE_SECONDS):
        async with cluster.session.get(
            f"{cluster.address.url}{root}",
            headers=cluster.address.headers,
            params={"watch": "1", "fieldSelector": f"metadata.name={name}"},
            ssl=cluster.address.tls or True,
        ) as reply:
            async for line in reply.content:
                conditions = json.loads(line)["object"].get("status", {}).get("conditions", [])
                if any(c["type"] == "Established" and c["status"] == "True" for c in conditions):
                    return


def address_in(path: Path) -> Address:
    config = yaml.safe_load(path.read_text())
    contexts = {one["name"]: one["context"] for one in config["contexts"]}
    context = contexts[config["current-context"]]
    cluster = {one["name"]: one["cluster"] for one in config["clusters"]}[context["cluster"]]
    user = {one["name"]: one["user"] for one in config["users"]}[context["user"]] or {}
    if "exec" in user or "auth-provider" in user:
        raise ValueError(f"{path}: give a token or a client certificate")
    headers = {"Authorization": f"Bearer {user['token']}"} if "token" in user else {}
    url = cluster["server"].rstrip("/")
    return Address(url, headers, _tls(cluster, user) if url.startswith("https") else None)


def _tls(cluster: dict[str, Any], user: dict[str, Any]) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=cluster.get("certificate-authority"))
    if "certificate-authority-data" in cluster:
        context.load_verify_locations(cadata=_plain(cluster["certificate-authority-data"]).decode())
    if cluster.get("insecure-skip-tls-verify"):
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if "client-certificate" in user:
        context.load_cert_chain(user["client-certificate"], user["client-key"])
    elif "client-certificate-data" in user:
        with tempfile.TemporaryDirectory() as folder:
            certificate, key = Path(folder, "certificate"), Path(folder, "key")
            certificate.write_bytes(_plain(user["client-certificate-data"]))
            key.write_bytes(_plain(user["client-key-data"]))
            context.load_cert_chain(certificate, key)
    return context


def _plain(text: str) -> bytes:
    return base64.b64decode(text)
