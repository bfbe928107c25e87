"""Commands to the engine as a whole: pause, sleep, reset, dump. The core runs them between steps.

A pause that lets everything finish does not hold up later commands; one that undoes it ends it with
an error. Pause and sleep are two reasons not to schedule, each undone by its own command.
"""

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from worker.engine.features.adapters import Adapters
from worker.engine.messages import (
    Command,
    CommandReply,
    Configure,
    DumpCache,
    LoadAdapter,
    Pause,
    RequestOutput,
    ResetPrefixCache,
    Resume,
    Sleep,
    UnloadAdapter,
    WakeUp,
)
from worker.engine.scheduling.admission import PauseState
from worker.engine.scheduling.scheduler import Scheduler
from worker.errors import ConfigError
from worker.executor.interface import Executor

MODES = ("abort", "wait", "keep")
MEMORY_TAGS = frozenset({"weights", "kv_cache"})


class _Configurable(Protocol):
    def configure(self, settings: dict[str, object]) -> None: ...


@dataclass(slots=True)
class CommandRunner:
    """Sole owner of the engine's paused or sleeping state, and of commands not answered yet.

    `outputs` are the last outputs of aborted requests, `replies` the answers; the reader removes
    them. All methods but `configure` and those about adapters require that no step is in flight.
    """

    scheduler: Scheduler
    executor: Executor
    sleep_level: int | None = None
    outputs: list[RequestOutput] = field(default_factory=list)
    replies: list[CommandReply] = field(default_factory=list)
    loading: list[tuple[LoadAdapter, Future[Any]]] = field(default_factory=list)
    _paused: PauseState = PauseState.UNPAUSED
    _missing: frozenset[str] = frozenset()  # memory that sleep released and wake has not restored
    _pending: list[Pause | Sleep] = field(default_factory=list)

    def run(self, command: Command) -> None:
        match command:
            case ResetPrefixCache():
                self._reset(command)
            case Pause():
                self._pause(command)
            case Resume():
                self._paused = PauseState.UNPAUSED
                self._cancel(Pause, "the engine was resumed before everything had finished")
                self._reply(command)
            case Sleep():
                self._sleep(command)
            case WakeUp():
                self._wake(command)
            case DumpCache():
                blocks = self.scheduler.blocks.cached_blocks()
                self.replies.append(CommandReply(command.command_id, blocks=blocks))
            case Configure():
                self.configure(command)
            case LoadAdapter() | UnloadAdapter():
                self.serve_adapter(command)
        self._update_pause_state()
        self.look()

    def look(self) -> None:
        """Answer the pending commands once everything has finished."""
        if not self._pending or self.scheduler.has_begun or self.scheduler.has_promised:
            return
        reached, self._pending = self._pending, []
        for command in reached:
            if isinstance(command, Sleep):
                self._fall_asleep(command)
            else:
                self._reply(command)
        self._update_pause_state()

    def configure(self, command: Configure) -> None:
        """Pass settings to the executor, at any time: a simulated step that hangs is released."""
        if not hasattr(self.executor, "configure"):
            self._reply(command, "this engine has no settings that can change while it runs")
            return
        try:
            cast(_Configurable, self.executor).configure(command.settings)
        except ConfigError as error:
            self._reply(command, str(error))
        else:
            self._reply(command)

    def serve_adapter(self, command: LoadAdapter | UnloadAdapter) -> None:
        """Begin to read an adapter, or give one up; may be called at any time."""
        adapters = self.scheduler.find(Adapters)
        if adapters is None:
            self._reply(command, "there are no adapters here: start the worker with --enable-lora")
        elif isinstance(command, LoadAdapter):
            self.loading.append((command, adapters.slots.load(command.adapter)))
        else:
            adapters.give_up(command.adapter)
            self._reply(command)

    def look_at_adapters(self) -> None:
        """Reply for the adapters that have been read; may be called at any time."""
        waiting = []
        for command, read in self.loading:
            if not read.done():
                waiting.append((command, read))
                continue
            error = read.exception()
            adapters = self.scheduler.find(Adapters)
            if error is not None and adapters is not None:
                adapters.give_up(command.adapter)
            self._reply(command, None if error is None else str(error))
        self.loading = waiting

    def _update_pause_state(self) -> None:
        state = self._paused
        if any(isinstance(command, Sleep) for command in self._pending):
            state = PauseState.PAUSED_NEW if state is PauseState.UNPAUSED else state
        if self.sleep_level is not None:
            state = PauseState.PAUSED_ALL
        self.scheduler.pause_state = state

    def _reply(self, command: Command, error: str | None = None) -> None:
        self.replies.append(CommandReply(command.command_id, error is None, error))

    def _cancel(self, kind: type[Pause | Sleep], error: str) -> None:
        for command in self._pending:
            if isinstance(command, kind):
                self._reply(command, error)
        self._pending = [c for c in self._pending if not isinstance(c, kind)]

    def _reset(self, command: ResetPrefixCache) -> None:
        if command.reset_running:
            self.scheduler.preempt_all()
        done = self.scheduler.reset_prefix_cache()
        self._reply(command, None if done else "requests are running; their blocks are in use")

    def _pause(self, command: Pause) -> None:
        if command.mode not in MODES:
            self._reply(command, f"mode {command.mode!r} is not one of {', '.join(MODES)}")
            return
        if command.mode == "keep":
            self._paused = PauseState.PAUSED_ALL
            self._cancel(Pause, "the engine was paused before everything had finished")
            self._reply(command)
            return
        if command.mode == "abort":
            self.outputs += self.scheduler.abort_all()
        self._paused = PauseState.PAUSED_NEW
        self._pending.append(command)

    def _sleep(self, command: Sleep) -> None:
        if command.mode not in MODES:
            self._reply(command, f"mode {command.mode!r} is not one of {', '.join(MODES)}")
        elif command.level not in (0, 1, 2):
            self._reply(command, f"level {command.level} is not one of 0, 1, 2")
        elif command.mode == "wait" and self.sleep_level is None:
            self._pending.append(command)
        else:
            if command.mode == "abort":
                self.outputs += self.scheduler.abort_all()
            self._fall_asleep(command)

    def _fall_asleep(self, command: Sleep) -> None:
        """Release memory that is still held, also to go from a lighter sleep to a deeper one."""
        level = self.sleep_level or 0
        if command.level > level or (command.level and self._missing != MEMORY_TAGS):
            self.scheduler.preempt_all()
            if command.level > 1:
                self.scheduler.leave_model()  # another model may be loaded
            self.scheduler.reset_prefix_cache(forget_tiers=command.level > 1)
            self.executor.sleep(command.level)
            self._missing = MEMORY_TAGS
        self.sleep_level = max(level, command.level)
        self._reply(command)

    def _wake(self, command: WakeUp) -> None:
        tags = MEMORY_TAGS if command.tags is None else frozenset(command.tags)
        unknown = tags - MEMORY_TAGS
        if unknown:
            known = ", ".join(sorted(MEMORY_TAGS))
            self._reply(command, f"tags {sorted(unknown)} are not among {known}")
            return
        self._cancel(Sleep, "the engine was woken up before everything had finished")
        back = tags & self._missing
        if back:
            self.executor.wake(back)
            self._missing -= back
        if not self._missing:
            self.sleep_level = None
        self._reply(command)
