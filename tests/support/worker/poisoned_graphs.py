"""Graphs of a simulated device: a replay runs the captured function on poisoned memory."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock

import torch
from torch import Tensor

from worker.executor.graphs import GraphDevice


class PoisonedGraphs(GraphDevice):
    """Outputs and scratch memory hold nan (or the largest int) before each replay, as does
    `spoilt`, which no replay may read. A fetch copies as late as allowed.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.is_busy = False
        self.spoilt: list[Tensor] = []
        self._one_at_a_time = Lock()
        self._fetches: list[tuple[Tensor, Tensor]] = []

    def host_buffer(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int32)

    def renew(self) -> None:
        self.calls.append("renew")

    def capture(self, launch: Callable[[], None], writes: Tensor) -> Callable[[], None]:
        def replay() -> None:
            with self._at_work("replay"):
                for tensor in (writes, *self.spoilt):
                    tensor.fill_(torch.nan if tensor.is_floating_point() else -(1 << 31))
                launch()

        with self._at_work("capture"):
            launch()
        return replay

    def send(self, source: Tensor, target: Tensor) -> None:
        with self._at_work("send"):
            target.copy_(source)

    def fetch(self, source: Tensor, target: Tensor) -> Callable[[], None]:
        with self._at_work("fetch"):
            target.fill_(-(1 << 31))
            self._fetches.append((source, target))
        return self._finish

    def spare_fetched(self) -> None:
        self._finish()

    def timed(self, replay: Callable[[], None]) -> Callable[[], float]:
        replay()
        return lambda: 0.001

    def _finish(self) -> None:
        with self._at_work():
            for source, target in self._fetches:
                target.copy_(source)
            self._fetches.clear()

    @contextmanager
    def _at_work(self, *calls: str) -> Iterator[None]:
        with self._one_at_a_time:
            self.calls += calls
            # New memory is filled. `use_deterministic_algorithms` would import the compiler.
            torch.set_deterministic_debug_mode("error")
            self.is_busy = True
            try:
                yield
            finally:
                self.is_busy = False
                torch.set_deterministic_debug_mode("default")
