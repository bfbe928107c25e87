"""One supervised child process: started, watched, restarted, and never left behind."""

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

from fleet import reaper
from fleet.errors import FleetError

FIRST_DELAY_SECONDS = 0.2
LONGEST_DELAY_SECONDS = 30.0
CALM_SECONDS = 60.0  # a child that lived so long starts again without delay
_TAIL_LINES = 8


@dataclass(frozen=True, slots=True)
class Program:
    """What to run. `environment` is added to ours; everything it prints goes to `log_path`."""

    name: str
    argv: tuple[str, ...]
    log_path: Path
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Backoff:
    """How long to wait before the next start; grows while starts keep failing."""

    delay_seconds: float = FIRST_DELAY_SECONDS

    def after(self, lived_seconds: float) -> Backoff:
        """The pause that follows a life of `lived_seconds`."""
        if lived_seconds >= CALM_SECONDS:
            return Backoff()
        return Backoff(min(2 * self.delay_seconds, LONGEST_DELAY_SECONDS))


class Reaper:
    """Owns the process that ends our children should we vanish without a chance to do it."""

    def __init__(self) -> None:
        # Isolated, and in a session of its own: a Ctrl-C in the terminal must not reach it.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", reaper.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def adopt(self, group: int) -> None:
        """Promise that the process group `group` will not survive us."""
        self._write(f"+{group}\n")

    def release(self, group: int) -> None:
        """Take the promise back: the group is gone."""
        self._write(f"-{group}\n")

    def close(self) -> None:
        """Let it end whatever was not released, and wait for that."""
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
    """Owns one running program and its restarts.

    `is_ready` returns once the program serves. `run` returns after `stop`; it raises `FleetError`
    when the program ends before it was ready for the first time.
    """

    def __init__(
        self,
        program: Program,
        guard: Reaper,
        is_ready: Callable[[], Awaitable[object]],
        say: Callable[[str], None],
    ) -> None:
        self.program = program
        self.ready = asyncio.Event()
        self.deaths = 0
        self._guard = guard
        self._is_ready = is_ready
        self._say = say
        self._stopping = asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        """Process id, which is also its process group; None while it is not running."""
        return None if self._process is None else self._process.pid

    async def run(self) -> None:
        """Start, and start again after every death, until `stop`."""
        backoff = Backoff()
        loop = asyncio.get_running_loop()
        while not self._stopping.is_set():
            started = loop.time()
            status = await self._live()
            if self._stopping.is_set():
                return
            ended = describe_exit(status)
            if not self.ready.is_set():
                raise FleetError(f"{self.program.name} {ended} while starting{self.last_words()}")
            self.deaths += 1
            pause = backoff.delay_seconds
            self._say(
                f"{self.program.name} {ended}; starting it again in {pause:g} s "
                f"(log: {self.program.log_path})"
            )
            backoff = backoff.after(loop.time() - started)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause)

    async def _live(self) -> int:
        """One life of the program; returns its exit status."""
        with self.program.log_path.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *self.program.argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.program.environment},
                start_new_session=True,
            )
        self._process = process
        self._guard.adopt(process.pid)
        try:
            async with asyncio.TaskGroup() as group:
                watch = group.create_task(self._watch(), name=f"{self.program.name}-ready")
                status = await process.wait()
                watch.cancel()
        finally:
            # Also when we are cancelled: what it started itself goes with it.
            reaper.signal_group(process.pid, signal.SIGKILL)
            self._process = None
            self._guard.release(process.pid)
        return status

    async def _watch(self) -> None:
        await self._is_ready()
        if self.ready.is_set():
            self._say(f"{self.program.name} is back")
        self.ready.set()

    async def stop(self, grace_seconds: float) -> None:
        """Ask it to go; after `grace_seconds` it is killed. `run` returns then."""
        self._stopping.set()
        process = self._process
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), grace_seconds)
        except TimeoutError:
            self.kill()

    def kill(self) -> None:
        """End it and everything it started, now."""
        self._stopping.set()
        if self._process is not None:
            reaper.signal_group(self._process.pid, signal.SIGKILL)

    def last_words(self) -> str:
        """The end of its log, for an error message."""
        with contextlib.suppress(OSError):
            lines = self.program.log_path.read_text("utf-8", "replace").splitlines()
            tail = "\n".join(f"  | {line}" for line in lines[-_TAIL_LINES:])
            return f" (log: {self.program.log_path})\n{tail}"
        return ""


def describe_exit(status: int) -> str:
    """An exit status in words."""
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"
