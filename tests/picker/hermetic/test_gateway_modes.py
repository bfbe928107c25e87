"""Gateways that show bodies otherwise than in full duplex: decisions answer a held body."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode as Mode
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from ext_proc_stream import (
    RESPONSE_TRAILERS,
    GatewayStream,
    completion,
    directed,
    in_order,
    refused,
    response_head,
)
from metrics_pages import page, pods
from whole_picker import until, whole_picker

REWRITE = {"x-llm-d-model-name-rewrite": "n"}
UNTOUCHED = pb.ProcessingResponse(request_headers=pb.HeadersResponse())
PASSED = pb.ProcessingResponse(response_body=pb.BodyResponse())


def held(destination: str, body: bytes | None, length: int | None) -> Any:
    """The decision as the answer to a body that the gateway holds."""
    message = pb.ProcessingResponse()
    (head,) = directed(destination)
    message.request_body.response.CopyFrom(head.request_headers.response)
    message.dynamic_metadata.CopyFrom(head.dynamic_metadata)
    mutation = message.request_body.response.header_mutation
    if length is not None:
        option = mutation.set_headers.add(append_action=mutation.set_headers[0].append_action)
        option.header.key, option.header.raw_value = "content-length", str(length).encode()
    if body is not None:
        message.request_body.response.body_mutation.body = body
    return in_order(message)


async def test_a_buffered_body_is_answered_with_the_decision(tmp_path: Path) -> None:
    """Nothing is sent back of a body that did not change; the response passes unseen."""
    one = pods(page())
    async with whole_picker(tmp_path, one) as picker, picker.stream() as stream:
        await stream.request_headers(modes=(Mode.BUFFERED, Mode.NONE))
        assert await stream.read(1) == [UNTOUCHED]
        await stream.request_body(completion())
        assert await stream.read(1) == [held(one[0].host_port, None, None)]
        assert await stream.response_headers() == response_head()
        await stream.response_trailers()
        assert await stream.read(1) == [RESPONSE_TRAILERS]
        assert await picker.outcomes() == {"completed": 1}


async def test_a_buffered_body_that_changes_is_sent_with_its_length(tmp_path: Path) -> None:
    """Where the client had stated one; and the response is asked to be shown."""
    one = pods(page())
    for stated in (True, False):
        async with whole_picker(tmp_path, one) as picker, picker.stream() as stream:
            body = b'{"prompt":"p","model":"m"}'
            length = {"content-length": str(len(body))} if stated else {}
            await stream.request_headers(REWRITE | length, modes=(Mode.BUFFERED, Mode.NONE))
            assert await stream.read(1) == [UNTOUCHED]
            await stream.request_body(body)
            changed = b'{"model":"n","prompt":"p"}'
            expected = held(one[0].host_port, changed, len(changed) if stated else None)
            assert await stream.read(1) == [expected]
            (said,) = await stream.response_headers({"content-length": "13"})
            assert said.mode_override.response_body_mode == Mode.FULL_DUPLEX_STREAMED
            assert list(said.response_headers.response.header_mutation.remove_headers) == [
                "content-length"
            ]
            await stream.response_body(b'{"model":"n"}', ends=True)
            (said,) = await stream.read_response()
            piece = said.response_body.response.body_mutation.streamed_response
            assert (piece.body, piece.end_of_stream) == (b'{"model":"m"}', True)


async def test_a_gateway_without_response_bodies_may_end_early(tmp_path: Path) -> None:
    """After the headers of the response it shows nothing more: that is the whole of it."""
    async with whole_picker(tmp_path, pods(page())) as picker:
        async with picker.stream() as stream:
            await stream.request_headers(modes=(Mode.FULL_DUPLEX_STREAMED, Mode.NONE))
            await stream.request_body(completion())
            await stream.read_request()
            await stream.response_headers()
        await until(picker.is_idle)
        assert await picker.outcomes() == {"completed": 1}


@pytest.mark.parametrize("mode", [Mode.STREAMED, Mode.BUFFERED])
async def test_each_shown_piece_of_a_response_is_answered(tmp_path: Path, mode: int) -> None:
    """Unchanged where nothing changes; its usage is read all the same."""
    answer = b'{"usage":{"prompt_tokens":7,"completion_tokens":10}}'
    async with whole_picker(tmp_path, pods(page())) as picker, picker.stream() as stream:
        await stream.request_headers(modes=(Mode.FULL_DUPLEX_STREAMED, mode))
        await stream.request_body(completion())
        await stream.read_request()
        await stream.response_headers()
        pieces = [answer[:9], answer[9:]] if mode == Mode.STREAMED else [answer]
        for index, piece in enumerate(pieces):
            await stream.response_body(piece, ends=index == len(pieces) - 1)
            assert await stream.read(1) == [PASSED]
        assert await picker.series("llm_d_epp_request_output_tokens_sum") == 10


@pytest.mark.parametrize(
    "modes",
    [
        (Mode.STREAMED, Mode.NONE),
        (Mode.BUFFERED_PARTIAL, Mode.NONE),
        (Mode.GRPC, Mode.NONE),
        (Mode.FULL_DUPLEX_STREAMED, Mode.GRPC),
    ],
)
async def test_modes_that_leave_no_room_for_a_decision_are_refused(
    tmp_path: Path, modes: tuple[int, int]
) -> None:
    """At once, with a 500 that says what to set."""
    text = (
        "Internal - the gateway must send request bodies to the endpoint picker in "
        "FULL_DUPLEX_STREAMED or BUFFERED mode, and response bodies in a mode other than GRPC"
    )
    async with whole_picker(tmp_path, pods(page())) as picker, picker.stream() as stream:
        await stream.request_headers(modes=modes)
        assert await stream.read(1) == refused(500, text)


async def test_a_gateway_that_shows_no_bodies_gets_any_endpoint(tmp_path: Path) -> None:
    """Nothing is known of such a request."""
    one = pods(page())
    async with whole_picker(tmp_path, one) as picker, picker.stream() as stream:
        await stream.request_headers(modes=(Mode.NONE, Mode.NONE))
        assert await stream.read(1) == directed(one[0].host_port)


async def test_a_gateway_that_only_observes_hears_nothing(tmp_path: Path) -> None:
    """No decision is made that nobody follows."""
    async with whole_picker(tmp_path, pods(page())) as picker:
        stream = GatewayStream(picker.channel)
        head = pb.HttpHeaders()
        head.headers.headers.add(key=":path", raw_value=b"/v1/completions")
        await stream.send(request_headers=head, observability_mode=True)
        await stream.request_body(completion())
        assert await stream.rest() == []
        assert await picker.requests() is None
        assert await picker.outcomes() == {"skipped": 1}
