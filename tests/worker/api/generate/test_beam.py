"""The beam search gives what a search without short cuts gives."""

from __future__ import annotations

import math
import random
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.api.generate.beam import Beam, BeamRules, Beams, advance, best, is_over, score
from worker.types import TokenLogprobs

END = 0


class ToyModel:
    """A language model over a few tokens: each prefix has random log probabilities of its own."""

    def __init__(self, seed: int, vocabulary: int) -> None:
        self._seed = seed
        self.vocabulary = vocabulary
        self.num_calls = 0

    def logprobs(self, prefix: tuple[int, ...]) -> list[float]:
        """Of each token after the prefix."""
        rng = random.Random(f"{self._seed} {prefix}")
        weights = [rng.expovariate(1.0) ** 2 for _ in range(self.vocabulary)]
        return [math.log(w / sum(weights)) for w in weights]

    def likeliest(self, prefix: tuple[int, ...], count: int) -> TokenLogprobs:
        """What an engine answers: the drawn token, then the likeliest ones."""
        self.num_calls += 1
        logprobs = self.logprobs(prefix)
        order = sorted(range(self.vocabulary), key=lambda i: -logprobs[i])[:count]
        ids = (order[0], *order)
        return TokenLogprobs(ids, tuple(logprobs[i] for i in ids), 1)


def search(model: ToyModel, rules: BeamRules) -> Beams:
    """The whole search."""
    beams = Beams()
    while not is_over(beams, rules):
        found = [model.likeliest(b.token_ids, rules.num_candidates) for b in beams.live]
        beams = advance(beams, found, rules)
    return beams


def plain_search(model: ToyModel, rules: BeamRules) -> list[tuple[tuple[int, ...], float]]:
    """vLLM's loop, to the last token and without short cuts: (tokens, score), best first."""
    live: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    ended: list[tuple[tuple[int, ...], float]] = []
    for _ in range(rules.max_tokens):
        extended = []
        for tokens, logprob in live:
            found = model.logprobs(tokens)
            order = sorted(range(model.vocabulary), key=lambda i: -found[i])
            for i in order[: 2 * rules.width]:
                candidate = ((*tokens, i), logprob + found[i])
                (ended if i in rules.end_ids else extended).append(candidate)
        live = sorted(extended, key=lambda c: -c[1])[: rules.width]
    scored = [
        (
            tokens,
            logprob
            / max(rules.num_prompt_tokens + len(tokens) - (tokens[-1] in rules.end_ids), 1)
            ** rules.length_penalty,
        )
        for tokens, logprob in ended + live
    ]
    return sorted(scored, key=lambda c: -c[1])[: rules.width]


@given(
    seed=st.integers(0, 10_000),
    vocabulary=st.integers(2, 9),
    width=st.integers(1, 4),
    max_tokens=st.integers(1, 6),
    length_penalty=st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0]),
    ends=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_a_search_finds_what_a_search_without_short_cuts_finds(
    seed: int, vocabulary: int, width: int, max_tokens: int, length_penalty: float, ends: bool
) -> None:
    """Stopping early changes neither the answers nor their scores."""
    model = ToyModel(seed, vocabulary)
    end_ids = frozenset({END} if ends else ())
    rules = BeamRules(width, 5, max_tokens, end_ids, length_penalty)
    answers = best(search(model, rules), rules)
    expected = plain_search(model, rules)
    assert [b.token_ids for b in answers] == [tokens for tokens, _ in expected]
    for beam, (_, expected_score) in zip(answers, expected, strict=True):
        assert score(beam, rules) == pytest.approx(expected_score, rel=1e-12)


def test_a_wide_beam_finds_the_likeliest_text_of_all() -> None:
    """With room for every prefix, the best answer is the best of all sequences."""
    model = ToyModel(3, 3)
    rules = BeamRules(width=27, num_prompt_tokens=1, max_tokens=3, length_penalty=0.0)
    texts = {
        tokens: sum(model.logprobs(tokens[:n])[tokens[n]] for n in range(3))
        for tokens in product(range(3), repeat=3)
    }
    first = best(search(model, rules), rules)[0]
    assert first.token_ids == max(texts, key=texts.__getitem__)
    assert score(first, rules) == pytest.approx(max(texts.values()))


def test_a_search_ends_when_no_beam_can_win_any_more() -> None:
    """An end that is nearly certain leaves nothing to look for."""
    sure = TokenLogprobs((END, END, 1), (-0.01, -0.01, -5.0), 1)
    rules = BeamRules(width=1, num_prompt_tokens=1, max_tokens=100, end_ids=frozenset({END}))
    beams = advance(Beams(), [sure], rules)
    assert [b.token_ids for b in beams.ended] == [(END,)]
    assert is_over(beams, rules)


class CountedIds(tuple[int, ...]):
    """Token ids that count how often a part of them is copied."""

    __slots__ = ()
    num_copies = 0

    def __getitem__(self, index: Any) -> Any:
        """As of a tuple."""
        CountedIds.num_copies += isinstance(index, slice)
        return super().__getitem__(index)


def test_a_long_search_keeps_and_builds_no_more_than_can_win() -> None:
    """Of hundreds of ends only `width` are kept, and a step spells out 2 × width candidates."""
    width, steps = 4, 200
    # Every beam has an end at every step, and a next token so sure that no end settles the search.
    ids = CountedIds((9, 9, END, *range(10, 16)))
    logprobs = (-1e-6, -1e-6, -1.0, *(-2.0 - i for i in range(6)))
    rules = BeamRules(width, 1, steps, frozenset({END}), num_shown=2)
    beams, CountedIds.num_copies = Beams(), 0
    for _ in range(steps):
        assert not is_over(beams, rules)
        beams = advance(beams, [TokenLogprobs(ids, logprobs, 1)] * len(beams.live), rules)
        assert len(beams.live) <= width
        assert len(beams.ended) <= width
    assert CountedIds.num_copies <= 2 * width * steps
    scores = [score(b, rules) for b in beams.ended]
    assert scores == sorted(scores, reverse=True)


def test_entries_tell_the_chosen_token_and_its_rivals() -> None:
    """What the answer shows of each token: itself with its rank, then the likeliest."""
    rules = BeamRules(width=2, num_prompt_tokens=1, max_tokens=1, num_shown=1)
    beams = advance(Beams(), [TokenLogprobs((7, 7, 8, 9), (-1.0, -1.0, -2.0, -3.0), 1)], rules)
    assert [b.entries[0] for b in beams.live] == [
        TokenLogprobs((7, 7), (-1.0, -1.0), 1),
        TokenLogprobs((8, 7), (-2.0, -1.0), 2),
    ]


def test_an_end_token_does_not_count_as_length() -> None:
    """The score divides by the tokens before the end."""
    rules = BeamRules(width=1, num_prompt_tokens=2, max_tokens=9, end_ids=frozenset({END}))
    assert score(Beam((5, END), -6.0, ended=True), rules) == -2.0
    assert score(Beam((5, 6), -6.0), rules) == -1.5
