"""Usage in responses, in every shape and however their bodies are cut."""

import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.framework.interfaces import ResponseReader
from picker.plugins.parsers._usage import (
    META_INFO,
    TAIL_BYTES,
    USAGE,
    JsonUsage,
    Shape,
    SseEvents,
    SseUsage,
    anthropic_usage,
    is_event_stream,
    merge,
    openai_usage,
    sglang_event_usage,
    sglang_usage,
    usage_reader,
)
from picker.types import Usage
from tests.depth import examples

COUNTS = {"prompt_tokens": 5, "completion_tokens": 10, "total_tokens": 15}
SHOWN = Usage(5, 10, 15)


def read(reader: ResponseReader, *pieces: bytes) -> Usage | None:
    for index, piece in enumerate(pieces):
        reader.feed(piece, index == len(pieces) - 1)
    return reader.usage


def read_json(shape: Shape, document: Any, marker: bytes = USAGE) -> Usage | None:
    return read(JsonUsage(shape, marker), json.dumps(document).encode())


def sse(*events: Any) -> bytes:
    texts = (event if isinstance(event, str) else json.dumps(event) for event in events)
    return "".join(f"data: {text}\n\n" for text in texts).encode()


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        ({"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": []}, Usage(5, 2, 7)),
        (COUNTS, SHOWN),
        ({"input_tokens": 5, "output_tokens": 10, "total_tokens": 15}, SHOWN),
        ({"prompt_tokens": 5, "completion_tokens": 10}, SHOWN),
        ({"prompt_tokens": "5", "output_tokens": "10.9", "total_tokens": 16.7}, Usage(5, 10, 16)),
        ({"prompt_tokens": 8, "total_tokens": 8}, Usage(8, 0, 8)),
        ({"prompt_tokens": 8, "total_tokens": 9}, Usage(8, 0, 8)),
        ({**COUNTS, "prompt_tokens_details": {"cached_tokens": 4}}, Usage(5, 10, 15, 4)),
        ({**COUNTS, "input_tokens_details": {"cached_tokens": 0}}, Usage(5, 10, 15, 0)),
        ({**COUNTS, "prompt_tokens_details": None}, SHOWN),
        ({"prompt_tokens": True, "completion_tokens": -3, "total_tokens": "many"}, None),
        ({"prompt_tokens": "1.0e999", "completion_tokens": "9" * 30}, None),
        ({"prompt_tokens": 10**30}, None),
        ({}, None),
        (None, None),
        ("5", None),
    ],
)
def test_openai_documents(usage: Any, expected: Usage | None) -> None:
    assert read_json(openai_usage, {"id": "x", "choices": [], "usage": usage}) == expected


@pytest.mark.parametrize("kind", ["response.completed", "response.incomplete", "response.failed"])
def test_the_final_event_of_the_responses_api_has_the_usage_of_its_response(kind: str) -> None:
    usage = {"input_tokens": 5, "output_tokens": 10, "input_tokens_details": {"cached_tokens": 2}}
    body = sse(
        {"type": "response.created", "response": {"usage": {"input_tokens": 99}}},
        {"type": kind, "response": {"usage": usage, "output": []}},
    )
    assert read(SseUsage(openai_usage, USAGE), body) == Usage(5, 10, 15, 2)


@pytest.mark.parametrize(
    "event",
    [
        {"type": ["response.completed"], "response": {"usage": COUNTS}},
        {"type": "response.completed", "response": "usage"},
        {"type": "response.completed", "response": None, "x": "usage"},
        {"usage": [1]},
        "usage",
        '{"usage":',
        '{"usage": {"prompt_tokens": 1}',
        '{"a":' * 5000 + '"usage"',
        '["usage"]',
        '{"usage": "\ud800"}',
    ],
)
def test_odd_events_are_skipped(event: Any) -> None:
    text = event if isinstance(event, str) else json.dumps(event)
    body = f"data: {text}\n\n".encode("utf-8", "surrogatepass")
    for shape in (openai_usage, anthropic_usage):
        assert read(SseUsage(shape, USAGE), body) is None
        assert read(JsonUsage(shape, USAGE), text.encode("utf-8", "surrogatepass")) is None
    assert read(SseUsage(openai_usage, USAGE), body, sse({"usage": COUNTS})) == SHOWN


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([sse({"usage": COUNTS}, "[DONE]")], SHOWN),
        ([sse({"usage": COUNTS}), sse("[DONE]")], SHOWN),
        ([sse({"choices": []}), sse({"usage": COUNTS}), sse("[DONE]"), b""], SHOWN),
        ([sse({"usage": COUNTS})[:-1] + b"data: [DONE]\n\t"], SHOWN),
        ([sse({"usage": None}), sse({"choices": []}, "[DONE]")], None),
        ([sse({"usage": {**COUNTS, "completion_tokens": 1}}, {"usage": COUNTS})], SHOWN),
        ([b'data: {"usage":\ndata: {"prompt_tokens": 5}}\n\n'], Usage(5, 0, 5)),
        ([b""], None),
    ],
)
def test_openai_streams(pieces: list[bytes], expected: Usage | None) -> None:
    assert read(SseUsage(openai_usage, USAGE), *pieces) == expected


ANTHROPIC_STREAM = sse(
    {
        "type": "message_start",
        "message": {"usage": {"input_tokens": 7, "cache_read_input_tokens": 3, "output_tokens": 1}},
    },
    {"type": "content_block_delta", "delta": {"text": "the usage of"}},
    {"type": "message_delta", "usage": {"output_tokens": 12}},
    {"type": "message_stop"},
)


def test_anthropic_reports_usage_in_two_events() -> None:
    assert read(SseUsage(anthropic_usage, USAGE), ANTHROPIC_STREAM) == Usage(7, 12, 19, 3)
    usage = {"input_tokens": 7, "output_tokens": 12, "cache_read_input_tokens": 3}
    assert read_json(anthropic_usage, {"usage": usage}) == Usage(7, 12, 19, 3)
    assert read_json(anthropic_usage, {"usage": {}}) is None


def test_sglang_reports_usage_in_meta_info() -> None:
    info = {"prompt_tokens": 7, "completion_tokens": 2, "cached_tokens": 3}
    one = {"text": "a", "meta_info": info}
    assert read_json(sglang_usage, one, META_INFO) == Usage(7, 2, 9, 3)
    assert read_json(sglang_usage, [one, one, one], META_INFO) == Usage(7, 6, 13, 3)
    assert read_json(sglang_usage, {"text": "meta_info"}, META_INFO) is None
    assert read_json(sglang_usage, [{"meta_info": {}}], META_INFO) is None


@pytest.mark.parametrize(
    "bad", [None, 7, "text", {"meta_info": 7}, {"meta_info": [1]}, {"meta_info": {}}, [[]]]
)
def test_an_unreadable_answer_of_sglang_spoils_no_other(bad: Any) -> None:
    info = {"prompt_tokens": 5, "completion_tokens": 3, "cached_tokens": 2}
    answers = [{"meta_info": info}, bad, {"meta_info": info}]
    assert read_json(sglang_usage, answers, META_INFO) == Usage(5, 6, 11, 2)


def test_only_the_event_of_sglang_with_a_finish_reason_counts() -> None:
    begun = {"meta_info": {"prompt_tokens": 7, "completion_tokens": 1, "finish_reason": None}}
    over = {"meta_info": {**begun["meta_info"], "completion_tokens": 4, "finish_reason": {"t": 1}}}
    reader = SseUsage(sglang_event_usage, META_INFO)
    assert read(reader, sse(begun, begun)) is None
    assert read(SseUsage(sglang_event_usage, META_INFO), sse(begun, over, [over])) == Usage(
        7, 4, 11
    )


@pytest.mark.parametrize(
    ("known", "said", "expected"),
    [
        (None, Usage(1, 2, 9), Usage(1, 2, 9)),
        (Usage(1, 2, 3), Usage(0, 5, 0), Usage(1, 5, 6)),
        (Usage(1, 2, 3), Usage(0, 5, 99), Usage(1, 5, 6)),
        (Usage(1, 2, 3, 4), Usage(7, 8, 99), Usage(7, 8, 99, 4)),
        (Usage(1, 2, 3, 4), Usage(cached_tokens=0), Usage(1, 2, 3, 4)),
        (Usage(1, 2, 3), Usage(cached_tokens=0), Usage(1, 2, 3, 0)),
        (Usage(1, 2, 3, 0), Usage(), Usage(1, 2, 3, 0)),
    ],
)
def test_new_numbers_replace_known_ones(known: Usage | None, said: Usage, expected: Usage) -> None:
    assert merge(known, said) == expected


@pytest.mark.parametrize(
    ("content_type", "is_stream"),
    [
        ("text/event-stream", True),
        ("Text/Event-Stream; charset=utf-8", True),
        ("application/json", False),
        ("", False),
    ],
)
def test_the_content_type_chooses_the_reader(content_type: str, is_stream: bool) -> None:
    assert is_event_stream(content_type) is is_stream
    reader = usage_reader(content_type, openai_usage)
    assert isinstance(reader, SseUsage if is_stream else JsonUsage)
    assert isinstance(reader, ResponseReader)


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({"data": "x" * 3 * TAIL_BYTES, "usage": COUNTS}, SHOWN),
        ({"data": '"usage": {"prompt_tokens": 9}' * TAIL_BYTES, "usage": COUNTS, "id": 7}, SHOWN),
        ({"usage": COUNTS, "data": "x" * 3 * TAIL_BYTES}, None),
        ({"data": "x" * 3 * TAIL_BYTES, "last": {"usage": COUNTS}}, None),
        ({"data": '"usage": {"prompt_tokens": 9}' * TAIL_BYTES}, None),
    ],
)
@pytest.mark.parametrize("piece_bytes", [1000, 10**7])
def test_the_end_of_a_document_longer_than_the_limit_is_read(
    document: dict[str, Any], expected: Usage | None, piece_bytes: int
) -> None:
    """Engines write the usage last."""
    body = json.dumps(document).encode()
    pieces = [body[at : at + piece_bytes] for at in range(0, len(body), piece_bytes)]
    assert read(JsonUsage(openai_usage, USAGE, TAIL_BYTES), *pieces) == expected


BODIES: list[tuple[Callable[[], ResponseReader], bytes, Usage]] = [
    (lambda: JsonUsage(openai_usage, USAGE), json.dumps({"usage": COUNTS}).encode(), SHOWN),
    (
        lambda: SseUsage(openai_usage, USAGE),
        sse({"choices": ["a"]}, {"usage": COUNTS}, "[DONE]").replace(b"\n", b"\r\n"),
        SHOWN,
    ),
    (lambda: SseUsage(anthropic_usage, USAGE), ANTHROPIC_STREAM, Usage(7, 12, 19, 3)),
]


@examples(150)
@given(st.sampled_from(BODIES), st.data())
def test_any_split_of_the_bytes_gives_the_same_usage(
    case: tuple[Callable[[], ResponseReader], bytes, Usage], data: st.DataObject
) -> None:
    make, body, expected = case
    cuts = data.draw(st.lists(st.integers(0, len(body)), max_size=8).map(sorted))
    places = [0, *cuts, len(body)]
    pieces = [body[a:b] for a, b in pairwise(places)]
    assert read(make(), *pieces) == expected
    assert read(make(), *(bytes([byte]) for byte in body)) == expected
    assert read(make(), *pieces, b"") == expected


MARKED = b'{"usage":1}'


def events_of(pieces: list[bytes], limit: int = 1000) -> list[list[bytes]]:
    reader = SseEvents(b"usage", limit)
    found: list[list[bytes]] = []
    for index, piece in enumerate(pieces):
        found += reader.feed(piece, index == len(pieces) - 1)
    return found


@pytest.mark.parametrize("newline", [b"\n", b"\r\n", b"\r"])
def test_lines_may_end_in_three_ways(newline: bytes) -> None:
    text = b"event: a\ndata: " + MARKED + b"\n\ndata: other\n\n"
    assert events_of([text.replace(b"\n", newline)]) == [[MARKED]]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"data:usage\n\n", [[b"usage"]]),
        (b"data:  usage\n\n", [[b" usage"]]),
        (b": usage\n\n", [[]]),
        (b"data\nid: usage\n\n", [[]]),
        (b"data: {\ndata: usage\ndata: }\n\n", [[b"{", b"usage", b"}"]]),
        (b"data: usage", [[b"usage"]]),
        (b"data: usage\n", [[b"usage"]]),
        (b"data: a\n\n\n\n\ndata: usage\n\n\n", [[b"usage"]]),
        (b"data: usage\n\ndata: usage 2\n\n", [[b"usage"], [b"usage 2"]]),
        (b"data: USAGE\n\n", []),
        (b"\n\n", []),
        (b"", []),
    ],
)
def test_the_values_of_data_lines_are_found(text: bytes, expected: list[list[bytes]]) -> None:
    assert events_of([text]) == expected


STREAM = (
    b"data: {}\r\n\r\n: hi\n\ndata: " + MARKED + b"\r\rdata:usage\ndata: 2\r\n\ndata: [DONE]\n\n"
)


@examples(200)
@given(st.lists(st.integers(0, len(STREAM)), max_size=6), st.sampled_from([20, 1000]))
def test_cuts_do_not_change_the_events(cuts: list[int], limit: int) -> None:
    places = [0, *sorted(cuts), len(STREAM)]
    pieces = [STREAM[a:b] for a, b in pairwise(places)]
    expected = [[MARKED], [b"usage", b"2"]]
    assert events_of([STREAM]) == expected
    assert events_of([bytes([byte]) for byte in STREAM]) == expected
    assert events_of(pieces) == expected


def test_events_that_end_by_one_newline_are_read_line_by_line_beyond_the_limit() -> None:
    """An empty line never comes, and yet little is stored and everything is read."""
    pieces = [b"data: usage %d\n" % number for number in range(10)]
    found = events_of(pieces, limit=40)
    assert len(found) > 1
    lines = [line for event in found for line in event]
    assert lines == [b"usage %d" % number for number in range(10)]


def test_a_line_longer_than_the_limit_is_dropped() -> None:
    pieces = [b"data: usage", b"x" * 50, b"x" * 50, b"\n\n", b"data: usage\n\n", b""]
    assert events_of(pieces, limit=30) == [[b"usage"]]
