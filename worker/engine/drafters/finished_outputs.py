"""Recently finished outputs, found again by their n-grams, separately for each group.

A group has one text: its outputs, each followed by `END`. Places count all text from the start,
even what was dropped from the front. For each anchor length `latest` has the last place after each
n-gram, and `before` leads to the one before it. A place that is not above `gone` ends a chain.
Indexing n-grams takes microseconds a token, so indexing and forgetting trail behind:

    start ≤ swept ≤ gone ≤ indexed ≤ the end of the text
"""

from array import array
from collections import deque
from collections.abc import Callable, Sequence

from worker.engine.drafters.suffix_paths import ANCHORS, MAX_PLACES
from worker.engine.drafters.texts import END, spell
from worker.errors import IntegrityError

# Only the end of a longer output is stored: one answer should not take the room of many.
MAX_OUTPUT_TOKENS = 4096

Group = tuple[str, str]  # tenant and cache salt


class OutputText:
    """The outputs of one group, as a `suffix_paths.Corpus`. Owned by `FinishedOutputs`."""

    def __init__(self) -> None:
        self.text = ""
        self._coming: deque[str] = deque()  # outputs that are to be joined to `text`
        self._start = 0  # the place of the first character of `text`
        self._swept = 0
        self._gone = 0
        self._indexed = 0
        # By length of the n-gram: apart, so that no table grows so large that its growing is felt.
        self._latest: dict[int, dict[str, int]] = {length: {} for length in ANCHORS}
        # By length, and by place - `_start` - 1; 0 where there is none before.
        self._before = {length: array("q") for length in ANCHORS}

    def places(self, anchor: str) -> list[int]:
        start, gone = self._start, self._gone
        before = self._before[len(anchor)]
        found: list[int] = []
        place = self._latest[len(anchor)].get(anchor, 0)
        while place > gone and len(found) < MAX_PLACES:
            found.append(place - start)
            place = before[place - start - 1]
        return found

    def append(self, output: str) -> None:
        self._coming.append(output)

    def index(self, num_tokens: int) -> int:
        """Index up to `num_tokens` more tokens (ends count); return how many. If fewer, all are."""
        num_done = 0
        while num_done < num_tokens:
            first = self._indexed - self._start
            if first == len(self.text) and not self._join(num_tokens - num_done):
                break
            output = max(self.text.rfind(END, 0, first) + 1, self._gone - self._start)
            end = self.text.index(END, first) + 1
            stop = min(end, first + num_tokens - num_done)
            self._name(output, first, stop, stop == end)
            num_done += stop - first
            self._indexed += stop - first
        return num_done

    def _join(self, num_tokens: int) -> bool:
        """Append waiting outputs of `num_tokens` tokens or all to the text; others cost no copy."""
        num_joined, texts = 0, [self.text]
        while self._coming and num_joined < num_tokens:
            texts += (self._coming.popleft(), END)
            num_joined += len(texts[-2]) + 1
        self.text = "".join(texts)
        return num_joined > 0

    def _name(self, output: int, first: int, stop: int, is_end: bool) -> None:
        """Index the places after characters [first, stop) of the output that begins at `output`;
        with `is_end` the last character is its end, which is in no n-gram.
        """
        text, start = self.text, self._start
        last = stop - is_end
        for length, before in self._before.items():
            latest = self._latest[length]
            named = min(max(first, output + length - 1), last)  # none ends at those before
            before.extend([0] * (named - first))
            for behind in range(named + 1, last + 1):
                ngram = text[behind - length : behind]
                before.append(latest.get(ngram, 0))
                latest[ngram] = start + behind
            before.extend([0] * is_end)

    def drop_oldest(self) -> int:
        """Drop the oldest output, which must exist; return its number of tokens."""
        first = self._gone - self._start
        if first == len(self.text):
            return len(self._coming.popleft())
        end = self.text.index(END, first)
        indexed = self._indexed - self._start
        if indexed <= end:  # the rest of it has no names: no lookup finds it
            self.text = self.text[:indexed] + self.text[end:]
            for before in self._before.values():
                before.append(0)
            self._indexed += 1
            self._gone = self._indexed
        else:
            self._gone = self._start + end + 1
        return end - first

    def sweep(self, num_tokens: int) -> int:
        """Forget up to `num_tokens` more tokens of dropped outputs; return how many. If fewer, none
        is left to forget.
        """
        text, start = self.text, self._start
        num_done = min(num_tokens, self._gone - self._swept)
        first = self._swept - start
        for length, latest in self._latest.items():
            for behind in range(max(first + 1, length), first + num_done + 1):
                ngram = text[behind - length : behind]
                if latest.get(ngram) == start + behind:
                    del latest[ngram]
        self._swept += num_done
        num_gone = self._gone - start
        if self._swept == self._gone and num_gone and 2 * num_gone >= len(text):
            self.text = text[num_gone:]
            for before in self._before.values():
                del before[:num_gone]
            self._start = self._gone
        return num_done

    @property
    def is_empty(self) -> bool:
        return self._gone - self._start == len(self.text) and not self._coming

    @property
    def outputs(self) -> list[str]:
        return [*self.text[self._gone - self._start :].split(END)[:-1], *self._coming]

    def check_integrity(self) -> None:
        """Raise IntegrityError unless lookups find the same as if only the rest had been learnt."""
        end = self._start + len(self.text)
        if not self._start <= self._swept <= self._gone <= self._indexed <= end:
            raise IntegrityError("places are out of order")
        fresh = OutputText()
        for output in self.outputs:
            fresh.append(output)
        fresh.index(self._indexed - self._gone)
        shift = self._gone - self._start
        for length, latest in fresh._latest.items():
            names = self._latest[length]
            if any(place <= self._swept for place in names.values()):
                raise IntegrityError("n-grams of what is gone are named after the sweep")
            if latest.keys() != {ngram for ngram, place in names.items() if place > self._gone}:
                raise IntegrityError("n-grams of other outputs than the stored ones can be found")
            for ngram in latest:
                if [place + shift for place in fresh.places(ngram)] != self.places(ngram):
                    raise IntegrityError(f"places of {ngram!r} are not those in the stored outputs")


class FinishedOutputs:
    """The outputs of all groups: at most `max_outputs`, with at most `max_tokens` tokens in all.

    Beyond that, the tenant that has most loses the oldest output of its largest group: no tenant
    can empty another's memory. The weight of an output is its share of both limits. An indexed
    token takes some 600 bytes (measured), most of that for n-grams seen nowhere else.
    """

    def __init__(self, max_outputs: int, max_tokens: int) -> None:
        self._max_outputs = max_outputs
        self._max_tokens = max_tokens
        self._groups: dict[Group, OutputText] = {}
        # The weights of each tenant's groups; tenants and groups in the order of their changes.
        self._weights: dict[str, dict[Group, int]] = {}
        # Groups with something to index, or to sweep; in turn.
        self._to_index: dict[Group, None] = {}
        self._to_sweep: dict[Group, None] = {}
        self._num_outputs = 0
        self._num_tokens = 0

    @property
    def num_outputs(self) -> int:
        return self._num_outputs

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    def of(self, group: Group) -> OutputText | None:
        text = self._groups.get(group)
        return None if text is None or text.is_empty else text

    def add(self, group: Group, token_ids: Sequence[int]) -> None:
        """Keep an output, of a long one only the end; to make room, drop others, or this one."""
        most = min(MAX_OUTPUT_TOKENS, self._max_tokens)
        if not token_ids or not self._max_outputs or not most:
            return
        output = spell(token_ids[-most:])
        if group not in self._groups:
            self._groups[group] = OutputText()
        self._groups[group].append(output)
        self._to_index[group] = None
        self._count(group, 1, len(output))
        while self._num_outputs > self._max_outputs or self._num_tokens > self._max_tokens:
            self._drop()

    def learn(self, num_tokens: int) -> None:
        """Index up to `num_tokens` more tokens of added outputs, and forget more of dropped ones:
        so the index never grows far beyond the limit.
        """
        self._work(self._to_sweep, OutputText.sweep, 2 * num_tokens)
        self._work(self._to_index, OutputText.index, num_tokens)

    def _work(
        self, groups: dict[Group, None], work: Callable[[OutputText, int], int], num_tokens: int
    ) -> None:
        while groups and num_tokens > 0:
            group = next(iter(groups))
            del groups[group]
            num_done = work(self._groups[group], num_tokens)
            if num_done == num_tokens:
                groups[group] = None  # there may be more, when the others have had their turn
            elif self._groups[group].is_empty and group not in self._to_sweep:
                del self._groups[group]
                self._to_index.pop(group, None)
            num_tokens -= num_done

    def _drop(self) -> None:
        # Among equals, the one changed least recently. There are few when outputs are long.
        weights = max(self._weights.values(), key=lambda groups: sum(groups.values()))
        group = max(weights, key=weights.__getitem__)
        num_tokens = self._groups[group].drop_oldest()
        self._to_sweep[group] = None
        self._count(group, -1, -num_tokens)

    def _count(self, group: Group, num_outputs: int, num_tokens: int) -> None:
        self._num_outputs += num_outputs
        self._num_tokens += num_tokens
        change = num_tokens * self._max_outputs + num_outputs * self._max_tokens
        weights = self._weights.pop(group[0], {})
        weight = weights.pop(group, 0) + change
        if weight:
            weights[group] = weight
        if weights:
            self._weights[group[0]] = weights

    def check_integrity(self) -> None:
        stored = {group: text.outputs for group, text in self._groups.items()}
        if self._num_outputs != sum(map(len, stored.values())):
            raise IntegrityError(f"{self._num_outputs} outputs are counted, others are stored")
        if self._num_tokens != sum(len(o) for outputs in stored.values() for o in outputs):
            raise IntegrityError(f"{self._num_tokens} tokens are counted, others are stored")
        if self._num_outputs > self._max_outputs or self._num_tokens > self._max_tokens:
            raise IntegrityError("more is stored than allowed")
        for group, outputs in stored.items():
            weight = sum(len(o) * self._max_outputs + self._max_tokens for o in outputs)
            if self._weights.get(group[0], {}).get(group, 0) != weight:
                raise IntegrityError(f"{group!r} weighs {weight}")
            if not outputs and group not in self._to_sweep:
                raise IntegrityError(f"nothing is left of {group!r} but its tables")
        for text in self._groups.values():
            text.check_integrity()
