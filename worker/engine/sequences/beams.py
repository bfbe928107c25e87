"""Beam search, one step at a time: from log probabilities to live beams and answers. Pure.

A step extends every live beam by its likeliest next tokens (`num_candidates`), sets aside those
that end, and keeps the `width` likeliest of the others. There are two rules for the rest.

*vLLM's* (`early_stopping` None). Every end token among a beam's candidates ends a beam. The score
is the sum over length ** `length_penalty`; the length counts the prompt but no end token. At the
last token the live beams are answers too. Unlike vLLM's, this search stops once no live beam can
beat the `width` answers found: a sum of log probabilities only falls, so no answer changes.

*Transformers'* (`early_stopping` False, True or "never"). A beam ends only if it is one of the
`width` likeliest of the step. The length counts the answer's tokens, its end token too. With
`width` answers the search is over at once (True), or when the likeliest live beam is no better than
the worst of them, by its present length (False) or the length that suits it best ("never").
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from worker.types import BeamParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Beam:
    """A continuation of the prompt. `entries` has the log probabilities of each token, if they are
    wanted. One that has ended has its `score`, and `end_token` if such a token ended it.
    """

    token_ids: tuple[int, ...] = ()
    logprob: float = 0.0
    entries: tuple[TokenLogprobs, ...] = ()
    score: float | None = None
    end_token: int | None = None


@dataclass(frozen=True, slots=True)
class BeamRules:
    """The rules of one search, for answers of at most `max_outputs` tokens."""

    params: BeamParams
    num_prompt: int
    max_outputs: int
    end_ids: frozenset[int] = frozenset()

    @property
    def num_candidates(self) -> int:
        # As in transformers: `width` beams continue even if every end token is likely.
        return max(2, 1 + len(self.end_ids)) * self.params.width

    def score(self, logprob: float, num_outputs: int, ends: bool) -> float:
        """Return the rank of an answer among answers: higher is better."""
        length = num_outputs
        if self.params.early_stopping is None:
            length = max(1, self.num_prompt + num_outputs - ends)
        penalty: float = length**self.params.length_penalty
        return logprob / penalty


@dataclass(frozen=True, slots=True)
class Beams:
    """A search between two steps: the beams that live, likeliest first, and the best `width` of
    those that ended, best first (the older one of equals). `parents` are the places that the live
    beams' beginnings had among the live beams of the step before.
    """

    live: tuple[Beam, ...] = (Beam(),)
    ended: tuple[Beam, ...] = ()
    parents: tuple[int, ...] = ()
    is_over: bool = False


@dataclass(frozen=True, slots=True)
class _Candidate:
    parent: int
    place: int
    token_id: int
    logprob: float


def advance(beams: Beams, found: Sequence[TokenLogprobs], rules: BeamRules) -> Beams:
    """Take one step. `found` has, for each live beam, the token that was drawn (which is ignored)
    and the likeliest next tokens, at least `num_candidates` or the whole vocabulary.
    """
    width, length = rules.params.width, len(beams.live[0].token_ids) + 1
    is_last = length >= rules.max_outputs
    ranked = sorted(_candidates(beams.live, found, rules), key=lambda c: -c.logprob)
    going_on = [c for c in ranked if c.token_id not in rules.end_ids][:width]
    if rules.params.early_stopping is not None:
        ending = [c for c in ranked[:width] if is_last or c.token_id in rules.end_ids]
    else:
        ending = [c for c in ranked if c.token_id in rules.end_ids][:width]
        ending += going_on if is_last else []
    ended = [
        *beams.ended,
        *(_extended(beams.live[c.parent], found[c.parent], c, rules, True) for c in ending),
    ]
    ended.sort(key=lambda beam: -(beam.score or 0.0))
    best = tuple(ended[:width])
    if is_last or not going_on or _is_decided(best, going_on[0].logprob, length, rules):
        return Beams((), best, is_over=True)
    live = [_extended(beams.live[c.parent], found[c.parent], c, rules) for c in going_on]
    return Beams(tuple(live), best, tuple(c.parent for c in going_on))


def _candidates(
    live: Sequence[Beam], found: Sequence[TokenLogprobs], rules: BeamRules
) -> list[_Candidate]:
    end = 1 + rules.num_candidates
    return [
        _Candidate(parent, place, entry.token_ids[place], beam.logprob + entry.logprobs[place])
        for parent, (beam, entry) in enumerate(zip(live, found, strict=True))
        for place in range(1, min(end, len(entry.token_ids)))
    ]


def _extended(
    beam: Beam, found: TokenLogprobs, candidate: _Candidate, rules: BeamRules, ends: bool = False
) -> Beam:
    token, num_shown = candidate.token_id, rules.params.num_shown
    entries = beam.entries
    if num_shown is not None:
        shown = slice(1, None if num_shown < 0 else 1 + num_shown)
        own = found.logprobs[candidate.place]
        entry = TokenLogprobs(
            (token, *found.token_ids[shown]), (own, *found.logprobs[shown]), candidate.place
        )
        entries = (*entries, entry)
    token_ids = (*beam.token_ids, token)
    if not ends:
        return Beam(token_ids, candidate.logprob, entries)
    end_token = token if token in rules.end_ids else None
    score = rules.score(candidate.logprob, len(token_ids), end_token is not None)
    return Beam(token_ids, candidate.logprob, entries, score, end_token)


def _is_decided(ended: Sequence[Beam], likeliest: float, length: int, rules: BeamRules) -> bool:
    """True if there are `width` answers and the rules do not ask for better ones; the likeliest
    live beam, of `length` tokens, has the log probability `likeliest`.
    """
    params = rules.params
    if len(ended) < params.width:
        return False
    if params.early_stopping is True:
        return True
    if params.length_penalty > 0 and params.early_stopping is not False:
        length = rules.max_outputs
    return rules.score(likeliest, length, ends=False) <= (ended[-1].score or 0.0)


@dataclass(slots=True)
class BeamSearch:
    """The mutable record of one search in the engine; sequences are named by their ids.

    `wanted` are the answers that have not been given up: index → request id. `slots` are the
    sequences of the search; `members` are those that the live beams are in now, in order. A member
    with `found` candidates is held until all members have theirs.
    """

    rules: BeamRules
    wanted: dict[int, str]
    slots: list[int]
    beams: Beams = Beams()
    members: list[int] = field(init=False)
    found: dict[int, TokenLogprobs] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.members = self.slots[:1]

    def holds(self, seq_id: int) -> bool:
        """True if a sequence has nothing to run until the search takes its step."""
        return seq_id in self.found or seq_id not in self.members

    def advance(self) -> None:
        """Take the step, now that `found` is complete; `members` are still those from before."""
        found = [self.found[seq_id] for seq_id in self.members]
        self.beams = advance(self.beams, found, self.rules)
        self.found = {}

    def best(self) -> list[Beam]:
        """Return the answers so far, best first: those that ended, and the live beams."""
        rules = self.rules
        live = [
            Beam(b.token_ids, b.logprob, b.entries, rules.score(b.logprob, len(b.token_ids), False))
            for b in self.beams.live
            if b.token_ids
        ]
        return sorted([*self.beams.ended, *live], key=lambda beam: -(beam.score or 0.0))
