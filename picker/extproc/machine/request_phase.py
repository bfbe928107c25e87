"""The request of one stream on its way through the picker: what came, and what is sent back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from picker.errors import Code, DropReason, RefusedError, enveloped
from picker.extproc.machine.messages import (
    Action,
    BodyMode,
    RequestBody,
    RequestHeaders,
    SendBufferedRequest,
    SendImmediate,
    SendRequestBody,
    SendRequestHeaders,
    SendRequestTrailers,
    body_chunks,
)
from picker.requestcontrol.headers import path_of
from picker.rpc.budget import ByteBudget, ByteShare
from picker.types import RawRequest, RouteDecision

DEFAULT_MAX_BODY_BYTES = 64 * 1024 * 1024
DEFAULT_MAX_HEADERS = 1_000
DEFAULT_MAX_HEADER_BYTES = 256 * 1024
RETRY_AFTER_SECONDS = 1  # when other bodies will be complete is not known; the least there is
_UNUSABLE = (BodyMode.LOCKSTEP, BodyMode.PARTIAL, BodyMode.UNKNOWN)


def no_room() -> RefusedError:
    """429: what is arriving already leaves no room for this body."""
    return RefusedError(
        Code.RESOURCE_EXHAUSTED,
        "the endpoint picker has no room for this request body while others are arriving",
        DropReason.SATURATED,
        RETRY_AFTER_SECONDS,
    )


def mode_refusal() -> RefusedError:
    """500: the gateway shows bodies in a way that leaves no room for a decision."""
    return RefusedError(
        Code.INTERNAL,
        "the gateway must send request bodies to the endpoint picker in FULL_DUPLEX_STREAMED or "
        "BUFFERED mode, and response bodies in a mode other than GRPC",
    )


@dataclass(frozen=True, slots=True)
class Limits:
    """How large a request may be. More of a body is a 413, more of headers a 431.

    `max_header_bytes` counts the headers as the proxy sends them, a few bytes of framing each
    included. `budget` bounds the bodies of all streams together while they arrive: a piece that
    does not fit, and is not the last, is a 429.
    """

    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    max_headers: int = DEFAULT_MAX_HEADERS
    max_header_bytes: int = DEFAULT_MAX_HEADER_BYTES
    budget: ByteBudget = field(default_factory=ByteBudget)


class RequestPhase:
    """Owns what came of one request until it is answered."""

    __slots__ = (
        "_body",
        "_body_bytes",
        "_headers",
        "_limits",
        "_share",
        "_subset_hint",
        "_trailers_end_body",
        "has_body",
        "mode",
        "trailers_pending",
        "trailers_seen",
    )

    def __init__(self, limits: Limits) -> None:
        self.mode = BodyMode.DUPLEX
        self.has_body = True
        self.trailers_seen = False
        self.trailers_pending = False  # they wait for the reply to the body
        self._limits = limits
        self._headers: Mapping[str, str] = {}
        self._subset_hint: tuple[str, ...] | None = None
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._share: ByteShare | None = None  # once a piece of the body is held
        self._trailers_end_body = False

    @property
    def waits_for_replies(self) -> bool:
        """Whether the proxy waits for the reply to each message it shows."""
        return self.mode is not BodyMode.DUPLEX

    def begin(self, event: RequestHeaders) -> None:
        """Take the headers. Raises `RefusedError` for too many, and for an unusable body mode."""
        self.mode = event.request_body
        self.has_body = not (event.end_of_stream or event.request_body is BodyMode.ABSENT)
        limits = self._limits
        if event.num_headers > limits.max_headers:
            many = f"the request has more than {limits.max_headers} headers"
            raise RefusedError(Code.HEADERS_TOO_LARGE, many)
        if event.num_header_bytes > limits.max_header_bytes:
            large = f"the request's headers exceed {limits.max_header_bytes} bytes"
            raise RefusedError(Code.HEADERS_TOO_LARGE, large)
        if event.request_body in _UNUSABLE:
            raise mode_refusal()
        self._headers = event.headers
        self._subset_hint = event.subset_hint

    def add(self, event: RequestBody, is_last: bool) -> None:
        """Take a piece of the body. Raises `RefusedError` when it becomes too large, and when there
        is no room for what is to be held until the last piece comes.
        """
        if event.subset_hint is not None:
            self._subset_hint = event.subset_hint
        self._body_bytes += len(event.data)
        if self._body_bytes > self._limits.max_body_bytes:
            limit = f"the request body exceeds {self._limits.max_body_bytes} bytes"
            raise RefusedError(Code.PAYLOAD_TOO_LARGE, limit)
        if not is_last:
            share = self._share = self._share or ByteShare(self._limits.budget)
            if not share.grow(len(event.data)):
                raise no_room()
        if event.data:
            self._body.append(event.data)

    def end_with_trailers(self) -> None:
        """Trailers have come instead of a last piece of the body."""
        self.trailers_seen = self.trailers_pending = self._trailers_end_body = True

    def complete(self) -> RawRequest:
        """Everything that came, as the director wants it; it arrives no more."""
        if self._share is not None:
            self._share.release()
        body = b"".join(self._body) if self.has_body else None
        self._body = [body] if body else []
        return RawRequest(self._headers, body, self._subset_hint)

    def drop_body(self) -> None:
        """Nothing will be sent back."""
        if self._share is not None:
            self._share.release()
        self._body = []

    def refusal(
        self, status: int, text: str, headers: tuple[tuple[str, str], ...]
    ) -> SendImmediate:
        """The reply that ends the request here, in the form of its API."""
        body = enveloped(path_of(self._headers), status, text)
        if body is None:
            return SendImmediate(status, text, headers)
        return SendImmediate(status, body, (*headers, ("content-type", "application/json")))

    def answer(self, decision: RouteDecision) -> list[Action]:
        """The replies that let the request go; what is held of its body is let go of."""
        original = self._body[0] if self._body else b""
        self._body = []
        if self.mode is BodyMode.BUFFERED and self.has_body:
            return self._answer_held_body(decision)
        body = original if decision.body is None else decision.body
        # A length next to trailers would make an HTTP/1 upstream drop the trailers.
        length = len(body) if self.has_body and body and not self.trailers_seen else None
        actions: list[Action] = [
            SendRequestHeaders(
                decision.destination, decision.set_headers, length, decision.metadata
            )
        ]
        if self.has_body and (body or not self._trailers_end_body):
            pieces = body_chunks(body)
            actions += [SendRequestBody(piece, False) for piece in pieces[:-1]]
            actions.append(SendRequestBody(pieces[-1], not self._trailers_end_body))
        if self.trailers_pending:
            actions.append(SendRequestTrailers())
        return actions

    def _answer_held_body(self, decision: RouteDecision) -> list[Action]:
        body, length = decision.body, None
        # The proxy refuses a new body that differs from the length the client stated. Where none
        # was stated, none is added: next to a length an HTTP/1 upstream drops the trailers.
        if body is not None and "content-length" in self._headers:
            length = len(body)
        reply = SendBufferedRequest(
            decision.destination, decision.set_headers, body, length, decision.metadata
        )
        return [reply, SendRequestTrailers()] if self.trailers_pending else [reply]
