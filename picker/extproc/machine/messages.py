"""Events of a stream's machine, and its actions. All are frozen; header names are lower case."""

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import TypeAlias

import msgspec

from picker.errors import DropReason, RefusedError
from picker.types import FinishCause, Metadata, RawRequest, RouteDecision

MAX_CHUNK_BYTES = 62_000  # Envoy's limit for one streamed body reply, with room for framing

_NOTHING: Metadata = MappingProxyType({})
_NO_HEADERS: Mapping[str, str] = MappingProxyType({})


def body_chunks(body: bytes) -> list[bytes]:
    """Split `body` into pieces of at most `MAX_CHUNK_BYTES`; an empty body is one piece."""
    if len(body) <= MAX_CHUNK_BYTES:
        return [body]
    return [body[at : at + MAX_CHUNK_BYTES] for at in range(0, len(body), MAX_CHUNK_BYTES)]


class BodyMode(Enum):
    """The way in which the proxy shows the bodies of one direction to the picker."""

    DUPLEX = "duplex"  # pieces go both ways independently; a piece that is not sent back is lost
    BUFFERED = "buffered"  # one message with the whole body, which the proxy keeps until the reply
    PARTIAL = "partial"  # one message with as much as the proxy keeps; the rest is not shown
    LOCKSTEP = "lockstep"  # every piece waits for its reply, which may say "unchanged"
    ABSENT = "absent"  # bodies do not pass through the picker
    UNKNOWN = "unknown"  # a mode whose replies the picker does not know


class Ending(Enum):
    END_OF_STREAM = "end of stream"  # the proxy closed its side in order
    CANCELLED = "cancelled"  # the proxy reset the stream
    ERROR = "error"  # the transport, the peer's protocol or the picker failed
    SHUTDOWN = "shutdown"  # this process is stopping


# Events


class RequestHeaders(msgspec.Struct, frozen=True):
    """Headers of the client's request. `subset_hint` None: the whole pool may serve.

    `num_headers` and `num_header_bytes` include repeated names. If `only_observes` is set, the
    proxy expects no reply to any message.
    """

    headers: Mapping[str, str]
    end_of_stream: bool = False
    subset_hint: tuple[str, ...] | None = None
    request_body: BodyMode = BodyMode.DUPLEX
    response_body: BodyMode = BodyMode.DUPLEX
    num_headers: int = 0
    num_header_bytes: int = 0
    only_observes: bool = False


class RequestBody(msgspec.Struct, frozen=True):
    """A piece of the client's body. A `subset_hint` here replaces an earlier one."""

    data: bytes
    end_of_stream: bool = False
    subset_hint: tuple[str, ...] | None = None


class RequestTrailers(msgspec.Struct, frozen=True): ...


class ResponseHeaders(msgspec.Struct, frozen=True):
    """Headers of the response. `headers` includes pseudo-headers; `served_by` is `ip:port`.

    `has_destination_metadata`: the proxy sent metadata in the namespace of destinations.
    `reached_no_endpoint`: the proxy reports that no endpoint has seen the request. `response_body`
    and `only_observes` apply if a stream begins with this message.
    """

    status: int | None = None
    end_of_stream: bool = False
    served_by: str | None = None
    headers: Mapping[str, str] = msgspec.field(default_factory=lambda: _NO_HEADERS)
    has_destination_metadata: bool = False
    reached_no_endpoint: bool = False
    response_body: BodyMode = BodyMode.DUPLEX
    only_observes: bool = False


class ResponseBody(msgspec.Struct, frozen=True):
    data: bytes
    end_of_stream: bool = False


class ResponseTrailers(msgspec.Struct, frozen=True): ...


class UnknownMessage(msgspec.Struct, frozen=True):
    """A message of a kind that did not exist when this was written."""


class Closed(msgspec.Struct, frozen=True):
    ending: Ending


Event: TypeAlias = (
    RequestHeaders
    | RequestBody
    | RequestTrailers
    | ResponseHeaders
    | ResponseBody
    | ResponseTrailers
    | UnknownMessage
    | Closed
)
# Of the picker itself: a decision, a refusal (by the director, or for lack of room), an eviction.
OwnEvent: TypeAlias = RouteDecision | RefusedError | DropReason

# Actions


class Route(msgspec.Struct, frozen=True):
    """Ask the director where `request` goes; answer with `routed` or `dropped`.

    With `is_timed` the proxy does not wait for long; `OverrideTimeout` asks it to wait longer.
    """

    request: RawRequest
    is_timed: bool = False


class CancelRoute(msgspec.Struct, frozen=True): ...


class Finish(msgspec.Struct, frozen=True):
    """End the request and release its resources. Emitted exactly once for each stream."""

    cause: FinishCause
    response_status: int | None = None
    served_by: str | None = None


class SendRequestHeaders(msgspec.Struct, frozen=True):
    """Let the request go to `destination`; a length of None leaves that header unchanged.

    `hides_bodies` asks a proxy that would wait for a whole body not to show the picker the bodies
    of either direction; the proxy may disregard that. `report_id` (empty: none) asks a proxy to
    report under it on the response.
    """

    destination: str
    set_headers: tuple[tuple[str, str], ...] = ()
    content_length: int | None = None
    metadata: Metadata = msgspec.field(default_factory=lambda: _NOTHING)
    hides_bodies: bool = False
    report_id: str = ""


class OverrideTimeout(msgspec.Struct, frozen=True):
    """Ask a proxy to wait longer for a reply; its own `max_message_timeout` bounds that."""

    seconds: int


class SendRequestHeadersUnchanged(msgspec.Struct, frozen=True):
    """Let a proxy that waits for this reply continue with the body, before a decision."""


class SendBufferedRequest(msgspec.Struct, frozen=True):
    """Release a request that the proxy holds; None leaves the body or its length unchanged."""

    destination: str
    set_headers: tuple[tuple[str, str], ...] = ()
    body: bytes | None = None
    content_length: int | None = None
    metadata: Metadata = msgspec.field(default_factory=lambda: _NOTHING)
    report_id: str = ""


class SendRequestBody(msgspec.Struct, frozen=True):
    data: bytes
    end_of_stream: bool


class SendRequestTrailers(msgspec.Struct, frozen=True): ...


class SendResponseHeaders(msgspec.Struct, frozen=True):
    """Forward the response headers, with some headers set and others removed.

    `show_body` asks a proxy whose mode hides response bodies to show this one, in full duplex; the
    proxy may disregard that.
    """

    set_headers: tuple[tuple[str, str], ...]
    remove_headers: tuple[str, ...] = ()
    show_body: bool = False


class SendResponseBody(msgspec.Struct, frozen=True):
    data: bytes
    end_of_stream: bool
    metadata: Metadata = msgspec.field(default_factory=lambda: _NOTHING)


class SendHeldResponseBody(msgspec.Struct, frozen=True):
    """Replace the part of the response's body that a proxy holds while it waits for this reply."""

    data: bytes
    content_length: int | None = None
    metadata: Metadata = msgspec.field(default_factory=lambda: _NOTHING)


class SendResponseBodyUnchanged(msgspec.Struct, frozen=True):
    """Let a proxy that waits for this reply continue with the part of the body that it holds."""

    metadata: Metadata = msgspec.field(default_factory=lambda: _NOTHING)


class SendResponseTrailers(msgspec.Struct, frozen=True): ...


class SendImmediate(msgspec.Struct, frozen=True):
    """Answer the client now, in place of an endpoint."""

    status: int
    body: str
    headers: tuple[tuple[str, str], ...] = ()


Reply: TypeAlias = (
    OverrideTimeout
    | SendRequestHeaders
    | SendRequestHeadersUnchanged
    | SendBufferedRequest
    | SendRequestBody
    | SendRequestTrailers
    | SendResponseHeaders
    | SendResponseBody
    | SendHeldResponseBody
    | SendResponseBodyUnchanged
    | SendResponseTrailers
    | SendImmediate
)
Action: TypeAlias = Route | CancelRoute | Finish | Reply
