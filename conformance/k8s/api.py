"""A small client of a Kubernetes API: what the suite has to write, and no more."""

import json
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from kubernetes import client as kubernetes_client
from kubernetes import config as kubernetes_config

Document = dict[str, Any]
_MERGE = "application/merge-patch+json"
_TIMEOUT_SECONDS = 30.0
_PATHS = {
    "Namespace": ("/api/v1", "namespaces", False),
    "Pod": ("/api/v1", "pods", True),
    "InferencePool": ("/apis/inference.networking.k8s.io/v1", "inferencepools", True),
    "CustomResourceDefinition": (
        "/apis/apiextensions.k8s.io/v1",
        "customresourcedefinitions",
        False,
    ),
}


class ApiRefusalError(Exception):
    """The API server said no; `code` is the HTTP status."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text[:300]}")
        self.code = code


@dataclass(frozen=True, slots=True)
class KubeApi:
    """One API server, by its entry in a kubeconfig."""

    session: aiohttp.ClientSession
    url: str
    headers: Mapping[str, str]
    tls: ssl.SSLContext | bool

    async def create(self, document: Document, namespace: str = "") -> Document:
        """Create an object. Raises `ApiRefusalError`."""
        return await self._call("POST", _path(document["kind"], namespace), document)

    async def read(self, kind: str, name: str, namespace: str = "") -> Document | None:
        """An object; None where there is none. Raises `ApiRefusalError`."""
        try:
            return await self._call("GET", _path(kind, namespace, name))
        except ApiRefusalError as refusal:
            if refusal.code == 404:
                return None
            raise

    async def items(self, kind: str, namespace: str) -> list[Document]:
        """All objects of a kind. Raises `ApiRefusalError`."""
        found: list[Document] = (await self._call("GET", _path(kind, namespace)))["items"]
        return found

    async def names(self, kind: str, namespace: str) -> list[str]:
        """The names of all objects of a kind. Raises `ApiRefusalError`."""
        return [item["metadata"]["name"] for item in await self.items(kind, namespace)]

    async def replace(self, document: Document, namespace: str = "") -> Document:
        """Put the object there, whatever is there now. Raises `ApiRefusalError`."""
        kind, name = document["kind"], document["metadata"]["name"]
        found = await self.read(kind, name, namespace)
        if found is None:
            return await self.create(document, namespace)
        version = found["metadata"]["resourceVersion"]
        metadata = {**document["metadata"], "resourceVersion": version}
        body = {**document, "metadata": metadata}
        return await self._call("PUT", _path(kind, namespace, name), body)

    async def merge(
        self, kind: str, name: str, patch: Document, namespace: str = "", part: str = ""
    ) -> Document:
        """A merge patch of the object, or of its `part` (`status`). Raises `ApiRefusalError`."""
        path = _path(kind, namespace, name) + (f"/{part}" if part else "")
        return await self._call("PATCH", path, patch, _MERGE)

    async def delete(self, kind: str, name: str, namespace: str = "") -> None:
        """Delete, without a grace period; nothing where there is none."""
        options = {"gracePeriodSeconds": 0, "propagationPolicy": "Background"}
        try:
            await self._call("DELETE", _path(kind, namespace, name), options)
        except ApiRefusalError as refusal:
            if refusal.code != 404:
                raise

    async def version(self) -> str:
        """The version that the server reports."""
        return str((await self._call("GET", "/version")).get("gitVersion", "of no version"))

    async def _call(
        self, method: str, path: str, body: Document | None = None, kind: str = "application/json"
    ) -> Document:
        data = None if body is None else json.dumps(body)
        headers = {**self.headers, "content-type": kind}
        url = self.url + path
        async with self.session.request(
            method, url, data=data, headers=headers, ssl=self.tls
        ) as reply:
            text = await reply.text()
            if reply.status >= 400:
                raise ApiRefusalError(reply.status, text)
            found = json.loads(text)
            return found if isinstance(found, dict) else {}


def _path(kind: str, namespace: str, name: str = "") -> str:
    root, plural, namespaced = _PATHS[kind]
    place = f"/namespaces/{namespace}" if namespaced else ""
    return f"{root}{place}/{plural}" + (f"/{name}" if name else "")


@asynccontextmanager
async def api_at(kubeconfig: Path) -> AsyncIterator[KubeApi]:
    """The API server of a kubeconfig's current context."""
    found: Any = kubernetes_client.Configuration()  # the package's types are of no use
    load: Any = kubernetes_config.load_kube_config
    load(str(kubeconfig), client_configuration=found)
    headers = {
        setting["key"]: setting["value"]
        for setting in found.auth_settings().values()
        if setting["in"] == "header" and setting["value"]
    }
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_SECONDS)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        yield KubeApi(session, found.host.rstrip("/"), headers, _tls(found))


def _tls(found: Any) -> ssl.SSLContext | bool:
    if not found.host.startswith("https"):
        return True
    context = ssl.create_default_context(cafile=found.ssl_ca_cert)
    if not found.verify_ssl:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if found.cert_file:
        context.load_cert_chain(found.cert_file, found.key_file)
    return context
