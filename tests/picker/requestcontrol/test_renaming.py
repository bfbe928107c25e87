"""Clients receive the model name that they asked for, wherever the response is cut."""

import json
import re
import tracemalloc
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.requestcontrol.renaming import ModelRenamer
from tests.depth import examples


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
