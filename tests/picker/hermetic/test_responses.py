"""Responses on their way to the client (cases H16, H17 and H19, and more of their kind).

This picker passes pieces on as they come instead of gathering a JSON response first, so that a
client sees the first byte when the endpoint sends it; the bytes are the same. Headers of an
endpoint are not repeated, but stay; those that are the picker's own are removed.
"""

from __future__ import annotations

import json
from pathlib import Path

from ext_proc_stream import completion, response_head, response_pieces
from metrics_pages import page, pods
from whole_picker import WholePicker, whole_picker

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


async def test_the_response_of_a_request_without_body_passes(tmp_path: Path) -> None:
    """Nobody watches it; its end is the end of the request."""
    async with whole_picker(tmp_path, pods(page())) as picker, picker.stream() as stream:
        await stream.request_headers(path="/v1/models", ends=True)
        await stream.read(1)
        assert not await picker.is_idle()
        assert await stream.respond([b'{"data":', b"[]}"]) == b'{"data":[]}'
        assert await picker.outcomes() == {"completed": 1}
        assert await picker.is_idle()


async def test_names_that_clients_invent_do_no_harm(tmp_path: Path) -> None:
    """The page of metrics stays readable."""
    model, who = 'm"\n\\{}', 'a"b\\'
    async with whole_picker(tmp_path, pods(page())) as picker:
        await picker.ask(completion(model), {"x-llm-d-inference-fairness-id": who})
        assert await picker.requests(model_name=model, fairness_id=who) == 1
