"""Responses on their way to the client (cases H16, H17 and H19, and more of their kind).

This picker passes pieces on as they come instead of gathering a JSON response first, so that a
client sees the first byte when the endpoint sends it; the bytes are the same. Headers of an
endpoint are not repeated, but stay; those that are the picker's own are removed.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ext_proc_stream import (
    RESPONSE_TRAILERS,
    completion,
    directed,
    response_head,
    response_pieces,
)
from metrics_pages import page, pods
from whole_picker import WholePicker, until, whole_picker

USAGE = {"prompt_tokens": 7, "total_tokens": 17, "completion_tokens": 10}
ANSWER = json.dumps({"id": "cmpl-1", "model": "my-model", "usage": USAGE}).encode()
EVENTS = [
    b'data: {"id":"1","choices":[{"text":"a"}],"usage":null}\n\n',
    b'data: {"id":"1","choices":[],"usage":'
    + json.dumps(USAGE).encode()
    + b"}\n\ndata: [DONE]\n\n",
]
STREAM = {"content-type": "text/event-stream; charset=utf-8"}


async def tokens_of(picker: WholePicker) -> tuple[float | None, float | None]:
    """Sums of the tokens that responses have told."""
    asked = await picker.series("llm_d_epp_request_input_tokens_sum")
    return asked, await picker.series("llm_d_epp_request_output_tokens_sum")


async def test_a_json_response_in_two_chunks(tmp_path: Path) -> None:
    """H16: each chunk goes on as it is, the last one with the end; its usage is counted once."""
    async with whole_picker(tmp_path, pods(page())) as picker, picker.stream() as stream:
        await stream.ask(completion())
        assert await stream.response_headers({"x-went-into-req-headers": "true"}) == response_head()
        await stream.response_body(ANSWER[:30])
        assert await stream.read(1) == response_pieces(ANSWER[:30], ends=False)
        await stream.response_body(ANSWER[30:], ends=True)
        assert await stream.read(1) == response_pieces(ANSWER[30:])
        assert await tokens_of(picker) == (7, 10)
        assert await picker.series("llm_d_epp_response_size_bytes_sum") == len(ANSWER)
        assert await picker.is_idle()


async def test_a_json_response_that_ends_with_an_empty_chunk(tmp_path: Path) -> None:
    """H17."""
    async with whole_picker(tmp_path, pods(page())) as picker, picker.stream() as stream:
        await stream.ask(completion())
        await stream.response_headers()
        await stream.response_body(ANSWER)
        await stream.response_body(b"", ends=True)
        expected = [*response_pieces(ANSWER, ends=False), *response_pieces(b"")]
        assert await stream.read_response() == expected
        assert await tokens_of(picker) == (7, 10)


async def test_a_stream_of_events(tmp_path: Path) -> None:
    """H19: every chunk is echoed, the last one with the end; usage is counted once."""
    async with whole_picker(tmp_path, pods(page())) as picker, picker.stream() as stream:
        await stream.ask(completion(stream=True))
        assert await stream.response_headers(STREAM) == response_head()
        for event in EVENTS:
            await stream.response_body(event)
            assert await stream.read(1) == response_pieces(event, ends=False)
        await stream.response_body(b"", ends=True)
        assert await stream.read(1) == response_pieces(b"")
        assert await tokens_of(picker) == (7, 10)
        assert await picker.series("llm_d_epp_request_ttft_seconds_count", streaming="true") == 1
        assert await picker.series("llm_d_epp_request_streaming_tpot_seconds_count") == 1


@pytest.mark.parametrize("width", [1, 2, 3, 7, 61])
async def test_usage_is_found_however_events_are_cut(tmp_path: Path, width: int) -> None:
    """The reference loses a line that is cut; nothing is added to what the client gets."""
    whole = b"".join(EVENTS)
    pieces = [whole[at : at + width] for at in range(0, len(whole), width)]
    async with whole_picker(tmp_path, pods(page())) as picker, picker.stream() as stream:
        await stream.ask(completion(stream=True))
        assert await stream.respond(pieces, STREAM) == whole
        assert await tokens_of(picker) == (7, 10)


@pytest.mark.parametrize(
    "body",
    [
        b'{"usage": {"input_tokens": "7", "output_tokens": 10.9}}',
        b'{"model":"x","usage":{"prompt_tokens":7,"completion_tokens":10,"total_tokens":99}}',
    ],
)
async def test_usage_may_be_spelled_otherwise(tmp_path: Path, body: bytes) -> None:
    """Numbers as text, fractions, the names of other APIs."""
    async with whole_picker(tmp_path, pods(page())) as picker, picker.stream() as stream:
        await stream.ask(completion())
        assert await stream.respond([body]) == body
        assert await tokens_of(picker) == (7, 10)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'{"usage": 7}', b'{"usage": {"prompt_tokens": -7}}', b"\xff\x00"]
)
async def test_a_response_that_tells_nothing_is_passed_on(tmp_path: Path, body: bytes) -> None:
    """Byte for byte; nothing is counted and nothing fails."""
    async with whole_picker(tmp_path, pods(page())) as picker, picker.stream() as stream:
        await stream.ask(completion())
        assert await stream.respond([body]) == body
        assert await tokens_of(picker) == (None, None)
        assert await picker.series("pointsman_plugin_failures_total") is None


@pytest.mark.parametrize("size", [0, 1, 61_000, 62_000, 62_001, 63_000, 125_000, 1_000_000])
async def test_large_pieces_leave_in_chunks(tmp_path: Path, size: int) -> None:
    """Of 62,000 bytes at most, on both ways (U1)."""
    body = completion(prompt="é" * max(size // 2, 1))
    body += b" " * (size - len(body))
    response = bytes(index % 251 for index in range(size))
    one = pods(page())
    async with whole_picker(tmp_path, one) as picker, picker.stream() as stream:
        said = await stream.ask(body)
        assert said == directed(one[0].host_port, body)
        await stream.response_headers({"content-type": "application/octet-stream"})
        await stream.response_body(response, ends=True)
        assert await stream.read_response() == response_pieces(response)


async def test_errors_of_endpoints_are_counted_and_passed_on(tmp_path: Path) -> None:
    """By `:status`, which the reference does not read; also as JSON to a request for a stream."""
    async with whole_picker(tmp_path, pods(page())) as picker, picker.stream() as stream:
        await stream.ask(completion(stream=True))
        assert await stream.respond([b'{"error"', b':"no"}'], {":status": "503"}) == (
            b'{"error":"no"}'
        )
        code = "ModelServerError"
        assert await picker.series("llm_d_epp_request_error_total", error_code=code) == 1
        assert await picker.outcomes() == {"completed": 1}


async def test_headers_an_endpoint_must_not_send_are_removed(tmp_path: Path) -> None:
    """What belongs to the picker or the gateway; a length stays while no byte changes."""
    async with whole_picker(tmp_path, pods(page())) as picker, picker.stream() as stream:
        await stream.ask(completion())
        forged = {
            "x-gateway-destination-endpoint": "6.6.6.6:1",
            "x-llm-d-request-dropped-reason": "rejected-saturated",
            "content-length": "2",
            "x-session-token": "theirs",
        }
        removed = ("x-gateway-destination-endpoint", "x-llm-d-request-dropped-reason")
        assert await stream.response_headers(forged) == response_head(removed=removed)


async def test_a_response_without_body(tmp_path: Path) -> None:
    """Its headers are its end."""
    async with whole_picker(tmp_path, pods(page())) as picker, picker.stream() as stream:
        await stream.ask(completion())
        assert await stream.response_headers({":status": "204"}, ends=True) == response_head()
        assert await picker.outcomes() == {"completed": 1}
        assert await picker.is_idle()


@pytest.mark.parametrize("last", [False, True])
async def test_a_response_may_end_with_trailers(tmp_path: Path, last: bool) -> None:
    """Whether or not its last piece says that it is the last."""
    async with whole_picker(tmp_path, pods(page())) as picker, picker.stream() as stream:
        await stream.ask(completion())
        await stream.response_headers()
        await stream.response_body(ANSWER, ends=last)
        await stream.response_trailers()
        assert await stream.read(2) == [*response_pieces(ANSWER, ends=last), RESPONSE_TRAILERS]
        assert await tokens_of(picker) == (7, 10)
        assert await picker.is_idle()


async def test_who_served_is_told_beside_the_response(tmp_path: Path) -> None:
    """What served in the end is the proxy's business; the request ends where it began."""
    two = pods(page(), page())
    async with whole_picker(tmp_path, two) as picker, picker.stream() as stream:
        await stream.ask(completion())
        assert await stream.response_headers(served=two[1].host_port) == response_head()
        await stream.response_body(ANSWER, ends=True)
        await stream.read_response()
        await until(picker.is_idle)


async def test_the_response_of_a_request_without_body_passes(tmp_path: Path) -> None:
    """Nobody watches it; its end is the end of the request."""
    async with whole_picker(tmp_path, pods(page())) as picker, picker.stream() as stream:
        await stream.request_headers(path="/v1/models", ends=True)
        await stream.read(1)
        assert not await picker.is_idle()
        assert await stream.respond([b'{"data":', b"[]}"]) == b'{"data":[]}'
        assert await picker.outcomes() == {"completed": 1}
        assert await picker.is_idle()


async def test_trailers_alone_end_a_response(tmp_path: Path) -> None:
    """And what comes after its end is nobody's."""
    async with whole_picker(tmp_path, pods(page())) as picker, picker.stream() as stream:
        await stream.ask(completion())
        await stream.response_headers()
        await stream.response_trailers()
        assert await stream.read(1) == [RESPONSE_TRAILERS]
        await stream.response_body(b"more", ends=True)
        await stream.response_trailers()
        assert await picker.outcomes() == {"completed": 1}


@pytest.mark.parametrize(
    ("headers", "is_error"),
    [
        ({":status": "", "status": "500"}, True),
        ({":status": "404"}, True),
        ({":status": "200", "status": "500"}, False),
        ({":status": "abc"}, False),
        ({":status": ""}, False),
    ],
)
async def test_which_status_counts(tmp_path: Path, headers: dict[str, str], is_error: bool) -> None:
    """`:status`, else `status`; what is no number says nothing."""
    async with whole_picker(tmp_path, pods(page())) as picker, picker.stream() as stream:
        await stream.ask(completion())
        assert await stream.respond([b"{}"], headers) == b"{}"
        errors = await picker.series("llm_d_epp_request_error_total")
        assert errors == (1 if is_error else None)


async def test_names_that_clients_invent_do_no_harm(tmp_path: Path) -> None:
    """The page of metrics stays readable."""
    model, who = 'm"\n\\{}', 'a"b\\'
    async with whole_picker(tmp_path, pods(page())) as picker:
        await picker.ask(completion(model), {"x-llm-d-inference-fairness-id": who})
        assert await picker.requests(model_name=model, fairness_id=who) == 1
