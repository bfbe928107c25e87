"""Engines that `speculation.py` measures, in process and built as a worker builds them."""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from worker.config import EngineConfig, SchedulerConfig, SpeculativeConfig
from worker.engine.core import EngineCore
from worker.engine.messages import AddRequest
from worker.engine.pipeline import OverlappedPipeline
from worker.engine.process.build import build_core
from worker.executor import start
from worker.executor.interface import Executor
from worker.models.llama import LlamaModel
from worker.models.loader import load_model
from worker.types import EngineStats, ModelOutput, SamplingParams, SchedulerOutput

BLOCK_SIZE = 16
MAX_MODEL_LEN = 1024
MAX_BATCH = 64


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a run."""

    prompt: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Slice:
    """The part of a job's decoding in one turn of an engine."""

    seconds: float
    cpu_seconds: float  # of all threads
    num_decoded: int  # tokens


@dataclass(slots=True)
class Outcome:
    """The outcome of a job on one engine. Decoding begins once every request has a first token."""

    answers: list[tuple[int, ...]]
    prompt_seconds: float = 0.0
    slices: list[Slice] = field(default_factory=list)
    num_shares: int = 0  # sequences' shares of steps, of decoding
    num_runs: int = 0  # shares with drafts
    num_draft_tokens: int = 0
    num_accepted: int = 0

    @property
    def decode_seconds(self) -> float:
        """All of its turns."""
        return sum(one.seconds for one in self.slices)

    @property
    def decode_cpu_seconds(self) -> float:
        """The same in the time that processors were at it."""
        return sum(one.cpu_seconds for one in self.slices)

    @property
    def whole_seconds(self) -> float:
        """Seconds of the whole run, prompts included."""
        return self.prompt_seconds + self.decode_seconds

    @property
    def num_decoded(self) -> int:
        """Tokens, but for the first ones."""
        return sum(one.num_decoded for one in self.slices)


class Turn:
    """When an engine's steps may run, on the `thread` that all engines share. Owns the engine's
    clock, which pauses meanwhile, and the steps that it has submitted too late for its turn.

    So engines that take turns do not disturb each other, nor what they learn of step times; and
    none is some percent slower for good by where its thread's buffers happen to lie in memory.
    """

    def __init__(self, thread: ThreadPoolExecutor) -> None:
        self._thread = thread
        self._lock = threading.Lock()  # guards the next two
        self._is_now = False
        self._steps: deque[Callable[[], None]] = deque()
        self._spent = 0.0
        self._since: float | None = None

    def pipeline(self, executor: Executor) -> OverlappedPipeline:
        """The usual one, on `executor`."""
        return _InTurn(executor, self)

    def clock(self) -> float:
        """Seconds of turns so far."""
        return self._spent + (0.0 if self._since is None else time.perf_counter() - self._since)

    def submit(
        self, run: Callable[[SchedulerOutput], ModelOutput], step: SchedulerOutput
    ) -> Future[ModelOutput]:
        """Run the step, behind those before it, when it is its engine's turn."""
        future: Future[ModelOutput] = Future()

        def work() -> None:
            try:
                future.set_result(run(step))
            except BaseException as error:  # noqa: BLE001 - for the one that waits
                future.set_exception(error)

        with self._lock:
            self._steps.append(work)
            if self._is_now:
                self._thread.submit(self._run_next)
        return future

    def __enter__(self) -> None:
        self._since = time.perf_counter()
        with self._lock:
            self._is_now = True
            for _ in self._steps:
                self._thread.submit(self._run_next)

    def __exit__(self, *exc: object) -> None:
        """Wait for the step that runs, and let no other begin."""
        with self._lock:
            self._is_now = False
        self._thread.submit(lambda: None).result()
        self._spent = self.clock()
        self._since = None

    def _run_next(self) -> None:
        with self._lock:
            if not self._is_now:
                return  # it is submitted again
            work = self._steps.popleft()
        work()


class _InTurn(OverlappedPipeline):
    """The usual pipeline, whose steps wait for their engine's turn."""

    def __init__(self, executor: Executor, turn: Turn) -> None:
        super().__init__(executor)
        self._turn = turn

    def submit(self, step: SchedulerOutput) -> None:
        self._running.append(self._turn.submit(self._run, step))


def engine_config(
    path: Path,
    dtype: str,
    num_threads: int | None,
    eos_token_ids: tuple[int, ...],
    speculative: SpeculativeConfig | None,
) -> EngineConfig:
    """A worker's defaults but for the prefix cache, which would let later rounds skip prompts."""
    limits = SchedulerConfig(4096, MAX_BATCH, MAX_MODEL_LEN)
    return EngineConfig(
        "torch",
        str(path),
        dtype,
        block_size=BLOCK_SIZE,
        num_blocks_override=MAX_BATCH * MAX_MODEL_LEN // BLOCK_SIZE // 4,
        enable_prefix_caching=False,
        num_threads=num_threads,
        scheduler=limits,
        eos_token_ids=eos_token_ids,
        speculative=speculative,
    )


class Shared:
    """The model, loaded for the first engine, and the thread of steps: all engines share both.

    Of engines with weights of their own, built alike, some are several percent faster than others
    for good, by where their weights happen to lie in memory.
    """

    def __init__(self) -> None:
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="executor")
        self._model: LlamaModel | None = None

    def __enter__(self) -> None:
        start.load_model = self._load

    def __exit__(self, *exc: object) -> None:
        start.load_model = load_model

    def _load(self, *args: Any, **options: Any) -> LlamaModel:
        if self._model is None:
            self._model = load_model(*args, **options)
        return self._model


class Subject:
    """One engine, which lives as long as the benchmark: what it learns, it keeps.

    A job is begun, which runs its prompts, gone on with in turns, and ended.
    """

    def __init__(self, name: str, core: EngineCore, turn: Turn) -> None:
        self.name = name
        self._core = core
        self._turn = turn
        self._count = 0
        self._stats = EngineStats()
        self._before = self._stats
        self._names: dict[str, int] = {}
        self._answers: list[list[int]] = []
        self._outcome = Outcome([])

    @classmethod
    def build(cls, name: str, config: EngineConfig, shared: Shared) -> Subject:
        """Build one as a worker does, but for the shared parts. Raises WorkerError."""
        turn = Turn(shared.thread)
        with shared:
            return cls(name, build_core(config, turn.clock, turn.pipeline)[0], turn)

    def run(self, job: Sequence[Request], tenant: str) -> Outcome:
        """A whole job in one turn."""
        self.begin(job, tenant)
        self.advance(None)
        return self.end()

    def begin(self, job: Sequence[Request], tenant: str) -> None:
        """Ask for everything at once and wait until every request has a token.

        An engine that does not wait for results has begun its next step by then, which is decoding.
        Outputs of another `tenant` are nothing that drafts are made from.
        """
        self._names = {f"{self._count}-{index}": index for index in range(len(job))}
        self._count += 1
        self._before = self._stats
        self._answers = [[] for _ in job]
        self._outcome = Outcome([])
        with self._turn:
            started = time.perf_counter()
            for name, index in self._names.items():
                prompt, params = list(job[index].prompt), job[index].params
                self._core.add(AddRequest(name, prompt, params, 0.0, tenant=tenant))
            while self._core.has_work and not all(self._answers):
                self._step()
            since, since_cpu = time.perf_counter(), time.process_time()
        seconds, cpu_seconds = time.perf_counter() - since, time.process_time() - since_cpu
        self._outcome.prompt_seconds = since - started
        self._outcome.slices.append(Slice(seconds, cpu_seconds, 0))
        self._outcome.num_shares = 0

    def advance(self, num_decoded: int | None) -> bool:
        """Continue until `tokens` are decoded, None: to the end. Returns False at the end."""
        left = None if num_decoded is None else num_decoded - self._outcome.num_decoded
        if not self._core.has_work:
            return False
        decoded = 0
        since, since_cpu = time.perf_counter(), time.process_time()
        with self._turn:
            while self._core.has_work and (left is None or decoded < left):
                decoded += self._step()
        seconds, cpu_seconds = time.perf_counter() - since, time.process_time() - since_cpu
        self._outcome.slices.append(Slice(seconds, cpu_seconds, decoded))
        return self._core.has_work

    def end(self) -> Outcome:
        """The outcome of the job."""
        assert not self._core.has_work
        outcome = self._outcome
        before, after = self._before.speculation, self._stats.speculation
        outcome.answers = [tuple(answer) for answer in self._answers]
        outcome.num_runs = after.num_drafts - before.num_drafts
        outcome.num_draft_tokens = after.num_draft_tokens - before.num_draft_tokens
        outcome.num_accepted = after.num_accepted_tokens - before.num_accepted_tokens
        return outcome

    def shutdown(self) -> None:
        """Give its memory back."""
        with self._turn:
            self._core.shutdown()

    def _step(self) -> int:
        """One step; how many tokens came."""
        step = self._core.step()
        if step is None:
            return 0
        self._stats = step.stats
        number = 0
        for output in step.outputs:
            assert output.error is None, output.error
            self._answers[self._names[output.request_id]].extend(output.token_ids)
            number += len(output.token_ids)
            self._outcome.num_shares += bool(output.token_ids)
        return number


def side_by_side(
    subjects: Sequence[Subject], job: Sequence[Request], tenant: str, steps_a_turn: int, rng: Random
) -> list[Outcome]:
    """Run one job on every engine, all decoding it in turns of some tokens a request: the same part
    of every answer at about the same time. The order is random in every turn, so that no engine
    always follows the same one; none has two turns in a row, of which the second would find its
    weights in the caches.
    """
    for subject in subjects:
        subject.begin(job, tenant)
    turn = 0
    left = list(subjects)
    while left:
        turn += 1
        last = left[-1]
        rng.shuffle(left)
        if left[0] is last:
            left.append(left.pop(0))
        decoded = turn * steps_a_turn * len(job)
        left = [subject for subject in left if subject.advance(decoded)]
    return [subject.end() for subject in subjects]


@dataclass(frozen=True, slots=True)
class Pair:
    """A job on a method's engine, and on the plain ones beside it."""

    plain: tuple[Outcome, ...]
    drafted: Outcome

    def plain_mean(self, name: str) -> float:
        """A time of the plain engines, on the average."""
        return statistics.fmean(getattr(outcome, name) for outcome in self.plain)


@dataclass(slots=True)
class Tally:
    """Outcomes of one method on one workload, and of plain decoding beside it, by job."""

    pairs: dict[int, list[Pair]] = field(default_factory=lambda: defaultdict(list))

    def add(self, job: int, plain: Sequence[Outcome], outcome: Outcome) -> None:
        """Take in a job that was done."""
        self.pairs[job].append(Pair(tuple(plain), outcome))

    def row(self) -> dict[str, float]:
        """The figures of the table; docs/speculation.md explains the columns."""
        plain, drafted = self._seconds("decode_seconds")
        plain_cpu, drafted_cpu = self._seconds("decode_cpu_seconds")
        every = [pair for pairs in self.pairs.values() for pair in pairs]
        tokens = sum(pairs[0].drafted.num_decoded for pairs in self.pairs.values())
        runs, drafts = self._total("num_runs"), self._total("num_draft_tokens")
        accepted, shares = self._total("num_accepted"), max(self._total("num_shares"), 1)
        return {
            "plain/s": tokens / plain,
            "with/s": tokens / drafted,
            "speed-up": plain / drafted,
            "±": _ratio_error(self.pairs.values()),
            "cpu": plain_cpu / drafted_cpu,
            "whole": statistics.median(
                pair.plain_mean("whole_seconds") / pair.drafted.whole_seconds for pair in every
            ),
            "accepted": accepted / drafts if drafts else math.nan,
            "length": 1 + accepted / runs if runs else math.nan,
            "tok/step": self._total("num_decoded") / shares,
            "mean_k": drafts / shares,
            "requests": sum(len(pair.drafted.answers) for pair in every),
            "differ": sum(
                mine != theirs
                for pair in every
                for mine, theirs in zip(pair.drafted.answers, pair.plain[0].answers, strict=True)
            ),
        }

    def _seconds(self, name: str) -> tuple[float, float]:
        """A time of every job once, plain and with drafts: medians over rounds."""
        rounds = self.pairs.values()
        return (
            sum(statistics.median(pair.plain_mean(name) for pair in pairs) for pairs in rounds),
            sum(statistics.median(getattr(p.drafted, name) for p in pairs) for pairs in rounds),
        )

    def _total(self, which: str) -> int:
        return sum(getattr(p.drafted, which) for pairs in self.pairs.values() for p in pairs)


def _ratio_error(jobs: Iterable[Sequence[Pair]]) -> float:
    """The standard error of the mean ratio of times, relative to it, from the spread of rounds."""
    logs = [
        [math.log(p.plain_mean("decode_seconds") / p.drafted.decode_seconds) for p in pairs]
        for pairs in jobs
    ]
    freedom = sum(len(own) - 1 for own in logs)
    if not freedom:
        return math.nan
    spread = sum((one - statistics.fmean(own)) ** 2 for own in logs for one in own)
    return math.sqrt(spread / freedom / sum(map(len, logs)))
