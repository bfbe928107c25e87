"""Every way a request can be refused, and the one table that gives each its HTTP status.

`docs/protocol.md` lists the meaning of each status here.

Source: Gateway API Inference Extension, Endpoint Picker Protocol, and the error codes of the
reference picker.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum

DROP_REASON_HEADER = "x-llm-d-request-dropped-reason"
RETRY_AFTER_HEADER = "retry-after"


class Code(Enum):
    """The kind of an error; its value is the word used in the response body."""

    BAD_REQUEST = "BadRequest"
    UNAUTHORIZED = "Unauthorized"
    FORBIDDEN = "Forbidden"
    NOT_FOUND = "NotFound"
    PRECONDITION_FAILED = "PreconditionFailed"
    PAYLOAD_TOO_LARGE = "PayloadTooLarge"
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
    Code.RESOURCE_EXHAUSTED: 429,
    Code.HEADERS_TOO_LARGE: 431,
    Code.INTERNAL: 500,
    Code.SERVICE_UNAVAILABLE: 503,
}


class DropReason(Enum):
    """Value of the `x-llm-d-request-dropped-reason` response header.

    The reasons that begin with `rejected` are of requests that never left, those that begin with
    `evicted` of requests that were under way.
    """

    SATURATED = "rejected-saturated"
    NO_ENDPOINTS = "rejected-no-endpoints"
    TTL_EXPIRED = "rejected-ttl-expired"
    CONTEXT_CANCELLED = "rejected-context-cancelled"
    SHUTTING_DOWN = "rejected-shutting-down"
    EVICTED = "evicted"
    EVICTED_QUEUE_PRESSURE = "evicted-queue-pressure"
    EVICTED_PRIORITY = "evicted-priority"


class PickerError(Exception):
    """Root of this package's error tree."""


class ConfigError(PickerError):
    """A configuration that cannot be used; the message names file, line, key and the fix."""


@dataclass(eq=False)
class RefusedError(PickerError):
    """A request that is answered by the picker itself instead of by an endpoint.

    `message` is shown to the client; `drop_reason` is set when the request was shed rather than
    wrong, `retry_after_seconds` where it is known when another attempt may go better (RFC 9110:
    whole seconds, 1 or more).
    """

    code: Code
    message: str
    drop_reason: DropReason | None = None
    retry_after_seconds: int | None = None

    def __post_init__(self) -> None:
        super().__init__(self.message)

    @property
    def status(self) -> int:
        """HTTP status of the answer."""
        return HTTP_STATUS[self.code]

    @property
    def body(self) -> str:
        """Plain-text body, in the form clients of the reference picker know."""
        return f"inference error: {self.code.value} - {self.message}"

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        """Response headers beyond the status."""
        headers = () if self.drop_reason is None else drop_headers(self.drop_reason)
        if self.retry_after_seconds is None:
            return headers
        return (*headers, (RETRY_AFTER_HEADER, str(self.retry_after_seconds)))


def drop_headers(reason: DropReason) -> tuple[tuple[str, str], ...]:
    """The response header that says why a request was shed."""
    return ((DROP_REASON_HEADER, reason.value),)


def eviction_headers(reason: DropReason) -> tuple[tuple[str, str], ...]:
    """The response headers of a request that was stopped while it was under way."""
    return (*drop_headers(reason), (RETRY_AFTER_HEADER, str(EVICTED_RETRY_AFTER_SECONDS)))


def enveloped(path: str, status: int, text: str) -> str | None:
    """`text` in the form that the API at `path`, without its query, has for errors, in JSON; None:
    plain text. Only Anthropic's clients need theirs.
    """
    if not path.rstrip("/").endswith(_ANTHROPIC_PATHS):
        return None
    error = {"type": _ANTHROPIC_TYPES.get(status, "api_error"), "message": text}
    return json.dumps({"type": "error", "error": error})


def no_endpoints(
    message: str = "failed to find endpoint candidates for serving the request",
) -> RefusedError:
    """503: the pool, or the part of it that this request may use, has no endpoint."""
    return RefusedError(Code.SERVICE_UNAVAILABLE, message, DropReason.NO_ENDPOINTS)


def bad_request(message: str) -> RefusedError:
    """400: the client's request cannot be understood."""
    return RefusedError(Code.BAD_REQUEST, message)


_ANTHROPIC_PATHS = ("/messages", "/messages/count_tokens")
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    412: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    431: "invalid_request_error",
    503: "overloaded_error",
}
EVICTED_STATUS = HTTP_STATUS[Code.RESOURCE_EXHAUSTED]
EVICTED_BODY = "request evicted by flow control"
EVICTED_RETRY_AFTER_SECONDS = 1  # when there will be room is not known; the least that can be said
