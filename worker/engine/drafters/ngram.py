"""Prompt lookup: the tokens that followed an earlier occurrence of the last few tokens.

The match is the longest n in [min, max] such that the last n tokens occur earlier in the sequence
too (the two may overlap), and of all such places the earliest, as in vLLM.
"""

from dataclasses import dataclass

from worker.engine.drafters.interface import DraftContext
from worker.engine.drafters.texts import SequenceTexts, tokens_of
from worker.types import Drafts

# How far a match is measured beyond what the search needs, and how much of the end of a text is
# looked at for other places of it: both only say how sure the drafts are.
_MAX_MEASURED_TOKENS = 32
_MAX_COUNTED_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class NgramMatch:
    """An earlier occurrence, [`start`, `start` + `length`), of the last `length` tokens."""

    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length


def find_match(text: str, shortest: int, longest: int) -> NgramMatch | None:
    """Return the longest match of a spelled sequence's end, of `shortest` to `longest` tokens."""
    if len(text) <= shortest:
        return None
    end = len(text) - 1  # an earlier place ends before the last token
    best: NgramMatch | None = None
    length, start = shortest, 0
    while length <= longest:
        # A longer match ends further right, so the search continues from here: one pass, in C.
        start = text.find(text[-length:], start, end)
        if start < 0:
            break
        more = _measure(text, NgramMatch(start, length), longest)
        length += more
        start -= more
        best = NgramMatch(start, length)
        length += 1
    return best


def _measure(text: str, match: NgramMatch, longest: int) -> int:
    """Return by how many tokens the match extends to the left, up to `longest` in all."""
    here, there = match.start - 1, len(text) - match.length - 1
    most = min(longest - match.length, match.start)
    more = 0
    while more < most and text[here - more] == text[there - more]:
        more += 1
    return more


class NgramDrafter:
    """Drafts what followed the last `shortest` to `longest` tokens. Owns the text of each sequence.

    The confidence after a match of L tokens (measured up to 32) is L / (L + 1); draft i, if those
    before it are accepted, ends a match of L + i tokens. That of the first draft is multiplied by
    the share of the match's places in the last 8,192 tokens that continue with it.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        if not 1 <= shortest <= longest:
            raise ValueError(f"no lookup of {shortest} to {longest} tokens")
        self._shortest = shortest
        self._longest = longest
        self.texts = SequenceTexts()

    def propose(self, context: DraftContext, num_tokens: int) -> Drafts | None:
        text = self.texts.read(context.seq_id, context.token_ids)
        match = find_match(text, self._shortest, self._longest)
        if match is None:
            return None
        drafts = text[match.end : match.end + num_tokens]
        length = match.length + _measure(text, match, _MAX_MEASURED_TOKENS)
        sure = [(length + i) / (length + i + 1) for i in range(len(drafts))]
        sure[0] *= _agreement(text, match)
        return Drafts(len(text), tokens_of(drafts), tuple(sure))

    def end(self, context: DraftContext, learns: bool) -> None:
        self.texts.forget(context.seq_id)

    def learn(self, num_tokens: int) -> None: ...


def _agreement(text: str, match: NgramMatch) -> float:
    """Return the share of the recent places of the match that continue as the match does."""
    since = max(0, len(text) - _MAX_COUNTED_TOKENS)
    ngram = text[-match.length :]
    is_older = match.start < since
    num_places = text.count(ngram, since, len(text) - 1) + is_older
    num_alike = text.count(ngram + text[match.end], since) + is_older
    return num_alike / num_places
