"""The three kinds of patches that are answered: JSON patch, merge patch, strategic merge patch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from kube_api.resources import Object, Resource
from kube_api.statuses import ApiError, bad_request, failed_test, unsupported_media_type

JSON_PATCH = "application/json-patch+json"
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
    """The object with the patch applied; `obj` stays as it is.

    Raises ApiError 415 for a kind the resource does not take (strategic merge patch on a custom
    resource; server-side apply, which this server does not know), 422 for a failed `test`, 400 for
    a patch that makes no sense.
    """
    kinds: dict[str, Callable[[Object, Any], Any]] = {JSON_PATCH: _json, MERGE_PATCH: _merge}
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


def _json(target: Any, operations: Any) -> Any:
    if not isinstance(operations, list):
        raise bad_request("a JSON patch is a list of operations")
    holder = {"": target}
    for operation in operations:
        try:
            _operate(holder, operation)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            text = f"the patch cannot be applied: {operation}: {error}"
            raise ApiError(422, "Invalid", text, {}) from error
    return holder[""]


def _operate(holder: Object, operation: Object) -> None:
    path, kind = operation["path"], operation["op"]
    if kind == "test":
        if _at(holder, path) != operation["value"]:
            raise failed_test()
    elif kind == "remove":
        _remove(holder, path)
    elif kind == "replace":
        _at(holder, path)
        _remove(holder, path)
        _add(holder, path, operation["value"])
    elif kind == "add":
        _add(holder, path, operation["value"])
    elif kind in ("copy", "move"):
        value = copy.deepcopy(_at(holder, operation["from"]))
        if kind == "move":
            _remove(holder, operation["from"])
        _add(holder, path, value)
    else:
        raise ValueError(f"unknown operation {kind!r}")


def _steps(path: str) -> list[str]:
    """The pointer's steps, the first of which is the document itself."""
    if path and not path.startswith("/"):
        raise ValueError(f"{path!r} is not a JSON pointer")
    return [step.replace("~1", "/").replace("~0", "~") for step in path.split("/")]


def _at(holder: Any, path: str) -> Any:
    value = holder
    for step in _steps(path):
        value = value[int(step)] if isinstance(value, list) else value[step]
    return value


def _parent(holder: Any, path: str) -> tuple[Any, str]:
    *above, last = _steps(path)
    value = holder
    for step in above:
        value = value[int(step)] if isinstance(value, list) else value[step]
    return value, last


def _remove(holder: Any, path: str) -> None:
    parent, last = _parent(holder, path)
    if isinstance(parent, list):
        del parent[int(last)]
    else:
        del parent[last]


def _add(holder: Any, path: str, value: Any) -> None:
    parent, last = _parent(holder, path)
    if isinstance(parent, list):
        index = len(parent) if last == "-" else int(last)
        if not 0 <= index <= len(parent):
            raise IndexError(f"{path} is outside the list")
        parent.insert(index, value)
    else:
        parent[last] = value
