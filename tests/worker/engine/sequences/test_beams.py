"""A beam search finds what a search without short cuts finds."""

import math
import random
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.depth import examples
from worker.engine.sequences.beams import Beam, BeamRules, Beams, BeamSearch, advance
from worker.types import BeamParams, TokenLogprobs

EARLY: tuple[bool | Literal["never"] | None, ...] = (None, False, True, "never")
rules_of_a_search = st.builds(
    BeamRules,
    st.builds(
        BeamParams,
        width=st.integers(1, 5),
        length_penalty=st.sampled_from([-2.0, -0.5, 0.0, 0.7, 1.0, 3.0]),
        early_stopping=st.sampled_from(EARLY),
        num_shown=st.sampled_from([None, 0, 2]),
    ),
    num_prompt=st.integers(1, 5),
    max_outputs=st.integers(1, 6),
    end_ids=st.sampled_from([frozenset(), frozenset({0}), frozenset({0, 3})]),
)


def logprobs(seed: int, size: int, prefix: tuple[int, ...]) -> list[float]:
    rng = random.Random(f"{seed} {prefix}")
    weights = [rng.expovariate(1.0) ** 2 for _ in range(size)]
    return [math.log(weight / sum(weights)) for weight in weights]


def likeliest(seed: int, size: int, beam: Beam, count: int) -> TokenLogprobs:
    own = logprobs(seed, size, beam.token_ids)
    order = sorted(range(size), key=lambda token: -own[token])[:count]
    ids = (order[0], *order)
    return TokenLogprobs(ids, tuple(own[token] for token in ids), 1)


def search(seed: int, size: int, rules: BeamRules) -> tuple[Beam, ...]:
    beams = Beams()
    while not beams.is_over:
        found = [likeliest(seed, size, beam, rules.num_candidates) for beam in beams.live]
        before, beams = beams, advance(beams, found, rules)
        for beam, parent in zip(beams.live, beams.parents, strict=True):
            assert beam.token_ids[:-1] == before.live[parent].token_ids
        assert len(beams.live) <= rules.params.width
    return beams.ended


Answer = tuple[tuple[int, ...], float]


def of_vllm(seed: int, size: int, rules: BeamRules) -> list[Answer]:
    """Return the answers of vLLM's loop, run to the last token: (tokens, score), best first."""
    live: list[Answer] = [((), 0.0)]
    ended: list[Answer] = []
    for _ in range(rules.max_outputs):
        going_on: list[Answer] = []
        for tokens, total in live:
            own = logprobs(seed, size, tokens)
            for token in sorted(range(size), key=lambda t: -own[t])[: rules.num_candidates]:
                extended = ((*tokens, token), total + own[token])
                (ended if token in rules.end_ids else going_on).append(extended)
        live = sorted(going_on, key=lambda c: -c[1])[: rules.params.width]
        if not live:
            break
    penalty = rules.params.length_penalty

    def score(tokens: tuple[int, ...], total: float) -> float:
        length = rules.num_prompt + len(tokens) - (tokens[-1] in rules.end_ids)
        return float(total / max(length, 1) ** penalty)

    scored = [(tokens, score(tokens, total)) for tokens, total in ended + live]
    return sorted(scored, key=lambda c: -c[1])[: rules.params.width]


def of_transformers(seed: int, size: int, rules: BeamRules) -> list[Answer]:
    """Apply the rule of `generate`: of all candidates the best, of which the first may end."""
    params, full = rules.params, rules.params.width
    live: list[Answer] = [((), 0.0)]
    ended: list[Answer] = []
    for length in range(1, rules.max_outputs + 1):
        every = [
            ((*tokens, token), total + own)
            for tokens, total in live
            for token, own in enumerate(logprobs(seed, size, tokens))
        ]
        top = sorted(every, key=lambda c: -c[1])[: rules.num_candidates]
        is_end = [c[0][-1] in rules.end_ids or length == rules.max_outputs for c in top]
        ended += [
            (tokens, total / length**params.length_penalty)
            for (tokens, total), ends in list(zip(top, is_end, strict=True))[:full]
            if ends
        ]
        ended = sorted(ended, key=lambda c: -c[1])[:full]
        live = [c for c, ends in zip(top, is_end, strict=True) if not ends][:full]
        if not live:
            break
        if len(ended) == full:
            longest = params.early_stopping == "never" and params.length_penalty > 0
            reach = rules.max_outputs if longest else length
            if params.early_stopping is True:
                break
            if live[0][1] / reach**params.length_penalty <= ended[-1][1]:
                break
    return ended


@given(seed=st.integers(0, 10_000), size=st.integers(4, 9), rules=rules_of_a_search)
@examples(400)
def test_a_search_finds_what_plain_loops_find(seed: int, size: int, rules: BeamRules) -> None:
    found = search(seed, size, rules)
    plain = of_vllm if rules.params.early_stopping is None else of_transformers
    expected = plain(seed, size, rules)
    assert [beam.token_ids for beam in found] == [tokens for tokens, _ in expected]
    assert [beam.score for beam in found] == pytest.approx([score for _, score in expected])
    for beam in found:
        own = [logprobs(seed, size, beam.token_ids[:i])[t] for i, t in enumerate(beam.token_ids)]
        assert beam.logprob == pytest.approx(sum(own))
        last = beam.token_ids[-1]
        assert beam.end_token == (last if last in rules.end_ids else None)
        shown = rules.params.num_shown
        assert len(beam.entries) == (0 if shown is None else len(own))
        assert [entry.logprobs[0] for entry in beam.entries] == own[: len(beam.entries)]
        assert all(len(entry.token_ids) == 1 + (shown or 0) for entry in beam.entries)


def test_a_search_ends_before_its_last_token_where_no_beam_can_win() -> None:
    """By vLLM's rule too, which changes no answer: more steps could only lose."""
    rules = BeamRules(BeamParams(1, 0.0), num_prompt=1, max_outputs=50, end_ids=frozenset({0}))
    sure = TokenLogprobs((0, 0, 1), (-0.1, -0.1, -3.0), 1)
    beams = advance(Beams(), [sure], rules)
    assert beams.is_over
    assert [beam.token_ids for beam in beams.ended] == [(0,)]


def test_the_answers_so_far_are_ranked_like_answers() -> None:
    rules = BeamRules(
        BeamParams(2, 1.0, False), num_prompt=3, max_outputs=9, end_ids=frozenset({0})
    )
    search = BeamSearch(rules, {0: "a", 1: "b"}, [7, 8])
    assert search.best() == []
    assert not search.holds(7)
    search.found[7] = TokenLogprobs((1, 1, 0, 2, 3), (-1.0, -1.0, -1.1, -2.0, -3.0), 1)
    assert search.holds(7)
    search.advance()
    assert [beam.token_ids for beam in search.best()] == [(1,), (0,), (2,)]
