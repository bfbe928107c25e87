"""Beam search, one step at a time. Pure.

Theory of operation. A beam is a continuation of the prompt and the sum of its tokens' log
probabilities. Each step asks for the 2 × width likeliest next tokens of every live beam, extends it
by each, sets aside those that end, and keeps the `width` likeliest of the others. At the end the
best of what was set aside and what still lives are the answers, by log probability over length to
the power of `length_penalty`. The length counts the prompt but not an end token, as in vLLM.

vLLM runs every search to its last token. This one stops as soon as no live beam can still beat the
answers found, which changes no answer: a sum of log probabilities only falls, so `_ceiling` bounds
the score of whatever a beam may become.
"""

from __future__ import annotations

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
    """A search between two steps: the beams that live, likeliest first, and those that ended."""

    live: tuple[Beam, ...] = (Beam(),)
    ended: tuple[Beam, ...] = ()


def score(beam: Beam, rules: BeamRules) -> float:
    """By which answers are ranked: higher is better."""
    length = rules.num_prompt_tokens + len(beam.token_ids) - beam.ended
    return _over_length(beam.logprob, length, rules)


def advance(beams: Beams, found: Sequence[TokenLogprobs], rules: BeamRules) -> Beams:
    """One step: `found` tells the `num_candidates` likeliest next tokens of each live beam (after
    the one that was drawn, which does not matter here).
    """
    extended = [
        _extended(beam, entry, place, rules)
        for beam, entry in zip(beams.live, found, strict=True)
        for place in range(1, 1 + min(rules.num_candidates, len(entry.token_ids) - 1))
    ]
    live = sorted((b for b in extended if not b.ended), key=lambda b: -b.logprob)
    return Beams(tuple(live[: rules.width]), beams.ended + tuple(b for b in extended if b.ended))


def is_over(beams: Beams, rules: BeamRules) -> bool:
    """Whether more steps could not change the answers."""
    if not beams.live or len(beams.live[0].token_ids) >= rules.max_tokens:
        return True
    if len(beams.ended) < rules.width:
        return False
    worst_answer = sorted((score(b, rules) for b in beams.ended), reverse=True)[rules.width - 1]
    return all(_ceiling(beam, rules) <= worst_answer for beam in beams.live)


def best(beams: Beams, rules: BeamRules) -> tuple[Beam, ...]:
    """The answers, best first; of equals the one that ended."""
    candidates = (*beams.ended, *beams.live)
    return tuple(sorted(candidates, key=lambda b: -score(b, rules))[: rules.width])


def _extended(beam: Beam, entry: TokenLogprobs, place: int, rules: BeamRules) -> Beam:
    token_id, logprob = entry.token_ids[place], entry.logprobs[place]
    shown = slice(1, 1 + rules.num_shown)
    told = TokenLogprobs(
        (token_id, *entry.token_ids[shown]), (logprob, *entry.logprobs[shown]), rank=place
    )
    return Beam(
        (*beam.token_ids, token_id),
        beam.logprob + logprob,
        (*beam.entries, told),
        ended=token_id in rules.end_ids,
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
