"""The requests of the picker to a Kubernetes API server, as an interface."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec


@dataclass(frozen=True, slots=True)
class ApiResource:
    """A kind of object in terms of API paths; `group` "" is the core group."""

    group: str
    version: str
    plural: str

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def qualified(self) -> str:
        return f"{self.plural}.{self.group}" if self.group else self.plural

    def path(self, namespace: str, name: str = "") -> str:
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        path = f"{root}/namespaces/{namespace}/{self.plural}"
        return f"{path}/{name}" if name else path


PODS = ApiResource("", "v1", "pods")
POOLS = ApiResource("inference.networking.k8s.io", "v1", "inferencepools")
LEGACY_POOLS = ApiResource("inference.networking.x-k8s.io", "v1alpha2", "inferencepools")
OBJECTIVES = ApiResource("llm-d.ai", "v1alpha2", "inferenceobjectives")
LEGACY_OBJECTIVES = ApiResource("inference.networking.x-k8s.io", "v1alpha2", "inferenceobjectives")
REWRITES = ApiResource("llm-d.ai", "v1alpha2", "inferencemodelrewrites")
LEGACY_REWRITES = ApiResource("inference.networking.x-k8s.io", "v1alpha2", "inferencemodelrewrites")
LEASES = ApiResource("coordination.k8s.io", "v1", "leases")
ENDPOINT_SLICES = ApiResource("discovery.k8s.io", "v1", "endpointslices")


@dataclass(frozen=True, slots=True)
class Selection:
    namespace: str
    label_selector: str = ""
    field_selector: str = ""


@dataclass(frozen=True, slots=True)
class Listing:
    """All objects of a selection at one moment, each as the JSON that the server sent."""

    items: Sequence[msgspec.Raw]
    resource_version: str


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """One line of a watch. `kind` is ADDED, MODIFIED, DELETED or BOOKMARK; an ERROR is raised."""

    kind: str
    object: msgspec.Raw


class ApiError(Exception):
    """A refusal; `status` is the HTTP status, or the code of an ERROR in a watch."""

    def __init__(
        self, status: int, reason: str, message: str, retry_after_seconds: float | None = None
    ) -> None:
        super().__init__(f"{status} {reason}: {message}" if reason else f"{status}: {message}")
        self.status = status
        self.reason = reason
        self.message = message
        self.retry_after_seconds = retry_after_seconds


class UnreachableError(Exception):
    """No answer from an API server: no connection, a broken or silent one, or unreadable bytes."""


class SilentError(UnreachableError):
    """A connection has stayed open without any bytes for longer than a live watch would."""


class KubernetesApi(Protocol):
    """An API server. Every method raises `ApiError` or `UnreachableError` and nothing else."""

    async def list(self, resource: ApiResource, selection: Selection) -> Listing: ...

    def watch(
        self, resource: ApiResource, selection: Selection, resource_version: str
    ) -> AbstractAsyncContextManager[AsyncIterator[WatchEvent]]:
        """Watch the changes after `resource_version`, with bookmarks, until the server ends it."""

    async def get(self, resource: ApiResource, namespace: str, name: str) -> dict[str, Any]: ...

    async def send(self, method: str, path: str, document: dict[str, Any]) -> dict[str, Any]:
        """POST a new object or review, or PUT one (409 if outdated); return the stored object."""

    async def has(self, resource: ApiResource) -> bool:
        """Return whether the server knows the kind."""
