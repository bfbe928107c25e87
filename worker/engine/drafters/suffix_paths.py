"""Likely continuations of a text, by what followed its last tokens elsewhere.

Theory of operation (SuffixDecoding, Oliaro et al., arXiv:2411.04975, as Arctic Inference and so
vLLM have it). The last m tokens are looked up for every m up to a depth. The places of a match are
where its next token would stand; from there the path takes the token that follows at most places,
and continues with those places alone. A place where the text ends counts among the places but not
for any token. The share of the places that continue with a token, multiplied along the path, is the
probability of the path; it begins with n / (n + 1) for n places, the one more being here, where
something new may follow: what was seen once is believed by half. Where it falls below a bound the
path ends; it also ends after (m * factor) tokens. The score of a path is the sum of the
probabilities of its tokens: how many of them are expected to stand. The m with the best score wins,
a longer one over a shorter. (Arctic counts the place here only where it looks in the sequence
itself, so that a token seen once in one other answer is always believed there. It is accepted less
often.)

Matches are not counted in a tree, which in Python costs kilobytes a token, but at the places where
a few of the last tokens, the anchor, occurred the last 32 times: 8 tokens for matches of 8 and
more, 3 for those of 3 to 7, 1 below. So the work of a look-up has a bound, and counts are of recent
text. Of tokens that follow equally often the one seen last is taken.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from worker.engine.drafters.texts import END

ANCHORS = (8, 3, 1)
MAX_PLACES = 32


@dataclass(frozen=True, slots=True)
class PathLimits:
    """Limits of a match's length, of a path's length for each token of its match, and of its
    probability.
    """

    max_match_tokens: int
    max_spec_factor: float
    min_probability: float

    def budget(self, match_tokens: int, num_tokens: int) -> int:
        """The most tokens of a path behind a match, when `num_tokens` are asked for."""
        return min(num_tokens, int(match_tokens * self.max_spec_factor + 1e-6))


@dataclass(frozen=True, slots=True)
class Path:
    """Tokens (spelled) that may follow a match of `match_tokens`, each with the share of the places
    that continue with it, given those before it; `score` is the expected number of accepted tokens.
    """

    text: str = ""
    shares: tuple[float, ...] = ()
    score: float = 0.0
    match_tokens: int = 0


class Corpus(Protocol):
    """Text in which anchors are looked up; what ends a text in it is `END` or the end."""

    @property
    def text(self) -> str:
        """All of it; places are indices into it."""
        ...

    def places(self, anchor: str) -> list[int]:
        """The positions behind the latest MAX_PLACES occurrences of `anchor`, latest first."""
        ...


class SequenceCorpus:
    """A sequence, searched from its end for earlier occurrences."""

    def __init__(self, text: str) -> None:
        self.text = text

    def places(self, anchor: str) -> list[int]:
        """Behind the latest of `anchor`, other than the one at the end of the sequence."""
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
    """The path of the best score behind the last tokens of `context`; an empty one if there is
    none.
    """
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
    """The number of tokens before `place` that are the last ones of `context`: `known` at least,
    `longest` at most.
    """
    most = min(longest, place)
    length = known
    while length < most and text[place - length - 1] == context[-length - 1]:
        length += 1
    return length


def likeliest_path(
    text: str, places: Sequence[int], max_tokens: int, min_probability: float
) -> Path:
    """The path that begins at `places`, at least one, the latest first."""
    tokens: list[str] = []
    shares: list[float] = []
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
