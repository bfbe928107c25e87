"""Protobuf to events and replies to protobuf, with the messages written out as text."""

from typing import Any

import pytest
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from google.protobuf import text_format
from google.protobuf.json_format import MessageToDict
from google.protobuf.struct_pb2 import Struct
from hypothesis import given
from hypothesis import strategies as st

from picker.extproc import wire
from picker.extproc.machine import messages as m
from picker.extproc.machine.messages import BodyMode
from picker.extproc.wire import decode
from picker.requestcontrol.headers import PICKER_OWNED
from tests.depth import examples

SUBSET = """
metadata_context { filter_metadata { key: "envoy.lb.subset_hint" value { fields {
  key: "x-gateway-destination-endpoint-subset" value { %s } } } } }
"""


def message(text: str) -> bytes:
    return text_format.Parse(text, pb.ProcessingRequest()).SerializeToString()


def replied(reply: m.Reply) -> pb.ProcessingResponse:
    return pb.ProcessingResponse.FromString(wire.encode(reply))


def headers_event(text: str) -> m.RequestHeaders:
    return wire.decode(message(text))


@pytest.mark.parametrize(
    ("text", "event"),
    [
        ("request_headers {}", m.RequestHeaders({})),
        ("request_headers { end_of_stream: true }", m.RequestHeaders({}, True)),
        ('request_body { body: "abc" }', m.RequestBody(b"abc")),
        ("request_body { end_of_stream: true }", m.RequestBody(b"", True)),
        ("request_trailers {}", m.RequestTrailers()),
        ("response_headers {}", m.ResponseHeaders()),
        ('response_body { body: "x" end_of_stream: true }', m.ResponseBody(b"x", True)),
        ("response_trailers {}", m.ResponseTrailers()),
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
    assert event.status == status


def test_the_endpoint_that_served_is_read_from_the_metadata() -> None:
    text = """response_headers {} metadata_context { filter_metadata { key: "envoy.lb" value {
        fields { key: "x-gateway-destination-endpoint-served"
                 value { string_value: "10.0.0.1:8000" } } } } }"""
    served = m.ResponseHeaders(served_by="10.0.0.1:8000", has_destination_metadata=True)
    assert wire.decode(message(text)) == served
    silent = text.replace("destination-endpoint-served", "destination-endpoint-other")
    assert wire.decode(message(silent)) == m.ResponseHeaders(has_destination_metadata=True)


def test_response_headers_are_lowered_and_pseudo_headers_are_among_them() -> None:
    event = wire.decode(
        message("""response_headers { headers {
          headers { key: ":status" raw_value: "200" }
          headers { key: "Content-Type" raw_value: "application/json" } } }""")
    )
    headers = {":status": "200", "content-type": "application/json"}
    assert event == m.ResponseHeaders(200, headers=headers)


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
    assert wire.decode(field_99) == m.UnknownMessage()
    known = pb.ProcessingRequest(request_trailers=pb.HttpTrailers()).SerializeToString()
    assert wire.decode(known + field_99) == m.RequestTrailers()


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


ATTRIBUTES = "envoy.filters.http.ext_proc"


def head(attributes: dict[str, Any] | None, served: str | None = None) -> m.ResponseHeaders:
    message = pb.ProcessingRequest(response_headers=pb.HttpHeaders())
    if attributes is not None:
        fields = Struct()
        fields.update(attributes)
        message.attributes[ATTRIBUTES].CopyFrom(fields)
    if served is not None:
        metadata = Struct()
        metadata.update({"x-gateway-destination-endpoint-served": served})
        message.metadata_context.filter_metadata["envoy.lb"].CopyFrom(metadata)
    return decode(message.SerializeToString())


@pytest.mark.parametrize(
    ("attributes", "served", "served_by", "reached_no_endpoint"),
    [
        (None, None, None, False),
        (None, "10.0.0.1:1", "10.0.0.1:1", False),
        ({"upstream.address": "10.0.0.2:1"}, None, "10.0.0.2:1", False),
        ({"upstream.address": "10.0.0.2:1"}, "10.0.0.1:1", "10.0.0.1:1", False),
        (
            {"upstream.address": "10.0.0.2:1", "upstream.request_attempt_count": 2},
            None,
            "10.0.0.2:1",
            False,
        ),
        ({"upstream.request_attempt_count": 1}, None, None, True),
        ({"upstream.address": "", "upstream.request_attempt_count": 1}, None, None, True),
        ({"response.code": 503}, None, None, False),
        ({}, None, None, False),
    ],
)
def test_the_origin_of_the_answer(
    attributes: dict[str, Any] | None,
    served: str | None,
    served_by: str | None,
    reached_no_endpoint: bool,
) -> None:
    event = head(attributes, served)
    assert (event.served_by, event.reached_no_endpoint) == (served_by, reached_no_endpoint)


def test_the_header_reply_routes_and_says_the_same_in_metadata() -> None:
    reply = m.SendRequestHeaders("10.0.0.1:8000,[::1]:80", (("x-request-id", "é"),), 17)
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
    mutation = replied(m.SendRequestHeaders("a:1")).request_headers.response.header_mutation
    removed = set(mutation.remove_headers)
    assert removed == set(PICKER_OWNED) - {"x-gateway-destination-endpoint"}
    assert {"x-prefiller-host-port", "x-gateway-model-name-rewrite"} <= removed
    ours = m.SendRequestHeaders("a:1", (("x-prefiller-host-port", "b:2"),))
    mutation = replied(ours).request_headers.response.header_mutation
    assert "x-prefiller-host-port" not in mutation.remove_headers
    assert set(mutation.remove_headers) | {"x-prefiller-host-port"} == removed


def test_no_length_is_set_when_none_is_known() -> None:
    mutation = replied(m.SendRequestHeaders("a:1")).request_headers.response.header_mutation
    assert [option.header.key for option in mutation.set_headers] == [
        "x-gateway-destination-endpoint"
    ]


@pytest.mark.parametrize("body", [None, b"", b'{"model":"big"}'])
def test_the_reply_to_a_buffered_body_says_all_that_a_header_reply_says(body: bytes | None) -> None:
    ours = (("x-request-id", "7"), ("x-prefiller-host-port", "b:2"))
    message = replied(m.SendBufferedRequest("10.0.0.1:8000,[::1]:80", ours, body, 15))
    at_headers = replied(m.SendRequestHeaders("10.0.0.1:8000,[::1]:80", ours, 15))
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
    message = replied(m.SendBufferedRequest("a:1", (("x-request-id", "7"),)))
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


def test_a_tunnel_asks_for_bodies_to_be_hidden() -> None:
    plain, hiding = (replied(m.SendRequestHeaders("a:1", hides_bodies=on)) for on in (False, True))
    assert not plain.HasField("mode_override")
    override = "request_trailer_mode: SEND response_header_mode: SEND response_trailer_mode: SEND"
    assert hiding.mode_override == text_format.Parse(override, type(hiding.mode_override)())
    assert hiding.request_headers == plain.request_headers


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        (m.SendRequestHeadersUnchanged(), "request_headers {}"),
        (
            m.SendRequestBody(b"ab", False),
            'request_body { response { body_mutation { streamed_response { body: "ab" } } } }',
        ),
        (
            m.SendRequestBody(b"", True),
            "request_body { response { body_mutation { streamed_response"
            " { end_of_stream: true } } } }",
        ),
        (m.SendRequestTrailers(), "request_trailers {}"),
        (
            m.SendResponseHeaders((("x-a", "1"),)),
            'response_headers { response { header_mutation { set_headers { header { key: "x-a"'
            ' raw_value: "1" } append_action: OVERWRITE_IF_EXISTS_OR_ADD } } } }',
        ),
        (m.SendResponseHeaders(()), "response_headers {}"),
        (
            m.SendResponseHeaders((), ("x-owned",)),
            'response_headers { response { header_mutation { remove_headers: "x-owned" } } }',
        ),
        (
            m.SendResponseHeaders((), show_body=True),
            "response_headers {} mode_override { request_body_mode: BUFFERED"
            " request_trailer_mode: SEND response_header_mode: SEND"
            " response_body_mode: FULL_DUPLEX_STREAMED response_trailer_mode: SEND }",
        ),
        (
            m.SendHeldResponseBody(b"", 0),
            'response_body { response { body_mutation { body: "" } header_mutation {'
            ' set_headers { header { key: "content-length" raw_value: "0" }'
            " append_action: OVERWRITE_IF_EXISTS_OR_ADD } } } }",
        ),
        (
            m.SendHeldResponseBody(b"ab"),
            'response_body { response { body_mutation { body: "ab" } } }',
        ),
        (
            m.SendResponseBody(b"ab", True),
            "response_body { response { body_mutation { streamed_response"
            ' { body: "ab" end_of_stream: true } } } }',
        ),
        (m.SendResponseBodyUnchanged(), "response_body {}"),
        (m.SendResponseTrailers(), "response_trailers {}"),
        (
            m.SendImmediate(429, "slow down", (("x-why", "full"),)),
            'immediate_response { status { code: TooManyRequests } body: "slow down" headers {'
            ' set_headers { header { key: "x-why" raw_value: "full" }'
            " append_action: OVERWRITE_IF_EXISTS_OR_ADD } } details: 'endpoint_picker' }",
        ),
    ],
)
def test_each_reply_is_its_message(reply: m.Reply, text: str) -> None:
    assert replied(reply) == text_format.Parse(text, pb.ProcessingResponse())


def test_text_that_is_no_utf8_is_replaced_in_an_answer() -> None:
    """A refusal that quotes a broken body can still be sent."""
    assert replied(m.SendImmediate(400, "bad \ud800")).immediate_response.body == b"bad ?"


METADATA = {
    "envoy.lb": {
        "x-cost": 10,
        "x-scores": {"10.0.0.1:8000": 0.5},
        "x-gateway-destination-endpoint": "192.0.2.1:1",
        "x-none": {},
    },
    "other": {"x-text": "té\ud800"},
}


@pytest.mark.parametrize("kind", [m.SendRequestHeaders, m.SendBufferedRequest])
def test_metadata_of_a_decision_stands_beside_the_destination(kind: type) -> None:
    message = replied(kind("a:1", metadata=METADATA))
    assert MessageToDict(message.dynamic_metadata) == {
        "envoy.lb": {
            "x-cost": 10.0,
            "x-scores": {"10.0.0.1:8000": 0.5},
            "x-gateway-destination-endpoint": "a:1",
            "x-none": {},
        },
        "other": {"x-text": "té?"},
    }


@pytest.mark.parametrize(
    "reply",
    [
        m.SendResponseBody(b"x", True, {"envoy.lb": {"x-cost": 10}}),
        m.SendHeldResponseBody(b"x", metadata={"envoy.lb": {"x-cost": 10}}),
        m.SendResponseBodyUnchanged({"envoy.lb": {"x-cost": 10}}),
    ],
)
def test_metadata_of_a_response_goes_out_with_its_body(reply: m.Reply) -> None:
    assert MessageToDict(replied(reply).dynamic_metadata) == {"envoy.lb": {"x-cost": 10.0}}
