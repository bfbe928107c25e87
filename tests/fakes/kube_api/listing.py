"""Lists, whole and in pages; all pages of a list show the version of the first."""

import base64
from dataclasses import dataclass, field

import msgspec

from tests.fakes.kube_api.resources import Resource
from tests.fakes.kube_api.statuses import expired_continue
from tests.fakes.kube_api.store import Store, Stored
from tests.fakes.kube_api.target import Target


@dataclass(frozen=True, slots=True)
class _Rest:
    version: int
    items: tuple[Stored, ...]


@dataclass(slots=True)
class Lists:
    store: Store
    _rests: dict[str, _Rest] = field(default_factory=dict)

    def page(self, target: Target) -> bytes:
        """Return the JSON of one reply. Raises ApiError 410."""
        token = target.query.get("continue", "")
        version, items = self._continued(token) if token else self._begun(target)
        limit = target.number("limit")
        metadata: dict[str, object] = {"resourceVersion": str(version)}
        if limit and len(items) > limit:
            metadata["continue"] = self._remember(version, items[limit:])
            if not (target.query.get("labelSelector") or target.query.get("fieldSelector")):
                metadata["remainingItemCount"] = len(items) - limit
            items = items[:limit]
        return _body(target.resource, metadata, items)

    def expire(self) -> None:
        self._rests.clear()

    def _begun(self, target: Target) -> tuple[int, tuple[Stored, ...]]:
        selected = target.selector()
        found = self.store.all(target.resource)
        return self.store.version, tuple(one for one in found if selected(one.obj))

    def _continued(self, token: str) -> tuple[int, tuple[Stored, ...]]:
        rest = self._rests.get(token)
        if rest is None:
            raise expired_continue()
        return rest.version, rest.items

    def _remember(self, version: int, items: tuple[Stored, ...]) -> str:
        metadata = items[0].obj["metadata"]
        key = msgspec.json.encode({"v": version, "start": metadata["name"], "left": len(items)})
        token = base64.urlsafe_b64encode(key).decode()
        self._rests[token] = _Rest(version, items)
        return token


def _body(resource: Resource, metadata: dict[str, object], items: tuple[Stored, ...]) -> bytes:
    head = {
        "kind": f"{resource.kind}List",
        "apiVersion": resource.api_version,
        "metadata": metadata,
    }
    raws = [one.raw if resource.custom else _untyped(one) for one in items]
    return msgspec.json.encode(head)[:-1] + b',"items":[' + b",".join(raws) + b"]}"


def _untyped(one: Stored) -> bytes:
    return msgspec.json.encode(
        {key: value for key, value in one.obj.items() if key not in ("kind", "apiVersion")}
    )
