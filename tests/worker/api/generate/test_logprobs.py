"""The wire form of log probabilities."""

import math

import msgspec
import pytest

from worker.api.generate.logprobs import ChatLogprobs, Columns, CompletionLogprobs, prompt_logprobs
from worker.types import TokenLogprobs

TABLE = {0: b"<end>", 1: b" Hi", 2: b"\xe2\x82", 3: b"\xac", 4: b"!", 5: b" Hi"}
SKIP = frozenset({0})


def entry(token_id: int, *others: int, rank: int = 1) -> TokenLogprobs:
    ids = (token_id, *others)
    return TokenLogprobs(ids, tuple(-1 - i / 10 for i in ids), rank)


def completion(*, as_ids: bool = False) -> CompletionLogprobs:
    return CompletionLogprobs(TABLE.__getitem__, as_ids=as_ids, skip_ids=SKIP)


def test_a_chat_token_has_its_bytes_and_its_rivals() -> None:
    (content,) = ChatLogprobs(TABLE.__getitem__, as_ids=False).take([entry(2, 1, 2)])["content"]
    assert content == {
        "token": "�",
        "logprob": -1.2,
        "bytes": [0xE2, 0x82],
        "top_logprobs": [
            {"token": " Hi", "logprob": -1.1, "bytes": [32, 72, 105]},
            {"token": "�", "logprob": -1.2, "bytes": [0xE2, 0x82]},
        ],
    }


def test_a_fixed_token_that_is_also_likely_shows_once() -> None:
    (content,) = ChatLogprobs(TABLE.__getitem__, as_ids=True).take([entry(1, 1, 4, 4, 3)])[
        "content"
    ]
    assert [t["token"] for t in content["top_logprobs"]] == [
        "token_id:1",
        "token_id:4",
        "token_id:3",
    ]


def test_minus_infinity_is_written_as_a_number() -> None:
    impossible = TokenLogprobs((1, 4), (-math.inf, -math.inf), 3)
    (content,) = ChatLogprobs(TABLE.__getitem__, as_ids=False).take([impossible])["content"]
    assert (content["logprob"], content["top_logprobs"][0]["logprob"]) == (-9999.0, -9999.0)
    written = completion().take([impossible])
    assert written["token_logprobs"] == [-9999.0]
    _, shown = msgspec.json.decode(prompt_logprobs([impossible], 2, 1, TABLE.__getitem__))
    assert shown["1"]["logprob"] == -9999.0


def test_text_offsets_count_characters_of_the_text() -> None:
    writer = completion()
    first = writer.take([entry(1), entry(2)])
    second = writer.take([entry(3), entry(4), entry(0)])
    both = msgspec.json.decode(Columns().followed_by(iter([first, second])).raw())
    assert both["text_offset"] == [0, 3, 3, 4, 5]
    assert both["tokens"] == [" Hi", "�", "�", "!", "<end>"]
    assert both["token_logprobs"] == [-1.1, -1.2, -1.3, -1.4, -1.0]


def test_the_drawn_token_wins_where_texts_are_alike() -> None:
    """`top_logprobs` is keyed by text: the first of two equal texts counts."""
    assert completion().take([entry(1, 5, 4)])["top_logprobs"] == [{" Hi": -1.1, "!": -1.4}]
    assert completion(as_ids=True).take([entry(1, 5)])["top_logprobs"] == [
        {"token_id:1": -1.1, "token_id:5": -1.5}
    ]


def test_an_echoed_prompt_begins_with_null() -> None:
    writer = completion()
    echoed = Columns().followed_by(writer.prompt([1, 4], " Hi!", [entry(4, 1)]))
    assert msgspec.json.decode(echoed.raw()) == {
        "text_offset": [0, 3],
        "token_logprobs": [None, -1.4],
        "tokens": [" Hi", "!"],
        "top_logprobs": [None, {"!": -1.4, " Hi": -1.1}],
    }
    writer.follow(" Hi!")
    assert writer.take([entry(4)])["text_offset"] == [4]


def test_the_models_prefix_takes_no_room_in_an_echo() -> None:
    """A bos token is a token of the prompt but no part of its text."""
    _, written_as = completion().prompt([0, 1, 4], " Hi!", [entry(1), entry(4)])
    assert written_as["text_offset"] == [0, 3]


@pytest.mark.parametrize(("asked", "fixed_rank"), [(1, None), (-1, 2)])
def test_prompt_logprobs_are_ranked(asked: int, fixed_rank: int | None) -> None:
    written_as = prompt_logprobs([entry(4, 1, 3, rank=7)], 3, asked, TABLE.__getitem__)
    first, second, unknown = msgspec.json.decode(written_as)
    assert first is unknown is None
    assert second == {
        "4": {"logprob": -1.4, "rank": 7, "decoded_token": "!"},
        "1": {"logprob": -1.1, "rank": 1, "decoded_token": " Hi"},
        "3": {"logprob": -1.3, "rank": fixed_rank, "decoded_token": "�"},
    }
