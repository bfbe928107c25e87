"""Recently finished outputs, found again by their n-grams, each group's apart.

Theory of operation. A group has one text: its outputs, each with an `END` behind it. A place is a
number that goes on counting when text is dropped from the front. Of each anchor length (see
`suffix_paths`) `latest` names the last place behind each n-gram, and `before` leads from there to
the one before it, and so on, as in an LZ77 hash chain. Outputs are dropped oldest first, so that
what is dropped is always the far end of all its chains: a place that is not above `gone` ends a
chain, and a name goes when its latest place does. The text itself is cut when half of it is gone.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence

from worker.engine.drafters.suffix_paths import ANCHORS, MAX_PLACES
from worker.engine.drafters.texts import END, spell
from worker.errors import IntegrityError

# Of a longer output only the end is kept, so that learning it takes a few milliseconds at most.
MAX_OUTPUT_TOKENS = 4096


def _ngrams(text: str, length: int) -> list[str]:
    return [text[end - length : end] for end in range(length, len(text) + 1)]


class OutputText:
    """The outputs of one group, as a `suffix_paths.Corpus`. Owned by `FinishedOutputs`."""

    def __init__(self) -> None:
        self.text = ""
        self._start = 0  # the place of the first character of `text`
        self._gone = 0  # places up to here have been dropped
        # By length of the n-gram: apart, so that no table grows so large that its growing is felt.
        self._latest: dict[int, dict[str, int]] = {length: {} for length in ANCHORS}
        # By length, and by place - `_start` - 1; 0 where there is none before.
        self._before = {length: array("q") for length in ANCHORS}

    def places(self, anchor: str) -> list[int]:
        """Behind the latest of `anchor`, whose length is one of ANCHORS."""
        start, gone = self._start, self._gone
        before = self._before[len(anchor)]
        found: list[int] = []
        place = self._latest[len(anchor)].get(anchor, 0)
        while place > gone and len(found) < MAX_PLACES:
            found.append(place - start)
            place = before[place - start - 1]
        return found

    def append(self, output: str) -> None:
        """Learn one more output."""
        start = self._start + len(self.text)
        self.text += output + END
        for length, before in self._before.items():
            latest = self._latest[length]
            num_without = min(length - 1, len(output))  # tokens that no n-gram ends at yet
            before.extend([0] * num_without)
            place = start + num_without
            for ngram in _ngrams(output, length):
                place += 1
                before.append(latest.get(ngram, 0))
                latest[ngram] = place
            before.append(0)  # behind the end

    def drop_oldest(self, num_tokens: int) -> None:
        """Forget the oldest output, which has `num_tokens`."""
        first = self._gone - self._start
        output = self.text[first : first + num_tokens]
        for length, latest in self._latest.items():
            place = self._gone + length - 1
            for ngram in _ngrams(output, length):
                place += 1
                if latest.get(ngram) == place:
                    del latest[ngram]
        self._gone += num_tokens + 1
        num_gone = self._gone - self._start
        if 2 * num_gone >= len(self.text):
            self.text = self.text[num_gone:]
            for before in self._before.values():
                del before[:num_gone]
            self._start = self._gone

    @property
    def num_tokens_kept(self) -> int:
        """Characters in memory, those gone but not cut off yet and the ends included."""
        return len(self.text)

    @property
    def outputs(self) -> list[str]:
        """Everything that can still be found, oldest first."""
        return self.text[self._gone - self._start :].split(END)[:-1]

    def check_integrity(self) -> None:
        """Raise IntegrityError unless the same is found as if only what is left had been learnt."""
        fresh = OutputText()
        for output in self.outputs:
            fresh.append(output)
        shift = self._gone - self._start
        for length, latest in fresh._latest.items():
            if latest.keys() != self._latest[length].keys():
                raise IntegrityError("n-grams of other outputs than those kept can be found")
            for ngram in latest:
                if [place + shift for place in fresh.places(ngram)] != self.places(ngram):
                    raise IntegrityError(f"places of {ngram!r} are not those in the outputs kept")


class FinishedOutputs:
    """The last `max_outputs` outputs of all groups together, of `max_tokens` tokens in all at most.
    The sole owner of what is learnt from sequences that have ended.

    An indexed token takes up to some 300 bytes, most of that for n-grams seen nowhere else.
    """

    def __init__(self, max_outputs: int, max_tokens: int) -> None:
        self._max_outputs = max_outputs
        self._max_tokens = max_tokens
        self._groups: dict[tuple[str, str], OutputText] = {}
        self._ages: deque[tuple[tuple[str, str], int]] = deque()  # group and tokens, oldest first
        self._num_tokens = 0

    @property
    def num_outputs(self) -> int:
        """Outputs kept."""
        return len(self._ages)

    @property
    def num_tokens(self) -> int:
        """Tokens of the outputs kept."""
        return self._num_tokens

    def of(self, group: tuple[str, str]) -> OutputText | None:
        """What one group's sequences put out; None when nothing of it is left."""
        return self._groups.get(group)

    def add(self, group: tuple[str, str], token_ids: Sequence[int]) -> None:
        """Keep an output, the end of it if it is long, and forget the oldest ones for it."""
        most = min(MAX_OUTPUT_TOKENS, self._max_tokens)
        if not token_ids or not self._max_outputs or not most:
            return
        output = spell(token_ids[-most:])
        self._num_tokens += len(output)
        self._ages.append((group, len(output)))
        while len(self._ages) > self._max_outputs or self._num_tokens > self._max_tokens:
            self._drop_oldest()
        if group not in self._groups:
            self._groups[group] = OutputText()
        self._groups[group].append(output)

    def _drop_oldest(self) -> None:
        group, num_tokens = self._ages.popleft()
        self._num_tokens -= num_tokens
        self._groups[group].drop_oldest(num_tokens)
        if not self._groups[group].num_tokens_kept:
            del self._groups[group]

    def check_integrity(self) -> None:
        """Raise IntegrityError unless counts, ages and what can be found agree."""
        kept: dict[tuple[str, str], list[int]] = {}
        for group, num_tokens in self._ages:
            kept.setdefault(group, []).append(num_tokens)
        if kept != {g: [len(o) for o in t.outputs] for g, t in self._groups.items()}:
            raise IntegrityError("the outputs kept are not those whose ages are known")
        if self._num_tokens != sum(num_tokens for _, num_tokens in self._ages):
            raise IntegrityError(f"{self._num_tokens} tokens are counted, others are kept")
        if len(self._ages) > self._max_outputs or self._num_tokens > self._max_tokens:
            raise IntegrityError("more is kept than may be")
        for text in self._groups.values():
            text.check_integrity()
