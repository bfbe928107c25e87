"""Responses are measured, read, shown to hooks and given their model's name back."""

import json
import re
import tracemalloc
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.framework.interfaces import Flight
from picker.plugins.parsers.http_parsers import OpenAIParser
from picker.requestcontrol.pipeline import ParserTable
from picker.requestcontrol.responses import ModelRenamer
from picker.types import (
    FinishCause,
    Metadata,
    ParsedBody,
    RawRequest,
    ResponseHead,
    ResponseProgress,
    ResponseTap,
    Usage,
)
from tests.depth import examples

HEADERS = {":path": "/v1/completions", "x-request-id": "id-1"}
RENAMING = {**HEADERS, "x-llm-d-model-name-rewrite": "served"}
BODY = b'{"model":"asked","prompt":"hello"}'
JSON = {"content-type": "application/json"}
EVENTS = {"content-type": "text/event-stream; charset=utf-8"}


@dataclass
class Reader:
    error: Exception | None = None
    usage: Usage | None = None
    fed: list[tuple[bytes, bool]] = field(default_factory=list)

    def feed(self, data: bytes, is_last: bool) -> None:
        if self.error is not None:
            raise self.error
        self.fed.append((data, is_last))
        self.usage = Usage(5, sum(len(piece) for piece, _ in self.fed))


class ReadingParser(OpenAIParser):
    def __init__(self, reader: Reader | Exception) -> None:
        super().__init__()
        self.reader = reader
        self.asked: list[tuple[str, str]] = []

    def response_reader(self, body: ParsedBody, content_type: str) -> Any:
        self.asked.append((body.model, content_type))
        if isinstance(self.reader, Exception):
            raise self.reader
        return self.reader


@dataclass
class Hook:
    headers: Mapping[str, str] | None = None
    metadata: Metadata | None = None
    error: Exception | None = None
    heads: list[ResponseHead] = field(default_factory=list)
    progress: list[ResponseProgress] = field(default_factory=list)
    ends: list[tuple[Flight, FinishCause, Usage | None, float]] = field(default_factory=list)

    def response_head(self, flight: Flight, head: ResponseHead) -> Mapping[str, str] | None:
        self.heads.append(head)
        return self._answer(self.headers)

    def response_progress(self, flight: Flight, progress: ResponseProgress) -> Metadata | None:
        self.progress.append(progress)
        return self._answer(self.metadata)

    def request_ended(self, flight: Any, cause: Any, usage: Any, now_seconds: float) -> None:
        self.ends.append((flight, cause, usage, now_seconds))
        self._answer(None)

    def _answer(self, answer: Any) -> Any:
        if self.error is not None:
            raise self.error
        return answer


async def under_way(
    house: Any,
    *hooks: Hook,
    reader: Reader | Exception | None = None,
    headers: Mapping[str, str] = HEADERS,
    body: bytes = BODY,
) -> tuple[Any, ResponseTap]:
    fields: dict[str, Any] = {
        "response_heads": hooks,
        "response_progress": hooks,
        "request_ends": hooks,
    }
    pipeline = house.pipeline(**fields)
    if reader is not None:
        pipeline = replace(pipeline, parsers=ParserTable([ReadingParser(reader)]))
    house.director.use(pipeline)
    exchange, decision = await house.route(RawRequest(headers, body))
    return exchange, decision.response


async def test_headers_of_all_hooks_are_set_on_the_response(house: Any) -> None:
    hooks = Hook({"x-a": "1", "x-b": "1"}), Hook(error=ValueError()), Hook({"x-a": "3"})
    _, tap = await under_way(house, *hooks)
    head = ResponseHead(200, JSON, "10.0.0.1:8000", True)
    assert dict(tap.head(head)) == {"x-a": "3", "x-b": "1"}
    shown = msgspec.structs.replace(head, came_at_seconds=10.0)
    assert [hook.heads for hook in hooks] == [[shown]] * 3
    assert house.recorder.failed == ["Hook"]


async def test_hooks_see_how_far_a_response_has_come(house: Any) -> None:
    hook = Hook(metadata={"envoy.lb": {"cost": 10.0}})
    _, tap = await under_way(house, hook, reader=Reader())
    tap.head(ResponseHead(200, EVENTS))
    house.step = 0.0
    assert tap.body(b"", False) == (b"", {})
    house.now = 100.0
    assert tap.body(b"abc", False) == (b"abc", {})
    house.now = 101.0
    assert tap.body(b"de", False) == (b"de", {})
    house.now = 102.0
    assert tap.body(b"", True) == (b"", {"envoy.lb": {"cost": 10.0}})
    assert hook.progress == [
        ResponseProgress(100.0, 3, Usage(5, 3), is_first=True),
        ResponseProgress(101.0, 5, Usage(5, 5)),
        ResponseProgress(102.0, 5, Usage(5, 5), is_last=True),
    ]
    assert house.recorder.gaps == [1.0]


async def test_metadata_of_several_hooks_is_merged(house: Any) -> None:
    first = Hook(metadata={"envoy.lb": {"a": 1.0, "b": 1.0}, "other": {"x": "y"}})
    second = Hook(metadata={"envoy.lb": {"b": 2.0}})
    _, tap = await under_way(house, first, Hook(), second)
    assert tap.body(b"x", True)[1] == {"envoy.lb": {"a": 1.0, "b": 2.0}, "other": {"x": "y"}}


async def test_the_outcome_says_how_the_response_went(house: Any) -> None:
    house.step = 0.0
    exchange, tap = await under_way(house, reader=Reader())
    house.now = 10.0
    tap.head(ResponseHead(200, EVENTS))
    house.now = 12.0
    tap.body(b"abc", False)
    house.now = 15.0
    tap.body(b"de", True)
    exchange.finish(FinishCause.COMPLETED, 200)
    (outcome,) = house.recorder.outcomes
    assert outcome.usage == Usage(5, 5)
    response = outcome.response
    assert (response.is_streaming, response.num_bytes, response.ttft_seconds) == (True, 5, 12.0)
    assert house.recorder.gaps == [3.0]


async def test_a_response_that_is_no_stream_has_no_gaps(house: Any) -> None:
    """The pieces of a plain response are an accident of the transport."""
    exchange, tap = await under_way(house)
    tap.head(ResponseHead(200, JSON))
    tap.body(b"abc", False)
    tap.body(b"de", True)
    exchange.finish(FinishCause.COMPLETED, 200)
    assert house.recorder.gaps == []
    assert house.recorder.outcomes[0].response.is_streaming is False
    assert house.recorder.outcomes[0].usage is None


async def test_a_response_whose_body_is_not_shown_says_nothing(house: Any) -> None:
    reader = Reader()
    hook = Hook()
    exchange, tap = await under_way(house, hook, reader=reader)
    tap.head(ResponseHead(200, JSON))
    assert tap.end() == b""
    exchange.finish(FinishCause.COMPLETED, 200)
    outcome = house.recorder.outcomes[0]
    assert (outcome.response, outcome.usage, hook.progress) == (None, None, [])


@pytest.mark.parametrize("headers", [JSON, EVENTS, {"content-type": "application/problem+json"}])
async def test_the_models_name_is_given_back(house: Any, headers: Mapping[str, str]) -> None:
    _, tap = await under_way(house, headers=RENAMING)
    tap.head(ResponseHead(200, headers))
    pieces = (b'data: {"model":"ser', b'ved"}\n', b'{"mod')
    out = [tap.body(piece, False)[0] for piece in pieces]
    out.append(tap.body(b"", True)[0])
    assert out == [b"data: {", b'"model":"asked"}\n', b"{", b'"mod']


async def test_trailers_release_the_bytes_held_back(house: Any) -> None:
    _, tap = await under_way(house, headers=RENAMING)
    tap.head(ResponseHead(200, JSON))
    assert tap.body(b'{"model":"served', False) == (b"{", {})
    assert (tap.end(), tap.end()) == (b'"model":"served', b"")


@pytest.mark.parametrize(
    "headers",
    [
        {**JSON, "content-encoding": "gzip"},
        {"content-type": "text/plain"},
        {"content-type": "application/octet-stream"},
        {},
    ],
)
async def test_bodies_of_other_kinds_pass_unchanged(house: Any, headers: Mapping[str, str]) -> None:
    _, tap = await under_way(house, headers=RENAMING)
    tap.head(ResponseHead(200, headers))
    piece = b'{"model":"served"}{"mod'
    assert tap.body(piece, False)[0] == piece


async def test_a_compressed_body_is_not_read(house: Any) -> None:
    reader = Reader()
    _, tap = await under_way(house, reader=reader)
    tap.head(ResponseHead(200, {**JSON, "content-encoding": "br"}))
    tap.body(b"x", True)
    assert reader.fed == []


async def test_a_request_that_was_not_renamed_is_left_alone(house: Any) -> None:
    _, tap = await under_way(house)
    tap.head(ResponseHead(200, JSON))
    assert tap.body(b'{"model":"served"}', True)[0] == b'{"model":"served"}'


async def test_pieces_after_the_last_one_pass_unseen(house: Any) -> None:
    hook = Hook()
    _, tap = await under_way(house, hook, headers=RENAMING)
    tap.head(ResponseHead(200, JSON))
    tap.body(b"a", True)
    assert tap.body(b"b", True) == (b"b", {})
    assert len(hook.progress) == 1


@pytest.mark.parametrize("reader", [Reader(ValueError("odd")), ValueError("none")])
async def test_a_reader_that_breaks_is_reported_once(
    house: Any, reader: Reader | Exception
) -> None:
    hook = Hook()
    exchange, tap = await under_way(house, hook, reader=reader)
    tap.head(ResponseHead(200, JSON))
    assert [tap.body(b"x", False)[0] for _ in range(3)] == [b"x"] * 3
    exchange.finish(FinishCause.COMPLETED, 200)
    assert len(house.recorder.failed) == 1
    assert len(hook.progress) == 3
    assert hook.ends[0][2] is None


async def test_a_hook_that_breaks_is_not_asked_about_the_response_again(house: Any) -> None:
    broken, sound = Hook(error=ValueError("odd")), Hook(metadata={"n": {"k": 1.0}})
    exchange, tap = await under_way(house, broken, sound)
    tap.body(b"x", False)
    assert tap.body(b"y", True) == (b"y", {"n": {"k": 1.0}})
    exchange.finish(FinishCause.COMPLETED, 200)
    assert (len(broken.progress), len(sound.progress)) == (1, 2)
    assert (len(broken.ends), len(sound.ends)) == (1, 1)
    assert house.recorder.failed == ["Hook", "Hook"]
    assert house.inflight.total == 0
    assert len(house.recorder.outcomes) == 1


@pytest.mark.parametrize("cause", list(FinishCause))
async def test_hooks_are_called_once_at_the_end_for_every_cause(
    house: Any, cause: FinishCause
) -> None:
    hook = Hook()
    exchange, tap = await under_way(house, hook, reader=Reader())
    tap.head(ResponseHead(200, JSON))
    tap.body(b"abc", False)
    house.step = 0.0
    exchange.finish(cause, 200)
    exchange.finish(FinishCause.COMPLETED, 200)
    ((flight, ended, usage, now),) = hook.ends
    assert (ended, usage) == (cause, Usage(5, 3))
    assert flight.result.endpoints[0].name == "pod-1"
    assert now == house.now


async def test_hooks_of_a_prepared_request_are_called_if_it_does_not_leave(house: Any) -> None:
    """One hook refused the request; the others may hold something of it."""

    class Refuses:
        def pre_request(self, request: object, result: object, attributes: object) -> None:
            raise ValueError("odd")

    hook = Hook()
    house.use(hooks=[Refuses()], request_ends=(hook,))
    await house.refusal(RawRequest(HEADERS, BODY))
    assert [cause for _, cause, _, _ in hook.ends] == [FinishCause.REFUSED]


async def test_hooks_are_not_called_for_requests_that_they_never_saw(house: Any) -> None:
    hook = Hook()
    house.use(request_ends=(hook,))
    await house.refusal(RawRequest({**HEADERS, "x-llm-d-model-name-rewrite": "m"}, b"{"))
    exchange, _ = await house.route(RawRequest(HEADERS, None))
    exchange.finish(FinishCause.COMPLETED)
    assert hook.ends == []


async def test_the_usage_of_a_real_stream_is_read_while_its_model_is_renamed(house: Any) -> None:
    stream = (
        b'data: {"model":"served","choices":[{"text":"a"}]}\n\n'
        b'data: {"model": "served","usage":{"prompt_tokens":7,"completion_tokens":10,'
        b'"total_tokens":17,"prompt_tokens_details":{"cached_tokens":4}}}\n\n'
        b"data: [DONE]\n\n"
    )
    for size in (1, 7, 50, len(stream)):
        exchange, decision = await house.route(RawRequest(RENAMING, BODY))
        assert decision.needs_response_body
        tap = decision.response
        tap.head(ResponseHead(200, EVENTS))
        pieces = [stream[at : at + size] for at in range(0, len(stream), size)]
        out = b"".join(tap.body(piece, False)[0] for piece in pieces) + tap.body(b"", True)[0]
        assert out == stream.replace(b"served", b"asked")
        exchange.finish(FinishCause.COMPLETED, 200)
        assert house.recorder.outcomes[-1].usage == Usage(7, 10, 17, 4)


def renamed(body: bytes, served: str, asked: str, cuts: list[int] | None = None) -> list[bytes]:
    renamer = ModelRenamer(served, asked)
    edges = [0, *sorted(cut % (len(body) + 1) for cut in cuts or []), len(body)]
    pieces = [body[begin:end] for begin, end in pairwise(edges)]
    return [renamer.feed(piece, place == len(pieces) - 1) for place, piece in enumerate(pieces)]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"model":"vllm-backend-01"}', b'{"model":"gpt-4-proxy"}'),
        (b'{"model": "vllm-backend-01"}', b'{"model": "gpt-4-proxy"}'),
        (
            b'data: {"id":"1","model":"vllm-backend-01"}\n\ndata: {"model": "vllm-backend-01"}\n\n',
            b'data: {"id":"1","model":"gpt-4-proxy"}\n\ndata: {"model": "gpt-4-proxy"}\n\n',
        ),
        (b'{"model":"vllm-backend-01-large"}', None),
        (b'{"model":"other"}', None),
        (b'{"my-model":"vllm-backend-01"}', None),
        (b'{"content":"\\"model\\":\\"vllm-backend-01\\""}', None),
        (b'{"id":"vllm-backend-01"}', None),
        (b"data: [DONE]\n\n", None),
        (b"", None),
    ],
)
def test_the_member_called_model_and_nothing_else_is_renamed(
    body: bytes, expected: bytes | None
) -> None:
    assert b"".join(renamed(body, "vllm-backend-01", "gpt-4-proxy")) == (
        body if expected is None else expected
    )


@pytest.mark.parametrize("served", ["é", 'a"b', "org/model", "a\\b", "x\n", "日本"])
@pytest.mark.parametrize("is_ascii", [True, False])
def test_names_are_found_however_json_spells_them(served: str, is_ascii: bool) -> None:
    body = json.dumps({"model": served}, ensure_ascii=is_ascii).encode()
    assert json.loads(b"".join(renamed(body, served, served + "!"))) == {"model": served + "!"}


def test_an_escaped_slash_is_a_slash() -> None:
    """Some servers write it so."""
    assert renamed(b'{"model":"org\\/m"}', "org/m", "n") == [b'{"model":"n"}']


def test_names_are_released_with_their_response() -> None:
    """Clients may name a model of any length in a header."""
    renamed(b'{"model":"served"}', "served", "asked")
    tracemalloc.start()
    try:
        for number in range(8):
            served = f"{number}" + "m/" * 2000
            body = json.dumps({"model": served}).encode()
            assert renamed(body, served, "asked") == [b'{"model": "asked"}']
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 100_000


def test_whole_events_are_never_held_back() -> None:
    renamer = ModelRenamer("served", "asked")
    event = b'data: {"model":"served","text":"\\"m"}\n\n'
    assert renamer.feed(event, False) == event.replace(b"served", b"asked")
    tail = b'data: {"text":"mode"}\n\n'
    assert renamer.feed(tail, False) == tail


def test_the_bytes_held_back_are_fewer_than_the_member() -> None:
    """A server that stops in the middle must not keep the client waiting for bytes."""
    renamer = ModelRenamer("served", "asked")
    assert renamer.feed(b'{"a":1,"model":"ser', False) == b'{"a":1,'
    assert renamer.feed(b"ver", False) == b'"model":"server'
    assert renamer.feed(b'","mod', False) == b'",'
    assert renamer.feed(b"", True) == b'"mod'


JSON_PARTS = st.sampled_from(
    [
        *(b'"model":"ab"', b'"model": "ab"', b'"model" : "ab"', b'"model":"abc"', b'"', b"model"),
        *(b'"m"model":"ab"', b'"model"', b'"model":', b'"model":"a', b":", b"ab", b"{", b"\\"),
    ]
)


@examples(300)
@given(st.lists(JSON_PARTS, max_size=12).map(b"".join), st.lists(st.integers(0, 200), max_size=8))
def test_a_cut_changes_nothing(body: bytes, cuts: list[int]) -> None:
    expected = re.sub(rb'("model" ?: ?)"ab"', rb'\1"xyz"', body)
    assert b"".join(renamed(body, "ab", "xyz", cuts)) == expected


@examples(100)
@given(st.binary(max_size=100), st.lists(st.integers(0, 100), max_size=5))
def test_bytes_of_any_kind_pass_unchanged(body: bytes, cuts: list[int]) -> None:
    assert b"".join(renamed(body, "served-model-name", "asked", cuts)) == body
