"""Host time of a decode step outside the device: everything but the model, which is a null device.

    python benchmarks/step_host.py [--sizes 1,16,64] [--contexts 128,1024,8192] [--steps 40]

A scheduler drives the model runner with two steps in flight; the device's part (forward pass,
logits, draws) returns at once what it was given beforehand. CPU time of one thread, microseconds a
step, the median of some rounds: of the executor (submit and collect) and of the whole step
(schedule, submit, collect, update). The limit of the executor is 600 at 64 sequences.

`graphs` are the same steps as a GPU replays them from graphs, without the calls of CUDA, with a
line through the sizes: microseconds a step, and for each sequence. In `graphs+LoRA`, three of four
sequences have an adapter. `simulated` is the executor of `--engine sim`, which draws tokens and
works out the time of a step.

Prints a table and writes benchmarks/results/step_host.json.
"""

import statistics
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from measuring import Table, command_line, numbers, write_results
from torch import Tensor

from worker.config import CacheConfig, SchedulerConfig, SimConfig
from worker.engine.features.adapters import Adapters, AdapterSlots
from worker.engine.messages import AddRequest
from worker.engine.scheduling.scheduler import Scheduler
from worker.executor.adapters import DeviceAdapters, ReadAdapter
from worker.executor.graphs import DecodeGraphs, GraphDevice, graph_sizes
from worker.executor.interface import Executor, Ticket
from worker.executor.model_runner import ModelRunner
from worker.ops.lora import AdapterStore
from worker.ops.noise import Stream
from worker.ops.sample import Sampler
from worker.ops.step import StepAdapters, StepTensors
from worker.sim.runner import SimExecutor, SimLimits
from worker.types import Adapter, SamplingParams, SchedulerOutput

BLOCK_SIZE, VOCAB, ROUNDS, ADAPTERS = 16, 49_152, 5, 3
WISHES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "T+top-p": {"temperature": 0.7, "top_p": 0.9},
    "penalties": {"temperature": 0.7, "repetition_penalty": 1.1},
}


class NullModel:
    """Stands for `LlamaModel`: hidden states and logits that are there already."""

    kernels = native = None
    device = torch.device("cpu")
    config = SimpleNamespace(vocab_size=VOCAB)

    def __init__(self, most: int) -> None:
        self._hidden = torch.zeros(most, 1)
        self._logits = torch.zeros(most, VOCAB)

    def hidden(self, step: StepTensors, cache: Tensor) -> Tensor:
        """A row for each row to sample."""
        return self._hidden[: len(step.sample_rows)]

    def normed(self, hidden: Tensor) -> Tensor:
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of zero for each row."""
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
        """Allocate memory that is not pinned."""
        return torch.zeros(size, dtype=torch.int32)

    def renew(self) -> None:
        """Do nothing: the buffer holds no device memory."""

    def capture(self, launch: Callable[[], None], writes: Tensor) -> Callable[[], None]:
        """Discard the launch: nothing is replayed."""
        return _nothing

    def send(self, source: Tensor, target: Tensor) -> None:
        """Copy to the device at once."""
        target.copy_(source)

    def fetch(self, source: Tensor, target: Tensor) -> Callable[[], None]:
        """Copy to the host at once."""
        target.copy_(source)
        return _nothing

    def spare_fetched(self) -> None:
        """Nothing is under way."""


def _nothing() -> None:
    return


class NullAdapters(AdapterStore):
    """Adapters that are read and put in no time."""

    def put(self, slot: int, prepared: Any) -> None:
        """Do nothing: no step multiplies."""

    def plan_rows(self, owners: Tensor) -> StepAdapters:
        """Plan nothing: graphs are not captured."""
        raise NotImplementedError


def read(adapter: Adapter) -> Future[Any]:
    """Return a future that is done."""
    done: Future[Any] = Future()
    done.set_result(ReadAdapter(adapter.number, None))
    return done


def runner(size: int, num_blocks: int, is_graphed: bool) -> Executor:
    """The model runner of a worker on the null device."""
    model: Any = NullModel(size)
    cache = torch.zeros(1, 1, 2, 1, BLOCK_SIZE, 1)
    room = (2 * size + 1, num_blocks)
    adapters = DeviceAdapters(model.config, 1, NullAdapters())
    sizes = graph_sizes(size)
    graphs = DecodeGraphs(NullGraphs(), sizes, room, 0, adapters.plan_rows) if is_graphed else None
    made = ModelRunner(model, lambda: model, lambda: cache, graphs=graphs, adapters=adapters)
    made._sampler = Sampler(NullDraws())
    return made


class Loop:
    """A scheduler and an executor with `size` sequences of `context` tokens that decode."""

    def __init__(self, kind: str, size: int, context: int, wishes: dict[str, Any], steps: int):
        num_blocks = -(-(context + (ROUNDS + 1) * steps + 8) // BLOCK_SIZE) + 1
        limits = SchedulerConfig(size * context, size, 1 << 20)
        cache = CacheConfig(size * num_blocks, BLOCK_SIZE, False)
        adapters = Adapters(AdapterSlots(ADAPTERS, ADAPTERS, read))
        self._scheduler = Scheduler(cache, limits, features=[adapters])
        if kind == "simulated":
            config = SimConfig(inter_token_latency_seconds=0.01, end_token_id=2)
            room = SimLimits(size * num_blocks, BLOCK_SIZE, size)
            self._executor: Executor = SimExecutor(config, lambda seconds, follows: None, room)
        else:
            self._executor = runner(size, num_blocks, kind.startswith("graphs"))
        self._tickets: deque[tuple[SchedulerOutput, Ticket]] = deque()
        self._now = self.seconds = 0.0
        params = SamplingParams(max_tokens=1 << 19, ignore_eos=True, **wishes)
        for index in range(size):
            prompt, number = [index + 1] * context, index % (ADAPTERS + 1)
            has_adapter = kind == "graphs+LoRA" and number
            adapter = Adapter(f"a{number}", "", number) if has_adapter else None
            self._scheduler.add(AddRequest(str(index), prompt, params, 0.0, adapter=adapter))

    def step(self) -> None:
        """Hand one step over, take the one before it in; counts the executor's time."""
        self._now += 1
        step = self._scheduler.schedule(self._now)
        assert step is not None
        began = time.thread_time()
        self._tickets.append((step, self._executor.submit(step)))
        self.seconds += time.thread_time() - began
        if len(self._tickets) < 2:
            return
        oldest, ticket = self._tickets.popleft()
        began = time.thread_time()
        result = ticket.collect()
        self.seconds += time.thread_time() - began
        self._scheduler.update(oldest, result, self._now)


def measure(loop: Loop, steps: int) -> dict[str, float]:
    """Microseconds of the executor and of the whole, a step."""
    own, whole = [], []
    for turn in range(ROUNDS + 1):
        began, loop.seconds = time.thread_time(), 0.0
        for _ in range(steps):
            loop.step()
        if turn:
            whole.append((time.thread_time() - began) / steps * 1e6)
            own.append(loop.seconds / steps * 1e6)
    return {"executor_us": statistics.median(own), "whole_step_us": statistics.median(whole)}


def main() -> None:
    """Measure each kind of step, size, context and kind of draw."""
    parser = command_line(__doc__)
    parser.add_argument("--sizes", type=numbers(int), default=[1, 16, 64, 128])
    parser.add_argument("--contexts", type=numbers(int), default=[128, 1024, 8192])
    parser.add_argument("--steps", type=int, default=40, help="of a round")
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures = ("executor_us .1f", "whole_step_us .1f")
    table = Table("step <11", "sequences", "context", "draw <10", *figures)
    lines = []
    for kind in ("launched", "graphs", "graphs+LoRA", "simulated"):
        draws = WISHES if kind == "launched" else {"T+top-p": WISHES["T+top-p"]}
        for context in options.contexts:
            for draw, wishes in draws.items():
                owns = []
                for size in options.sizes:
                    found = measure(Loop(kind, size, context, wishes, options.steps), options.steps)
                    owns.append(found["executor_us"])
                    table.add(step=kind, sequences=size, context=context, draw=draw, **found)
            if kind != "launched" and len(owns) > 1:
                each, fixed = np.polyfit(options.sizes, owns, 1)
                lines.append(f"{kind}, {context}: {fixed:.0f} us and {each:.2f} us a sequence")
    print("\n".join(lines))
    write_results(options, rows=table.rows, lines=lines)


if __name__ == "__main__":
    main()
