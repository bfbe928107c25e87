"""An executor whose answers depend on every token of the context as the block tables show it."""

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence

from worker.executor.interface import HostExecutor
from worker.types import (
    Drafts,
    Draw,
    KvLoad,
    ModelOutput,
    SampleSpec,
    ScheduledSequence,
    SchedulerOutput,
    TokenLogprobs,
)

VOCABULARY = 7
Guesses = tuple[tuple[int, ...], tuple[float, ...]]
TOKEN_BYTES = 2  # of KV
CORRUPT = 666_000  # a seed from here on draws well seed - CORRUPT times, then not at all


def next_token(context: Sequence[int], seed: int, banned: Sequence[int] = ()) -> int:
    token = zlib.crc32(bytes(context) + seed.to_bytes(8, "little")) % VOCABULARY
    return next(
        t % VOCABULARY for t in range(token, token + VOCABULARY) if t % VOCABULARY not in banned
    )


def kv_of(tokens: Sequence[int]) -> memoryview:
    return memoryview(bytes(x for place, token in enumerate(tokens) for x in (token, place)))


def logprobs_of(token: int, position: int) -> TokenLogprobs:
    return TokenLogprobs((token,), (-float(position),), 1)


def pooled(places: Iterable[tuple[int, int]]) -> list[float]:
    """Return the sum of made-up hidden states: whole numbers, so the result is exact."""
    rows = [(1.0, float(position), float((position + 1) * token)) for position, token in places]
    return [sum(column) for column in zip(*rows, strict=True)]


class PagedExecutor(HostExecutor):
    """An executor on a KV cache of plain tokens.

    It reads each context back through the block table, so a wrong table, a block that was reused
    too early, a hit on the wrong contents or a missing copy changes the answer or raises. With
    `truth`, the tokens of a sequence by its id, every token read is compared with it as well.

    Drafts are verified as real executors do, each row on its own context. `make_drafts` stands for
    a drafter on the device: (context, how to draw what follows it, most) → (tokens, confidences).
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.truth: Callable[[int], Sequence[int]] | None = None
        self.make_drafts: Callable[[list[int], SampleSpec, int], Guesses] | None = None
        self.may_be_followed = False
        self._slots: dict[tuple[int, int], tuple[int, int]] = {}  # (block, slot) → token, position
        self.steps: list[SchedulerOutput] = []
        self.asleep = 0

    def execute(self, step: SchedulerOutput) -> ModelOutput:
        assert not self.asleep
        self._move(step)
        for sequence in step.sequences:
            assert not sequence.takes_pending
            for position, token in enumerate(sequence.token_ids, sequence.start):
                self._slots[self._slot(sequence.block_table, position)] = (token, position)
        result = ModelOutput({}, may_be_followed=self.may_be_followed)
        for sequence in step.sequences:
            self._answer(sequence, result)
        self.steps.append(step)
        return result

    def _move(self, step: SchedulerOutput) -> None:
        for save in step.kv_saves:
            for block, into in zip(save.blocks, save.into, strict=True):
                slots = [self._slots[block, slot] for slot in range(self._block_size)]
                into[:] = bytes(number for slot in slots for number in slot)
        self._copy(step.block_copies)
        for load in step.kv_loads:
            self._load(load)

    def _copy(self, copies: Sequence[tuple[int, int]]) -> None:
        read = {
            (destination, slot): self._slots[source, slot]
            for source, destination in copies
            for slot in range(self._block_size)
            if (source, slot) in self._slots
        }
        assert len({destination for _, destination in copies}) == len(copies)
        self._slots.update(read)

    def _load(self, load: KvLoad) -> None:
        data = b"".join(load.parts)
        assert len(load.blocks) == -(-len(data) // TOKEN_BYTES // self._block_size)
        for index in range(len(data) // TOKEN_BYTES):
            token, position = data[TOKEN_BYTES * index : TOKEN_BYTES * (index + 1)]
            block, slot = divmod(index, self._block_size)
            self._slots[load.blocks[block], slot] = (token, position)

    def read_kv(self, blocks: Sequence[int], num_tokens: int) -> memoryview:
        slots = [self._slots[self._slot(blocks, place)] for place in range(num_tokens)]
        first = slots[0][1] if slots else 0  # the blocks may be those of the middle of a sequence
        assert [position for _, position in slots] == list(range(first, first + num_tokens))
        return memoryview(bytes(number for slot in slots for number in slot))

    def _answer(self, sequence: ScheduledSequence, result: ModelOutput) -> None:
        seq_id, num_drafts = sequence.seq_id, sequence.num_drafts
        end = sequence.start + len(sequence.token_ids) - num_drafts
        context = list(self._read(sequence.block_table, end + num_drafts))
        self._compare(seq_id, context[:end])
        targets = sequence.prompt_targets
        if any(self._is_corrupt(sample) for sample in sequence.samples):
            result.failed[seq_id] = "not a number"
            return
        if targets:
            rows = [*context[sequence.start + 1 :], targets[-1]][: len(targets)]
            assert rows == list(targets)
            result.prompt_logprobs[seq_id] = tuple(
                logprobs_of(target, position)
                for position, target in enumerate(targets, sequence.start + 1)
            )
        if sequence.num_pooled:
            places = enumerate(context[end - sequence.num_pooled : end], end - sequence.num_pooled)
            result.pooled[seq_id] = pooled(places)
        if num_drafts:
            assert (len(sequence.samples), end - sequence.start) == (1, 1)
            assert not targets
            result.sampled[seq_id] = tuple(self._verify(context, end, sequence))
        elif sequence.samples:
            result.sampled[seq_id] = tuple(self._draw(context, s) for s in sequence.samples)
        if sequence.num_to_draft:
            self._draft(context[:end], sequence, result)

    def _verify(self, context: list[int], end: int, sequence: ScheduledSequence) -> Iterator[Draw]:
        drafts = list(sequence.drafts)
        for row in range(len(drafts) + 1):
            sample = sequence.samples[0].after(drafts[:row])
            if self._is_corrupt(sample):
                return
            draw = self._draw(context[: end + row], sample)
            yield draw
            if drafts[row : row + 1] != [draw.token_id]:
                return

    def _draft(self, context: list[int], sequence: ScheduledSequence, result: ModelOutput) -> None:
        assert len(sequence.samples) == 1
        room = len(sequence.block_table) * self._block_size
        last = sequence.start + len(sequence.token_ids) + 1 + sequence.num_to_draft
        assert last <= room
        drawn = [draw.token_id for draw in result.sampled[sequence.seq_id]]
        after = sequence.samples[0].after(drawn)
        token_ids, confidences = self.make_drafts([*context, *drawn], after, sequence.num_to_draft)
        result.drafts[sequence.seq_id] = Drafts(after.position, token_ids, confidences)

    def _compare(self, seq_id: int, context: list[int]) -> None:
        if self.truth is not None:
            known = list(self.truth(seq_id))[: len(context)]
            assert context[: len(known)] == known

    @staticmethod
    def _is_corrupt(sample: SampleSpec) -> bool:
        seed = sample.params.seed
        return seed >= CORRUPT and sample.position - sample.num_prompt >= seed - CORRUPT

    @staticmethod
    def _draw(context: list[int], sample: SampleSpec) -> Draw:
        assert sample.position == len(context)
        assert list(sample.history) == (context if sample.params.needs_history else [])
        assert sample.num_prompt <= len(context)
        token = next_token(context, sample.params.seed, sample.banned_ids)
        wanted = sample.params.logprobs is not None
        return Draw(token, logprobs_of(token, sample.position) if wanted else None)

    def sleep(self, level: int) -> None:
        self._slots.clear()
        self.asleep = 2

    def wake(self, tags: frozenset[str]) -> None:
        self.asleep -= len(tags)

    def shutdown(self) -> None: ...

    def _slot(self, table: Sequence[int], position: int) -> tuple[int, int]:
        return table[position // self._block_size], position % self._block_size

    def _read(self, table: Sequence[int], end: int) -> Iterator[int]:
        for position in range(end):
            token, written_position = self._slots[self._slot(table, position)]
            assert written_position == position
            yield token
