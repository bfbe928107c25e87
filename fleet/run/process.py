"""One supervised child process: started, watched, restarted, and always ended with its parent."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fleet.errors import FleetError
from fleet.run import reaper

FIRST_DELAY_SECONDS = 0.2
LONGEST_DELAY_SECONDS = 30.0  # shorter than the patience of a front
CALM_SECONDS = 60.0  # a child that lived this long starts again without delay
_TAIL_LINES = 8


@dataclass(frozen=True, slots=True)
class Program:
    """A program to run. `environment` is added to ours; `log_path` receives all its output."""

    name: str
    argv: tuple[str, ...]
    log_path: Path
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RestartDelay:
    delay_seconds: float = FIRST_DELAY_SECONDS

    def after(self, lived_seconds: float) -> RestartDelay:
        if lived_seconds >= CALM_SECONDS:
            return RestartDelay()
        return RestartDelay(min(2 * self.delay_seconds, LONGEST_DELAY_SECONDS))


# Isolated: it imports nothing from the current directory or from PYTHONPATH.
_REAPER = (sys.executable, "-I", "-S", reaper.__file__)


class Reaper:
    """Owns the process that ends our children if this one is killed. Under the lock `turn`,
    children start one at a time, so that signals are handled in between.
    """

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        # In a session of its own: a Ctrl-C in the terminal must not reach it.
        self._process = subprocess.Popen(
            _REAPER,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    async def start(self, program: Program) -> asyncio.subprocess.Process:
        """Start a program. Until its group is adopted, it is only the reaper's script, which ends
        with this process by itself. Raises `FleetError`.
        """
        try:
            with program.log_path.open("ab") as log:
                process = await asyncio.create_subprocess_exec(
                    *(*_REAPER, *program.argv),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **program.environment},
                    start_new_session=True,
                )
        except OSError as error:
            raise FleetError(f"{program.name} cannot be started: {error}") from error
        self.adopt(process.pid)
        if process.stdin is not None:
            process.stdin.write(b"\n")
            process.stdin.close()
        return process

    def adopt(self, group: int) -> None:
        self._write(f"+{group}\n")

    def release(self, group: int) -> None:
        self._write(f"-{group}\n")

    def remove(self, path: Path) -> None:
        """Have `path` removed if this process dies; files are removed at a regular end, too."""
        self._write(f"/{path}\n")

    def close(self) -> None:
        """Let the reaper end all groups that were not released, and wait; folders stay."""
        self._write(".\n")
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        self._process.wait()

    def _write(self, line: str) -> None:
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(line.encode())
                self._process.stdin.flush()


class Child:
    """Owns a program's restarts. `run` raises `FleetError` when the program ends before it was ever
    ready; `again` is the program to run after a death if it is not the same one.
    """

    def __init__(
        self,
        program: Program,
        guard: Reaper,
        is_ready: Callable[[], Awaitable[object]],
        say: Callable[[str], None],
        again: Program | None = None,
    ) -> None:
        self.program = program
        self.ready = asyncio.Event()  # it was ready once
        self.serving = asyncio.Event()  # the current process is ready
        self.settled = asyncio.Event()  # it was ready once, or has failed for good
        self.deaths = 0
        self.failure: FleetError | None = None  # the reason why it was never ready
        self.has_ended = False  # and is not started again
        self._again = program if again is None else again
        self._guard = guard
        self._is_ready = is_ready
        self._say = say
        self._stopping = asyncio.Event()
        self._no_pause = asyncio.Event()
        self._renewing = False
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        """The id of the process and of its group; None while it is not running."""
        return None if self._process is None else self._process.pid

    async def run(self) -> None:
        backoff, asked_for = RestartDelay(), False
        loop = asyncio.get_running_loop()
        try:
            while not self._stopping.is_set():
                self._no_pause.clear()
                started = loop.time()
                status = await self._run_once(asked_for)
                if self._stopping.is_set():
                    return
                asked_for, self._renewing = self._renewing, False
                if asked_for:
                    continue
                await self._died(status, backoff.delay_seconds)
                backoff = backoff.after(loop.time() - started)
        finally:
            self.has_ended = True
            self.settled.set()

    async def _died(self, status: int, pause: float) -> None:
        ended = describe_exit(status)
        if not self.ready.is_set():
            text = f"{self.program.name} {ended} while starting{self.last_words()}"
            self.failure = FleetError(text)
            raise self.failure
        self.deaths += 1
        self.program = self._again
        self._say(
            f"{self.program.name} {ended}; starting it again in {pause:g} s "
            f"(log: {self.program.log_path})"
        )
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._no_pause.wait(), pause)

    async def _run_once(self, asked_for: bool) -> int:
        async with self._guard.turn:
            # It may have been stopped while it waited for its turn.
            if self._stopping.is_set():
                return 0
            try:
                process = self._process = await self._guard.start(self.program)
            except FleetError as error:
                self.failure = error
                raise
        try:
            if self._stopping.is_set():  # `stop` found no process to end
                return 0
            async with asyncio.TaskGroup() as group:
                watch = group.create_task(self._watch(asked_for), name=f"{self.program.name}-ready")
                status = await process.wait()
                watch.cancel()
        finally:
            # Also on cancellation: end the processes that it started, too.
            reaper.signal_group(process.pid, signal.SIGKILL)
            self.serving.clear()
            self._process = None
            self._guard.release(process.pid)
            await process.wait()  # the event loop may be about to end
        return status

    async def _watch(self, asked_for: bool) -> None:
        await self._is_ready()
        if self.ready.is_set() and not asked_for:
            self._say(f"{self.program.name} is back")
        self.ready.set()
        self.serving.set()
        self.settled.set()

    def retire(self) -> None:
        self._stopping.set()
        self._no_pause.set()

    def ask_to_end(self) -> None:
        self.retire()
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)

    async def stop(self, drain_seconds: float, grace_seconds: float = 0.0) -> None:
        """Stop the process; after `drain_seconds` hurry it up, after `grace_seconds` kill it."""
        self.retire()
        await self._end(drain_seconds, grace_seconds)

    async def renew(self, drain_seconds: float, grace_seconds: float = 0.0) -> None:
        """End the process as `stop` does; return before the next one is `serving`."""
        self._no_pause.set()
        if self._process is not None:
            self._renewing = True
            await self._end(drain_seconds, grace_seconds)
        self.serving.clear()

    async def _end(self, drain_seconds: float, grace_seconds: float) -> None:
        process = self._process
        if process is None:
            return
        # Two different signals: one that is sent twice before it is handled counts once.
        for number, seconds in ((signal.SIGTERM, drain_seconds), (signal.SIGINT, grace_seconds)):
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)
            if not seconds:
                continue
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), seconds)
                return
        reaper.signal_group(process.pid, signal.SIGKILL)
        await process.wait()

    def kill(self) -> None:
        self.retire()
        if self._process is not None:
            reaper.signal_group(self._process.pid, signal.SIGKILL)

    def last_words(self) -> str:
        with contextlib.suppress(OSError):
            lines = self.program.log_path.read_text("utf-8", "replace").splitlines()
            tail = "\n".join(f"  | {line}" for line in lines[-_TAIL_LINES:])
            return f"\n{tail}" if tail else ""
        return ""


def describe_exit(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"
