"""Protobuf to events and replies to protobuf, with the messages written out as text."""

import pytest
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from google.protobuf import text_format
from hypothesis import given
from hypothesis import strategies as st

from picker.extproc import wire
from picker.extproc.machine.messages import (
    BodyMode,
    Reply,
    RequestBody,
    RequestHeaders,
    RequestTrailers,
    ResponseBody,
    ResponseHeaders,
    ResponseTrailers,
    UnknownMessage,
)
from tests.depth import examples

SUBSET = """
metadata_context { filter_metadata { key: "envoy.lb.subset_hint" value { fields {
  key: "x-gateway-destination-endpoint-subset" value { %s } } } } }
"""


def message(text: str) -> bytes:
    return text_format.Parse(text, pb.ProcessingRequest()).SerializeToString()


def replied(reply: Reply) -> pb.ProcessingResponse:
    return pb.ProcessingResponse.FromString(wire.encode(reply))


def headers_event(text: str) -> RequestHeaders:
    return wire.decode(message(text))


@pytest.mark.parametrize(
    ("text", "event"),
    [
        ("request_headers {}", RequestHeaders({})),
        ("request_headers { end_of_stream: true }", RequestHeaders({}, True)),
        ('request_body { body: "abc" }', RequestBody(b"abc")),
        ("request_body { end_of_stream: true }", RequestBody(b"", True)),
        ("request_trailers {}", RequestTrailers()),
        ("response_headers {}", ResponseHeaders()),
        ('response_body { body: "x" end_of_stream: true }', ResponseBody(b"x", True)),
        ("response_trailers {}", ResponseTrailers()),
    ],
)
def test_each_kind_of_message_is_its_event(text: str, event: object) -> None:
    assert wire.decode(message(text)) == event


def test_header_names_are_lowered_and_raw_values_win() -> None:
    event = headers_event("""
        request_headers { headers {
          headers { key: "X-One" value: "value" raw_value: "raw" }
          headers { key: "x-two" value: "value" }
          headers { key: "x-bytes" raw_value: "\\377" }
          headers { key: "x-twice" raw_value: "first" }
          headers { key: "X-Twice" raw_value: "last" }
        } }""")
    assert event.headers == {
        "x-one": "raw",
        "x-two": "value",
        "x-bytes": "\ufffd",
        "x-twice": "last",
    }


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (
            'list_value { values { string_value: "10.0.0.1:8000" }'
            ' values { string_value: "10.0.0.2" } }',
            ("10.0.0.1:8000", "10.0.0.2"),
        ),
        ('string_value: "10.0.0.1:8000, 10.0.0.2,"', ("10.0.0.1:8000", "10.0.0.2")),
        ('list_value { values { number_value: 3 } values { string_value: "a" } }', ("a",)),
        ("list_value {}", ()),
        ('string_value: ""', ()),
        ("bool_value: true", None),
        ("null_value: NULL_VALUE", None),
    ],
)
def test_the_subset_hint_is_a_list_or_a_comma_string(
    value: str, hint: tuple[str, ...] | None
) -> None:
    assert headers_event("request_headers {}" + SUBSET % value).subset_hint == hint
    body = wire.decode(message("request_body {}" + SUBSET % value))
    assert isinstance(body, RequestBody)
    assert body.subset_hint == hint


def test_metadata_without_the_subset_key_is_no_hint() -> None:
    text = """request_headers {} metadata_context { filter_metadata {
        key: "envoy.lb.subset_hint" value { fields { key: "other" value { bool_value: true } } } } }
    """
    assert headers_event(text).subset_hint is None


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("NONE", BodyMode.ABSENT),
        ("STREAMED", BodyMode.LOCKSTEP),
        ("BUFFERED", BodyMode.BUFFERED),
        ("BUFFERED_PARTIAL", BodyMode.PARTIAL),
        ("FULL_DUPLEX_STREAMED", BodyMode.DUPLEX),
        ("GRPC", BodyMode.UNKNOWN),
        ("77", BodyMode.UNKNOWN),
    ],
)
def test_the_proxys_body_modes_are_known_from_its_first_message(
    mode: str, expected: BodyMode
) -> None:
    config = f"request_headers {{}} protocol_config {{ request_body_mode: {mode} }}"
    assert headers_event(config).request_body is expected
    config = f"request_headers {{}} protocol_config {{ response_body_mode: {mode} }}"
    assert headers_event(config).response_body is expected
    assert headers_event("request_headers {}").request_body is BodyMode.DUPLEX
    first = wire.decode(message(config.replace("request_headers", "response_headers")))
    assert isinstance(first, ResponseHeaders)
    assert first.response_body is expected


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ('headers { key: ":status" raw_value: "503" }', 503),
        ('headers { key: "status" raw_value: "404" }', 404),
        ('headers { key: "status" raw_value: "1" } headers { key: ":status" value: "200" }', 200),
        ('headers { key: ":status" raw_value: "abc" }', None),
        ("", None),
    ],
)
def test_the_response_status_is_read_from_the_pseudo_header_first(
    headers: str, status: int | None
) -> None:
    event = wire.decode(message(f"response_headers {{ headers {{ {headers} }} }}"))
    assert isinstance(event, ResponseHeaders)
    assert event.status == status


def test_the_endpoint_that_served_is_read_from_the_metadata() -> None:
    text = """response_headers {} metadata_context { filter_metadata { key: "envoy.lb" value {
        fields { key: "x-gateway-destination-endpoint-served"
                 value { string_value: "10.0.0.1:8000" } } } } }"""
    served = ResponseHeaders(served_by="10.0.0.1:8000", has_destination_metadata=True)
    assert wire.decode(message(text)) == served
    silent = text.replace("destination-endpoint-served", "destination-endpoint-other")
    assert wire.decode(message(silent)) == ResponseHeaders(has_destination_metadata=True)


def test_response_headers_are_lowered_and_pseudo_headers_are_among_them() -> None:
    event = wire.decode(
        message("""response_headers { headers {
          headers { key: ":status" raw_value: "200" }
          headers { key: "Content-Type" raw_value: "application/json" } } }""")
    )
    headers = {":status": "200", "content-type": "application/json"}
    assert event == ResponseHeaders(200, headers=headers)


def test_headers_are_measured_before_repeated_names_fall_together() -> None:
    event = headers_event("""request_headers { headers {
          headers { key: "x-twice" raw_value: "first" }
          headers { key: "x-twice" raw_value: "last" } } }""")
    assert (len(event.headers), event.num_headers) == (1, 2)
    assert event.num_header_bytes >= len("x-twice" * 2 + "first" + "last")


def test_a_proxy_that_only_observes_says_so() -> None:
    assert headers_event("request_headers {} observability_mode: true").only_observes
    assert not headers_event("request_headers {}").only_observes


def test_a_message_of_a_later_kind_is_known_to_be_unknown() -> None:
    field_99 = b"\x9a\x06\x02hi"
    assert wire.decode(field_99) == UnknownMessage()
    known = pb.ProcessingRequest(request_trailers=pb.HttpTrailers()).SerializeToString()
    assert wire.decode(known + field_99) == RequestTrailers()


@pytest.mark.parametrize("data", [b"", b"\xff\xff", b"\x0a\x05abc"])
def test_bytes_that_say_nothing_are_malformed(data: bytes) -> None:
    with pytest.raises(wire.MalformedMessageError):
        wire.decode(data)


@examples(200)
@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_else(data: bytes) -> None:
    try:
        wire.decode(data)
    except wire.MalformedMessageError:
        return
