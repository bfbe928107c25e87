"""Runs the steps of an executor one after the other, the next one handed in early or not.

Theory of operation
-------------------
A step may be submitted before the one in front of it has ended. Where it then says `takes_pending`,
the token is not known yet: the pipeline puts it in when the step's turn comes, from the result of
the step before, so that an executor only ever sees plain tokens. A sequence whose draw failed in
the step before is left out; the scheduler ends it when it sees that result, and discards whatever
the next step gives.

Steps run strictly in the order of `submit`, each after the one before it has ended. The scheduler
relies on that when it gives away blocks that a step in flight still writes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Protocol

from worker.executor.interface import Executor
from worker.types import ModelOutput, SampleSpec, ScheduledSequence, SchedulerOutput


class Pipeline(Protocol):
    """Steps in, results out, in the same order. `depth` is how many may be in it at once."""

    depth: int

    def submit(self, step: SchedulerOutput) -> None:
        """Hand in the next step. Never blocks on the executor."""
        ...

    def wait(self) -> ModelOutput:
        """The result of the oldest step that was submitted and not waited for, when it is there.

        Raises whatever the executor raised; the pipeline can only be shut down then.
        """
        ...

    def shutdown(self) -> None:
        """End what runs and give the device back. Idempotent."""
        ...


class InlinePipeline:
    """Runs each step within `wait`, on the caller's thread. Implements `Pipeline`."""

    def __init__(self, executor: Executor, depth: int = 1) -> None:
        self.depth = depth
        self._executor = executor
        self._steps: deque[SchedulerOutput] = deque()
        self._previous: ModelOutput | None = None

    def submit(self, step: SchedulerOutput) -> None:
        """Keep the step until it is waited for."""
        self._steps.append(step)

    def wait(self) -> ModelOutput:
        """Run the oldest step."""
        result = execute(self._executor, self._steps.popleft(), self._previous)
        self._previous = result
        return result

    def shutdown(self) -> None:
        """Drop what was not run."""
        self._steps.clear()
        self._executor.shutdown()


class OverlappedPipeline:
    """Runs the steps on a thread of its own, two deep. Implements `Pipeline`."""

    depth = 2

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="executor")
        self._running: deque[Future[ModelOutput]] = deque()
        self._previous: ModelOutput | None = None  # belongs to the thread
        self._broken = False  # likewise

    def submit(self, step: SchedulerOutput) -> None:
        """Hand the step to the thread."""
        self._running.append(self._thread.submit(self._run, step))

    def wait(self) -> ModelOutput:
        """Block until the oldest step has ended."""
        return self._running.popleft().result()

    def shutdown(self) -> None:
        """Wait for the step that runs, drop the rest."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._running.clear()
        self._executor.shutdown()

    def _run(self, step: SchedulerOutput) -> ModelOutput:
        if self._broken:
            raise RuntimeError("a step before this one failed")
        self._broken = True
        self._previous = execute(self._executor, step, self._previous)
        self._broken = False
        return self._previous


def execute(executor: Executor, step: SchedulerOutput, previous: ModelOutput | None) -> ModelOutput:
    """Run a step after the one that gave `previous`."""
    known = resolve(step, previous)
    if not known.sequences and not known.block_copies:
        return ModelOutput({})
    return executor.execute(known)


def resolve(step: SchedulerOutput, previous: ModelOutput | None) -> SchedulerOutput:
    """The step with every pending token filled in from the result of the step before it.

    A sequence that has no token there, because it failed, is left out.
    """
    if not any(sequence.takes_pending for sequence in step.sequences):
        return step
    drawn = {} if previous is None else previous.sampled
    sequences = []
    for sequence in step.sequences:
        if not sequence.takes_pending:
            sequences.append(sequence)
        elif sequence.seq_id in drawn:
            sequences.append(_filled_in(sequence, drawn[sequence.seq_id][0].token_id))
    return SchedulerOutput(step.step, tuple(sequences), step.block_copies)


def _filled_in(sequence: ScheduledSequence, token_id: int) -> ScheduledSequence:
    return ScheduledSequence(
        sequence.seq_id,
        [*sequence.token_ids, token_id],
        sequence.start,
        sequence.block_table,
        tuple(_with_past(sample, token_id) for sample in sequence.samples),
        False,
        sequence.prompt_targets,
        sequence.num_prompt_logprobs,
    )


def _with_past(sample: SampleSpec, token_id: int) -> SampleSpec:
    if not sample.params.needs_history:
        return sample
    history: Sequence[int] = [*sample.history, token_id]
    return replace(sample, history=history)
