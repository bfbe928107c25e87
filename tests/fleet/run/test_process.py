"""Child processes: started, watched, restarted, stopped, and ended with their parent."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from fleet.errors import FleetError
from fleet.run.process import (
    CALM_SECONDS,
    LONGEST_DELAY_SECONDS,
    Child,
    Program,
    Reaper,
    RestartDelay,
    describe_exit,
)
from tests.support.waiting import until

LIMIT_SECONDS = 120


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def guard() -> Iterator[Reaper]:
    reaper = Reaper()
    yield reaper
    reaper.close()


@pytest.fixture
def child(tmp_path: Path, guard: Reaper) -> Callable[..., Child]:
    def make(script: str) -> Child:
        program = Program("thing", (sys.executable, "-c", script), tmp_path / "thing.log")

        async def is_ready() -> None:
            await until(lambda: b"ready" in program.log_path.read_bytes())

        said: list[str] = []
        made = Child(program, guard, is_ready, said.append)
        made.said = said  # type: ignore[attr-defined]
        return made

    return make


@contextlib.asynccontextmanager
async def running(child: Child, stops: bool = True) -> AsyncIterator[Child]:
    async with asyncio.timeout(LIMIT_SECONDS), asyncio.TaskGroup() as group:
        group.create_task(child.run())
        await child.ready.wait()
        yield child
        if stops:
            await child.stop(LIMIT_SECONDS)


WAIT = "print('ready', flush=True); import time; time.sleep(600)"


async def test_a_child_that_dies_is_started_again(child) -> None:
    async with running(child(WAIT)) as thing:
        first = thing.pid
        os.kill(first, signal.SIGKILL)
        await until(lambda: thing.pid not in (None, first))
        assert thing.deaths == 1
        assert "thing was ended by SIGKILL; starting it again in 0.2 s" in thing.said[0]
    assert not alive(first)
    assert thing.pid is None


async def test_a_child_that_cannot_start_is_an_error_with_its_last_words(child) -> None:
    with pytest.raises(FleetError, match=r"thing ended with status 3 while starting") as caught:
        await child("import sys; sys.exit(print('no such flag') or 3)").run()
    assert "| no such flag" in str(caught.value)


@pytest.mark.parametrize("program", ["/no/such/program", "/dev/null"])
async def test_a_program_that_cannot_run_is_named(tmp_path: Path, guard, program: str) -> None:
    thing = Child(
        Program("thing", (program,), tmp_path / "log"), guard, asyncio.Event().wait, print
    )
    with pytest.raises(FleetError, match=rf"ended with status 1 (?s:.*)cannot run {program}: \w+"):
        await thing.run()


async def test_a_process_that_cannot_be_made_is_one_sentence(tmp_path: Path, guard) -> None:
    program = Program("thing", (sys.executable,), tmp_path / "gone" / "log")
    thing = Child(program, guard, asyncio.Event().wait, print)
    with pytest.raises(FleetError, match=r"thing cannot be started: .*No such file") as caught:
        await thing.run()
    assert thing.failure is caught.value


async def test_signals_are_handled_while_many_children_are_started(child, guard: Reaper) -> None:
    """A signal during the first start prevents the others."""
    children, started = [child(WAIT) for _ in range(30)], []

    def stop() -> None:
        for one in children:
            started.append(one.pid)
            one.kill()

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, stop)
    try:
        async with asyncio.timeout(LIMIT_SECONDS), asyncio.TaskGroup() as group:
            for one in children:
                group.create_task(one.run())
            os.kill(os.getpid(), signal.SIGUSR1)
    finally:
        loop.remove_signal_handler(signal.SIGUSR1)
    assert sum(pid is not None for pid in started) <= 2
    assert all(one.has_ended for one in children)
    assert guard.turn.locked() is False


async def test_processes_of_a_child_end_with_it(child) -> None:
    script = (
        "import subprocess, sys; p = subprocess.Popen(['sleep', '600']);"
        "print(p.pid, 'ready', flush=True); p.wait()"
    )
    async with running(child(script)) as thing:
        grandchild = int(thing.program.log_path.read_text().split()[0])
        assert alive(grandchild)
    await until(lambda: not alive(grandchild))


async def test_a_stubborn_child_is_killed(child) -> None:
    script = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {WAIT}"
    async with running(child(script), stops=False) as thing:
        pid = thing.pid
        await thing.stop(0.05)
    assert not alive(pid)


async def test_a_child_is_asked_twice_before_it_is_killed(child) -> None:
    """The second signal differs, for a child that is slow on purpose."""
    script = (
        "import signal; signals = (signal.SIGTERM, signal.SIGINT);"
        "signal.pthread_sigmask(signal.SIG_BLOCK, signals); print('ready', flush=True);"
        "[print(signal.sigwait({one}).name, flush=True) for one in signals]"
    )
    async with running(child(script), stops=False) as thing:
        await thing.stop(0.05, LIMIT_SECONDS)
    assert thing.program.log_path.read_text().split() == ["ready", "SIGTERM", "SIGINT"]
    assert thing.has_ended


async def test_a_renewed_child_is_another_process_and_no_death(child) -> None:
    async with running(child(WAIT)) as thing:
        first = thing.pid
        await thing.renew(LIMIT_SECONDS)
        assert not alive(first)
        assert not thing.serving.is_set()
        await thing.serving.wait()
        second = thing.pid
        assert second not in (None, first)
        assert (thing.deaths, thing.said) == (0, [])
        os.kill(second, signal.SIGKILL)
        await until(lambda: thing.pid not in (None, second))
        await thing.serving.wait()
        assert thing.said[1:] == ["thing is back"]


async def test_a_child_is_renewed_while_it_waits_to_start_again(child) -> None:
    async with running(child(WAIT)) as thing:
        for _ in range(4):  # the delay grows beyond the patience of this test
            thing._process.kill()
            await until(lambda: thing.pid is None)
            await thing.renew(0.0)
            await thing.serving.wait()
        assert thing.deaths == 4


async def test_a_retired_child_ends_with_its_process(child) -> None:
    async with running(child(WAIT), stops=False) as thing:
        thing.retire()
        os.kill(thing.pid, signal.SIGKILL)
    assert (thing.has_ended, thing.said) == (True, [])


async def test_after_a_death_another_program_may_take_its_place(tmp_path, guard) -> None:
    log = tmp_path / "thing.log"

    async def is_ready() -> None:
        await until(lambda: b"ready" in log.read_bytes())

    first, again = (
        Program("thing", (sys.executable, "-c", f"{WAIT} # {text}"), log) for text in ("one", "two")
    )
    async with running(Child(first, guard, is_ready, print, again)) as thing:
        assert thing.program is first
        os.kill(thing.pid, signal.SIGKILL)
        await until(lambda: not thing.serving.is_set())
        await thing.serving.wait()
        assert thing.program is again


def test_files_do_not_survive_their_owner_either(tmp_path: Path) -> None:
    reaper = Reaper()
    for name in ("here", "gone", "with a space"):
        reaper.remove(tmp_path / name)
    (tmp_path / "here").touch()
    (tmp_path / "with a space").touch()
    (tmp_path / "other").touch()
    reaper.close()
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


async def test_cancelling_the_supervision_ends_the_child(child) -> None:
    thing = child(WAIT)
    supervision = asyncio.ensure_future(thing.run())
    await thing.ready.wait()
    pid = thing.pid
    supervision.cancel()
    await asyncio.gather(supervision, return_exceptions=True)
    with pytest.raises(ProcessLookupError):  # nor is it a zombie
        os.kill(pid, 0)


def test_children_do_not_survive_the_death_of_their_owner() -> None:
    owner_script = (
        "import subprocess, sys; from fleet.run.process import Reaper;"
        "reaper = Reaper();"
        "child = subprocess.Popen(['sleep', '600'], start_new_session=True);"
        "reaper.adopt(child.pid); print(child.pid, flush=True); child.wait()"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", owner_script], stdout=subprocess.PIPE, text=True
    )
    orphan = int(owner.stdout.readline())
    assert alive(orphan)
    owner.kill()
    owner.wait()
    owner.stdout.close()
    asyncio.run(until(lambda: not alive(orphan)))


def test_a_child_whose_owner_dies_before_it_is_adopted_never_begins(tmp_path: Path) -> None:
    """The owner is killed between the start of the process and the message to the reaper."""
    program = f"open({str(tmp_path / 'begun')!r}, 'w').close(); import time; time.sleep(600)"
    owner_script = f"""
import asyncio, os, pathlib, signal, sys
from fleet.run.process import Child, Program, Reaper

class Doomed(Reaper):
    def adopt(self, group):
        print(group, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

log = pathlib.Path({str(tmp_path / "log")!r})
program = Program("thing", (sys.executable, "-c", {program!r}), log)
asyncio.run(Child(program, Doomed(), asyncio.Event().wait, print).run())
"""
    owner = subprocess.run([sys.executable, "-c", owner_script], stdout=subprocess.PIPE, text=True)
    assert owner.returncode == -signal.SIGKILL
    orphan = int(owner.stdout)
    asyncio.run(until(lambda: not alive(orphan)))
    assert not (tmp_path / "begun").exists()


def test_pauses_grow_and_start_over() -> None:
    backoff = RestartDelay()
    pauses = []
    for _ in range(12):
        pauses.append(backoff.delay_seconds)
        backoff = backoff.after(1.0)
    assert pauses[:3] == [0.2, 0.4, 0.8]
    assert max(pauses) == LONGEST_DELAY_SECONDS
    assert backoff.after(CALM_SECONDS) == RestartDelay()


def test_exits_are_described_in_words() -> None:
    assert describe_exit(-9) == "was ended by SIGKILL"
    assert describe_exit(-250) == "was ended by signal 250"
    assert describe_exit(2) == "ended with status 2"
