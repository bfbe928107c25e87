"""Likely continuations of a text, by what followed its last tokens elsewhere: SuffixDecoding
(Oliaro et al., arXiv:2411.04975).

The last m tokens are looked up for every m up to a depth. From the places of a match the path takes
the token that follows at most places; the shares of these places, multiplied along the path and by
n / (n + 1) for n places, are its probability. It ends where that falls below a bound, or after (m *
factor) tokens. The m with the greatest sum of probabilities wins, a longer one over a shorter.

Matches are not counted in a tree, which in Python costs kilobytes a token, but at the latest 32
places of an anchor: the last 8, 3 or 1 tokens. So look-ups are bounded, and counts are recent.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from worker.engine.drafters.texts import END

ANCHORS = (8, 3, 1)
MAX_PLACES = 32


@dataclass(frozen=True, slots=True)
class PathLimits:
    """The limits of matches, of a path's length per token of its match, and of its probability."""

    max_match_tokens: int
    max_spec_factor: float
    min_probability: float

    def budget(self, match_tokens: int, num_tokens: int) -> int:
        return min(num_tokens, int(match_tokens * self.max_spec_factor + 1e-6))


@dataclass(frozen=True, slots=True)
class Path:
    """Spelled tokens that may follow a match of `match_tokens`, each with the share of the places
    that continue with it; `score` is the expected number of accepted tokens.
    """

    text: str = ""
    shares: tuple[float, ...] = ()
    score: float = 0.0
    match_tokens: int = 0


class Corpus(Protocol):
    """Text in which anchors are looked up; each text in it ends with `END` or at the end."""

    @property
    def text(self) -> str: ...

    def places(self, anchor: str) -> list[int]:
        """Return the places after the latest MAX_PLACES occurrences of `anchor`, latest first."""


class SequenceCorpus:
    def __init__(self, text: str) -> None:
        self.text = text

    def places(self, anchor: str) -> list[int]:
        find, text = self.text.rfind, self.text
        found: list[int] = []
        before = len(text) - 1
        while len(found) < MAX_PLACES:
            at = find(anchor, 0, before)
            if at < 0:
                break
            place = at + len(anchor)
            found.append(place)
            before = place - 1
        return found


def best_path(corpus: Corpus, context: str, limits: PathLimits, num_tokens: int) -> Path:
    """Return the path of the best score after the last tokens of `context`, which may be empty."""
    best = Path()
    longest = min(limits.max_match_tokens, len(context))
    for anchor in ANCHORS:
        if anchor > longest:
            continue
        if limits.budget(longest, num_tokens) <= best.score:
            break  # no path can score more than one a token
        places = corpus.places(context[-anchor:])
        matches = [_match_tokens(corpus.text, place, context, anchor, longest) for place in places]
        for length in sorted(set(matches), reverse=True):
            budget = limits.budget(length, num_tokens)
            if budget <= best.score:
                break
            among = [p for p, tokens in zip(places, matches, strict=True) if tokens >= length]
            path = likeliest_path(corpus.text, among, budget, limits.min_probability)
            if path.score > best.score:
                best = replace(path, match_tokens=length)
        longest = anchor - 1
    return best


def _match_tokens(text: str, place: int, context: str, known: int, longest: int) -> int:
    """Count the tokens before `place` that also end `context`, from `known` up to `longest`."""
    most = min(longest, place)
    length = known
    while length < most and text[place - length - 1] == context[-length - 1]:
        length += 1
    return length


def likeliest_path(
    text: str, places: Sequence[int], max_tokens: int, min_probability: float
) -> Path:
    """Return the likeliest path from `places`, which are one or more, the latest first."""
    tokens: list[str] = []
    shares: list[float] = []
    # One place more, where something new may follow: what was seen once is half believed.
    probability, score = len(places) / (len(places) + 1), 0.0
    while len(tokens) < max_tokens and probability >= min_probability:
        if len(places) == 1:
            # Nothing branches any more.
            rest = text[places[0] : places[0] + max_tokens - len(tokens)].partition(END)[0]
            tokens.append(rest)
            shares += [1.0] * len(rest)
            score += probability * len(rest)
            break
        followers: dict[str, list[int]] = {}
        for place in places:
            followers.setdefault(text[place : place + 1], []).append(place + 1)
        followers.pop("", None)
        followers.pop(END, None)
        if not followers:
            break
        token = max(followers, key=lambda t: len(followers[t]))
        share = len(followers[token]) / len(places)
        probability *= share
        if probability < min_probability:
            break
        tokens.append(token)
        shares.append(share)
        score += probability
        places = followers[token]
    return Path("".join(tokens), tuple(shares), score)
