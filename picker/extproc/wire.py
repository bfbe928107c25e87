"""Decodes protobuf bytes to events, encodes actions; the only file that knows `envoy.*`.

The meaning of a message depends on the message alone. Header names become lower case; a value is
`raw_value` unless that is empty, else `value`.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any, cast

from envoy.config.core.v3 import base_pb2
from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2
from envoy.service.accesslog.v3 import als_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet
from msgspec.structs import replace

from picker.errors import ANSWER_DETAILS, PickerError
from picker.extproc.machine import messages as m
from picker.extproc.machine.messages import BodyMode, Event, Reply
from picker.requestcontrol.headers import (
    DESTINATION,
    DESTINATION_NAMESPACE,
    DESTINATION_SERVED,
    DESTINATION_SUBSET,
    PICKER_OWNED,
    REPORT,
    REPORT_ID,
    REPORT_NAMESPACE,
    SUBSET_NAMESPACE,
)
from picker.types import BodyReport, Metadata

METHOD = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
LOG_METHOD = "/envoy.service.accesslog.v3.AccessLogService/StreamAccessLogs"
FIRST_PIECE_METHOD = "/pointsman.picker.v1.Responses/FirstPiece"  # of our own Lua filter
# Envoy's key of the attributes that it is configured to send.
ATTRIBUTES = "envoy.filters.http.ext_proc"
UPSTREAM_ADDRESS = "upstream.address"
UPSTREAM_ATTEMPTS = "upstream.request_attempt_count"

_Message = Any  # the wheel with Envoy's messages carries no types
_Mode = processing_mode_pb2.ProcessingMode
# GRPC, whose messages arrive without framing, and later modes are unknown here.
_BODY_MODES: Mapping[int, BodyMode] = {
    _Mode.NONE: BodyMode.ABSENT,
    _Mode.STREAMED: BodyMode.LOCKSTEP,
    _Mode.BUFFERED: BodyMode.BUFFERED,
    _Mode.BUFFERED_PARTIAL: BodyMode.PARTIAL,
    _Mode.FULL_DUPLEX_STREAMED: BodyMode.DUPLEX,
}


def _override(request_body: int, response_body: int) -> _Message:
    return _Mode(
        request_body_mode=request_body,
        request_trailer_mode=_Mode.SEND,
        response_header_mode=_Mode.SEND,
        response_body_mode=response_body,
        response_trailer_mode=_Mode.SEND,  # Envoy requires trailers in full duplex
    )


_SHOW_BODY = _override(_Mode.BUFFERED, _Mode.FULL_DUPLEX_STREAMED)  # the request is over then
_HIDE_BODIES = _override(_Mode.NONE, _Mode.NONE)  # Envoy compares it with the overrides it allows
_OVERWRITE = base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
# The destination is always set.
_REMOVABLE = tuple(name for name in PICKER_OWNED if name != DESTINATION)
MAX_REMEMBERED = 4096  # destinations, and sets of response headers
REPORT_ID_CHARACTERS = 17  # all ids have the same length, so that one replaces another in bytes
_DIGITS = 18
_ANY_REPORT_ID = "?" * REPORT_ID_CHARACTERS


class MalformedMessageError(PickerError):
    """Bytes that are not a `ProcessingRequest`, or an empty one."""


def decode(data: bytes) -> Event:
    """Decode one `ProcessingRequest`. Raises `MalformedMessageError`."""
    try:
        message = pb.ProcessingRequest.FromString(data)
    except DecodeError as error:
        raise MalformedMessageError(f"not a ProcessingRequest: {error}") from error
    kind = message.WhichOneof("request")
    if kind is None:  # the generated code knows no later kinds, and keeps them as unknown fields
        if len(UnknownFieldSet(message)) > 0:
            return m.UnknownMessage()
        raise MalformedMessageError("a ProcessingRequest without content")
    return _DECODERS[kind](message)


def encode(reply: Reply) -> bytes:
    data = _CONSTANTS.get(type(reply))
    return _ENCODERS[type(reply)](reply) if data is None else data


def decode_log(data: bytes) -> list[tuple[str, BodyReport]]:
    """Decode one message of Envoy's access log; return the id and the report of each response that
    has them. Raises `MalformedMessageError`.
    """
    try:
        entries = als_pb2.StreamAccessLogsMessage.FromString(data).http_logs.log_entry
    except DecodeError as error:
        raise MalformedMessageError(f"not a StreamAccessLogsMessage: {error}") from error
    found = []
    for entry in entries:
        common, is_known = entry.common_properties, entry.common_properties.HasField("metadata")
        known = common.metadata.filter_metadata if is_known else {}
        if DESTINATION_NAMESPACE not in known:
            continue
        report_id = known[DESTINATION_NAMESPACE].fields[REPORT_ID].string_value
        said = known[REPORT_NAMESPACE].fields[REPORT].string_value
        report = _report_of(said.encode(), entry.response.response_body_bytes)
        if common.response_flags.downstream_connection_termination:
            report = replace(report, is_cut=True)
        found.append((report_id, report))
    return found


def decode_first_piece(data: bytes) -> tuple[str, BodyReport]:
    """Decode the message about a first piece. Raises `MalformedMessageError`."""
    report_id, _, size = data.partition(b" ")
    if not (report_id.isascii() and size.isdigit() and len(size) <= _DIGITS):
        raise MalformedMessageError("not a report of a first piece")
    return report_id.decode(), BodyReport(num_bytes=int(size))


def _report_of(said: bytes, num_bytes: int) -> BodyReport:
    """Read `PIECES MICROSECONDS\nDATA`, which the proxy's filter writes at the end of a body."""
    counts, _, text = said.partition(b"\n")
    pieces, _, micros = counts.partition(b" ")
    if not (pieces.isdigit() and micros.isdigit()) or len(counts) > 2 * _DIGITS:
        return BodyReport(is_last=True, num_bytes=num_bytes)
    return BodyReport(True, text, num_bytes, int(pieces), int(micros) / 1e6)


# Messages to events


def _request_headers(message: _Message) -> Event:
    request_body = response_body = BodyMode.DUPLEX  # the default of a proxy without this field
    if message.HasField("protocol_config"):
        config, unknown = message.protocol_config, BodyMode.UNKNOWN
        request_body = _BODY_MODES.get(config.request_body_mode, unknown)
        response_body = _BODY_MODES.get(config.response_body_mode, unknown)
    shown = message.request_headers
    return m.RequestHeaders(
        headers=_header_map(shown.headers.headers),
        end_of_stream=shown.end_of_stream,
        subset_hint=_subset_hint(message) if message.HasField("metadata_context") else None,
        request_body=request_body,
        response_body=response_body,
        num_headers=len(shown.headers.headers),
        num_header_bytes=shown.headers.ByteSize(),
        only_observes=message.observability_mode,
    )


def _request_body(message: _Message) -> Event:
    body = message.request_body
    hint = _subset_hint(message) if message.HasField("metadata_context") else None
    return m.RequestBody(body.body, body.end_of_stream, hint)


def _response_headers(message: _Message) -> Event:
    headers = _header_map(message.response_headers.headers.headers)
    served_by, has_metadata = None, False
    if message.HasField("metadata_context"):
        has_metadata = DESTINATION_NAMESPACE in message.metadata_context.filter_metadata
        value = _metadata(message, DESTINATION_NAMESPACE, DESTINATION_SERVED)
        served_by = value.string_value or None if value is not None else None
    upstream, reached_no_endpoint = "", False
    if ATTRIBUTES in message.attributes:
        fields = message.attributes[ATTRIBUTES].fields
        upstream = fields[UPSTREAM_ADDRESS].string_value if UPSTREAM_ADDRESS in fields else ""
        # Known only if the proxy sends its attempts as well as the address.
        reached_no_endpoint = not upstream and UPSTREAM_ATTEMPTS in fields
    status = headers.get(":status") or headers.get("status", "")
    is_number = status.isascii() and status.isdigit() and len(status) == 3
    response_body = BodyMode.DUPLEX
    if message.HasField("protocol_config"):
        mode = message.protocol_config.response_body_mode
        response_body = _BODY_MODES.get(mode, BodyMode.UNKNOWN)
    return m.ResponseHeaders(
        status=int(status) if is_number else None,
        end_of_stream=message.response_headers.end_of_stream,
        served_by=served_by or upstream or None,
        headers=headers,
        has_destination_metadata=has_metadata,
        reached_no_endpoint=reached_no_endpoint,
        response_body=response_body,
        only_observes=message.observability_mode,
    )


def _response_body(message: _Message) -> Event:
    return m.ResponseBody(message.response_body.body, message.response_body.end_of_stream)


_DECODERS: Mapping[str, Callable[[_Message], Event]] = {
    "request_headers": _request_headers,
    "request_body": _request_body,
    "request_trailers": lambda _: m.RequestTrailers(),
    "response_headers": _response_headers,
    "response_body": _response_body,
    "response_trailers": lambda _: m.ResponseTrailers(),
}


def _header_map(headers: Iterable[_Message]) -> dict[str, str]:
    """Map names to values; of a repeated header the last value counts."""
    found: dict[str, str] = {}
    for header in headers:
        raw = header.raw_value
        found[header.key.lower()] = raw.decode("utf-8", "replace") if raw else header.value
    return found


def _metadata(message: _Message, namespace: str, key: str) -> _Message | None:
    known = message.metadata_context.filter_metadata
    # A look-up in a map of messages would insert a missing key.
    return known[namespace].fields.get(key) if namespace in known else None


def _subset_hint(message: _Message) -> tuple[str, ...] | None:
    """Return the endpoints that may serve; entries and values of another kind count as absent."""
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


# Replies to messages


def _send_request_headers(reply: m.SendRequestHeaders) -> bytes:
    message = _directed(reply, "request_headers")
    if reply.hides_bodies:
        message.mode_override.CopyFrom(_HIDE_BODIES)
    if reply.report_id:
        _add_report_id(message, reply.report_id)
    return cast("bytes", message.SerializeToString())


def _send_buffered_request(reply: m.SendBufferedRequest) -> bytes:
    if not (reply.set_headers or reply.metadata) and reply.body is None:
        if not reply.report_id:
            return _unchanged_body_to(reply.destination)
        made = _reported_body_to(reply.destination)
        return made.replace(_ANY_REPORT_ID.encode(), reply.report_id.encode())
    message = _directed(reply, "request_body")
    if reply.report_id:
        _add_report_id(message, reply.report_id)
    if reply.body is not None:
        message.request_body.response.body_mutation.body = reply.body
    return cast("bytes", message.SerializeToString())


@lru_cache(MAX_REMEMBERED)
def _to(destination: str, part: str) -> _Message:
    message = pb.ProcessingResponse()
    response = getattr(message, part).response
    response.clear_route_cache = True  # the route may depend on headers that are set here
    if destination:
        _set(response.header_mutation, DESTINATION, destination)
        response.header_mutation.remove_headers.extend(_REMOVABLE)
        _add_destination(message, destination)
    return message


@lru_cache(MAX_REMEMBERED)
def _unchanged_body_to(destination: str) -> bytes:
    return cast("bytes", _to(destination, "request_body").SerializeToString())


@lru_cache(MAX_REMEMBERED)
def _reported_body_to(destination: str) -> bytes:
    message = pb.ProcessingResponse()
    message.CopyFrom(_to(destination, "request_body"))
    _add_report_id(message, _ANY_REPORT_ID)
    return cast("bytes", message.SerializeToString())


def _add_report_id(message: _Message, report_id: str) -> None:
    fields = message.dynamic_metadata.fields[DESTINATION_NAMESPACE].struct_value.fields
    fields[REPORT_ID].string_value = report_id


def _add_destination(message: _Message, destination: str) -> None:
    fields = message.dynamic_metadata.fields[DESTINATION_NAMESPACE].struct_value.fields
    fields[DESTINATION].string_value = destination


def _directed(reply: m.SendRequestHeaders | m.SendBufferedRequest, part: str) -> _Message:
    """Return a copy of the message with the destination, with the rest of `reply` added."""
    message = pb.ProcessingResponse()
    message.CopyFrom(_to(reply.destination, part))
    mutation = getattr(message, part).response.header_mutation
    if reply.content_length is not None:
        _set(mutation, "content-length", str(reply.content_length))
    for name, value in reply.set_headers:
        _set(mutation, name, value)
        if reply.destination and name in _REMOVABLE:
            # Envoy removes before it sets; without the name that order does not matter.
            mutation.remove_headers.remove(name)
    if reply.metadata:
        _add_metadata(message, reply.metadata)
        _add_destination(message, reply.destination)  # which plugins may not overwrite
    return message


def _add_metadata(message: _Message, metadata: Metadata) -> None:
    for namespace, values in metadata.items():
        fields = message.dynamic_metadata.fields[namespace].struct_value.fields
        for key, value in values.items():
            if isinstance(value, str):
                fields[key].string_value = value.encode("utf-8", "replace").decode()
            elif isinstance(value, Mapping):
                numbers = fields[key].struct_value
                numbers.SetInParent()  # an empty mapping must appear as well
                for name, number in value.items():
                    numbers.fields[name].number_value = number
            else:
                fields[key].number_value = value


def _override_timeout(reply: m.OverrideTimeout) -> bytes:
    message = pb.ProcessingResponse()
    message.override_message_timeout.FromSeconds(reply.seconds)
    return cast("bytes", message.SerializeToString())


def _send_request_body(reply: m.SendRequestBody) -> bytes:
    message = pb.ProcessingResponse()
    piece = message.request_body.response.body_mutation.streamed_response
    piece.body = reply.data
    piece.end_of_stream = reply.end_of_stream
    return cast("bytes", message.SerializeToString())


@lru_cache(MAX_REMEMBERED)  # nearly every response has the same
def _send_response_headers(reply: m.SendResponseHeaders) -> bytes:
    message = pb.ProcessingResponse(response_headers=pb.HeadersResponse())
    headers = message.response_headers
    for name, value in reply.set_headers:
        _set(headers.response.header_mutation, name, value)
    if reply.remove_headers:
        headers.response.header_mutation.remove_headers.extend(reply.remove_headers)
    if reply.show_body:
        message.mode_override.CopyFrom(_SHOW_BODY)
    return cast("bytes", message.SerializeToString())


def _send_response_body(reply: m.SendResponseBody) -> bytes:
    message = pb.ProcessingResponse()
    piece = message.response_body.response.body_mutation.streamed_response
    piece.body = reply.data
    piece.end_of_stream = reply.end_of_stream
    _add_metadata(message, reply.metadata)
    return cast("bytes", message.SerializeToString())


def _send_held_response_body(reply: m.SendHeldResponseBody) -> bytes:
    message = pb.ProcessingResponse()
    response = message.response_body.response
    response.body_mutation.body = reply.data
    if reply.content_length is not None:
        _set(response.header_mutation, "content-length", str(reply.content_length))
    _add_metadata(message, reply.metadata)
    return cast("bytes", message.SerializeToString())


def _send_response_body_unchanged(reply: m.SendResponseBodyUnchanged) -> bytes:
    message = pb.ProcessingResponse(response_body=pb.BodyResponse())
    _add_metadata(message, reply.metadata)
    return cast("bytes", message.SerializeToString())


def _send_immediate(reply: m.SendImmediate) -> bytes:
    message = pb.ProcessingResponse()
    message.immediate_response.status.code = reply.status
    message.immediate_response.body = reply.body.encode("utf-8", "replace")
    message.immediate_response.details = ANSWER_DETAILS
    for name, value in reply.headers:
        _set(message.immediate_response.headers, name, value)
    return cast("bytes", message.SerializeToString())


def _set(mutation: _Message, name: str, value: str) -> None:
    option = mutation.set_headers.add()
    option.append_action = _OVERWRITE
    option.header.key = name
    # JSON allows lone surrogates, which UTF-8 cannot carry.
    option.header.raw_value = value.encode("utf-8", "replace")


_CONSTANTS: Mapping[type, bytes] = {
    kind: pb.ProcessingResponse(**content).SerializeToString()
    for kind, content in (
        (m.SendRequestHeadersUnchanged, {"request_headers": pb.HeadersResponse()}),
        (m.SendRequestTrailers, {"request_trailers": pb.TrailersResponse()}),
        (m.SendResponseTrailers, {"response_trailers": pb.TrailersResponse()}),
    )
}
_ENCODERS: Mapping[type, Callable[[Any], bytes]] = {
    m.OverrideTimeout: _override_timeout,
    m.SendRequestHeaders: _send_request_headers,
    m.SendBufferedRequest: _send_buffered_request,
    m.SendRequestBody: _send_request_body,
    m.SendResponseHeaders: _send_response_headers,
    m.SendResponseBody: _send_response_body,
    m.SendHeldResponseBody: _send_held_response_body,
    m.SendResponseBodyUnchanged: _send_response_body_unchanged,
    m.SendImmediate: _send_immediate,
}
