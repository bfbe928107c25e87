"""Responses of renamed requests get the client's model name back, however they are cut."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ext_proc_stream import (
    RESPONSE_TRAILERS,
    body_of,
    completion,
    response_head,
    response_pieces,
)
from metrics_pages import page, pods
from whole_picker import whole_picker

ASKED, SERVED = "gpt-4-proxy", "vllm-backend-01"
REWRITE = {"x-llm-d-model-name-rewrite": SERVED}
STREAM = {"content-type": "text/event-stream"}


def events(model: str) -> bytes:
    """A short stream whose events name their model."""
    chunk = {"id": "c", "model": model, "choices": [{"delta": {"content": SERVED}}]}
    last = {"model": model, "choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 9}}
    texts = [json.dumps(chunk), json.dumps(chunk, separators=(",", ":")), json.dumps(last)]
    return "".join(f"data: {text}\n\n" for text in [*texts, "[DONE]"]).encode()


async def test_a_stream_cut_at_every_byte_is_renamed(tmp_path: Path) -> None:
    """Two pieces, for each place of the cut; the text of the answer keeps the name it holds."""
    whole, expected = events(SERVED), events(ASKED)
    async with whole_picker(tmp_path, pods(page())) as picker:
        for cut in range(len(whole) + 1):
            async with picker.stream() as stream:
                await stream.ask(completion(ASKED, stream=True), REWRITE)
                pieces = [whole[:cut], whole[cut:]]
                assert await stream.respond(pieces, STREAM) == expected, cut
        counted = await picker.series("llm_d_epp_request_output_tokens_sum", model_name=ASKED)
        assert counted == 9 * (len(whole) + 1)


@pytest.mark.parametrize("width", [1, 2, 5, 17])
async def test_a_stream_in_tiny_pieces_is_renamed(tmp_path: Path, width: int) -> None:
    """Down to single bytes; what is held back comes with a later piece."""
    whole = events(SERVED)
    pieces = [whole[at : at + width] for at in range(0, len(whole), width)]
    async with whole_picker(tmp_path, pods(page())) as picker, picker.stream() as stream:
        await stream.ask(completion(ASKED, stream=True), REWRITE)
        assert await stream.respond(pieces, STREAM) == events(ASKED)


@pytest.mark.parametrize(
    ("served", "expected"),
    [
        (f'{{"model":"{SERVED}","x":1}}', f'{{"model":"{ASKED}","x":1}}'),
        (f'{{"model": "{SERVED}"}}', f'{{"model": "{ASKED}"}}'),
        (f'{{"a":{{"model":"{SERVED}"}},"model": "{SERVED}"}}', None),
        (f'{{"model":"{SERVED}-2"}}', f'{{"model":"{SERVED}-2"}}'),
        (f'{{"text":"{SERVED}"}}', f'{{"text":"{SERVED}"}}'),
        ('{"no": "model"}', '{"no": "model"}'),
        ("[DONE]", "[DONE]"),
        ("", ""),
    ],
)
async def test_a_json_response_is_renamed(
    tmp_path: Path, served: str, expected: str | None
) -> None:
    """U5; every member `model` that names the served one, nothing else."""
    wanted = served.replace(SERVED, ASKED) if expected is None else expected
    async with whole_picker(tmp_path, pods(page())) as picker, picker.stream() as stream:
        await stream.ask(completion(ASKED), REWRITE)
        assert await stream.respond([served.encode()]) == wanted.encode()


async def test_a_length_that_may_change_is_not_stated(tmp_path: Path) -> None:
    """The headers have left before the name is found."""
    async with whole_picker(tmp_path, pods(page())) as picker, picker.stream() as stream:
        await stream.ask(completion(ASKED), REWRITE)
        said = await stream.response_headers({"content-length": "100"})
        assert said == response_head(removed=["content-length"])


async def test_what_is_held_back_comes_before_trailers(tmp_path: Path) -> None:
    """A response that ends in the middle of a name loses nothing."""
    async with whole_picker(tmp_path, pods(page())) as picker, picker.stream() as stream:
        await stream.ask(completion(ASKED), REWRITE)
        await stream.response_headers()
        await stream.response_body(b'{"x":1,"model":"vllm-back')
        assert await stream.read(1) == response_pieces(b'{"x":1,', ends=False)
        await stream.response_trailers()
        assert await stream.read(2) == [
            *response_pieces(b'"model":"vllm-back', ends=False),
            RESPONSE_TRAILERS,
        ]


@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "application/json", "content-encoding": "gzip"},
        {"content-type": "application/octet-stream"},
    ],
)
async def test_what_is_no_plain_json_is_not_touched(
    tmp_path: Path, headers: dict[str, str]
) -> None:
    """Bytes that only look like it."""
    body = f'{{"model":"{SERVED}"}}'.encode()
    async with whole_picker(tmp_path, pods(page())) as picker, picker.stream() as stream:
        await stream.ask(completion(ASKED), REWRITE)
        assert await stream.respond([body], headers) == body


@pytest.mark.parametrize("model", ["m/é", 'a"b', "org/model-7B"])
async def test_names_are_found_as_json_spells_them(tmp_path: Path, model: str) -> None:
    """Escaped, with its slash escaped, or as plain UTF-8."""
    async with whole_picker(tmp_path, pods(page())) as picker:
        for text in (json.dumps(model), json.dumps(model, ensure_ascii=False)):
            async with picker.stream() as stream:
                await stream.ask(completion(ASKED), {"x-llm-d-model-name-rewrite": model})
                spelled = f'{{"model":{text}}}'.encode()
                assert await stream.respond([spelled]) == f'{{"model":"{ASKED}"}}'.encode()


async def test_the_name_is_not_touched_where_nothing_was_rewritten(tmp_path: Path) -> None:
    """The same name on both sides."""
    async with whole_picker(tmp_path, pods(page())) as picker, picker.stream() as stream:
        said = await stream.ask(completion(SERVED), REWRITE)
        assert body_of(said) == completion(SERVED)
        body = f'{{"model":"{SERVED}"}}'.encode()
        assert await stream.respond([body]) == body
