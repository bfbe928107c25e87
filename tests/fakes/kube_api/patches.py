"""Merge patch and strategic merge patch."""

import copy
from collections.abc import Callable
from typing import Any

from tests.fakes.kube_api.resources import Object, Resource
from tests.fakes.kube_api.statuses import bad_request, unsupported_media_type

MERGE_PATCH = "application/merge-patch+json"
STRATEGIC_PATCH = "application/strategic-merge-patch+json"

# Lists of built-in objects that strategic merge joins by a key instead of replacing them.
_MERGE_KEYS = {
    "conditions": "type",
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "ownerReferences": "uid",
    "imagePullSecrets": "name",
}


def patched(resource: Resource, obj: Object, content_type: str, patch: Any) -> Object:
    """Return a patched copy; raises ApiError 415 or 400 for a patch that is not possible."""
    kinds: dict[str, Callable[[Object, Any], Any]] = {MERGE_PATCH: _merge}
    if not resource.custom:
        kinds[STRATEGIC_PATCH] = _strategic
    apply = kinds.get(content_type)
    if apply is None:
        raise unsupported_media_type(list(kinds))
    result = apply(copy.deepcopy(obj), patch)
    if not isinstance(result, dict):
        raise bad_request("the patch does not give an object")
    return result


def _merge(target: Any, patch: Any) -> Any:
    if not isinstance(patch, dict):
        return patch
    merged = target if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = _merge(merged.get(key), value)
    return merged


def _strategic(target: Any, patch: Any, key: str = "") -> Any:
    if isinstance(patch, list):
        name = _MERGE_KEYS.get(key)
        return _joined(target or [], patch, name) if name else patch
    if not isinstance(patch, dict):
        return patch
    if patch.get("$patch") == "replace":
        return {k: v for k, v in patch.items() if k != "$patch"}
    merged = target if isinstance(target, dict) else {}
    for field, value in patch.items():
        if value is None:
            merged.pop(field, None)
        elif not field.startswith("$"):
            merged[field] = _strategic(merged.get(field), value, field)
    return merged


def _joined(items: list[Any], patch: list[Any], name: str) -> list[Any]:
    joined = {item.get(name): item for item in items}
    for item in patch:
        key = item.get(name)
        if item.get("$patch") == "delete":
            joined.pop(key, None)
        else:
            joined[key] = _strategic(joined.get(key), item)
    return list(joined.values())
