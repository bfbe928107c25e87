"""Protobuf to events and replies to protobuf, with the messages written out as text."""

from __future__ import annotations

import pytest
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from google.protobuf import text_format
from hypothesis import given, settings
from hypothesis import strategies as st

from picker.extproc import wire
from picker.extproc.messages import (
    BodyMode,
    Reply,
    RequestBody,
    RequestHeaders,
    RequestTrailers,
    ResponseBody,
    ResponseHeaders,
    ResponseTrailers,
    SendBufferedRequest,
    SendImmediate,
    SendRequestBody,
    SendRequestHeaders,
    SendRequestHeadersUnchanged,
    SendRequestTrailers,
    SendResponseBody,
    SendResponseBodyUnchanged,
    SendResponseHeaders,
    SendResponseTrailers,
)
from picker.requestcontrol.headers import PICKER_OWNED

SUBSET = """
metadata_context { filter_metadata { key: "envoy.lb.subset_hint" value { fields {
  key: "x-gateway-destination-endpoint-subset" value { %s } } } } }
"""


def message(text: str) -> bytes:
    """A `ProcessingRequest` from its text form."""
    return text_format.Parse(text, pb.ProcessingRequest()).SerializeToString()


def replied(reply: Reply) -> pb.ProcessingResponse:
    """What a reply looks like on the wire."""
    return pb.ProcessingResponse.FromString(wire.encode(reply))


def headers_event(text: str) -> RequestHeaders:
    """The event of a request headers message."""
    event = wire.decode(message(text))
    assert isinstance(event, RequestHeaders)
    return event


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
    """The six kinds of a `ProcessingRequest` map one to one."""
    assert wire.decode(message(text)) == event


def test_header_names_are_lowered_and_raw_values_win() -> None:
    """A proxy may fill either field; the raw one counts unless it is empty."""
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
    """An empty hint means nobody may serve; a value of another kind means no hint."""
    assert headers_event("request_headers {}" + SUBSET % value).subset_hint == hint
    body = wire.decode(message("request_body {}" + SUBSET % value))
    assert isinstance(body, RequestBody)
    assert body.subset_hint == hint


def test_metadata_without_the_subset_key_is_no_hint() -> None:
    """Other metadata of the proxy, even in the same namespace, does not narrow the choice."""
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
        ("BUFFERED_PARTIAL", BodyMode.LOCKSTEP),
        ("FULL_DUPLEX_STREAMED", BodyMode.DUPLEX),
    ],
)
def test_the_proxys_body_modes_are_known_from_its_first_message(
    mode: str, expected: BodyMode
) -> None:
    """Each direction has its own mode; without any word of it both are full duplex."""
    config = f"request_headers {{}} protocol_config {{ request_body_mode: {mode} }}"
    assert headers_event(config).request_body is expected
    config = f"request_headers {{}} protocol_config {{ response_body_mode: {mode} }}"
    assert headers_event(config).response_body is expected
    assert headers_event("request_headers {}").request_body is BodyMode.DUPLEX


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ('headers { key: ":status" raw_value: "503" }', 503),
        ('headers { key: "status" raw_value: "404" }', 404),
        (
            'headers { key: "status" raw_value: "1" } headers { key: ":status" value: "200" }',
            200,
        ),
        ('headers { key: ":status" raw_value: "abc" }', None),
        ("", None),
    ],
)
def test_the_response_status_is_read_from_the_pseudo_header_first(
    headers: str, status: int | None
) -> None:
    """`:status` wins over a header that merely has that name."""
    event = wire.decode(message(f"response_headers {{ headers {{ {headers} }} }}"))
    assert event == ResponseHeaders(status)


def test_the_endpoint_that_served_is_read_from_the_metadata() -> None:
    """The proxy reports which address of the fallback list answered."""
    text = """response_headers {} metadata_context { filter_metadata { key: "envoy.lb" value {
        fields { key: "x-gateway-destination-endpoint-served"
                 value { string_value: "10.0.0.1:8000" } } } } }"""
    assert wire.decode(message(text)) == ResponseHeaders(served_by="10.0.0.1:8000")


@pytest.mark.parametrize("data", [b"", b"\xff\xff", b"\x0a\x05abc"])
def test_bytes_that_say_nothing_are_malformed(data: bytes) -> None:
    """Broken protobuf and an empty message are the proxy's error, with our type."""
    with pytest.raises(wire.MalformedMessageError):
        wire.decode(data)


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_else(data: bytes) -> None:
    """Whatever arrives is an event or our typed error."""
    try:
        wire.decode(data)
    except wire.MalformedMessageError:
        return


def test_the_header_reply_routes_and_says_the_same_in_metadata() -> None:
    """The destination stands in the header and in the dynamic metadata, and the rest is set."""
    reply = SendRequestHeaders("10.0.0.1:8000,[::1]:80", (("x-request-id", "é"),), 17)
    message = replied(reply)
    response = message.request_headers.response
    assert response.clear_route_cache
    expected = {
        "x-gateway-destination-endpoint": b"10.0.0.1:8000,[::1]:80",
        "content-length": b"17",
        "x-request-id": "é".encode(),
    }
    options = response.header_mutation.set_headers
    assert {option.header.key: option.header.raw_value for option in options} == expected
    assert {option.append_action for option in options} == {2}  # OVERWRITE_IF_EXISTS_OR_ADD
    metadata = text_format.Parse(
        """fields { key: "envoy.lb" value { struct_value { fields {
             key: "x-gateway-destination-endpoint"
             value { string_value: "10.0.0.1:8000,[::1]:80" } } } } }""",
        type(message.dynamic_metadata)(),
    )
    assert message.dynamic_metadata == metadata


def test_every_control_header_of_the_client_is_removed_but_none_that_is_set() -> None:
    """A client cannot smuggle routing headers to an endpoint; what we set survives any order."""
    mutation = replied(SendRequestHeaders("a:1")).request_headers.response.header_mutation
    removed = set(mutation.remove_headers)
    assert removed == set(PICKER_OWNED) - {"x-gateway-destination-endpoint"}
    assert {"x-prefiller-host-port", "x-gateway-model-name-rewrite"} <= removed
    ours = SendRequestHeaders("a:1", (("x-prefiller-host-port", "b:2"),))
    mutation = replied(ours).request_headers.response.header_mutation
    assert "x-prefiller-host-port" not in mutation.remove_headers
    assert set(mutation.remove_headers) | {"x-prefiller-host-port"} == removed


def test_no_length_is_set_when_none_is_known() -> None:
    """A request without a body keeps whatever length it came with."""
    mutation = replied(SendRequestHeaders("a:1")).request_headers.response.header_mutation
    assert [option.header.key for option in mutation.set_headers] == [
        "x-gateway-destination-endpoint"
    ]


@pytest.mark.parametrize("body", [None, b"", b'{"model":"big"}'])
def test_the_reply_to_a_buffered_body_says_all_that_a_header_reply_says(body: bytes | None) -> None:
    """The same decision in the place of the body reply, with a new body where there is one."""
    ours = (("x-request-id", "7"), ("x-prefiller-host-port", "b:2"))
    message = replied(SendBufferedRequest("10.0.0.1:8000,[::1]:80", ours, body, 15))
    at_headers = replied(SendRequestHeaders("10.0.0.1:8000,[::1]:80", ours, 15))
    assert message.dynamic_metadata == at_headers.dynamic_metadata
    expected = pb.CommonResponse()
    expected.CopyFrom(at_headers.request_headers.response)
    if body is not None:
        expected.body_mutation.body = body
    response = message.request_body.response
    assert response == expected
    assert response.body_mutation.WhichOneof("mutation") == (None if body is None else "body")
    assert "x-gateway-model-name-rewrite" in response.header_mutation.remove_headers


def test_a_decision_on_an_untouched_buffered_body_is_this_message() -> None:
    """Written out whole, but for the names it removes."""
    message = replied(SendBufferedRequest("a:1", (("x-request-id", "7"),)))
    removed = message.request_body.response.header_mutation.remove_headers
    assert set(removed) == set(PICKER_OWNED) - {"x-gateway-destination-endpoint"}
    del removed[:]
    assert message == text_format.Parse(
        """request_body { response { clear_route_cache: true header_mutation {
             set_headers { header { key: "x-gateway-destination-endpoint" raw_value: "a:1" }
                           append_action: OVERWRITE_IF_EXISTS_OR_ADD }
             set_headers { header { key: "x-request-id" raw_value: "7" }
                           append_action: OVERWRITE_IF_EXISTS_OR_ADD } } } }
           dynamic_metadata { fields { key: "envoy.lb" value { struct_value { fields {
             key: "x-gateway-destination-endpoint" value { string_value: "a:1" } } } } } }""",
        pb.ProcessingResponse(),
    )


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        (SendRequestHeadersUnchanged(), "request_headers {}"),
        (
            SendRequestBody(b"ab", False),
            'request_body { response { body_mutation { streamed_response { body: "ab" } } } }',
        ),
        (
            SendRequestBody(b"", True),
            "request_body { response { body_mutation { streamed_response"
            " { end_of_stream: true } } } }",
        ),
        (SendRequestTrailers(), "request_trailers {}"),
        (
            SendResponseHeaders((("x-a", "1"),)),
            'response_headers { response { header_mutation { set_headers { header { key: "x-a"'
            ' raw_value: "1" } append_action: OVERWRITE_IF_EXISTS_OR_ADD } } } }',
        ),
        (SendResponseHeaders(()), "response_headers {}"),
        (
            SendResponseBody(b"ab", True),
            "response_body { response { body_mutation { streamed_response"
            ' { body: "ab" end_of_stream: true } } } }',
        ),
        (SendResponseBodyUnchanged(), "response_body {}"),
        (SendResponseTrailers(), "response_trailers {}"),
        (
            SendImmediate(429, "slow down", (("x-why", "full"),)),
            'immediate_response { status { code: TooManyRequests } body: "slow down" headers {'
            ' set_headers { header { key: "x-why" raw_value: "full" }'
            " append_action: OVERWRITE_IF_EXISTS_OR_ADD } } }",
        ),
    ],
)
def test_each_reply_is_its_message(reply: Reply, text: str) -> None:
    """The whole message, nothing more and nothing less."""
    assert replied(reply) == text_format.Parse(text, pb.ProcessingResponse())


def test_text_that_is_no_utf8_is_replaced_in_an_answer() -> None:
    """A refusal that quotes a broken body can still be sent."""
    assert replied(SendImmediate(400, "bad \ud800")).immediate_response.body == b"bad ?"
