"""Beam search, one step at a time. Pure.

Theory of operation. A beam is a continuation of the prompt and the sum of its tokens' log
probabilities. Each step asks for the 2 × width likeliest next tokens of every live beam, extends it
by each, sets aside those that end, and keeps the `width` likeliest of the others. At the end the
best of what was set aside and what still lives are the answers, by log probability over length to
the power of `length_penalty`. The length counts the prompt but not an end token, as in vLLM.

Of what was set aside only the best `width` can be answers, so no more are kept; and candidates are
ranked by their sums before any is spelled out. A search thus holds 2 × width continuations at most,
and a step builds no more than that.

vLLM runs every search to its last token. This one stops as soon as no live beam can still beat the
answers found, which changes no answer: a sum of log probabilities only falls, so `_ceiling` bounds
the score of whatever a beam may become.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from worker.types import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Beam:
    """A continuation of the prompt. `entries` tell of each token how likely it and others were;
    `ended`: its last token is an end token.
    """

    token_ids: tuple[int, ...] = ()
    logprob: float = 0.0
    entries: tuple[TokenLogprobs, ...] = ()
    ended: bool = False


@dataclass(frozen=True, slots=True)
class BeamRules:
    """What stays the same over a search. `num_shown` is how many of the likeliest tokens the
    entries keep.
    """

    width: int
    num_prompt_tokens: int
    max_tokens: int
    end_ids: frozenset[int] = frozenset()
    length_penalty: float = 1.0
    num_shown: int = 0

    @property
    def num_candidates(self) -> int:
        """How many next tokens to ask for: with half of them ends, `width` beams still live."""
        return 2 * self.width


@dataclass(frozen=True, slots=True)
class Beams:
    """A search between two steps: the beams that live, likeliest first, and the best `width` of
    those that ended, best first (of equals the older).
    """

    live: tuple[Beam, ...] = (Beam(),)
    ended: tuple[Beam, ...] = ()


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A live beam and one of its next tokens: that at `place` of what was found."""

    beam: Beam
    entry: TokenLogprobs
    place: int
    logprob: float

    @property
    def token_id(self) -> int:
        return self.entry.token_ids[self.place]


def score(beam: Beam, rules: BeamRules) -> float:
    """By which answers are ranked: higher is better."""
    length = rules.num_prompt_tokens + len(beam.token_ids) - beam.ended
    return _over_length(beam.logprob, length, rules)


def advance(beams: Beams, found: Sequence[TokenLogprobs], rules: BeamRules) -> Beams:
    """One step: `found` tells the `num_candidates` likeliest next tokens of each live beam (after
    the one that was drawn, which does not matter here).
    """
    going_on: list[_Candidate] = []
    ending: list[_Candidate] = []
    for beam, entry in zip(beams.live, found, strict=True):
        for place in range(1, 1 + min(rules.num_candidates, len(entry.token_ids) - 1)):
            candidate = _Candidate(beam, entry, place, beam.logprob + entry.logprobs[place])
            ends = candidate.token_id in rules.end_ids
            (ending if ends else going_on).append(candidate)
    # All are of one length, so that the likeliest are the best, of those that end too.
    live = [_extended(c, rules) for c in _likeliest(going_on, rules.width)]
    ended = [_extended(c, rules, ended=True) for c in _likeliest(ending, rules.width)]
    return Beams(tuple(live), _best((*beams.ended, *ended), rules))


def is_over(beams: Beams, rules: BeamRules) -> bool:
    """Whether more steps could not change the answers."""
    if not beams.live or len(beams.live[0].token_ids) >= rules.max_tokens:
        return True
    if len(beams.ended) < rules.width:
        return False
    worst_answer = score(beams.ended[-1], rules)
    return all(_ceiling(beam, rules) <= worst_answer for beam in beams.live)


def best(beams: Beams, rules: BeamRules) -> tuple[Beam, ...]:
    """The answers, best first; of equals the one that ended."""
    return _best((*beams.ended, *beams.live), rules)


def _best(beams: Sequence[Beam], rules: BeamRules) -> tuple[Beam, ...]:
    return tuple(sorted(beams, key=lambda b: -score(b, rules))[: rules.width])


def _likeliest(candidates: Sequence[_Candidate], count: int) -> list[_Candidate]:
    return heapq.nsmallest(count, candidates, key=lambda c: -c.logprob)


def _extended(candidate: _Candidate, rules: BeamRules, *, ended: bool = False) -> Beam:
    beam, entry, place = candidate.beam, candidate.entry, candidate.place
    shown = slice(1, 1 + rules.num_shown)
    told = TokenLogprobs(
        (candidate.token_id, *entry.token_ids[shown]),
        (entry.logprobs[place], *entry.logprobs[shown]),
        rank=place,
    )
    return Beam(
        (*beam.token_ids, candidate.token_id),
        candidate.logprob,
        (*beam.entries, told),
        ended=ended,
    )


def _ceiling(beam: Beam, rules: BeamRules) -> float:
    """No continuation of the beam scores higher: the length that suits its sum best, and only
    certain tokens from here on.
    """
    now = rules.num_prompt_tokens + len(beam.token_ids)
    longest = rules.num_prompt_tokens + rules.max_tokens
    return _over_length(beam.logprob, longest if rules.length_penalty > 0 else now, rules)


def _over_length(logprob: float, length: int, rules: BeamRules) -> float:
    divisor: float = max(length, 1) ** rules.length_penalty
    return logprob / divisor
