"""An executor whose answers depend on every token of the context as the block tables show it."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence

import pytest

from worker.engine.messages import AddRequest
from worker.types import (
    Draw,
    ModelOutput,
    SampleSpec,
    SamplingParams,
    ScheduledSequence,
    SchedulerOutput,
    TokenLogprobs,
)

VOCABULARY = 7
CORRUPT = 666_000  # a seed from here on draws well seed - CORRUPT times, then not at all


def next_token(context: Sequence[int], seed: int, banned: Sequence[int] = ()) -> int:
    """The token that follows a context: a hash of all of it, that is not banned."""
    token = zlib.crc32(bytes(context) + seed.to_bytes(8, "little")) % VOCABULARY
    return next(
        t % VOCABULARY for t in range(token, token + VOCABULARY) if t % VOCABULARY not in banned
    )


def told(token: int, position: int) -> TokenLogprobs:
    """Made-up log probabilities from which token and position can be told."""
    return TokenLogprobs((token,), (-float(position),), 1)


class PagedExecutor:
    """Implements `Executor` on a KV cache of plain tokens.

    It reads each context back through the block table, so a wrong table, a block that was re-used
    too early, a hit on the wrong contents or a missing copy changes the answer or raises.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._slots: dict[tuple[int, int], tuple[int, int]] = {}  # (block, slot) → token, position
        self.steps: list[SchedulerOutput] = []
        self.asleep = 0

    def execute(self, step: SchedulerOutput) -> ModelOutput:
        """Copy, write every chunk, then read every context that samples."""
        assert not self.asleep
        self._copy(step.block_copies)
        for sequence in step.sequences:
            assert not sequence.takes_pending
            for position, token in enumerate(sequence.token_ids, sequence.start):
                self._slots[self._slot(sequence.block_table, position)] = (token, position)
        result = ModelOutput({})
        for sequence in step.sequences:
            self._answer(sequence, result)
        self.steps.append(step)
        return result

    def _copy(self, copies: Sequence[tuple[int, int]]) -> None:
        read = {
            (destination, slot): self._slots[source, slot]
            for source, destination in copies
            for slot in range(self._block_size)
            if (source, slot) in self._slots
        }
        assert len({destination for _, destination in copies}) == len(copies)
        self._slots.update(read)

    def _answer(self, sequence: ScheduledSequence, result: ModelOutput) -> None:
        end = sequence.start + len(sequence.token_ids)
        context = list(self._read(sequence.block_table, end))
        targets = sequence.prompt_targets
        if any(self._is_corrupt(sample, end) for sample in sequence.samples):
            result.failed[sequence.seq_id] = "not a number"
            return
        if targets:
            rows = [*context[sequence.start + 1 :], targets[-1]][: len(targets)]
            assert rows == list(targets)
            result.prompt_logprobs[sequence.seq_id] = tuple(
                told(target, position)
                for position, target in enumerate(targets, sequence.start + 1)
            )
        if sequence.samples:
            result.sampled[sequence.seq_id] = tuple(
                self._draw(context, sample) for sample in sequence.samples
            )

    @staticmethod
    def _is_corrupt(sample: SampleSpec, end: int) -> bool:
        seed = sample.params.seed
        return seed >= CORRUPT and end - sample.num_prompt >= seed - CORRUPT

    @staticmethod
    def _draw(context: list[int], sample: SampleSpec) -> Draw:
        assert sample.position == len(context)
        assert list(sample.history) == (context if sample.params.needs_history else [])
        assert sample.num_prompt <= len(context)
        token = next_token(context, sample.params.seed, sample.banned_ids)
        wanted = sample.params.logprobs is not None
        return Draw(token, told(token, sample.position) if wanted else None)

    def sleep(self, level: int) -> None:
        """Forget every slot."""
        self._slots.clear()
        self.asleep = 2

    def wake(self, tags: frozenset[str]) -> None:
        """Each of the two tags takes back one half."""
        self.asleep -= len(tags)

    def shutdown(self) -> None:
        """Nothing to give back."""

    def _slot(self, table: Sequence[int], position: int) -> tuple[int, int]:
        return table[position // self._block_size], position % self._block_size

    def _read(self, table: Sequence[int], end: int) -> Iterator[int]:
        for position in range(end):
            token, written_position = self._slots[self._slot(table, position)]
            assert written_position == position
            yield token


@pytest.fixture
def paged_executor() -> type[PagedExecutor]:
    """The class of the executor that reads its context through the block tables."""
    return PagedExecutor


@pytest.fixture
def follow() -> Callable[..., int]:
    """The next token of a context and seed (and banned tokens), as the paged executor draws it."""
    return next_token


@pytest.fixture
def make_request() -> Callable[..., AddRequest]:
    """Builds requests: id, prompt, then sampling parameters by name."""

    def make(
        request_id: str,
        prompt: Sequence[int],
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        branches: Sequence[str] = (),
        **params: object,
    ) -> AddRequest:
        sampling = SamplingParams(**{"max_tokens": 4, **params})  # type: ignore[arg-type]
        return AddRequest(
            request_id, list(prompt), sampling, 0.0, priority, cache_salt, list(branches)
        )

    return make
