"""The vocabulary of one ext_proc stream, independent of protobuf and of the transport.

Events are what happens to a stream, actions what its machine asks the shell to do. All frozen.
Header names are lower case throughout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import TypeAlias

from picker.errors import DropReason, RefusedError
from picker.types import FinishCause, Metadata, RawRequest, RouteDecision

MAX_CHUNK_BYTES = 62_000  # Envoy's limit for one streamed body reply, with room for framing

_NOTHING: Metadata = MappingProxyType({})
_NO_HEADERS: Mapping[str, str] = MappingProxyType({})


def body_chunks(body: bytes) -> list[bytes]:
    """Split `body` into pieces of at most `MAX_CHUNK_BYTES`; no bytes are one empty piece."""
    if len(body) <= MAX_CHUNK_BYTES:
        return [body]
    return [body[at : at + MAX_CHUNK_BYTES] for at in range(0, len(body), MAX_CHUNK_BYTES)]


class BodyMode(Enum):
    """How the proxy shows bodies of one direction."""

    DUPLEX = "duplex"  # pieces go both ways independently; what is not sent back is lost
    BUFFERED = "buffered"  # one message with the whole body, which the proxy keeps until the reply
    PARTIAL = "partial"  # one message with as much as the proxy keeps; the rest is not shown
    LOCKSTEP = "lockstep"  # every piece waits for its reply, which may say "unchanged"
    ABSENT = "absent"  # bodies do not pass through the picker
    UNKNOWN = "unknown"  # a mode of which the picker does not know what it may answer


class Ending(Enum):
    """How a stream ended."""

    END_OF_STREAM = "end of stream"  # the proxy closed its side in order
    CANCELLED = "cancelled"  # the proxy reset the stream
    ERROR = "error"  # the transport, the peer's protocol, or we ourselves failed
    SHUTDOWN = "shutdown"  # this process is stopping


# Events


@dataclass(frozen=True, slots=True)
class RequestHeaders:
    """Headers of the client's request. `subset_hint` None: the whole pool may serve.

    `num_headers` and `num_header_bytes` are what came, repeated names included. A proxy with
    `only_observes` shows what happens and expects no answer to anything.
    """

    headers: Mapping[str, str]
    end_of_stream: bool = False
    subset_hint: tuple[str, ...] | None = None
    request_body: BodyMode = BodyMode.DUPLEX
    response_body: BodyMode = BodyMode.DUPLEX
    num_headers: int = 0
    num_header_bytes: int = 0
    only_observes: bool = False


@dataclass(frozen=True, slots=True)
class RequestBody:
    """A piece of the client's body. A `subset_hint` here replaces an earlier one."""

    data: bytes
    end_of_stream: bool = False
    subset_hint: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class RequestTrailers:
    """The client's trailers; nothing of the request follows."""


@dataclass(frozen=True, slots=True)
class ResponseHeaders:
    """Headers of the endpoint's response: its HTTP status and, where the proxy says so, who served.

    `served_by` is `ip:port`; `has_destination_metadata` is true as soon as the proxy sent anything
    in the namespace that it would be in. `headers` includes pseudo-headers.
    """

    status: int | None = None
    end_of_stream: bool = False
    served_by: str | None = None
    headers: Mapping[str, str] = field(default_factory=lambda: _NO_HEADERS)
    has_destination_metadata: bool = False


@dataclass(frozen=True, slots=True)
class ResponseBody:
    """A piece of the endpoint's response."""

    data: bytes
    end_of_stream: bool = False


@dataclass(frozen=True, slots=True)
class ResponseTrailers:
    """The endpoint's trailers; nothing of the response follows."""


@dataclass(frozen=True, slots=True)
class UnknownMessage:
    """A message of a kind that did not exist when this was written."""


@dataclass(frozen=True, slots=True)
class Closed:
    """The stream is over."""

    ending: Ending


@dataclass(frozen=True, slots=True)
class Routed:
    """The director decided."""

    decision: RouteDecision


@dataclass(frozen=True, slots=True)
class Dropped:
    """The director refused."""

    refusal: RefusedError


@dataclass(frozen=True, slots=True)
class Evicted:
    """The request has to make room, wherever it stands."""

    reason: DropReason


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
OwnEvent: TypeAlias = Routed | Dropped | Evicted

# Actions


@dataclass(frozen=True, slots=True)
class Route:
    """Ask the director where `request` goes; answer with `routed` or `dropped`."""

    request: RawRequest


@dataclass(frozen=True, slots=True)
class CancelRoute:
    """Nobody waits for the decision that `Route` asked for any more; stop deciding."""


@dataclass(frozen=True, slots=True)
class Finish:
    """The request is over; release what it holds. Exactly one per stream.

    `response_status` is what the client was sent (None: no response was seen), `served_by` the
    `ip:port` that the proxy reported.
    """

    cause: FinishCause
    response_status: int | None = None
    served_by: str | None = None


@dataclass(frozen=True, slots=True)
class SendRequestHeaders:
    """Let the request go to `destination` with these headers set; None leaves the length alone.

    `metadata` goes to the proxy beside the destination.
    """

    destination: str
    set_headers: tuple[tuple[str, str], ...] = ()
    content_length: int | None = None
    metadata: Metadata = field(default_factory=lambda: _NOTHING)


@dataclass(frozen=True, slots=True)
class SendRequestHeadersUnchanged:
    """Tell a proxy that waits for this reply to go on to the body; nothing is decided yet."""


@dataclass(frozen=True, slots=True)
class SendBufferedRequest:
    """Let the request whose whole body the proxy holds go to `destination` with these headers set.

    `body` None leaves the held body alone, `content_length` None the length.
    """

    destination: str
    set_headers: tuple[tuple[str, str], ...] = ()
    body: bytes | None = None
    content_length: int | None = None
    metadata: Metadata = field(default_factory=lambda: _NOTHING)


@dataclass(frozen=True, slots=True)
class SendRequestBody:
    """Forward a piece of the request body, at most `MAX_CHUNK_BYTES`."""

    data: bytes
    end_of_stream: bool


@dataclass(frozen=True, slots=True)
class SendRequestTrailers:
    """Forward the request trailers."""


@dataclass(frozen=True, slots=True)
class SendResponseHeaders:
    """Forward the response headers with these set and those removed.

    `show_body` asks a proxy that was not told to show response bodies to show this one, in full
    duplex; it may disregard that.
    """

    set_headers: tuple[tuple[str, str], ...]
    remove_headers: tuple[str, ...] = ()
    show_body: bool = False


@dataclass(frozen=True, slots=True)
class SendResponseBody:
    """Forward a piece of the response body, at most `MAX_CHUNK_BYTES`, and metadata with it."""

    data: bytes
    end_of_stream: bool
    metadata: Metadata = field(default_factory=lambda: _NOTHING)


@dataclass(frozen=True, slots=True)
class SendHeldResponseBody:
    """Replace what a proxy that waits for this reply holds of the response's body.

    `content_length` None leaves the stated length alone.
    """

    data: bytes
    content_length: int | None = None
    metadata: Metadata = field(default_factory=lambda: _NOTHING)


@dataclass(frozen=True, slots=True)
class SendResponseBodyUnchanged:
    """Tell a proxy that waits for this reply to go on with what it holds."""

    metadata: Metadata = field(default_factory=lambda: _NOTHING)


@dataclass(frozen=True, slots=True)
class SendResponseTrailers:
    """Forward the response trailers."""


@dataclass(frozen=True, slots=True)
class SendImmediate:
    """Answer the client now, instead of an endpoint."""

    status: int
    body: str
    headers: tuple[tuple[str, str], ...] = ()


Reply: TypeAlias = (
    SendRequestHeaders
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
