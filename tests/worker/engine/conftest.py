"""An executor whose answers depend on every token of the context as the block tables show it."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence

import pytest

from worker.engine.messages import AddRequest
from worker.types import Draw, ModelOutput, SamplingParams, SchedulerOutput

VOCABULARY = 7


def next_token(context: Sequence[int], seed: int) -> int:
    """The token that follows a context: a hash of all of it."""
    return zlib.crc32(bytes(context) + seed.to_bytes(8, "little")) % VOCABULARY


class PagedExecutor:
    """Implements `Executor` on a KV cache of plain tokens.

    It reads each context back through the block table, so a wrong table, a block that was re-used
    too early, a hit on the wrong contents or a missing copy changes the answer or raises.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._slots: dict[tuple[int, int], tuple[int, int]] = {}  # (block, slot) → token, position
        self.steps: list[SchedulerOutput] = []

    def execute(self, step: SchedulerOutput) -> ModelOutput:
        """Copy, write every chunk, then read every context that samples."""
        for source, destination in step.block_copies:
            for slot in range(self._block_size):
                if (source, slot) in self._slots:
                    self._slots[destination, slot] = self._slots[source, slot]
        for sequence in step.sequences:
            for position, token in enumerate(sequence.token_ids, sequence.start):
                self._slots[self._slot(sequence.block_table, position)] = (token, position)
        sampled = {}
        for sequence in step.sequences:
            if sequence.samples:
                end = sequence.start + len(sequence.token_ids)
                assert all(sample.position == end for sample in sequence.samples)
                context = list(self._read(sequence.block_table, end))
                sampled[sequence.seq_id] = tuple(
                    Draw(next_token(context, sample.params.seed)) for sample in sequence.samples
                )
        self.steps.append(step)
        return ModelOutput(sampled)

    def sleep(self, level: int) -> None:
        """Forget every slot."""
        self._slots.clear()

    def wake(self, tags: frozenset[str]) -> None:
        """Nothing to take back."""

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
def follow() -> Callable[[Sequence[int], int], int]:
    """The next token of a context and seed, as the paged executor draws it."""
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
        **params: object,
    ) -> AddRequest:
        sampling = SamplingParams(**{"max_tokens": 4, **params})  # type: ignore[arg-type]
        return AddRequest(request_id, list(prompt), sampling, 0.0, priority, cache_salt)

    return make
