"""Faults on demand: wrong answers, late answers, and no answers."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.fakes.kube_api.statuses import ApiError
from tests.fakes.kube_api.target import Target


class DroppedError(Exception): ...


@dataclass(slots=True)
class Fault:
    """A fault of requests with these verbs on these resources (all, if none are named).

    `times` limits the number of affected requests. A fault delays first, then hangs, drops or
    answers with its error; one that only delays lets the request continue.
    """

    verbs: tuple[str, ...] = ()
    plural: str | None = None
    times: int | None = None
    delay_seconds: float = 0.0
    hangs: bool = False
    drops: bool = False
    error: ApiError | None = None
    met: int = 0
    reached: asyncio.Event = field(default_factory=asyncio.Event)

    def concerns(self, target: Target) -> bool:
        left = self.times is None or self.met < self.times
        placed = target.resource.is_called(self.plural)
        return left and placed and (not self.verbs or target.verb in self.verbs)


@dataclass(slots=True)
class Faults:
    active: list[Fault] = field(default_factory=list)
    _lifted: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, fault: Fault) -> Fault:
        """Enable a fault. All faults that concern a request apply, in order."""
        self.active.append(fault)
        return fault

    def answer(
        self, error: ApiError, *verbs: str, plural: str | None = None, times: int | None = None
    ) -> Fault:
        return self.add(Fault(verbs, plural, times, error=error))

    def delay(self, seconds: float, *verbs: str, plural: str | None = None) -> Fault:
        return self.add(Fault(verbs, plural, delay_seconds=seconds))

    def lift(self) -> None:
        self.active.clear()
        self._lifted.set()
        self._lifted = asyncio.Event()

    async def befall(self, target: Target) -> None:
        for fault in list(self._concerning(target)):
            fault.met += 1
            fault.reached.set()
            if fault.delay_seconds:
                await asyncio.sleep(fault.delay_seconds)
            if fault.hangs:
                await self._lifted.wait()
            if fault.drops:
                raise DroppedError
            if fault.error is not None:
                raise fault.error

    def _concerning(self, target: Target) -> Iterator[Fault]:
        return (fault for fault in self.active if fault.concerns(target))
