"""Replies to protobuf, with the messages written out as text."""

import pytest
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from google.protobuf import text_format
from google.protobuf.json_format import MessageToDict

from picker.extproc import wire
from picker.extproc.machine import messages as m
from picker.requestcontrol.headers import PICKER_OWNED


def replied(reply: m.Reply) -> pb.ProcessingResponse:
    return pb.ProcessingResponse.FromString(wire.encode(reply))


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
