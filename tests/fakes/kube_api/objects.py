"""Create, put, patch and delete, each with the rules of an API server."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tests.fakes.kube_api.clock import LoopClock, stamp
from tests.fakes.kube_api.patches import patched
from tests.fakes.kube_api.resources import Object, Resource
from tests.fakes.kube_api.statuses import already_exists, not_found
from tests.fakes.kube_api.store import Key, Store, Stored, key_of, stored
from tests.fakes.kube_api.writes import FieldValidation, created, decoded, updated


@dataclass(frozen=True, slots=True)
class WriteOptions:
    validation: FieldValidation = FieldValidation.WARN
    dry_run: bool = False
    status: bool = False


@dataclass(frozen=True, slots=True)
class Written:
    stored: Stored
    code: int = 200
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DeleteOptions:
    grace_seconds: int | None = None

    @classmethod
    def of(cls, body: Any, query: Mapping[str, str]) -> DeleteOptions:
        """Read the options; the body takes precedence over the query."""
        body = body if isinstance(body, dict) else {}
        grace = body.get("gracePeriodSeconds")
        if grace is None and "gracePeriodSeconds" in query:
            grace = int(query["gracePeriodSeconds"])
        return cls(grace)


class Objects:
    def __init__(
        self, store: Store, clock: LoopClock, new_uid: Callable[[], str] | None = None
    ) -> None:
        self._store = store
        self._clock = clock
        self.new_uid = new_uid or (lambda: str(uuid.uuid4()))

    def create(
        self, resource: Resource, namespace: str, body: Any, options: WriteOptions
    ) -> Written:
        self._check_namespace(resource, namespace)
        obj, warnings = decoded(resource, body, options.validation)
        obj = created(resource, obj, namespace, self.new_uid(), self._clock.now())
        if options.dry_run:
            self._check_free(resource, obj)
            return Written(stored(obj, self._store.version), 201, tuple(warnings))
        return Written(self._store.insert(resource, obj), 201, tuple(warnings))

    def put(self, resource: Resource, key: Key, body: Any, options: WriteOptions) -> Written:
        obj, warnings = decoded(resource, body, options.validation)
        return self._write(resource, self._store.get(resource, key), obj, options, warnings)

    def patch(
        self, resource: Resource, key: Key, patch: tuple[str, Any], options: WriteOptions
    ) -> Written:
        found = self._store.get(resource, key)
        wanted = patched(resource, found.obj, *patch)
        obj, warnings = decoded(resource, wanted, options.validation)
        return self._write(resource, found, obj, options, warnings)

    def delete(self, resource: Resource, key: Key, options: DeleteOptions) -> tuple[Stored, bool]:
        """Delete, or begin the grace period of a Pod on a node; return whether it is gone."""
        found = self._store.get(resource, key)
        if resource.graceful:
            found, pending = self._with_grace(resource, found, options)
            if pending:
                return found, False
        return self._store.delete(resource, key), True

    def _with_grace(
        self, resource: Resource, found: Stored, options: DeleteOptions
    ) -> tuple[Stored, bool]:
        obj = found.obj
        current = obj["metadata"].get("deletionGracePeriodSeconds")
        grace = _grace(obj, options.grace_seconds)
        if current is not None and (options.grace_seconds is None or grace >= current):
            return found, True
        found = self._store.replace(resource, self._dying(obj, grace))
        return found, grace > 0

    def _dying(self, obj: Object, grace: int) -> Object:
        metadata = dict(obj["metadata"])
        if "deletionTimestamp" not in metadata and "generation" in metadata:
            metadata["generation"] += 1
        metadata["deletionTimestamp"] = stamp(self._clock.now() + grace)
        metadata["deletionGracePeriodSeconds"] = grace
        return {**obj, "metadata": metadata}

    def _write(
        self,
        resource: Resource,
        found: Stored,
        obj: Object,
        options: WriteOptions,
        warnings: list[str],
    ) -> Written:
        new = updated(resource, found.obj, obj, status=options.status)
        if options.dry_run:
            return Written(stored(new, found.version), 200, tuple(warnings))
        return Written(self._store.replace(resource, new), 200, tuple(warnings))

    def _check_namespace(self, resource: Resource, namespace: str) -> None:
        spaces = Resource("", "v1", "namespaces", "Namespace")
        if resource.namespaced and self._store.find(spaces, ("", namespace)) is None:
            raise not_found(spaces, namespace)

    def _check_free(self, resource: Resource, obj: Object) -> None:
        if self._store.find(resource, key_of(obj)) is not None:
            raise already_exists(resource, obj["metadata"]["name"])


def _grace(pod: Object, asked: int | None) -> int:
    """Return a Pod's grace period: none for a Pod without a kubelet, or one that has ended."""
    spec, phase = pod.get("spec") or {}, (pod.get("status") or {}).get("phase")
    if not spec.get("nodeName") or phase in ("Succeeded", "Failed"):
        return 0
    return int(spec.get("terminationGracePeriodSeconds", 30) if asked is None else asked)
