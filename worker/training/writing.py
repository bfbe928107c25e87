"""Samples of text that the target writes or reads, with its hidden states.

Each row runs a conversation over the target's own paged cache, and the next one when it ends. Every
token runs through the target once, and its hidden state is stored. A shard is written when the last
of its conversations has ended, and existing shards are not made again. Every conversation has
random numbers of its own, from the seed and its number, and no row depends on another.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, takewhile
from pathlib import Path

import torch
from torch import Tensor

from worker.engine.policies import is_repeating
from worker.executor.kv_cache import allocate
from worker.executor.state import DeviceState
from worker.executor.step_batch import StepBatch
from worker.models.llama import LlamaModel
from worker.training.conversations import Continuation, Conversation
from worker.training.store import (
    TrainingSample,
    num_targets,
    read_samples,
    shard_indices,
    shard_path,
    write_samples,
)
from worker.types import RepetitionDetection, ScheduledSequence

SHARD_CONVERSATIONS = 32
_LOOP = RepetitionDetection(max_pattern_size=40, min_pattern_size=1, min_count=4)
# Number of likeliest tokens that are sampled from at a temperature above 0.
_TOP_K = 64
_BLOCK_TOKENS = 64
# Tokens of one row in a step: bounds a step's memory while texts are read.
_MAX_ROW_TOKENS = 64


@dataclass(slots=True)
class _Row:
    """The conversation of a row. The `token_ids` up to `position` have been run."""

    index: int
    program: Conversation
    noise: torch.Generator
    token_ids: list[int] = field(default_factory=list)
    is_target: list[bool] = field(default_factory=list)
    position: int = 0
    wanted: Continuation | None = None
    num_drawn: int = 0
    is_good: bool = False

    @property
    def is_run(self) -> bool:
        """True once all needed tokens have run; the last one is needed only for sampling."""
        return self.position >= len(self.token_ids) - (self.wanted is None)

    def advance(self, drawn: tuple[int, ...] | None) -> bool:
        try:
            while not isinstance(action := self.program.send(drawn), Continuation):
                drawn = None
                self.token_ids += action.token_ids
                self.is_target += [action.is_target] * len(action.token_ids)
        except StopIteration as end:
            self.wanted = None
            self.is_good = bool(end.value)
            return False
        self.wanted, self.num_drawn = action, 0
        return True

    def append(self, token_id: int, is_target: bool) -> None:
        self.token_ids.append(token_id)
        self.is_target.append(is_target)
        self.num_drawn += 1

    def cut_loop(self) -> bool:
        """Shorten an answer that has become a loop to two rounds of it; return whether it has."""
        if not is_repeating(self.token_ids, self.num_drawn, _LOOP):
            return False
        ids = self.token_ids
        size = next(n for n in range(1, len(ids)) if ids[-n:] == ids[-2 * n : -n])
        self.cut(len(ids) - size * (_LOOP.min_count - 2))
        return True

    def cut(self, length: int) -> None:
        del self.token_ids[length:], self.is_target[length:]


class TextWriter:
    """Writes shards of samples into a directory; sole owner of the running rows and their cache.

    `conversation` returns conversation i, or None after the last one.
    """

    def __init__(
        self,
        model: LlamaModel,
        size: tuple[int, int],
        conversation: Callable[[int], Conversation | None],
        eos_token_ids: Sequence[int],
    ) -> None:
        """`size`: the number of rows, and the largest number of tokens of a conversation."""
        num_rows, self._max_tokens = size
        self._model = model
        self._conversation = conversation
        self._eos_token_ids = frozenset(eos_token_ids)
        self._features = torch.zeros(*size, model.config.hidden_size, dtype=model.dtype)
        self._rows: list[_Row | None] = [None] * num_rows
        self._ended: dict[int, TrainingSample | None] = {}
        self._row_blocks = -(-self._max_tokens // _BLOCK_TOKENS)
        blocks = (num_rows * self._row_blocks, _BLOCK_TOKENS)
        self._cache = allocate(*blocks, model.config, model.dtype, model.device)
        self._state = DeviceState(_BLOCK_TOKENS, model.device)

    def write(
        self, directory: Path, num_tokens: int, seed: int, report: Callable[[int], bool]
    ) -> list[int]:
        """Make shards until the first ones contain `num_tokens` target tokens, or conversations run
        out; return the numbers of these first shards.

        `report` is called with the number of tokens after each step; it returns whether to
        continue.
        """
        sizes = {
            n: num_targets(read_samples(shard_path(directory, n))) for n in shard_indices(directory)
        }
        following = self._unmade(frozenset(sizes), seed)
        continues = _is_missing(sizes, num_tokens) and report(sum(sizes.values()))
        while continues:
            self._seat(following)
            if not any(self._rows):
                sizes |= self._file(directory, whole=False)
                break
            self._step()
            sizes |= self._file(directory, whole=True)
            ended = num_targets([sample for sample in self._ended.values() if sample is not None])
            running = sum(sum(row.is_target) for row in self._rows if row is not None)
            continues = report(sum(sizes.values()) + ended + running)
            continues = continues and _is_missing(sizes, num_tokens)
        self._rows = [None] * len(self._rows)
        self._ended.clear()
        return _leading(sizes, num_tokens)

    def _unmade(self, done: frozenset[int], seed: int) -> Iterator[_Row]:
        for index in count():
            if index // SHARD_CONVERSATIONS in done:
                continue
            program = self._conversation(index)
            if program is None:
                return
            noise = random.Random(f"{seed}/{index}").getrandbits(48)
            yield _Row(index, program, torch.Generator().manual_seed(noise))

    def _seat(self, following: Iterator[_Row]) -> None:
        for seat, row in enumerate(self._rows):
            while row is None and (new := next(following, None)) is not None:
                new.advance(None)
                new.cut(self._max_tokens)
                if len(new.token_ids) < 2 and new.wanted is None:
                    self._ended[new.index] = None
                    continue
                self._rows[seat] = row = new

    def _step(self) -> None:
        batch = StepBatch(
            [self._scheduled(seat, row) for seat, row in enumerate(self._rows) if row is not None],
            self._state,
        )
        states = self._model.states(batch.tensors, self._cache)
        on_host = states.cpu()
        drawing: list[tuple[int, _Row, Continuation]] = []
        last = 0
        for sequence in batch.sequences:
            first, last = last, last + len(sequence.token_ids)
            seat, row = sequence.seq_id, self._rows[sequence.seq_id]
            if row is None:
                continue
            end = sequence.start + last - first
            self._features[seat, sequence.start : end] = on_host[first:last]
            row.position = end
            if row.is_run and row.wanted is not None:
                drawing.append((last - 1, row, row.wanted))
            elif row.is_run:
                self._end(row)
        if drawing:
            logits = self._model.logits(states[[place for place, _, _ in drawing]]).cpu()
            for own, (_, row, wanted) in zip(logits, drawing, strict=True):
                self._draw(row, wanted, own)

    def _scheduled(self, seat: int, row: _Row) -> ScheduledSequence:
        blocks = range(seat * self._row_blocks, (seat + 1) * self._row_blocks)
        tokens = row.token_ids[row.position : row.position + _MAX_ROW_TOKENS]
        return ScheduledSequence(seat, tokens, row.position, tuple(blocks))

    def _draw(self, row: _Row, wanted: Continuation, logits: Tensor) -> None:
        heat = wanted.temperature
        token = int(logits.argmax()) if heat == 0 else _drawn(logits / heat, row.noise)
        row.append(token, wanted.is_target)
        room = self._max_tokens - len(row.token_ids)
        if row.cut_loop() or room <= 0:  # nothing sensible follows
            row.is_good = any(row.is_target)
            self._end(row)
        elif token in self._eos_token_ids or row.num_drawn == wanted.max_tokens:
            if not row.advance(tuple(row.token_ids[-row.num_drawn :])) and row.is_run:
                self._end(row)
            elif len(row.token_ids) > self._max_tokens:
                row.cut(row.position + 1)
                self._end(row)

    def _end(self, row: _Row) -> None:
        seat = self._rows.index(row)
        self._rows[seat] = None
        length = min(row.position + 1, len(row.token_ids))
        self._ended[row.index] = None
        if row.is_good and length > 1:
            self._ended[row.index] = TrainingSample(
                torch.tensor(row.token_ids[:length]),
                torch.tensor(row.is_target[:length]),
                self._features[seat, : length - 1].clone(),
            )

    def _file(self, directory: Path, whole: bool) -> dict[int, int]:
        """Write finished shards (without `whole`: all); return each one's target token count."""
        members: dict[int, list[int]] = {}
        for index in self._ended:
            members.setdefault(index // SHARD_CONVERSATIONS, []).append(index)
        written = {}
        for shard, indices in members.items():
            if whole and len(indices) < SHARD_CONVERSATIONS:
                continue
            ended = [self._ended.pop(index) for index in sorted(indices)]
            samples = [sample for sample in ended if sample is not None]
            write_samples(shard_path(directory, shard), samples)
            written[shard] = num_targets(samples)
        return written


def _drawn(scores: Tensor, noise: torch.Generator) -> int:
    """Sample a token from softmax(scores [V]) among the likeliest (Gumbel-max)."""
    best, ids = scores.topk(min(_TOP_K, len(scores)))
    gumbel = -torch.log(-torch.log(torch.rand(len(best), generator=noise).clamp_(1e-20, 1 - 1e-7)))
    return int(ids[(best + gumbel).argmax()])


def _leading(sizes: Mapping[int, int], num_tokens: int) -> list[int]:
    """Return the first shards, without a gap, that contain `num_tokens`; they end in any order."""
    chosen, held = [], 0
    for shard in takewhile(sizes.__contains__, count()):
        if held >= num_tokens:
            break
        chosen.append(shard)
        held += sizes[shard]
    return chosen


def _is_missing(sizes: Mapping[int, int], num_tokens: int) -> bool:
    return sum(sizes[n] for n in _leading(sizes, num_tokens)) < num_tokens
