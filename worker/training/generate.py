"""Has the target write and read what the head learns from, and keeps what it thought meanwhile.

Theory of operation. Rows of a `LockstepDecoder` each follow a conversation; one that ends makes
room for the next. Whether a token is given or drawn, it is run through the target once, and its
hidden state is kept: so nothing needs to be run a second time to learn from it. A shard is written
when the last of its conversations has ended, and shards that are there already are not made again:
a kill costs the shards at work. Every conversation has its own random numbers, drawn from the seed
and its number, and no row depends on another.

An answer that ran into a loop is cut where the loop begins to be one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, takewhile
from pathlib import Path

import torch
from torch import Tensor

from worker.engine.policies import is_repeating
from worker.models.llama import LlamaModel
from worker.training.conversations import Conversation, Draw
from worker.training.lockstep import LockstepDecoder
from worker.training.store import Sample, read_samples, shard_indices, shard_path, write_samples
from worker.types import RepetitionDetection

SHARD_CONVERSATIONS = 32
_LOOP = RepetitionDetection(max_pattern_size=40, min_pattern_size=1, min_count=4)
# Tokens that a draw at a temperature chooses from.
_TOP_K = 64


@dataclass(slots=True)
class _Row:
    """One row's conversation. `token_ids` up to `position` have been run."""

    index: int
    program: Conversation
    noise: torch.Generator
    token_ids: list[int] = field(default_factory=list)
    is_target: list[bool] = field(default_factory=list)
    position: int = 0
    asked: Draw | None = None
    num_drawn: int = 0
    kept: bool = False

    def go_on(self, drawn: tuple[int, ...] | None) -> bool:
        """Lead the conversation to its next draw; False when it has ended."""
        try:
            while not isinstance(action := self.program.send(drawn), Draw):
                drawn = None
                self.token_ids += action.token_ids
                self.is_target += [action.is_target] * len(action.token_ids)
        except StopIteration as end:
            self.asked = None
            self.kept = bool(end.value)
            return False
        self.asked, self.num_drawn = action, 0
        return True

    def say(self, token_id: int) -> None:
        """Append what was drawn."""
        if self.asked is not None:
            self.token_ids.append(token_id)
            self.is_target.append(self.asked.is_target)
            self.num_drawn += 1

    @property
    def drawn(self) -> tuple[int, ...]:
        """What was drawn since it was asked."""
        return tuple(self.token_ids[len(self.token_ids) - self.num_drawn :])

    def cut_loop(self) -> bool:
        """Whether what was said has become a loop; if so, two rounds of it are left."""
        if not is_repeating(self.token_ids, self.num_drawn, _LOOP):
            return False
        said = self.token_ids
        size = next(n for n in range(1, len(said)) if said[-n:] == said[-2 * n : -n])
        self.forget(len(said) - size * (_LOOP.min_count - 2))
        return True

    def forget(self, length: int) -> None:
        """Keep only the first `length` tokens."""
        del self.token_ids[length:], self.is_target[length:]


class Scribe:
    """Writes shards of samples into a directory; sole owner of the rows under way.

    `conversation` gives conversation i, or None when there are no more. `prefix` begins them all.
    """

    def __init__(
        self,
        model: LlamaModel,
        decoder: LockstepDecoder,
        conversation: Callable[[int], Conversation | None],
        eos_token_ids: Sequence[int],
        prefix: Sequence[int],
    ) -> None:
        self._model = model
        self._decoder = decoder
        self._conversation = conversation
        self._eos_token_ids = frozenset(eos_token_ids)
        self._prefix = list(prefix)[: decoder.max_tokens - 1]
        hidden = model.config.hidden_size
        shape = (decoder.num_rows, decoder.max_tokens, hidden)
        self._features = torch.zeros(shape, dtype=model.dtype)
        self._rows: list[_Row | None] = [None] * decoder.num_rows
        self._has_prefix = [True] * decoder.num_rows
        self._ended: dict[int, Sample | None] = {}

    def write(
        self, directory: Path, num_tokens: int, seed: int, told: Callable[[int], bool]
    ) -> list[int]:
        """Make shards until the first ones hold `num_tokens` target tokens, or conversations run
        out; returns the numbers of as many of the first as hold them.

        `told` is called with the tokens there are, before the first step and after every one; it
        says whether to go on.
        """
        sizes = {n: _num_targets(shard_path(directory, n)) for n in shard_indices(directory)}
        following = self._unmade(frozenset(sizes), seed)
        self._run_prefix()
        goes_on = _is_missing(sizes, num_tokens) and told(sum(sizes.values()))
        while goes_on:
            self._seat(following)
            if not any(self._rows):
                sizes |= self._file(directory, whole=False)
                break
            self._step()
            sizes |= self._file(directory, whole=True)
            goes_on = told(sum(sizes.values()) + self._num_unfiled())
            goes_on = goes_on and _is_missing(sizes, num_tokens)
        self._rows = [None] * len(self._rows)
        self._ended.clear()
        return _leading(sizes, num_tokens)

    # ---- below: private ---------------------------------------------------------------------

    def _unmade(self, done: frozenset[int], seed: int) -> Iterator[_Row]:
        index = 0
        while True:
            if index // SHARD_CONVERSATIONS not in done:
                program = self._conversation(index)
                if program is None:
                    return
                noise = torch.Generator().manual_seed(
                    random.Random(f"{seed}/{index}").getrandbits(48)
                )
                yield _Row(index, program, noise)
            index += 1

    def _seat(self, following: Iterator[_Row]) -> None:
        """Give every empty row the next conversation."""
        for seat, row in enumerate(self._rows):
            while row is None and (new := next(following, None)) is not None:
                new.go_on(None)
                new.forget(self._decoder.max_tokens)
                if len(new.token_ids) < 2 and new.asked is None:
                    self._ended[new.index] = None
                    continue
                new.position = self._known(seat, new)
                self._rows[seat] = row = new

    def _known(self, seat: int, row: _Row) -> int:
        """How many of a conversation's tokens its row has run already."""
        known = len(self._prefix) if self._has_prefix[seat] else 0
        if row.token_ids[:known] != self._prefix[:known]:
            known, self._has_prefix[seat] = 0, False
        return min(known, len(row.token_ids) - 1)

    def _run_prefix(self) -> None:
        """Run what all conversations begin with in every row, once."""
        for position, token_id in enumerate(self._prefix):
            num_rows = len(self._rows)
            hidden = self._decoder.step([token_id] * num_rows, [position] * num_rows)
            self._features[:, position] = hidden.cpu()

    def _step(self) -> None:
        """Run one token of every row, and draw where a row has come to its end."""
        rows = self._rows
        tokens = [0 if row is None else row.token_ids[row.position] for row in rows]
        # An empty row runs anything where the next conversation will overwrite it.
        idle = min(len(self._prefix), self._decoder.max_tokens - 1)
        hidden = self._decoder.step(tokens, [idle if r is None else r.position for r in rows])
        on_host = hidden.cpu()
        drawing: list[int] = []
        for seat, row in enumerate(rows):
            if row is None:
                continue
            self._features[seat, row.position] = on_host[seat]
            row.position += 1
            if row.position == len(row.token_ids) and row.asked is not None:
                drawing.append(seat)
            elif row.position >= len(row.token_ids) - 1 and row.asked is None:
                self._end(seat, row)
        if drawing:
            self._draw(drawing, self._model.logits(hidden[drawing]).cpu())

    def _draw(self, seats: Sequence[int], logits: Tensor) -> None:
        likeliest = logits.argmax(dim=-1).tolist()
        for seat, greedy, row_logits in zip(seats, likeliest, logits, strict=True):
            row = self._rows[seat]
            if row is None or row.asked is None:
                continue
            heat = row.asked.temperature
            row.say(greedy if heat == 0 else _drawn(row_logits / heat, row.noise))
            room = self._decoder.max_tokens - len(row.token_ids)
            if row.cut_loop() or room <= 0:  # nothing sensible follows
                row.kept = any(row.is_target)
                self._end(seat, row)
                continue
            ended = row.token_ids[-1] in self._eos_token_ids
            if not ended and row.num_drawn < row.asked.max_tokens:
                continue
            if not row.go_on(row.drawn) and row.position >= len(row.token_ids) - 1:
                self._end(seat, row)
            elif len(row.token_ids) > self._decoder.max_tokens:
                row.forget(row.position + 1)
                self._end(seat, row)

    def _end(self, seat: int, row: _Row) -> None:
        """Keep what a row has come to, and empty it."""
        self._rows[seat] = None
        length = min(row.position + 1, len(row.token_ids))
        self._ended[row.index] = None
        if row.kept and length > 1:
            self._ended[row.index] = Sample(
                torch.tensor(row.token_ids[:length]),
                torch.tensor(row.is_target[:length]),
                self._features[seat, : length - 1].clone(),
            )

    def _num_unfiled(self) -> int:
        """Target tokens that are in no shard yet."""
        ended = (int(s.is_target.sum()) for s in self._ended.values() if s is not None)
        return sum(ended) + sum(sum(row.is_target) for row in self._rows if row is not None)

    def _file(self, directory: Path, whole: bool) -> dict[int, int]:
        """Write the shards all of whose conversations have ended (or all that there are), and the
        target tokens of each.
        """
        counts: dict[int, list[int]] = {}
        for index in self._ended:
            counts.setdefault(index // SHARD_CONVERSATIONS, []).append(index)
        written = {}
        for shard, members in counts.items():
            if whole and len(members) < SHARD_CONVERSATIONS:
                continue
            ended = [self._ended.pop(index) for index in sorted(members)]
            samples = [sample for sample in ended if sample is not None]
            write_samples(shard_path(directory, shard), samples)
            written[shard] = sum(int(sample.is_target.sum()) for sample in samples)
        return written


def _drawn(scores: Tensor, noise: torch.Generator) -> int:
    """A token drawn from softmax(scores [V]) among the likeliest (Gumbel-max)."""
    best, ids = scores.topk(min(_TOP_K, len(scores)))
    gumbel = -torch.log(-torch.log(torch.rand(len(best), generator=noise).clamp_(1e-20, 1 - 1e-7)))
    return int(ids[(best + gumbel).argmax()])


def _leading(sizes: Mapping[int, int], num_tokens: int) -> list[int]:
    """The first shards, up to a missing one, as many as it takes to hold `num_tokens`: not the luck
    of which conversation ended first.
    """
    chosen, held = [], 0
    for shard in takewhile(sizes.__contains__, count()):
        if held >= num_tokens:
            break
        chosen.append(shard)
        held += sizes[shard]
    return chosen


def _is_missing(sizes: Mapping[int, int], num_tokens: int) -> bool:
    return sum(sizes[n] for n in _leading(sizes, num_tokens)) < num_tokens


def _num_targets(path: Path) -> int:
    return sum(int(sample.is_target.sum()) for sample in read_samples(path))
