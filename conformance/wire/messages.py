"""Messages of ext_proc as a gateway writes them, and what pickers answer as plain values.

Modes are those of the protocol: full duplex for the bodies of requests and of responses.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from google.protobuf.struct_pb2 import Struct

DESTINATION = "x-gateway-destination-endpoint"
SUBSET = "x-gateway-destination-endpoint-subset"
SERVED = "x-gateway-destination-endpoint-served"
SELECTION = "test-epp-endpoint-selection"
SERVED_HEADER = "x-conformance-test-served-endpoint"
DESTINATION_NAMESPACE = "envoy.lb"
SUBSET_NAMESPACE = "envoy.lb.subset_hint"
COMPLETIONS = "/v1/completions"
Message = Any  # the wheel with Envoy's messages carries no types
Metadata = Mapping[str, Mapping[str, Any]]
_MODES = processing_mode_pb2.ProcessingMode
_DUPLEX = pb.ProtocolConfiguration(
    request_body_mode=_MODES.FULL_DUPLEX_STREAMED, response_body_mode=_MODES.FULL_DUPLEX_STREAMED
)


def completion(size: int = 0, prompt: str = "hello", **more: Any) -> bytes:
    """The JSON of a completions request, of at least `size` bytes, and exactly so where it fits."""
    fields = {"model": "conformance", "max_tokens": 4, **more}
    short = len(json.dumps({**fields, "prompt": prompt}))
    return json.dumps({**fields, "prompt": prompt + "x" * max(0, size - short)}).encode()


def cut(body: bytes, sizes: int | Sequence[int]) -> list[bytes]:
    """The body in pieces of these sizes; the last size is that of all further pieces."""
    order = [sizes] if isinstance(sizes, int) else list(sizes)
    pieces: list[bytes] = []
    at = 0
    while at < len(body):
        size = order[min(len(pieces), len(order) - 1)]
        pieces.append(body[at : at + size])
        at += size
    return pieces or [b""]


@dataclass(frozen=True, slots=True)
class Request:
    """A request as a gateway shows it. `body` None: it ends with its headers."""

    headers: Mapping[str, str] = field(default_factory=dict)
    body: tuple[bytes, ...] | None = (completion(),)
    path: str = COMPLETIONS
    trailers: bool = False
    metadata: Metadata = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Response:
    """A response as a gateway shows it. `body` None: it ends with its headers.

    `served` is the endpoint that the gateway says has served; None: it does not say. With
    `begins_stream` no request has come before it.
    """

    headers: Mapping[str, str] = field(default_factory=dict)
    body: tuple[bytes, ...] | None = (b'{"ok": true}',)
    trailers: bool = False
    served: str | None = None
    metadata: Metadata | None = None
    begins_stream: bool = False


@dataclass(slots=True)
class Answer:
    """All that a picker said to the request, or to the response, of one stream.

    `kinds` are its messages in order. `headers` are those that it sets, by lower-cased name, every
    value of each. `ends` counts the messages that end the body.
    """

    kinds: list[str] = field(default_factory=list)
    headers: dict[str, list[str]] = field(default_factory=dict)
    removed: list[str] = field(default_factory=list)
    clears_route: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)
    pieces: list[bytes] = field(default_factory=list)
    ends: int = 0
    status: int | None = None
    text: bytes = b""

    @property
    def body(self) -> bytes:
        """The body that the endpoint receives."""
        return b"".join(self.pieces)

    @property
    def in_headers(self) -> str | None:
        """The destination in the header mutation; None where there is not exactly one."""
        values = self.headers.get(DESTINATION, [])
        return values[0] if len(values) == 1 else None

    @property
    def in_metadata(self) -> str | None:
        """The destination in the dynamic metadata."""
        value = self.metadata.get(DESTINATION_NAMESPACE, {}).get(DESTINATION)
        return value if isinstance(value, str) else None

    @property
    def endpoints(self) -> list[str]:
        """The destination as a list; empty where there is none."""
        said = self.in_headers or self.in_metadata or ""
        return [entry.strip() for entry in said.split(",") if entry.strip()]


def request_headers(request: Request) -> Message:
    """The first message of a stream."""
    shown = {
        ":method": "GET" if request.body is None else "POST",
        ":path": request.path,
        ":authority": "conformance.example",
        ":scheme": "http",
        **({} if request.body is None else {"content-type": "application/json"}),
        **request.headers,
    }
    ends = request.body is None and not request.trailers
    message = pb.ProcessingRequest(request_headers=_headers(shown, ends), protocol_config=_DUPLEX)
    return _with(message, request.metadata)


def request_rest(request: Request) -> list[Message]:
    """Every message of the request after its headers."""
    found = [
        pb.ProcessingRequest(request_body=pb.HttpBody(body=piece, end_of_stream=ends))
        for piece, ends in _marked(request.body, request.trailers)
    ]
    if request.trailers:
        found.append(pb.ProcessingRequest(request_trailers=_trailers()))
    return [_with(message, request.metadata) for message in found]


def response_messages(response: Response) -> list[Message]:
    """Every message of a response."""
    metadata = response.metadata
    if metadata is None:
        reported = {} if response.served is None else {SERVED: response.served}
        metadata = {DESTINATION_NAMESPACE: reported} if reported else {}
    shown = {":status": "200", "content-type": "application/json", **response.headers}
    ends = response.body is None and not response.trailers
    found = [pb.ProcessingRequest(response_headers=_headers(shown, ends))]
    if response.begins_stream:
        found[0].protocol_config.CopyFrom(_DUPLEX)
    found += [
        pb.ProcessingRequest(response_body=pb.HttpBody(body=piece, end_of_stream=last))
        for piece, last in _marked(response.body, response.trailers)
    ]
    if response.trailers:
        found.append(pb.ProcessingRequest(response_trailers=_trailers()))
    return [_with(message, metadata) for message in found]


def _marked(pieces: tuple[bytes, ...] | None, trailers: bool) -> Iterable[tuple[bytes, bool]]:
    listed = pieces or ()
    return ((piece, at == len(listed) - 1 and not trailers) for at, piece in enumerate(listed))


def _headers(shown: Mapping[str, str], ends: bool) -> Message:
    message = pb.HttpHeaders(end_of_stream=ends)
    for key, value in shown.items():
        message.headers.headers.add(key=key, raw_value=value.encode())
    return message


def _trailers() -> Message:
    message = pb.HttpTrailers()
    message.trailers.headers.add(key="x-trailer", raw_value=b"yes")
    return message


def _with(message: Message, metadata: Metadata) -> Message:
    """Envoy repeats its metadata in every message of the phase."""
    for namespace, values in metadata.items():
        struct = Struct()
        struct.update(values)
        message.metadata_context.filter_metadata[namespace].CopyFrom(struct)
    return message


def take(answer: Answer, message: Message) -> str:
    """Add what the message says to the answer; gives the message's kind."""
    kind = str(message.WhichOneof("response"))
    answer.kinds.append(kind)
    _take_metadata(answer, message)
    if kind == "immediate_response":
        answer.status = message.immediate_response.status.code
        answer.text = message.immediate_response.body
        _take_mutation(answer, message.immediate_response.headers)
    elif kind in ("request_headers", "response_headers"):
        response = getattr(message, kind).response
        answer.clears_route = response.clear_route_cache
        _take_mutation(answer, response.header_mutation)
    elif kind in ("request_body", "response_body"):
        streamed = getattr(message, kind).response.body_mutation.streamed_response
        answer.pieces.append(streamed.body)
        answer.ends += streamed.end_of_stream
    return kind


def _take_metadata(answer: Answer, message: Message) -> None:
    for namespace, value in message.dynamic_metadata.fields.items():
        values = answer.metadata.setdefault(namespace, {})
        for key, field_value in value.struct_value.fields.items():
            values[key] = field_value.string_value


def _take_mutation(answer: Answer, mutation: Message) -> None:
    for option in mutation.set_headers:
        value = (option.header.raw_value or option.header.value.encode()).decode(errors="replace")
        answer.headers.setdefault(option.header.key.lower(), []).append(value)
    answer.removed.extend(mutation.remove_headers)
