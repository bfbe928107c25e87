"""Host time of a decode step outside the device: everything but the model, which is a null device.

`python -m benchmarks.step_host`, from the repository root. A scheduler drives the model runner with
two steps in flight; the device's part (forward pass, logits, draws) returns at once what it was
given beforehand. CPU time of one thread, milliseconds a step, the median of some rounds: of the
executor (submit and collect) and of the whole step (schedule, submit, collect, update). The limit
that the executor is held to is 0.6 ms at 64 sequences.

Then the same of steps that a GPU replays from graphs, without the calls of CUDA: microseconds of
the executor, and as a line through the sizes: so much a step, and so much for each sequence.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from worker.config import CacheConfig, SchedulerConfig
from worker.engine.messages import AddRequest
from worker.engine.scheduler import Scheduler
from worker.executor.graphs import DecodeGraphs, GraphDevice, graph_sizes
from worker.executor.interface import Ticket
from worker.executor.model_runner import ModelRunner
from worker.ops.noise import Stream
from worker.ops.sample import Sampler
from worker.ops.step import StepTensors
from worker.types import SamplingParams, SchedulerOutput

BLOCK_SIZE, VOCAB, ROUNDS, STEPS = 16, 49_152, 5, 40
WISHES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "T+top-p": {"temperature": 0.7, "top_p": 0.9},
    "penalties": {"temperature": 0.7, "repetition_penalty": 1.1},
}


class NullModel:
    """Stands for `LlamaModel`: hidden states and logits that are there already."""

    kernels = None
    device = torch.device("cpu")
    config = SimpleNamespace(vocab_size=VOCAB)

    def __init__(self, most: int) -> None:
        self._hidden = torch.zeros(most, 1)
        self._logits = torch.zeros(most, VOCAB)

    def hidden(self, step: StepTensors, cache: Tensor) -> Tensor:
        """One row for each row that is wanted."""
        return self._hidden[: len(step.sample_rows)]

    def normed(self, hidden: Tensor) -> Tensor:
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Zeros."""
        return self._logits[: len(hidden)]


class NullDraws:
    """Implements `DrawKernel`: every draw is token 17."""

    def __call__(
        self, logits: Tensor, adjusted: Tensor | None, draws: npt.NDArray[np.void], stream: Stream
    ) -> Tensor:
        """Tokens and states [2, n]."""
        answers = torch.zeros(2, len(draws), dtype=torch.int32)
        answers[0] = 17
        return answers


class NullGraphs(GraphDevice):
    """Copies at once, and replays nothing: every draw is token 0."""

    def host_buffer(self, size: int) -> Tensor:
        """Any memory."""
        return torch.zeros(size, dtype=torch.int32)

    def renew(self) -> None:
        """Nothing is held."""

    def capture(self, launch: Callable[[], None], writes: Tensor) -> Callable[[], None]:
        """Forget it."""
        return _nothing

    def send(self, source: Tensor, target: Tensor) -> None:
        """At once."""
        target.copy_(source)

    def fetch(self, source: Tensor, target: Tensor) -> Callable[[], None]:
        """At once."""
        target.copy_(source)
        return _nothing

    def spare_fetched(self) -> None:
        """Nothing is under way."""


def _nothing() -> None:
    return


class Loop:
    """A scheduler and a runner with `size` sequences of `context` tokens that decode."""

    def __init__(
        self, size: int, context: int, wishes: dict[str, Any], is_graphed: bool = False
    ) -> None:
        blocks = size * (-(-(context + (ROUNDS + 1) * STEPS + 8) // BLOCK_SIZE) + 1)
        limits = SchedulerConfig(size * context, size, 1 << 20)
        self._scheduler = Scheduler(CacheConfig(blocks, BLOCK_SIZE, False), limits)
        model: Any = NullModel(size)
        cache = torch.zeros(1, 1, 2, 1, BLOCK_SIZE, 1)
        room = (2 * size + 1, blocks // size)
        graphs = DecodeGraphs(NullGraphs(), graph_sizes(size), room) if is_graphed else None
        self._runner = ModelRunner(model, lambda: model, lambda: cache, graphs=graphs)
        self._runner._sampler = Sampler(NullDraws())
        self._tickets: deque[tuple[SchedulerOutput, Ticket]] = deque()
        self._now = self.seconds = 0.0
        params = SamplingParams(max_tokens=1 << 19, ignore_eos=True, **wishes)
        for index in range(size):
            prompt = [index + 1] * context
            self._scheduler.add(AddRequest(str(index), prompt, params, 0.0))

    def step(self) -> None:
        """Hand one step over, take the one before it in; counts the executor's time."""
        self._now += 1
        step = self._scheduler.schedule(self._now)
        assert step is not None
        began = time.thread_time()
        self._tickets.append((step, self._runner.submit(step)))
        self.seconds += time.thread_time() - began
        if len(self._tickets) < 2:
            return
        oldest, ticket = self._tickets.popleft()
        began = time.thread_time()
        result = ticket.collect()
        self.seconds += time.thread_time() - began
        self._scheduler.update(oldest, result, self._now)


def measure(
    size: int, context: int, wishes: dict[str, Any], is_graphed: bool = False
) -> tuple[float, float]:
    """Milliseconds of the executor and of the whole, a step."""
    loop = Loop(size, context, wishes, is_graphed)
    own, whole = [], []
    for turn in range(ROUNDS + 1):
        began, loop.seconds = time.thread_time(), 0.0
        for _ in range(STEPS):
            loop.step()
        if turn:
            whole.append((time.thread_time() - began) / STEPS * 1e3)
            own.append(loop.seconds / STEPS * 1e3)
    return statistics.median(own), statistics.median(whole)


def main() -> None:
    """Print a table."""
    torch.set_num_threads(1)
    print("ms a step            executor   whole step")
    for size, context in ((1, 128), (16, 128), (64, 128), (64, 1024), (64, 8192)):
        for name, wishes in WISHES.items():
            own, whole = measure(size, context, wishes)
            print(f"{size:3} x {context:5} {name:10} {own:7.3f} {whole:9.3f}", flush=True)
    print("\nus a step from graphs    executor   whole step")
    for context in (128, 1024, 8192):
        sizes, owns = (1, 16, 64, 128), []
        for size in sizes:
            own, whole = measure(size, context, WISHES["T+top-p"], is_graphed=True)
            owns.append(own * 1e3)
            print(f"{size:3} x {context:5} {own * 1e3:17.1f} {whole * 1e3:12.1f}", flush=True)
        each, fixed = np.polyfit(sizes, owns, 1)
        print(f"  {fixed:.0f} us a step and {each:.2f} us for each sequence", flush=True)


if __name__ == "__main__":
    main()
