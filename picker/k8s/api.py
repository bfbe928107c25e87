"""What the picker asks of a Kubernetes API server, without how it is asked.

`picker.k8s.client` speaks with a real one. Everything else here is written against `KubernetesApi`,
so that it can be run against a server in the same process, and in virtual time.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec


@dataclass(frozen=True, slots=True)
class ApiResource:
    """A kind of objects, as paths name it; `group` "" is the core."""

    group: str
    version: str
    plural: str

    @property
    def api_version(self) -> str:
        """As objects state it."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def qualified(self) -> str:
        """For people: plural and group."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    def path(self, namespace: str, name: str = "") -> str:
        """Of all objects in `namespace`, or of one."""
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
    """Which objects of a kind: those of one namespace that both selectors let through."""

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
    """The server refused; `status` is that of HTTP, or the code of an ERROR in a watch.

    `reason` is the server's own ("Gone", "Forbidden", "NotFound"…; "" when it gave none),
    `retry_after_seconds` how long it asked to be left alone.
    """

    def __init__(
        self, status: int, reason: str, message: str, retry_after_seconds: float | None = None
    ) -> None:
        super().__init__(f"{status} {reason}: {message}" if reason else f"{status}: {message}")
        self.status = status
        self.reason = reason
        self.message = message
        self.retry_after_seconds = retry_after_seconds


class UnreachableError(Exception):
    """No answer: no connection, a connection that broke or was silent for too long, no such name,
    or bytes that are no answer.
    """


class SilentError(UnreachableError):
    """A connection that stays open, and on which nothing came for longer than anything may last."""


class KubernetesApi(Protocol):
    """An API server. Every method raises `ApiError` or `UnreachableError` and nothing else."""

    async def list(self, resource: ApiResource, selection: Selection) -> Listing:
        """All objects now."""
        ...

    def watch(
        self, resource: ApiResource, selection: Selection, resource_version: str
    ) -> AbstractAsyncContextManager[AsyncIterator[WatchEvent]]:
        """What changes after `resource_version`, with bookmarks, until the server ends the watch.

        Ends with `SilentError` when nothing at all came for longer than a live watch is ever
        silent.
        """
        ...

    async def get(self, resource: ApiResource, namespace: str, name: str) -> dict[str, Any]:
        """One object."""
        ...

    async def send(self, method: str, path: str, document: dict[str, Any]) -> dict[str, Any]:
        """POST a new object or a review, or PUT an object in place of another (409 when its
        resourceVersion is not the current one); the object as the server has it then.
        """
        ...

    async def has(self, resource: ApiResource) -> bool:
        """True if the server knows the kind (discovery of its group and version)."""
        ...
