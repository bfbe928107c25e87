"""The interface between the engine and what owns the device."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Protocol

from worker.types import Adapter, Drafts, Draw, ModelOutput, ScheduledSequence, SchedulerOutput


class Ticket(Protocol):
    """A step that was submitted."""

    def collect(self) -> ModelOutput:
        """Wait for the step and return its result; called once, from any thread, even during
        `submit`. Every sequence with `samples` has its draws in the result, or is in `failed`.

        Raises `DeviceMemoryError`; later steps may have run on the draws of this step.
        """


class Executor(Protocol):
    """Runs steps in the order of `submit`, each after the previous one. It stores the KV cache and
    the last token of each sequence of the previous step; everything else is in `SchedulerOutput`.
    """

    def submit(self, step: SchedulerOutput) -> Ticket:
        """Hand a step to the device, from one thread at a time; it need not have run on return. At
        most one submitted step may be uncollected, and none if that step has or makes drafts and
        this one does not follow it.

        If a sequence `takes_pending`, its token is the one that the previous step drew for it; if
        there is none, its result is ignored.

        Raises `DeviceMemoryError`: block copies, loads and saves of the step are complete then, the
        slots that it was to write are undefined, and other steps may be submitted.
        """

    def read_adapter(self, adapter: Adapter) -> Future[Any]:
        """Begin to read an adapter for `SchedulerOutput.adapters`. May fail with `ModelError`."""

    def sleep(self, level: int) -> None:
        """Free memory: at level 1 the KV cache (and the device's copy of the weights), at level 2
        the weights too. Called only between steps; `submit` must not be called until `wake`.
        """

    def wake(self, tags: frozenset[str]) -> None:
        """Restore "weights", "kv_cache" or both after `sleep`; the KV cache is empty."""

    def shutdown(self) -> None:
        """Release the device. Idempotent."""


class KvMemory(Protocol):
    """An executor whose KV can move: it carries out `SchedulerOutput.kv_loads` and `kv_saves`.
    Blocks that a step saves are readable, for any reader, when the next step has ended.
    """

    @property
    def kv_shape(self) -> tuple[str, int, int, int]:
        """Return the cache's number format, layers, KV heads and head dimension."""

    @property
    def kv_facts(self) -> tuple[object, ...]:
        """Return everything else that its KV depends on, besides the weights."""

    def read_kv(self, blocks: Sequence[int], num_tokens: int) -> memoryview:
        """Copy the KV of the first tokens in `blocks` to the host: [num_tokens, layers, 2,
        kv_heads, head_dim], as bytes. A step that writes other slots may run meanwhile. Raises
        `DeviceMemoryError`.
        """

    def host_memory(self, num_bytes: int) -> memoryview:
        """Allocate memory for `kv_saves` that the device accesses fast. Raises `ConfigError`."""


def execute(executor: Executor, step: SchedulerOutput) -> ModelOutput:
    """Run one step to its end."""
    return executor.submit(step).collect()


@dataclass(frozen=True, slots=True)
class Finished:
    """The ticket of a step that ran while it was submitted."""

    output: ModelOutput

    def collect(self) -> ModelOutput:
        return self.output


class HostExecutor(Executor):
    """An executor whose tokens are plain ints once a step has run: `execute` sees all of them."""

    _previous = ModelOutput({})

    def execute(self, step: SchedulerOutput) -> ModelOutput:
        """Run one step to its end."""
        raise NotImplementedError

    def read_adapter(self, adapter: Adapter) -> Future[Any]:
        """Return at once: there is nothing to read, so any name and path is valid."""
        done: Future[Any] = Future()
        done.set_result(adapter)
        return done

    def sleep(self, level: int) -> None:
        return

    def wake(self, tags: frozenset[str]) -> None:
        return

    def shutdown(self) -> None:
        return

    def submit(self, step: SchedulerOutput) -> Ticket:
        """Run the step, without sequences whose pending token was not drawn."""
        known = with_tokens(step, self._previous)
        moves = known.block_copies or known.kv_loads or known.kv_saves
        is_empty = not (known.sequences or moves)
        self._previous = ModelOutput({}) if is_empty else self.execute(known)
        return Finished(self._previous)


def with_tokens(step: SchedulerOutput, previous: ModelOutput) -> SchedulerOutput:
    """Return the step with the tokens that the previous one drew, and the drafts that it made."""
    if not any(sequence.takes_pending for sequence in step.sequences):
        return step
    sequences = []
    for sequence in step.sequences:
        if not sequence.takes_pending:
            sequences.append(sequence)
        elif not (drawn := previous.sampled.get(sequence.seq_id)):
            continue
        elif sequence.limit:
            sequences.append(_settled(sequence, drawn, previous.drafts.get(sequence.seq_id)))
        else:
            sequences.append(with_token(sequence, drawn[0].token_id))
    return replace(step, sequences=tuple(sequences))


def _settled(
    sequence: ScheduledSequence, drawn: Sequence[Draw], made: Drafts | None
) -> ScheduledSequence:
    accepted = len(drawn) - 1
    start = sequence.start + accepted
    drafts = () if made is None else made.token_ids[: max(0, sequence.limit - start - 1)]
    return replace(
        sequence,
        token_ids=[drawn[-1].token_id, *drafts],
        start=start,
        samples=tuple(replace(s, position=s.position + accepted) for s in sequence.samples),
        takes_pending=False,
        num_drafts=len(drafts),
        limit=0,
    )


def with_token(sequence: ScheduledSequence, token_id: int) -> ScheduledSequence:
    return replace(
        with_history(sequence, token_id),
        token_ids=[*sequence.token_ids, token_id],
        takes_pending=False,
    )


def with_history(sequence: ScheduledSequence, token_id: int) -> ScheduledSequence:
    """Return the sequence with its pending token in the history of draws that depend on it."""
    samples = (
        replace(s, history=[*s.history, token_id]) if s.params.needs_history else s
        for s in sequence.samples
    )
    return replace(sequence, samples=tuple(samples))
