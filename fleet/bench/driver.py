"""Open and closed loops of sessions over one client.

In an open loop a request that is sent late still counts from when it should have been sent, so that
a stall of the endpoint counts in every request it held up (no coordinated omission). In a closed
loop a request is due when its session's turn comes; after a refusal with Retry-After the next
session of that slot waits for that time, as clients do.
"""

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import msgspec

from fleet.bench.client import Clock, Record
from fleet.bench.workload import TurnSession

PULSE_SECONDS = 0.05
Body = TypeVar("Body")
MadeBody = TypeVar("MadeBody", covariant=True)
SentBody = TypeVar("SentBody", contravariant=True)


class Form(Protocol[MadeBody]):
    def body(self, messages: list[dict[str, str]], output_tokens: int) -> MadeBody: ...


class Sender(Protocol[SentBody]):
    @property
    def in_flight(self) -> int: ...

    async def ask(self, body: SentBody, outcome: Record, /) -> None:
        """Return once `outcome` is complete; a failure is stored in its `error`."""


@dataclass(frozen=True, slots=True)
class RequestForm:
    model: str
    is_chat: bool = True
    ignore_eos: bool = True

    def body(self, messages: list[dict[str, str]], output_tokens: int) -> bytes:
        fields: dict[str, object] = {
            "model": self.model,
            "max_tokens": output_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            fields["ignore_eos"] = True
        if self.is_chat:
            fields["messages"] = messages
        else:
            fields["prompt"] = "\n".join(one["content"] for one in messages)
        return msgspec.json.encode(fields)


@dataclass(frozen=True, slots=True)
class ClientPulse:
    """A sample of the client's own share of the times: `late_seconds` is the delay of a timer."""

    at: float
    late_seconds: float
    in_flight: int


@dataclass(slots=True)
class Driver(Generic[Body]):
    """Owns the results of one stage, which begins at the clock time `begin_at`, or at once."""

    client: Sender[Body]
    form: Form[Body]
    clock: Clock
    think_seconds: float = 0.0
    max_requests: int | None = None
    begin_at: float | None = None
    outcomes: list[Record] = field(default_factory=list)
    pulses: list[ClientPulse] = field(default_factory=list)
    begun: float = 0.0
    started: int = 0

    async def open_loop(self, arrivals: Iterable[tuple[float, TurnSession]]) -> None:
        pulse = await self._begin()
        try:
            async with asyncio.TaskGroup() as group:
                for at, session in arrivals:
                    if self._is_enough():
                        return
                    due = self.begun + at
                    await self._until(due)
                    group.create_task(self._session(session, due), name="session")
                    await asyncio.sleep(0)  # also when late: answers must be read in time
        finally:
            pulse.cancel()

    async def closed_loop(
        self, sessions: Iterator[TurnSession], concurrency: int, seconds: float
    ) -> None:
        pulse = await self._begin()

        async def one_after_the_other() -> None:
            end = self.begun + seconds
            while self.clock() < end and not self._is_enough():
                session = next(sessions, None)
                if session is None:
                    return
                pause = await self._session(session, self.clock())
                if pause:
                    await self._until(min(end, self.clock() + pause))

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(concurrency):
                    group.create_task(one_after_the_other(), name="slot")
        finally:
            pulse.cancel()

    async def _begin(self) -> asyncio.Task[None]:
        self.begun = self.clock() if self.begin_at is None else self.begin_at
        await self._until(self.begun)
        return asyncio.create_task(self._pulse(), name="pulse")

    def _is_enough(self) -> bool:
        return self.max_requests is not None and self.started >= self.max_requests

    async def _session(self, session: TurnSession, due: float) -> float:
        """Run all turns; a failed turn ends the session, because the next one would lack its
        answer. Return for how many seconds the last answer asked the client to send nothing.
        """
        messages = [{"role": "system", "content": session.system}] if session.system else []
        last = len(session.exchanges) - 1
        for number, exchange in enumerate(session.exchanges):
            if number and self._is_enough():
                break
            self.started += 1
            messages.append({"role": "user", "content": exchange.text})
            outcome = Record(due, text=[] if number < last else None)
            await self.client.ask(self.form.body(messages, exchange.output_tokens), outcome)
            self.outcomes.append(outcome)
            if number == last or not outcome.is_good:
                return outcome.retry_after_seconds
            messages.append({"role": "assistant", "content": "".join(outcome.text or ())})
            outcome.text = None
            due = outcome.ended + self.think_seconds
            await self._until(due)
        return 0.0

    async def _until(self, due: float) -> None:
        while True:  # a timer of uvloop may fire half a millisecond early
            pause = due - self.clock()
            if pause <= 0:
                return
            await asyncio.sleep(pause)

    async def _pulse(self) -> None:
        while True:
            due = self.clock() + PULSE_SECONDS
            await asyncio.sleep(PULSE_SECONDS)
            now = self.clock()
            self.pulses.append(ClientPulse(now - self.begun, now - due, self.client.in_flight))
