"""The `Status` bodies of refusals, and the exception that carries one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.support.kube.crd_rules import FieldError

if TYPE_CHECKING:
    from tests.fakes.kube_api.resources import Resource


@dataclass(slots=True)
class ApiError(Exception):
    code: int
    reason: str
    message: str
    details: dict[str, Any] | None = None

    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
        }
        if self.details is not None:
            body["details"] = self.details
        return body | {"code": self.code}

    @property
    def headers(self) -> dict[str, str]:
        seconds = (self.details or {}).get("retryAfterSeconds")
        return {} if seconds is None else {"Retry-After": str(seconds)}


def _about(resource: Resource, name: str) -> dict[str, Any]:
    group = {"group": resource.group} if resource.group else {}
    return {"name": name, **group, "kind": resource.plural}


def bad_request(message: str) -> ApiError:
    return ApiError(400, "BadRequest", message)


def unauthorized() -> ApiError:
    return ApiError(401, "Unauthorized", "Unauthorized")


def not_found(resource: Resource, name: str) -> ApiError:
    text = f'{resource.qualified} "{name}" not found'
    return ApiError(404, "NotFound", text, _about(resource, name))


def method_not_allowed() -> ApiError:
    text = "the server does not allow this method on the requested resource"
    return ApiError(405, "MethodNotAllowed", text, {})


def already_exists(resource: Resource, name: str) -> ApiError:
    text = f'{resource.qualified} "{name}" already exists'
    return ApiError(409, "AlreadyExists", text, _about(resource, name))


def conflict(resource: Resource, name: str) -> ApiError:
    stale = "the object has been modified; please apply your changes to the latest version"
    text = f'Operation cannot be fulfilled on {resource.qualified} "{name}": {stale} and try again'
    return ApiError(409, "Conflict", text, _about(resource, name))


def expired(version: int, oldest: int) -> ApiError:
    return ApiError(410, "Expired", f"too old resource version: {version} ({oldest})")


def expired_continue() -> ApiError:
    text = (
        "The provided continue parameter is too old to display a consistent list result. You can "
        "start a new list without the continue parameter."
    )
    return ApiError(410, "Expired", text)


def unsupported_media_type(accepted: Sequence[str]) -> ApiError:
    text = "the body of the request was in an unknown format - accepted media types include: "
    return ApiError(415, "UnsupportedMediaType", text + ", ".join(accepted))


def invalid(resource: Resource, name: str, errors: Sequence[FieldError]) -> ApiError:
    texts = [str(error) for error in errors]
    listed = texts[0] if len(texts) == 1 else "[" + ", ".join(texts) + "]"
    kind = f"{resource.kind}.{resource.group}" if resource.group else resource.kind
    causes = [{"reason": e.reason, "message": e.message, "field": e.path} for e in errors]
    group = {"group": resource.group} if resource.group else {}
    details = {"name": name, **group, "kind": resource.kind, "causes": causes}
    return ApiError(422, "Invalid", f'{kind} "{name}" is invalid: {listed}', details)


def too_many_requests(message: str, retry_after_seconds: int = 1) -> ApiError:
    details = {"retryAfterSeconds": retry_after_seconds}
    return ApiError(429, "TooManyRequests", message, details)


def initializing() -> ApiError:
    return too_many_requests("storage is (re)initializing")


def internal(message: str = "an error on the server") -> ApiError:
    return ApiError(500, "InternalError", f"Internal error occurred: {message}")


def forbidden(
    resource: Resource, user: str, verb: str, namespace: str | None, name: str
) -> ApiError:
    target = f'{resource.qualified} "{name}"' if name else resource.qualified
    where = f'in the namespace "{namespace}"' if namespace else "at the cluster scope"
    text = (
        f'{target} is forbidden: User "{user}" cannot {verb} resource "{resource.plural}" '
        f'in API group "{resource.group}" {where}'
    )
    return ApiError(403, "Forbidden", text, _about(resource, name))


def success(resource: Resource, name: str, uid: str) -> dict[str, Any]:
    details = _about(resource, name) | {"uid": uid}
    body = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}
    return body | {"details": details}
