"""The request of one stream on its way through the picker: its pieces and the replies to them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from picker.errors import Code, DropReason, ErrorForm, RefusedError, form_of
from picker.extproc.machine import messages as m
from picker.extproc.machine.messages import Action, BodyMode, body_chunks
from picker.requestcontrol.headers import target_of
from picker.rpc.budget import ByteBudget, ByteShare
from picker.types import RawRequest, RouteDecision

DEFAULT_MAX_BODY_BYTES = 64 * 1024 * 1024  # the picker holds a body as a whole
DEFAULT_MAX_HEADERS = 1_000  # ten times as many as Envoy accepts
DEFAULT_MAX_HEADER_BYTES = 256 * 1024  # four times as many as Envoy accepts
RETRY_AFTER_SECONDS = 1  # the minimum: the time when other bodies are complete is unknown
# Envoy ignores overrides of its modes if one of them is full duplex (measured).
_NO_TUNNEL = (
    "upgrades need request bodies in FULL_DUPLEX_STREAMED mode, or in BUFFERED mode with "
    "allow_mode_override and response bodies in a mode other than FULL_DUPLEX_STREAMED"
)
# In these modes pieces of a body leave before the decision.
_UNUSABLE = (BodyMode.LOCKSTEP, BodyMode.PARTIAL, BodyMode.UNKNOWN)


def no_room() -> RefusedError:
    return RefusedError(
        Code.RESOURCE_EXHAUSTED,
        "the endpoint picker has no room for this request body while others are arriving",
        DropReason.SATURATED,
        RETRY_AFTER_SECONDS,
    )


def mode_refusal() -> RefusedError:
    return RefusedError(
        Code.INTERNAL,
        "the gateway must send request bodies to the endpoint picker in FULL_DUPLEX_STREAMED or "
        "BUFFERED mode, and response bodies in a mode other than GRPC",
    )


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """The limits of a request's size, and the wording of the picker's answers.

    `max_header_bytes` includes a few bytes of framing for each header. `budget` bounds the bodies
    of all streams together while they arrive: a piece that does not fit, if not the last, gets a
    429. With `conformance`, refusals have the reference picker's text, and responses its mark.
    """

    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    max_headers: int = DEFAULT_MAX_HEADERS
    max_header_bytes: int = DEFAULT_MAX_HEADER_BYTES
    budget: ByteBudget = field(default_factory=ByteBudget)
    conformance: bool = False


class RequestPhase(msgspec.Struct, eq=False):
    """Owns the pieces of one request until it is answered."""

    settings: StreamSettings
    mode: BodyMode = BodyMode.DUPLEX
    has_body: bool = True
    is_tunnel: bool = False  # data after the headers passes without waiting for its end
    trailers_seen: bool = False
    trailers_pending: bool = False  # they wait for the reply to the body
    trailers_end_body: bool = False  # in place of a last piece
    _headers: Mapping[str, str] = {}
    _subset_hint: tuple[str, ...] | None = None
    _body: list[bytes] = []
    _body_bytes: int = 0
    _share: ByteShare | None = None  # from the first piece of the body that is held
    _tunnel_has_ended: bool = False

    @property
    def waits_for_replies(self) -> bool:
        return self.mode is not BodyMode.DUPLEX

    def begin(self, event: m.RequestHeaders) -> None:
        """Take the headers. Raises `RefusedError` for too many of them and for an unusable mode."""
        self.mode = event.request_body
        is_over = event.end_of_stream or event.request_body is BodyMode.ABSENT
        self.is_tunnel = not is_over and opens_tunnel(event.headers)
        self.has_body = not (is_over or self.is_tunnel)
        # Before the first refusal, whose form depends on the path.
        self._headers = event.headers
        settings = self.settings
        if event.num_headers > settings.max_headers:
            many = f"the request has more than {settings.max_headers} headers"
            raise RefusedError(Code.HEADERS_TOO_LARGE, many)
        if event.num_header_bytes > settings.max_header_bytes:
            large = f"the request's headers exceed {settings.max_header_bytes} bytes"
            raise RefusedError(Code.HEADERS_TOO_LARGE, large)
        if event.request_body in _UNUSABLE:
            raise mode_refusal()
        stays_in_proxy = self.mode is BodyMode.BUFFERED and event.response_body is BodyMode.DUPLEX
        if self.is_tunnel and stays_in_proxy:
            raise RefusedError(Code.INTERNAL, _NO_TUNNEL)
        self._subset_hint = event.subset_hint

    def add(self, event: m.RequestBody, is_last: bool) -> None:
        """Take a piece of the body. Raises `RefusedError` if it is too large or has no room."""
        if event.subset_hint is not None:
            self._subset_hint = event.subset_hint
        self._body_bytes += len(event.data)
        if self._body_bytes > self.settings.max_body_bytes:
            limit = f"the request body exceeds {self.settings.max_body_bytes} bytes"
            raise RefusedError(Code.PAYLOAD_TOO_LARGE, limit)
        if not is_last:
            # A body that arrives in one piece is not held, and takes nothing of the budget.
            share = self._share = self._share or ByteShare(self.settings.budget)
            if not share.grow(len(event.data)):
                raise no_room()
        if event.data:
            self._body.append(event.data)

    def complete(self) -> RawRequest:
        """Return the complete request for the director. An empty body counts as none."""
        if self._share is not None:
            self._share.release()
        body = b"".join(self._body)
        # In place of its pieces, so that the body is not held twice.
        self._body = [body] if body else []
        return RawRequest(self._headers, body or None, self._subset_hint)

    def drop_body(self) -> None:
        if self._share is not None:
            self._share.release()
        self._body = []

    def refusal(self, error: RefusedError) -> m.SendImmediate:
        """Return the reply that ends the request here, in the error format of the request's API."""
        headers, form = self._headers, ErrorForm.REFERENCE
        if not self.settings.conformance:
            form = form_of(target_of(headers).partition("?")[0], headers.get("content-type", ""))
        return m.SendImmediate(error.status, *error.answer(form))

    def answer(self, decision: RouteDecision, report_id: str = "") -> list[Action]:
        original = b"".join(self._body)
        self.drop_body()
        if self.mode is BodyMode.BUFFERED and self.has_body:
            length = None
            # The proxy refuses a new body that differs from the length the client stated. Where
            # none was stated, none is added: next to a length an HTTP/1 upstream drops trailers.
            if decision.body is not None and "content-length" in self._headers:
                length = len(decision.body)
            reply = m.SendBufferedRequest(
                decision.destination,
                decision.set_headers,
                decision.body,
                length,
                decision.metadata,
                report_id,
            )
            return [reply, m.SendRequestTrailers()] if self.trailers_pending else [reply]
        body = original if decision.body is None else decision.body
        # A length next to trailers would make an HTTP/1 upstream drop the trailers.
        length = len(body) if self.has_body and body and not self.trailers_seen else None
        # In full duplex later data comes to the picker in any case, and goes back.
        hides_bodies = self.is_tunnel and self.mode is BodyMode.BUFFERED
        actions: list[Action] = [
            m.SendRequestHeaders(
                decision.destination,
                decision.set_headers,
                length,
                decision.metadata,
                hides_bodies,
                report_id,
            )
        ]
        if self.has_body and (body or not self.trailers_end_body):
            actions += _pieces(body, not self.trailers_end_body)
        elif self.is_tunnel and (original or self._tunnel_has_ended):
            actions += _pieces(original, self._tunnel_has_ended)
        if self.trailers_pending:
            actions.append(m.SendRequestTrailers())
        return actions

    def add_behind(self, event: m.RequestBody) -> None:
        """Keep a tunnel's piece that arrives during the decision; ignore a repeated last piece."""
        if self.is_tunnel and not self._tunnel_has_ended:
            self.add(event, is_last=False)
            self._tunnel_has_ended = event.end_of_stream

    def pass_on(self, event: m.RequestBody) -> list[Action]:
        if not self.is_tunnel or self._tunnel_has_ended:
            return []
        self._tunnel_has_ended = event.end_of_stream
        return _pieces(event.data, event.end_of_stream)


def _pieces(body: bytes, end_of_stream: bool) -> list[Action]:
    pieces = body_chunks(body)
    actions: list[Action] = [m.SendRequestBody(piece, False) for piece in pieces[:-1]]
    return [*actions, m.SendRequestBody(pieces[-1], end_of_stream)]


def opens_tunnel(headers: Mapping[str, str]) -> bool:
    """Return whether the client waits for the response before it sends more: after CONNECT, or
    after an upgrade, such as to a WebSocket. A request to upgrade to h2c has a body like others.
    """
    if headers.get(":method") == "CONNECT":
        return True
    protocol = headers.get("upgrade", "").strip().lower()
    if protocol in ("", "h2c") or headers.get("content-length", "0") != "0":
        return False
    named = headers.get("connection", "").lower().split(",")
    return "upgrade" in (name.strip() for name in named)
