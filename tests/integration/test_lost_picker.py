"""`pointsman up` when its picker dies or hangs, with real processes and real signals."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator

import pytest

from tests.support.fleet.running_fleet import Fleet, ready_fleet
from tests.support.waiting import until

pytestmark = [pytest.mark.envoy, pytest.mark.full]
STREAM_TOKENS = 1500  # a minute and a half while the workers are slow


def picker_of(fleet: Fleet) -> int:
    (picker,) = (pid for pid, line in fleet.descendants().items() if "-m picker" in line)
    return picker


class Streams:
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.begun = 0

    async def read(self) -> int:
        tokens = None
        stream = await self._fleet.openai.chat.completions.create(
            model="sim",
            max_tokens=STREAM_TOKENS,
            stream=True,
            stream_options={"include_usage": True},
            messages=[{"role": "user", "content": "hello"}],
            extra_body={"ignore_eos": True},
        )
        self.begun += 1
        async for event in stream:
            tokens = event.usage.completion_tokens if event.usage else None
        assert tokens is not None, "the stream was cut"
        return tokens


async def test_a_picker_that_is_killed_or_hangs_costs_no_request_and_cuts_no_stream() -> None:
    async with ready_fleet("--workers", "2") as fleet:
        await fleet.configure_workers(time_scale=6)
        streams = Streams(fleet)
        async with asyncio.TaskGroup() as group:
            streamed = [group.create_task(streams.read()) for _ in range(8)]
            await until(lambda: streams.begun == 8, what="all answers stream")
            answers = [group.create_task(fleet.say_hello()) for _ in range(20)]
            await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED)
            os.kill(picker_of(fleet), signal.SIGKILL)
            assert not any(task.done() for task in streamed), "nothing was there to be cut"
            answers += [group.create_task(fleet.say_hello()) for _ in range(40)]
            await asyncio.wait(answers)
            await fleet.configure_workers(time_scale=0.01)
        assert [task.result() for task in answers] == [4] * 60
        assert [task.result() for task in streamed] == [STREAM_TOKENS] * 8
        await until(lambda: "picker is back" in fleet.output, what="the picker is back")
        assert await fleet.say_hello() == 4
        with stopped(picker_of(fleet)):
            for _ in range(3):
                async with asyncio.TaskGroup() as group:
                    answers = [group.create_task(fleet.say_hello()) for _ in range(10)]
                assert [task.result() for task in answers] == [4] * 10
        assert await fleet.say_hello() == 4


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
