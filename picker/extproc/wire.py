"""Protobuf bytes to events, actions to protobuf bytes; the only file that knows `envoy.*`.

Stateless: what a message means depends on the message alone. Header names are lowered here, values
are `raw_value` when that is not empty, else `value`. Envoy applies `remove_headers` before
`set_headers`; a name that is set is left out of the removals all the same, so that the order does
not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any, cast

from envoy.config.core.v3 import base_pb2
from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from picker.errors import PickerError
from picker.extproc.messages import (
    BodyMode,
    Event,
    Reply,
    RequestBody,
    RequestHeaders,
    RequestTrailers,
    ResponseBody,
    ResponseHeaders,
    ResponseTrailers,
    SendBufferedRequest,
    SendHeldResponseBody,
    SendImmediate,
    SendPatience,
    SendRequestBody,
    SendRequestHeaders,
    SendRequestHeadersUnchanged,
    SendRequestTrailers,
    SendResponseBody,
    SendResponseBodyUnchanged,
    SendResponseHeaders,
    SendResponseTrailers,
    UnknownMessage,
)
from picker.requestcontrol.headers import (
    DESTINATION,
    DESTINATION_NAMESPACE,
    DESTINATION_SERVED,
    DESTINATION_SUBSET,
    PICKER_OWNED,
    SUBSET_NAMESPACE,
)
from picker.types import Metadata

METHOD = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
# Envoy's name for what it tells of the attributes that it was asked for.
ATTRIBUTES = "envoy.filters.http.ext_proc"
UPSTREAM_ADDRESS = "upstream.address"
UPSTREAM_ATTEMPTS = "upstream.request_attempt_count"

_Message = Any  # the wheel with Envoy's messages carries no types
_Mode = processing_mode_pb2.ProcessingMode
_BODY_MODES: Mapping[int, BodyMode] = {
    _Mode.NONE: BodyMode.ABSENT,
    _Mode.STREAMED: BodyMode.LOCKSTEP,
    _Mode.BUFFERED: BodyMode.BUFFERED,
    _Mode.BUFFERED_PARTIAL: BodyMode.PARTIAL,
    _Mode.FULL_DUPLEX_STREAMED: BodyMode.DUPLEX,
}
# Envoy insists on trailers in full duplex. The request is over when this is sent.
_SHOW_BODY = _Mode(
    request_body_mode=_Mode.BUFFERED,
    request_trailer_mode=_Mode.SEND,
    response_header_mode=_Mode.SEND,
    response_body_mode=_Mode.FULL_DUPLEX_STREAMED,
    response_trailer_mode=_Mode.SEND,
)
_OVERWRITE = base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
_REMOVABLE = tuple(name for name in PICKER_OWNED if name != DESTINATION)
_REMOVALS = pb.HeaderMutation(remove_headers=_REMOVABLE)


class MalformedMessageError(PickerError):
    """Bytes that are no `ProcessingRequest`, or one that says nothing."""


def decode(data: bytes) -> Event:
    """One `ProcessingRequest` as an event. Raises `MalformedMessageError`.

    A message of a kind that the generated code does not know shows no kind, but unknown fields.
    """
    try:
        message = pb.ProcessingRequest.FromString(data)
    except DecodeError as error:
        raise MalformedMessageError(f"not a ProcessingRequest: {error}") from error
    kind = message.WhichOneof("request")
    if kind is None:
        if len(UnknownFieldSet(message)) > 0:
            return UnknownMessage()
        raise MalformedMessageError("a ProcessingRequest without content")
    return _DECODERS[kind](message)


def encode(reply: Reply) -> bytes:
    """One reply as a `ProcessingResponse`."""
    message = _ENCODERS[type(reply)](reply)
    return cast("bytes", message.SerializeToString())


# Messages to events


def _request_headers(message: _Message) -> Event:
    request_body = BodyMode.DUPLEX
    if message.HasField("protocol_config"):
        request_body = _body_mode(message.protocol_config.request_body_mode)
    headers = message.request_headers.headers
    return RequestHeaders(
        headers=_header_map(headers.headers),
        end_of_stream=message.request_headers.end_of_stream,
        subset_hint=_subset_hint(message),
        request_body=request_body,
        response_body=_response_body_mode(message),
        num_headers=len(headers.headers),
        num_header_bytes=headers.ByteSize(),
        only_observes=message.observability_mode,
    )


def _request_body(message: _Message) -> Event:
    body = message.request_body
    return RequestBody(body.body, body.end_of_stream, _subset_hint(message))


def _request_trailers(message: _Message) -> Event:
    return RequestTrailers()


def _response_headers(message: _Message) -> Event:
    headers = _header_map(message.response_headers.headers.headers)
    upstream, reached_nobody = _upstream(message)
    return ResponseHeaders(
        status=_status(headers),
        end_of_stream=message.response_headers.end_of_stream,
        served_by=_served_by(message) or upstream,
        headers=headers,
        has_destination_metadata=_has_namespace(message, DESTINATION_NAMESPACE),
        reached_nobody=reached_nobody,
        response_body=_response_body_mode(message),
        only_observes=message.observability_mode,
    )


def _response_body(message: _Message) -> Event:
    return ResponseBody(message.response_body.body, message.response_body.end_of_stream)


def _response_trailers(message: _Message) -> Event:
    return ResponseTrailers()


_DECODERS: Mapping[str, Callable[[_Message], Event]] = {
    "request_headers": _request_headers,
    "request_body": _request_body,
    "request_trailers": _request_trailers,
    "response_headers": _response_headers,
    "response_body": _response_body,
    "response_trailers": _response_trailers,
}


def _response_body_mode(message: _Message) -> BodyMode:
    """What the first message of a stream says; a proxy that says nothing uses full duplex."""
    if not message.HasField("protocol_config"):
        return BodyMode.DUPLEX
    return _body_mode(message.protocol_config.response_body_mode)


def _body_mode(number: int) -> BodyMode:
    """GRPC, whose messages come without their framing, and later modes are unknown here."""
    return _BODY_MODES.get(number, BodyMode.UNKNOWN)


def _header_map(headers: Iterable[_Message]) -> dict[str, str]:
    """Names to values; of a repeated header the last value counts."""
    return {
        header.key.lower(): raw.decode("utf-8", "replace")
        if (raw := header.raw_value)
        else header.value
        for header in headers
    }


def _status(headers: Mapping[str, str]) -> int | None:
    """The HTTP status: `:status`, else `status`; None when there is no number in it."""
    text = headers.get(":status") or headers.get("status", "")
    return int(text) if text.isascii() and text.isdigit() and len(text) == 3 else None


def _has_namespace(message: _Message, namespace: str) -> bool:
    return (
        message.HasField("metadata_context")
        and namespace in message.metadata_context.filter_metadata
    )


def _metadata(message: _Message, namespace: str, key: str) -> _Message | None:
    if not _has_namespace(message, namespace):
        return None
    fields = message.metadata_context.filter_metadata[namespace].fields
    return fields.get(key)


def _subset_hint(message: _Message) -> tuple[str, ...] | None:
    """The endpoints that may serve: a list of strings or one string with commas.

    Entries that are no strings are skipped; a value of another kind counts as absent.
    """
    value = _metadata(message, SUBSET_NAMESPACE, DESTINATION_SUBSET)
    if value is None:
        return None
    match value.WhichOneof("kind"):
        case "list_value":
            texts = [item.string_value for item in value.list_value.values]
        case "string_value":
            texts = [value.string_value]
        case _:
            return None
    entries = (entry.strip() for text in texts for entry in text.split(","))
    return tuple(entry for entry in entries if entry)


def _served_by(message: _Message) -> str | None:
    value = _metadata(message, DESTINATION_NAMESPACE, DESTINATION_SERVED)
    return (value.string_value or None) if value is not None else None


def _upstream(message: _Message) -> tuple[str | None, bool]:
    """Where the proxy got the response, by its attributes, and whether it says that it is nowhere.

    Only a proxy that counts its attempts, as well as telling the address, can say the latter.
    """
    attributes = message.attributes
    if ATTRIBUTES not in attributes:
        return None, False
    fields = attributes[ATTRIBUTES].fields
    address = fields[UPSTREAM_ADDRESS].string_value if UPSTREAM_ADDRESS in fields else ""
    return address or None, not address and UPSTREAM_ATTEMPTS in fields


# Replies to messages


def _send_request_headers(reply: SendRequestHeaders) -> _Message:
    message = pb.ProcessingResponse()
    _direct(message, message.request_headers.response, reply)
    return message


def _send_request_headers_unchanged(_: SendRequestHeadersUnchanged) -> _Message:
    return pb.ProcessingResponse(request_headers=pb.HeadersResponse())


def _send_buffered_request(reply: SendBufferedRequest) -> _Message:
    message = pb.ProcessingResponse()
    response = message.request_body.response
    _direct(message, response, reply)
    if reply.body is not None:
        response.body_mutation.body = reply.body
    return message


def _direct(
    message: _Message, response: _Message, reply: SendRequestHeaders | SendBufferedRequest
) -> None:
    """Write a decision into `response`, a part of `message`, and into the metadata beside it."""
    response.clear_route_cache = True
    mutation = response.header_mutation
    _set(mutation, DESTINATION, reply.destination)
    if reply.content_length is not None:
        _set(mutation, "content-length", str(reply.content_length))
    for name, value in reply.set_headers:
        _set(mutation, name, value)
    _remove(mutation, {name for name, _ in reply.set_headers})
    _tell(message, reply.metadata)
    destination = message.dynamic_metadata.fields[DESTINATION_NAMESPACE].struct_value
    destination.fields[DESTINATION].string_value = reply.destination


def _remove(mutation: _Message, set_names: Set[str]) -> None:
    """Have what is ours removed, but for what is set."""
    if set_names.isdisjoint(_REMOVABLE):
        mutation.MergeFrom(_REMOVALS)  # prepared, as nearly every request has the same
    else:
        mutation.remove_headers.extend([name for name in _REMOVABLE if name not in set_names])


def _tell(message: _Message, metadata: Metadata) -> None:
    """Write `metadata` beside a reply."""
    for namespace, values in metadata.items():
        fields = message.dynamic_metadata.fields[namespace].struct_value.fields
        for key, value in values.items():
            if isinstance(value, str):
                fields[key].string_value = value.encode("utf-8", "replace").decode()
            elif isinstance(value, Mapping):
                numbers = fields[key].struct_value
                numbers.SetInParent()
                for name, number in value.items():
                    numbers.fields[name].number_value = number
            else:
                fields[key].number_value = value


def _send_patience(reply: SendPatience) -> _Message:
    message = pb.ProcessingResponse()
    message.override_message_timeout.FromSeconds(reply.seconds)
    return message


def _send_request_body(reply: SendRequestBody) -> _Message:
    message = pb.ProcessingResponse()
    piece = message.request_body.response.body_mutation.streamed_response
    piece.body = reply.data
    piece.end_of_stream = reply.end_of_stream
    return message


def _send_request_trailers(_: SendRequestTrailers) -> _Message:
    return pb.ProcessingResponse(request_trailers=pb.TrailersResponse())


def _send_response_headers(reply: SendResponseHeaders) -> _Message:
    message = pb.ProcessingResponse()
    for name, value in reply.set_headers:
        _set(message.response_headers.response.header_mutation, name, value)
    for name in reply.remove_headers:
        message.response_headers.response.header_mutation.remove_headers.append(name)
    if reply.show_body:
        message.mode_override.CopyFrom(_SHOW_BODY)
    message.response_headers.SetInParent()
    return message


def _send_response_body(reply: SendResponseBody) -> _Message:
    message = pb.ProcessingResponse()
    piece = message.response_body.response.body_mutation.streamed_response
    piece.body = reply.data
    piece.end_of_stream = reply.end_of_stream
    _tell(message, reply.metadata)
    return message


def _send_held_response_body(reply: SendHeldResponseBody) -> _Message:
    message = pb.ProcessingResponse()
    response = message.response_body.response
    response.body_mutation.body = reply.data
    if reply.content_length is not None:
        _set(response.header_mutation, "content-length", str(reply.content_length))
    _tell(message, reply.metadata)
    return message


def _send_response_body_unchanged(reply: SendResponseBodyUnchanged) -> _Message:
    message = pb.ProcessingResponse(response_body=pb.BodyResponse())
    _tell(message, reply.metadata)
    return message


def _send_response_trailers(_: SendResponseTrailers) -> _Message:
    return pb.ProcessingResponse(response_trailers=pb.TrailersResponse())


def _send_immediate(reply: SendImmediate) -> _Message:
    message = pb.ProcessingResponse()
    message.immediate_response.status.code = reply.status
    message.immediate_response.body = reply.body.encode("utf-8", "replace")
    for name, value in reply.headers:
        _set(message.immediate_response.headers, name, value)
    return message


def _set(mutation: _Message, name: str, value: str) -> None:
    option = mutation.set_headers.add()
    option.append_action = _OVERWRITE
    option.header.key = name
    option.header.raw_value = value.encode("utf-8", "replace")


_ENCODERS: Mapping[type, Callable[[Any], _Message]] = {
    SendPatience: _send_patience,
    SendRequestHeaders: _send_request_headers,
    SendRequestHeadersUnchanged: _send_request_headers_unchanged,
    SendBufferedRequest: _send_buffered_request,
    SendRequestBody: _send_request_body,
    SendRequestTrailers: _send_request_trailers,
    SendResponseHeaders: _send_response_headers,
    SendResponseBody: _send_response_body,
    SendHeldResponseBody: _send_held_response_body,
    SendResponseBodyUnchanged: _send_response_body_unchanged,
    SendResponseTrailers: _send_response_trailers,
    SendImmediate: _send_immediate,
}
