"""The interface between the engine and what owns the device."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Protocol

from worker.types import Adapter, ModelOutput, SampleSpec, ScheduledSequence, SchedulerOutput


class Ticket(Protocol):
    """A step that was submitted."""

    def collect(self) -> ModelOutput:
        """Wait for the step and return its result; once. Every sequence with `samples` has exactly
        as many draws in it, or stands in `failed`. Another thread than that of `submit` may call
        it, also while the next step is being submitted.

        Raises `DeviceMemoryError` as `submit` does; steps behind it may have run on what it drew.
        """
        ...


class Executor(Protocol):
    """Runs steps in the order of `submit`, each after the one before it. It keeps the KV cache and
    the last token of each sequence of the step before; everything else is in `SchedulerOutput`.
    """

    def submit(self, step: SchedulerOutput) -> Ticket:
        """Hand a step to the device; it need not have run when this returns. At most one step may
        be submitted whose ticket is not collected, and none if that one has or makes drafts.

        Where a sequence `takes_pending`, its token is the one that the step before drew for it;
        what becomes of a sequence that drew none there does not matter. Called from one thread at
        a time, not always the same one.

        Raises `DeviceMemoryError` where memory is too small for the step. Its block copies, loads
        and saves are made then, in what it was to write there may be anything, and others may be
        submitted.
        """
        ...

    def read_adapter(self, adapter: Adapter) -> Future[Any]:
        """Begin to read an adapter from its files into the host's memory. What the result holds is
        for `SchedulerOutput.adapters` alone. Fails with `ModelError` where it cannot be used.
        """
        ...

    def sleep(self, level: int) -> None:
        """Give memory back: level 1 the KV cache (and the device's copy of the weights), level 2
        the weights too. Only between steps; `submit` must not be called until `wake`.
        """
        ...

    def wake(self, tags: frozenset[str]) -> None:
        """Take back "weights", "kv_cache" or both after `sleep`; the KV cache comes back empty."""
        ...

    def shutdown(self) -> None:
        """Give the device back. Idempotent."""
        ...


class KvMemory(Protocol):
    """An executor whose KV can move: it carries out `SchedulerOutput.kv_loads` and `kv_saves`.
    What a step saves is there, for any reader, when a step behind it has ended.
    """

    @property
    def kv_shape(self) -> tuple[str, int, int, int]:
        """Number format, layers, KV heads and numbers of a head of its cache."""
        ...

    @property
    def kv_facts(self) -> tuple[object, ...]:
        """What else its KV depends on, besides the weights."""
        ...

    def read_kv(self, blocks: Sequence[int], num_tokens: int) -> memoryview:
        """A copy, on the host, of the KV of the first tokens in `blocks`: [num_tokens, layers, 2,
        kv_heads, head_dim], as bytes. A step may run that writes to other slots. Raises
        `DeviceMemoryError`.
        """
        ...

    def host_memory(self, num_bytes: int) -> memoryview:
        """Memory for `kv_saves`, such that the device reads and writes it fast. Raises
        `ConfigError`.
        """
        ...


def execute(executor: Executor, step: SchedulerOutput) -> ModelOutput:
    """Run one step to its end."""
    return executor.submit(step).collect()


@dataclass(frozen=True, slots=True)
class Finished:
    """The ticket of a step that ran while it was submitted."""

    output: ModelOutput

    def collect(self) -> ModelOutput:
        """Its result."""
        return self.output


class HostExecutor(Executor):
    """An executor whose tokens are plain ints as soon as a step has run.

    Subclasses give `execute`, which sees every token: pending ones are filled in. There is no
    memory to give back.
    """

    _previous = ModelOutput({})

    def execute(self, step: SchedulerOutput) -> ModelOutput:
        """Run one step to its end."""
        raise NotImplementedError

    def read_adapter(self, adapter: Adapter) -> Future[Any]:
        """There is nothing to read: any name and path will do."""
        done: Future[Any] = Future()
        done.set_result(adapter)
        return done

    def sleep(self, level: int) -> None:
        """Does nothing."""
        return

    def wake(self, tags: frozenset[str]) -> None:
        """Does nothing."""
        return

    def shutdown(self) -> None:
        """Does nothing."""
        return

    def submit(self, step: SchedulerOutput) -> Ticket:
        """Run the step; without sequences whose pending token was not drawn."""
        known = _with_tokens(step, self._previous)
        moves = known.block_copies or known.kv_loads or known.kv_saves
        is_empty = not (known.sequences or moves)
        self._previous = ModelOutput({}) if is_empty else self.execute(known)
        return Finished(self._previous)


def _with_tokens(step: SchedulerOutput, previous: ModelOutput) -> SchedulerOutput:
    if not any(sequence.takes_pending for sequence in step.sequences):
        return step
    sequences = []
    for sequence in step.sequences:
        if not sequence.takes_pending:
            sequences.append(sequence)
        elif drawn := previous.sampled.get(sequence.seq_id):
            sequences.append(with_token(sequence, drawn[0].token_id))
    return replace(step, sequences=tuple(sequences))


def with_token(sequence: ScheduledSequence, token_id: int) -> ScheduledSequence:
    """A share that takes a pending token, now that the token is known."""
    return replace(
        with_history(sequence, token_id),
        token_ids=[*sequence.token_ids, token_id],
        takes_pending=False,
    )


def with_history(sequence: ScheduledSequence, token_id: int) -> ScheduledSequence:
    """The same share, with the pending token in the history of draws that look at it."""
    samples = tuple(_with_past(sample, token_id) for sample in sequence.samples)
    return replace(sequence, samples=samples)


def _with_past(sample: SampleSpec, token_id: int) -> SampleSpec:
    if not sample.params.needs_history:
        return sample
    history: Sequence[int] = [*sample.history, token_id]
    return replace(sample, history=history)
