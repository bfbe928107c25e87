"""Texts and sessions."""

from itertools import islice
from random import Random

import pytest

from fleet.bench.workload import RING_WORDS, Synthetic, TokenRange, TracedRequest, WordRing


@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 700, RING_WORDS + 50])
def test_a_text_has_the_words_that_make_its_tokens(tokens: int) -> None:
    for tokens_per_word in (0.5, 1.0, 1.7):
        words = max(1, round(tokens / tokens_per_word))
        assert len(WordRing(1, tokens_per_word).text(5, tokens).split()) == words


def test_texts_of_different_keys_or_seeds_share_no_beginning() -> None:
    rings = [WordRing(seed, 1.0) for seed in (1, 2)]
    texts = [ring.text(key, 300) for ring in rings for key in range(500)]
    assert len({tuple(text.split()[:4]) for text in texts}) == len(texts)


def test_a_longer_text_of_a_key_begins_with_the_shorter() -> None:
    ring = WordRing(3, 1.0)
    assert ring.text(9, 500).startswith(ring.text(9, 200))


def test_sessions_of_a_group_begin_alike_and_others_do_not() -> None:
    data = Synthetic(
        TokenRange(8, 16), TokenRange(2, 4), 3, TokenRange(40, 40), turns=TokenRange(2, 5)
    )
    sessions = list(islice(data.sessions(WordRing(1, 1.0), Random(1)), 200))
    assert len({one.system for one in sessions}) == 3
    assert {len(one.exchanges) for one in sessions} == {2, 3, 4, 5}
    asked = [exchange for one in sessions for exchange in one.exchanges]
    assert {len(one.text.split()) for one in asked} == set(range(8, 17))
    assert {one.output_tokens for one in asked} == {2, 3, 4}
    assert len({one.text for one in asked}) == len(asked)


def test_groups_have_lengths_and_first_questions_of_their_own() -> None:
    data = Synthetic(
        TokenRange(8, 16), TokenRange(2, 4), 5, TokenRange(10, 400), 4, TokenRange(2, 2)
    )
    sessions = list(islice(data.sessions(WordRing(1, 1.0), Random(1)), 400))
    assert len({one.system for one in sessions}) == 5
    assert len({len(one.system.split()) for one in sessions}) > 1
    assert len({(one.system, one.exchanges[0].text) for one in sessions}) == 20
    assert len({one.exchanges[1].text for one in sessions}) == 400


def test_without_groups_every_session_has_a_system_prompt_of_its_own() -> None:
    data = Synthetic(prefix_tokens=TokenRange(10, 40))
    sessions = list(islice(data.sessions(WordRing(1, 1.0), Random(1)), 500))
    assert len({one.system for one in sessions}) == 500
    assert {len(one.system.split()) for one in sessions} == set(range(10, 41))


def test_blocks_with_the_same_ids_make_the_same_beginning() -> None:
    ring = WordRing(1, 1.0)
    first = TracedRequest(0.0, 25, 1, (7, 8, 9), 10).session(ring, 2.0, 0)
    second = TracedRequest(4.0, 35, 1, (7, 8, 4), 10).session(ring, 2.0, 1)
    a, b = (one.exchanges[0].text.split() for one in (first, second))
    assert (len(a), len(b), second.at_seconds) == (25, 35, 2.0)
    assert a[:20] == b[:20]
    assert a[20:] != b[20:25]
