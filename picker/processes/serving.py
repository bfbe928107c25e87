"""One serving process as the process that watches the pool sees it."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from typing import TypeAlias

from picker.errors import PickerError
from picker.pool.request_rules import NO_RULES, RuleSet
from picker.processes.messages import (
    Answered,
    Ask,
    Channel,
    Commit,
    Configuration,
    Drain,
    Failed,
    Follow,
    Prepare,
    Prepared,
    Ready,
    Start,
    Subject,
    Tell,
    ToChild,
    Told,
)
from picker.sharing.totals import Numbers

ANSWER_SECONDS = 2.0  # for the numbers, and to people
PREPARE_SECONDS = 10.0  # for a configuration


_Answer: TypeAlias = Prepared | Told | Answered


class UnansweredError(PickerError):
    """A question that a serving process did not answer: it ended, or it is stuck."""


class Serving:
    """Owns a child process, the conversation with it, and what it has told of its numbers."""

    def __init__(
        self,
        index: int,
        process: asyncio.subprocess.Process,
        channel: Channel,
        rules: RuleSet = NO_RULES,
    ) -> None:
        """`rules` are those that it begins with."""
        self.index = index
        self.pid = process.pid
        self.rules = rules  # of requests, as it was told last
        self.revision: int | None = None  # of its configuration; None while it does not serve
        self.failure: str | None = None
        self.numbers: Numbers | None = None
        self.unanswered = 0  # questions for the numbers, in a row
        self._process, self._channel = process, channel
        self._questions = count()
        self._waiting: dict[int, asyncio.Future[_Answer]] = {}

    @classmethod
    async def begin(cls, start: Start, inherited: Sequence[int]) -> Serving:
        """Start a child that inherits these descriptors."""
        ours, theirs = socket.socketpair()
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                # -P: a folder in the current directory that is named like our package is not ours.
                *("-P", "-m", "picker.processes", str(theirs.fileno()), str(os.getpid())),
                pass_fds=(theirs.fileno(), *inherited),
                stdin=asyncio.subprocess.DEVNULL,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        serving = cls(start.index, process, await Channel.over(ours), start.rules)
        await serving.send(start)
        return serving

    async def converse(self, on_ready: Callable[[Serving], None]) -> int:
        """Listen to it until it has ended; its exit status."""
        while (message := await self._channel.receive()) is not None:
            if isinstance(message, Ready):
                self.revision = message.revision
                on_ready(self)
            elif isinstance(message, Failed):
                self.failure = message.reason
            elif isinstance(message, Prepared | Told | Answered):
                self._answered(message)
        self.revision = None
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(UnansweredError(f"process {self.index} has ended"))
        status = await self._process.wait()
        self._channel.close()
        return status

    async def tell(self) -> Numbers | None:
        """Its numbers now, or those it told last when it does not answer."""
        try:
            await self._ask(Tell(next(self._questions)), ANSWER_SECONDS)
            self.unanswered = 0
        except UnansweredError:
            self.unanswered += 1
        return self.numbers

    async def prepare(self, configuration: Configuration) -> str | None:
        """Have it build a configuration; what is wrong with it, if anything."""
        question = Prepare(next(self._questions), configuration)
        try:
            answer = await self._ask(question, PREPARE_SECONDS)
        except UnansweredError as error:
            return None if self.revision is None else str(error)  # its successor begins with it
        return answer.problem if isinstance(answer, Prepared) else None

    async def answer(self, subject: Subject, argument: str) -> bytes | None:
        """What it knows about a question of people; None when it does not answer."""
        question = Ask(next(self._questions), subject, argument)
        try:
            answer = await self._ask(question, ANSWER_SECONDS)
        except UnansweredError:
            return None
        return answer.content if isinstance(answer, Answered) else None

    async def commit(self, revision: int) -> None:
        """Have it use what it has prepared."""
        if self.revision is not None:
            self.revision = revision
            await self.send(Commit())

    async def follow(self, rules: RuleSet) -> None:
        """Have it go by these objectives and rewrites. What it is too busy to take now it reads
        later.
        """
        self.rules = rules
        with suppress(TimeoutError):
            async with asyncio.timeout(ANSWER_SECONDS):
                await self.send(Follow(rules))

    async def drain(self) -> None:
        """Have it end when nobody needs it; asked twice, at once."""
        if self.revision is None:
            self.kill()
        else:
            await self.send(Drain())

    def kill(self) -> None:
        """End it at once."""
        if self._process.returncode is None:
            self._process.kill()

    async def send(self, message: ToChild) -> None:
        """Whether it has ended is found out elsewhere."""
        with suppress(ConnectionError):
            await self._channel.send(message)

    async def _ask(self, question: Prepare | Tell | Ask, seconds: float) -> _Answer:
        number = question.question
        answer: asyncio.Future[_Answer] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            async with asyncio.timeout(seconds):
                await self.send(question)  # waits as well, for one that does not read
                return await answer
        except TimeoutError:
            raise UnansweredError(f"process {self.index} does not answer") from None
        finally:
            del self._waiting[number]

    def _answered(self, message: _Answer) -> None:
        if isinstance(message, Told):
            self.numbers = message.numbers
        waiting = None if message.question is None else self._waiting.get(message.question)
        if waiting is not None and not waiting.done():
            waiting.set_result(message)
