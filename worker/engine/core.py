"""The engine without its process: schedule, execute, update; and commands in between.

With overlap, a call of `step` schedules step N+1 and hands it over while step N still runs, then
waits for N. A command waits until no step is in flight, and ends its call of `step`, which reports
the state that the command left.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import msgspec

from worker.engine.cache.cache_events import CacheEvent
from worker.engine.control import CommandRunner
from worker.engine.features.grammars import ConstrainedOutputs
from worker.engine.features.interface import BackgroundFeature
from worker.engine.messages import (
    AddRequest,
    Command,
    CommandReply,
    Configure,
    LoadAdapter,
    RequestOutput,
    StepOutputs,
    UnloadAdapter,
    Vocabulary,
)
from worker.engine.pipeline import InlinePipeline, OverlappedPipeline, Pipeline
from worker.engine.scheduling.admission import PauseState
from worker.engine.scheduling.scheduler import Scheduler
from worker.engine.sequences.grammar import GrammarCompiler
from worker.errors import DeviceMemoryError
from worker.executor.interface import Executor
from worker.types import EngineStats, SchedulerOutput

logger = logging.getLogger(__name__)

TRANSFERS_SECONDS = 1.0


class EngineCore:
    """Runs one scheduler on one executor. `clock` is monotonic, in seconds. With `overlap` the
    executor runs on a thread of its own, one step behind the scheduler. Not thread-safe, except for
    `running_step` and `modelled_seconds`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        clock: Callable[[], float],
        overlap: bool = False,
        pipeline: Pipeline | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._clock = clock
        if pipeline is None:
            pipeline = OverlappedPipeline(executor) if overlap else InlinePipeline(executor)
        self._pipeline = pipeline
        self._control = CommandRunner(scheduler, executor)
        self._commands: deque[Command] = deque()
        self._in_flight: deque[SchedulerOutput] = deque()
        self._ended: list[RequestOutput] = []  # refused or aborted since the last step
        self._is_changed = False  # something to report although no step ran
        self._running_step: tuple[float, int] | None = None
        self._grammars: GrammarCompiler | None = None
        self._background = [f for f in scheduler.features if isinstance(f, BackgroundFeature)]
        self._reported_totals: tuple[int, ...] = ()

    @property
    def idle_seconds(self) -> float | None:
        """The time after which to `step` without work, to report KV that moved. None: never."""
        return TRANSFERS_SECONDS if self._background else None

    @property
    def bell(self) -> int | None:
        return next((f.bell for f in self._background if f.bell is not None), None)

    @property
    def has_work(self) -> bool:
        """True if `step` has something to run or to report, or a reply is to be taken."""
        return bool(
            self._ended
            or self._in_flight
            or self._commands
            or self._is_changed
            or self._control.replies
            or self._control.loading
            or self._scheduler.is_runnable
            or any(feature.is_asked for feature in self._background)
        )

    @property
    def is_compiling(self) -> bool:
        """True if `step` would only wait: for a grammar, an adapter or a disk."""
        if self._in_flight or self._ended:
            return False
        waits = bool(self._control.loading) or any(f.is_reading for f in self._background)
        return (waits and not self._scheduler.is_runnable) or self._scheduler.is_compiling

    @property
    def running_step(self) -> tuple[float, int] | None:
        """The start of the oldest step in flight, and its tokens. Any thread may read it."""
        return self._running_step

    @property
    def modelled_seconds(self) -> float:
        """The known duration of a running simulated step, else 0. Any thread may read it."""
        seconds: float = getattr(self._control.executor, "modelled_seconds", 0.0)
        return seconds

    def take_vocabulary(self, vocabulary: Vocabulary) -> None:
        self._grammars = GrammarCompiler(vocabulary)
        self._scheduler.attach(ConstrainedOutputs(self._grammars))

    def add(self, request: AddRequest) -> None:
        """Queue a request. The next `step` reports an error if it can never run."""
        self._ended += self._scheduler.add(request)
        self._is_changed = True

    def abort(self, request_ids: Iterable[str], hands_over: bool = False) -> None:
        """End answers and free their blocks now; the next `step` reports them. Unknown ids are
        ignored. With `hands_over` another engine will ask for their cached KV.
        """
        for request_id in request_ids:
            output = self._scheduler.abort(request_id, hands_over)
            if output is not None:
                self._ended.append(output)

    def command(self, message: Command) -> None:
        """Queue a command for the next calls of `step`; `take_replies` returns the reply once it is
        carried out. `Configure` and commands about adapters are carried out at once.
        """
        if isinstance(message, Configure):
            self._control.configure(message)
        elif isinstance(message, LoadAdapter | UnloadAdapter):
            self._control.serve_adapter(message)
        else:
            self._commands.append(message)

    def take_replies(self) -> list[CommandReply]:
        self._control.look_at_adapters()
        replies, self._control.replies = self._control.replies, []
        return replies

    def take_events(self) -> list[CacheEvent]:
        return self._scheduler.blocks.take_events()

    def announce(self) -> Sequence[CacheEvent]:
        below = [event for feature in self._background for event in feature.announce()]
        return [*self._scheduler.blocks.announcement(), *below]

    def step(self) -> StepOutputs | None:
        """Advance by one step and return everything to report, if there is anything.

        Blocks until a step has ended, except when the first of several is submitted. A step for
        which memory is too small is taken back. Any other error of the executor propagates: the KV
        cache is in doubt then, and the engine must end.
        """
        has_report = bool(self._ended) or self._is_changed or self._has_moved()
        outputs, self._ended = self._ended, []
        self._is_changed = False
        num_tokens = 0
        submitted = bool(not self._commands and self._submit())
        if self._in_flight and (not submitted or len(self._in_flight) >= self._pipeline.depth):
            num_tokens = self._in_flight[0].num_tokens
            outputs += self._take_in()
            has_report = True
        if not self._in_flight:
            has_report = self._run_commands(outputs) or has_report
        return StepOutputs(outputs, self._stats(), num_tokens) if has_report else None

    def _has_moved(self) -> bool:
        reported = self._reported_totals
        self._reported_totals = tuple(n for f in self._background for n in f.totals)
        return reported != self._reported_totals

    def shutdown(self) -> None:
        if self._grammars is not None:
            self._grammars.shutdown()
        for feature in self._background:
            feature.close()
        self._pipeline.shutdown()

    def _submit(self) -> bool:
        now = self._clock()
        step = self._scheduler.schedule(now)
        self._ended += self._scheduler.take_failed()
        if step is None:
            return False
        self._in_flight.append(step)
        if self._running_step is None:
            self._running_step = (now, step.num_tokens)
        self._pipeline.submit(step)
        return True

    def _take_in(self) -> list[RequestOutput]:
        try:
            result = self._pipeline.wait()
        except DeviceMemoryError as error:
            logger.warning("a step is taken back and sequences are preempted: %s", error)
            self._in_flight.clear()
            self._running_step = None
            return self._scheduler.take_back()
        now = self._clock()
        step = self._in_flight.popleft()
        self._running_step = (now, self._in_flight[0].num_tokens) if self._in_flight else None
        return self._scheduler.update(step, result, now)

    def _run_commands(self, outputs: list[RequestOutput]) -> bool:
        """Carry out the queued commands; return whether there were any. No step is in flight."""
        had_any = bool(self._commands)
        while self._commands:
            self._control.run(self._commands.popleft())
        self._control.look()
        outputs += self._control.outputs
        self._control.outputs = []
        return had_any

    def _stats(self) -> EngineStats:
        return msgspec.structs.replace(
            self._scheduler.stats(),
            sleep_level=self._control.sleep_level,
            is_paused=self._scheduler.pause_state is not PauseState.UNPAUSED,
        )
