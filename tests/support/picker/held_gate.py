"""A gate that holds every request until a test lets it in, and records its calls."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from picker.errors import DropReason, RefusedError
from picker.types import FinishCause, InferenceRequest, Usage


@dataclass
class Pass:
    queue_seconds: float = 0.0
    places: list[str] = field(default_factory=list)
    ends: list[FinishCause] = field(default_factory=list)
    on_closed: Callable[[], None] | None = None

    def left(self, endpoint_key: str) -> None:
        self.places.append(endpoint_key)

    def closed(self, cause: FinishCause, usage: Usage | None) -> None:
        self.ends.append(cause)
        if self.on_closed is not None:
            self.on_closed()


@dataclass
class HeldGate:
    is_open: bool = False
    waiting: dict[str, asyncio.Future[Pass]] = field(default_factory=dict)
    passes: list[Pass] = field(default_factory=list)
    evictions: dict[str, Callable[[DropReason], None] | None] = field(default_factory=dict)
    came: asyncio.Event = field(default_factory=asyncio.Event)
    on_pool_changed: Callable[[], None] | None = None

    def pool_changed(self) -> None:
        if self.on_pool_changed is not None:
            self.on_pool_changed()

    async def admit(self, request: InferenceRequest, evict: Any) -> Pass:
        self.evictions[request.request_id] = evict
        if not self.is_open:
            answer = asyncio.get_running_loop().create_future()
            self.waiting[request.request_id] = answer
            self.came.set()
            try:
                issued: Pass = await answer
            finally:
                del self.waiting[request.request_id]
        else:
            issued = Pass()
        self.passes.append(issued)
        return issued

    def let_in(self, request_id: str, queue_seconds: float = 0.0) -> None:
        self.waiting[request_id].set_result(Pass(queue_seconds))

    def refuse(self, request_id: str, refusal: RefusedError) -> None:
        self.waiting[request_id].set_exception(refusal)
