"""Steps run in order, and host executors see the tokens of the step before."""

import threading
from collections.abc import Callable

import pytest

from worker.engine.pipeline import InlinePipeline, OverlappedPipeline, Pipeline
from worker.executor.interface import HostExecutor, execute
from worker.types import (
    Draw,
    ModelOutput,
    SampleSpec,
    SamplingParams,
    ScheduledSequence,
    SchedulerOutput,
)

PENALIZED = SamplingParams(max_tokens=9, presence_penalty=1.0)


def decode(
    step: int, start: int, *, pending: bool = True, history: tuple[int, ...] = ()
) -> SchedulerOutput:
    params = PENALIZED if history else SamplingParams(max_tokens=9)
    sample = SampleSpec(params, start + 1, history=history)
    tokens = [] if pending else [7]
    sequence = ScheduledSequence(0, tokens, start, (3,), (sample,), pending)
    return SchedulerOutput(step, (sequence,))


class Counting(HostExecutor):
    def __init__(self) -> None:
        self.seen: list[SchedulerOutput] = []
        self.threads: set[str] = set()
        self.go_on = threading.Event()
        self.go_on.set()
        self.fails = False
        self.is_shut_down = False

    def execute(self, step: SchedulerOutput) -> ModelOutput:
        assert self.go_on.wait(60)
        if self.fails:
            raise RuntimeError("device lost")
        self.seen.append(step)
        self.threads.add(threading.current_thread().name)
        return ModelOutput({s.seq_id: (Draw(s.token_ids[-1] + 1),) for s in step.sequences})

    def shutdown(self) -> None:
        self.is_shut_down = True


@pytest.fixture(params=["inline", "overlapped"])
def make(request: pytest.FixtureRequest) -> Callable[[Counting], Pipeline]:
    if request.param == "inline":
        return lambda executor: InlinePipeline(executor, depth=2)
    return OverlappedPipeline


def test_a_pending_token_comes_from_the_step_before(make: Callable[[Counting], Pipeline]) -> None:
    executor = Counting()
    pipeline = make(executor)
    pipeline.submit(decode(1, 0, pending=False))
    pipeline.submit(decode(2, 1))
    first = pipeline.wait()
    pipeline.submit(decode(3, 2))
    rest = [pipeline.wait(), pipeline.wait()]
    pipeline.shutdown()
    assert [r.sampled[0][0].token_id for r in (first, *rest)] == [8, 9, 10]
    assert [list(step.sequences[0].token_ids) for step in executor.seen] == [[7], [8], [9]]
    assert not any(s.takes_pending for step in executor.seen for s in step.sequences)
    assert executor.is_shut_down


def test_the_history_of_a_draw_grows_by_the_pending_token() -> None:
    executor = Counting()
    execute(executor, decode(1, 2, pending=False))
    execute(executor, decode(2, 3, history=(1, 2, 3)))
    execute(executor, decode(3, 4))
    _, filled, plain = (step.sequences[0] for step in executor.seen)
    assert list(filled.samples[0].history) == [1, 2, 3, 8]
    assert (filled.start, filled.block_table, filled.samples[0].position) == (3, (3,), 4)
    assert list(plain.samples[0].history) == []


def test_a_sequence_whose_draw_failed_is_left_out() -> None:
    executor = Counting()
    step = SchedulerOutput(2, (decode(2, 1).sequences[0], ScheduledSequence(1, [5], 0, (4,))))
    assert list(execute(executor, step).sampled) == [1]


def test_an_empty_step_never_reaches_the_executor(make: Callable[[Counting], Pipeline]) -> None:
    executor = Counting()
    pipeline = make(executor)
    pipeline.submit(decode(1, 1))
    assert pipeline.wait() == ModelOutput({})
    pipeline.shutdown()
    assert executor.seen == []


def test_overlapped_steps_run_beside_the_caller() -> None:
    executor = Counting()
    executor.go_on.clear()
    pipeline = OverlappedPipeline(executor)
    pipeline.submit(decode(1, 0, pending=False))
    pipeline.submit(decode(2, 1))
    assert executor.seen == []
    executor.go_on.set()
    assert pipeline.wait().sampled[0][0].token_id == 8
    assert pipeline.wait().sampled[0][0].token_id == 9
    pipeline.shutdown()
    assert threading.current_thread().name not in executor.threads
    assert len(executor.threads) == 1


def test_an_error_of_the_executor_is_raised_by_wait(make: Callable[[Counting], Pipeline]) -> None:
    """No later step runs on a cache that is in doubt."""
    executor = Counting()
    executor.fails = True
    pipeline = make(executor)
    pipeline.submit(decode(1, 0, pending=False))
    with pytest.raises(RuntimeError, match="device lost"):
        pipeline.wait()
    if isinstance(pipeline, OverlappedPipeline):
        executor.fails = False
        pipeline.submit(decode(2, 1, pending=False))
        with pytest.raises(RuntimeError, match="device lost"):
            pipeline.wait()
    pipeline.shutdown()
    assert executor.seen == []
