"""Every way a request can be refused, with its HTTP status, and the forms in which APIs write
errors.

Source: Gateway API Inference Extension, Endpoint Picker Protocol, and the error codes of the
reference picker; the error objects of OpenAI's API, as vLLM fills them, and of Anthropic's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from http import HTTPStatus
from types import MappingProxyType
from typing import Final

DROP_REASON_HEADER = "x-llm-d-request-dropped-reason"
RETRY_AFTER_HEADER = "retry-after"


class Code(Enum):
    """The kind of an error; its value is the word that the reference picker uses for it."""

    BAD_REQUEST = "BadRequest"
    UNAUTHORIZED = "Unauthorized"
    FORBIDDEN = "Forbidden"
    NOT_FOUND = "NotFound"
    PRECONDITION_FAILED = "PreconditionFailed"
    PAYLOAD_TOO_LARGE = "PayloadTooLarge"
    UNSUPPORTED_MEDIA_TYPE = "UnsupportedMediaType"
    RESOURCE_EXHAUSTED = "ResourceExhausted"
    HEADERS_TOO_LARGE = "HeadersTooLarge"
    INTERNAL = "Internal"
    SERVICE_UNAVAILABLE = "ServiceUnavailable"


HTTP_STATUS: dict[Code, int] = {
    Code.BAD_REQUEST: 400,
    Code.UNAUTHORIZED: 401,
    Code.FORBIDDEN: 403,
    Code.NOT_FOUND: 404,
    Code.PRECONDITION_FAILED: 412,
    Code.PAYLOAD_TOO_LARGE: 413,
    Code.UNSUPPORTED_MEDIA_TYPE: 415,
    Code.RESOURCE_EXHAUSTED: 429,
    Code.HEADERS_TOO_LARGE: 431,
    Code.INTERNAL: 500,
    Code.SERVICE_UNAVAILABLE: 503,
}


class DropReason(Enum):
    """The `x-llm-d-request-dropped-reason` of requests that were rejected, or stopped under way."""

    SATURATED = "rejected-saturated"
    NO_ENDPOINTS = "rejected-no-endpoints"
    TTL_EXPIRED = "rejected-ttl-expired"
    CONTEXT_CANCELLED = "rejected-context-cancelled"
    SHUTTING_DOWN = "rejected-shutting-down"
    EVICTED = "evicted"
    EVICTED_QUEUE_PRESSURE = "evicted-queue-pressure"
    EVICTED_PRIORITY = "evicted-priority"


class PickerError(Exception): ...


class ConfigError(PickerError):
    """A configuration that cannot be used; the message names file, line, key and the fix."""


@dataclass(eq=False)
class RefusedError(PickerError):
    """A request that is answered by the picker itself instead of by an endpoint.

    `message` is shown to the client; `drop_reason` is set when the request was shed rather than
    wrong, `retry_after_seconds` where it is known when another attempt may go better (RFC 9110:
    whole seconds, 1 or more). `param` names the member of the body that is at fault, `reference` is
    the reference picker's text where it differs.
    """

    code: Code
    message: str
    drop_reason: DropReason | None = None
    retry_after_seconds: int | None = None
    param: str | None = None
    reference: str | None = None

    def __post_init__(self) -> None:
        super().__init__(self.message)

    @property
    def status(self) -> int:
        return HTTP_STATUS[self.code]

    @property
    def reference_body(self) -> str:
        return f"inference error: {self.code.value} - {self.reference or self.message}"

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        headers: tuple[tuple[str, str], ...] = ()
        if self.drop_reason is not None:
            headers = ((DROP_REASON_HEADER, self.drop_reason.value),)
        if self.retry_after_seconds is None:
            return headers
        return (*headers, (RETRY_AFTER_HEADER, str(self.retry_after_seconds)))

    def answer(self, form: ErrorForm) -> tuple[str, tuple[tuple[str, str], ...]]:
        body = _WRITERS[form](self)
        return body, (*self.headers, JSON_CONTENT) if form in _JSON_FORMS else self.headers


class EvictedError(RefusedError):
    """429: the request was under way, but had to make room for others."""

    def __init__(self, reason: DropReason) -> None:
        super().__init__(
            Code.RESOURCE_EXHAUSTED,
            "the request was stopped to make room for others",
            reason,
            EVICTED_RETRY_AFTER_SECONDS,
        )

    @property
    def reference_body(self) -> str:
        return "request evicted by flow control"


class ErrorForm(Enum):
    OPENAI = "OpenAI's error object"
    ANTHROPIC = "Anthropic's error object"
    PLAIN = "text alone, which a proxy turns into gRPC's status message"
    REFERENCE = "the reference picker's text"


def form_of(path: str, content_type: str) -> ErrorForm:
    """Return the form of the API at `path`, for a request with that content type."""
    if content_type.startswith(GRPC_CONTENT):
        return ErrorForm.PLAIN
    if path.rstrip("/").endswith(ANTHROPIC_PATHS):
        return ErrorForm.ANTHROPIC
    return ErrorForm.OPENAI


def no_endpoints(message: str = "") -> RefusedError:
    """Return a 503: the pool, or the part that this request may use, has no endpoint."""
    if message:
        return RefusedError(Code.SERVICE_UNAVAILABLE, message, DropReason.NO_ENDPOINTS)
    return RefusedError(
        Code.SERVICE_UNAVAILABLE,
        "no endpoint is available for this request",
        DropReason.NO_ENDPOINTS,
        reference="failed to find endpoint candidates for serving the request",
    )


def bad_request(message: str, *, reference: str | None = None) -> RefusedError:
    """Return a 400: the client's request cannot be understood."""
    return RefusedError(Code.BAD_REQUEST, message, reference=reference)


def openai_type(status: int) -> str:
    return _OPENAI_TYPES.get(status) or HTTPStatus(status).phrase


def anthropic_type(status: int) -> str:
    return _ANTHROPIC_TYPES.get(status) or (
        "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "api_error"
    )


def _openai(error: RefusedError) -> str:
    status = error.status
    shown = {"message": _sentence(error), "type": openai_type(status), "param": error.param}
    return json.dumps({"error": {**shown, "code": status}})


def _anthropic(error: RefusedError) -> str:
    shown = {"type": anthropic_type(error.status), "message": _sentence(error)}
    return json.dumps({"type": "error", "error": shown})


def _sentence(error: RefusedError) -> str:
    return error.message[:1].upper() + error.message[1:]


# Envoy's access log and its filters distinguish the picker's answers from Envoy's own by this
# (`response.code_details`).
ANSWER_DETAILS: Final = "endpoint_picker"
GRPC_CONTENT: Final = "application/grpc"
JSON_CONTENT: Final = ("content-type", "application/json")
# What ends in `/messages` may be mounted anywhere.
ANTHROPIC_PATHS: Final = ("/messages", "/messages/count_tokens")
# Of other statuses it is the phrase that HTTP has for them.
_OPENAI_TYPES: Final[Mapping[int, str]] = MappingProxyType(
    {
        400: "BadRequestError",
        401: "AuthenticationError",
        403: "PermissionDeniedError",
        404: "NotFoundError",
        413: "Request Entity Too Large",  # the phrase of Python before 3.13
        429: "RateLimitError",
        500: "InternalServerError",
    }
)
_ANTHROPIC_TYPES: Final[Mapping[int, str]] = MappingProxyType(
    {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        413: "request_too_large",
        429: "rate_limit_error",
        503: "overloaded_error",
        504: "timeout_error",
    }
)
_JSON_FORMS: Final = (ErrorForm.OPENAI, ErrorForm.ANTHROPIC)
_WRITERS: Final[Mapping[ErrorForm, Callable[[RefusedError], str]]] = {
    ErrorForm.OPENAI: _openai,
    ErrorForm.ANTHROPIC: _anthropic,
    ErrorForm.PLAIN: _sentence,
    ErrorForm.REFERENCE: lambda error: error.reference_body,
}
EVICTED_STATUS: Final = HTTP_STATUS[Code.RESOURCE_EXHAUSTED]
EVICTED_RETRY_AFTER_SECONDS = 1  # when there will be room is not known; the least that can be said
