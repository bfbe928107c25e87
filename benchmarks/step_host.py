"""Host time of a decode step outside the device: everything but the model, which is a null device.

    python benchmarks/step_host.py [--sizes 1,16,64] [--contexts 128,1024,8192] [--steps 40]

A scheduler drives the model runner with two steps in flight; the device's part (forward pass,
logits, draws) returns at once what it was given beforehand. CPU time of one thread, microseconds a
step, the median of some rounds: of the executor (submit and collect) and of the whole step
(schedule, submit, collect, update). The limit of the executor is 600 at 64 sequences.

`graphs` are the same steps as a GPU replays them from graphs, without the calls of CUDA, with a
line through the sizes: microseconds a step, and for each sequence. In `graphs+LoRA`, three of four
sequences have an adapter. `drafts` are replayed steps beside a drafter on the device, which verify
three drafts a sequence and draft three more; each follows the one before it. `simulated` is the
executor of `--engine sim`, which draws tokens and works out the time of a step.

With Triton installed, `mixed` are steps in which one more sequence reads 128 tokens of its prompt,
through 30 layers of null products and Triton's backend, whose kernels are null: launched anew, and
in `pieces` around attention, without the calls of CUDA and Triton's launcher; and the time of the
latter as a part of the former's.

Prints a table and writes benchmarks/results/step_host.json.
"""

import functools
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from measuring import Table, command_line, numbers, write_results
from torch import Tensor

from worker.config import CacheConfig, SchedulerConfig, SpeculativeConfig
from worker.engine.features.adapters import Adapters, AdapterSlots
from worker.engine.features.speculation import Speculation
from worker.engine.messages import AddRequest
from worker.engine.scheduling.scheduler import Scheduler
from worker.executor.adapters import DeviceAdapters, ReadAdapter
from worker.executor.drafting import rounds
from worker.executor.drafting.cached_drafter import CachedDrafter
from worker.executor.graphs import DecodeGraphs, GraphDevice, graph_sizes
from worker.executor.interface import Executor, Ticket, execute
from worker.executor.model_runner import ModelRunner
from worker.models.config import ModelConfig
from worker.models.llama import LayerWeights, LlamaModel
from worker.ops.linear import Linear
from worker.ops.lora import AdapterStore
from worker.ops.noise import Stream
from worker.ops.rope import make_rope_table
from worker.ops.sample import Sampler
from worker.ops.step import StepAdapters, StepTensors
from worker.sim.config import SimConfig
from worker.sim.runner import SimExecutor, SimLimits
from worker.types import Adapter, SampleSpec, SamplingParams, ScheduledSequence, SchedulerOutput

BLOCK_SIZE, VOCAB, ROUNDS, ADAPTERS, DRAFTS = 16, 49_152, 5, 3, 3
LAYERS, CHUNK = 30, 128
WISHES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "T+top-p": {"temperature": 0.7, "top_p": 0.9},
    "penalties": {"temperature": 0.7, "repetition_penalty": 1.1},
}


class NullModel:
    """Stands for `LlamaModel`: hidden states and logits that are there already."""

    kernels = native = None
    device = torch.device("cpu")
    dtype = torch.float32
    config = SimpleNamespace(vocab_size=VOCAB)

    def __init__(self, most: int) -> None:
        self._hidden = torch.zeros(most, 1)
        self._logits = torch.zeros(most, VOCAB)

    def hidden(self, step: StepTensors, cache: Tensor) -> Tensor:
        """A row for each row to sample."""
        return self._hidden[: len(step.sample_rows)]

    def states_and_inputs(
        self, step: StepTensors, cache: Tensor, layers: Sequence[int]
    ) -> tuple[Tensor, list[Tensor]]:
        """A row for each row."""
        return torch.zeros(len(step.token_ids), 1), []

    def normed(self, hidden: Tensor) -> Tensor:
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of zero for each row."""
        return self._logits[: len(hidden)]


class NullProduct(Linear):
    """A product with a weight of `num_outputs` rows, which is not multiplied."""

    def __init__(self, num_outputs: int) -> None:
        self._num_outputs = num_outputs

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """A row of new memory for each row."""
        return x.new_empty(len(x), self._num_outputs)

    def rows(self, indices: Tensor) -> Tensor:
        """Allocate the rows of an embedding."""
        return torch.empty(len(indices), self._num_outputs)


class NullKernel:
    """Stands for a kernel of Triton's."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments, **constants: None


def layered_model() -> LlamaModel:
    """Layers of null products with Triton's backend, of which no kernel runs."""
    from worker.ops.triton import attention, fused
    from worker.ops.triton.backend import TritonBackend

    for module in (attention, fused):
        for name in vars(module):
            if name.endswith("_kernel"):
                setattr(module, name, NullKernel())
    hidden, inner, heads, dim = 16, 32, 2, 16
    config = ModelConfig("null", VOCAB, hidden, inner, LAYERS, heads, 1, dim, 1 << 14, 1e-5, 1e4)
    norm, into = torch.ones(hidden), NullProduct(hidden)
    layer = LayerWeights(norm, NullProduct((heads + 2) * dim), into, norm, NullProduct(64), into)
    rope = make_rope_table(torch.ones(dim // 2), config.max_context)
    place = (torch.float32, torch.device("cpu"))
    head = NullProduct(VOCAB)
    backend = TritonBackend(place[1])
    return LlamaModel(config, into, (layer,) * LAYERS, norm, head, rope, *place, backend=backend)


class NullNetwork:
    """Implements `DraftNetwork`: every draft is token 0."""

    config: Any = SimpleNamespace(num_layers=1, num_kv_heads=1, head_dim=1)
    reads_states, layers, max_positions, draft_vocab = False, (), 1 << 20, None

    def run(self, features: Tensor | None, step: StepTensors, cache: Tensor) -> Tensor:
        """A row for each row."""
        return torch.zeros(len(step.token_ids), 1)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of eight tokens for each row."""
        return torch.zeros(len(hidden), 8)


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

    def timed(self, replay: Callable[[], None]) -> Callable[[], float]:
        """Replay nothing, in zero seconds."""
        return float


class DraftedGraphs(NullGraphs):
    """Every draw and every draft is token 0, so that all drafts of a step are accepted."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._answers = functools.cache(self._answer)

    def fetch(self, source: Tensor, target: Tensor) -> Callable[[], None]:
        """Copy the answers of a step with 1 + `DRAFTS` rows a sequence, or with one."""
        target.copy_(self._answers(len(target)))
        return _nothing

    def _answer(self, count: int) -> Tensor:
        values = torch.zeros(count, dtype=torch.int32)
        each, verified = count // self._size, 3 + DRAFTS
        if each in {verified, verified + 2 * DRAFTS}:  # the last answer is where the run ends
            values[verified - 1 : verified * self._size : verified] = DRAFTS
        if each > verified:
            values[-DRAFTS * self._size :] = torch.ones(1).view(torch.int32)
        return values


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


def runner(size: int, num_blocks: int, kind: str) -> Executor:
    """The model runner of a worker on the null device."""
    model: Any = NullModel(size * (1 + DRAFTS))
    cache = torch.zeros(1, 1, 2, 1, BLOCK_SIZE, 1)
    room = (2 * size + 1, num_blocks)
    adapters = DeviceAdapters(model.config, 1, NullAdapters())
    graphs = drafter = None
    if kind.startswith("graphs"):
        graphs = DecodeGraphs(NullGraphs(), graph_sizes(size), room, 0, adapters.plan_rows)
    elif kind == "drafts":
        graphs = DecodeGraphs(DraftedGraphs(size), (size,), room, DRAFTS)
        network: Any = NullNetwork()
        blocks = (size * num_blocks + 1, BLOCK_SIZE)
        drafter = CachedDrafter(lambda _: network, network, model, blocks, "greedy")
    how = {"drafter": drafter, "graphs": graphs, "adapters": adapters}
    made = ModelRunner(model, lambda: model, lambda: cache, **how)
    made._sampler = Sampler(NullDraws())
    return made


class Loop:
    """A scheduler and an executor with `size` sequences of `context` tokens that decode."""

    def __init__(self, kind: str, size: int, context: int, wishes: dict[str, Any], steps: int):
        each = 1 + DRAFTS if kind == "drafts" else 1
        num_blocks = -(-(context + (ROUNDS + 1) * steps * each + 64) // BLOCK_SIZE) + 1
        limits = SchedulerConfig(size * context, size, 1 << 20)
        cache = CacheConfig(size * num_blocks, BLOCK_SIZE, False)
        adapters = Adapters(AdapterSlots(ADAPTERS, ADAPTERS, read))
        speculation = None
        if kind == "drafts":
            config = SpeculativeConfig("draft_model", DRAFTS, enable_adaptive_verification=False)
            speculation = Speculation(config, None, True)
        self._scheduler = Scheduler(cache, limits, features=[adapters, speculation])
        if kind == "simulated":
            sim = SimConfig(inter_token_latency_seconds=0.01, end_token_id=2)
            room = SimLimits(size * num_blocks, BLOCK_SIZE, size)
            self._executor: Executor = SimExecutor(sim, lambda seconds, follows: None, room)
        else:
            self._executor = runner(size, num_blocks, kind)
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
        if step is None:  # drafts of a prompt's step are known first
            self._take_in()
            self.step()
            return
        began = time.thread_time()
        self._tickets.append((step, self._executor.submit(step)))
        self.seconds += time.thread_time() - began
        if len(self._tickets) == 2:
            self._take_in()

    def _take_in(self) -> None:
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


def measure_mixed(size: int, context: int, steps: int) -> tuple[float, float]:
    """Microseconds of the executor for steps of `size` sequences that decode behind `context`
    tokens and one that reads `CHUNK`: launched anew, and in pieces. Both run in turn.
    """
    model, each = layered_model(), -(-max(context + 1, CHUNK) // BLOCK_SIZE)
    cache = torch.zeros(LAYERS, 1, 2, 1, BLOCK_SIZE, 16)
    sizes = {"piece_sizes": (2 * CHUNK, 4 * CHUNK)}
    kinds = [None, DecodeGraphs(NullGraphs(), (size,), (2 * size + 3, each), **sizes)]
    runners = [ModelRunner(model, lambda: model, lambda: cache, graphs=kind) for kind in kinds]
    params = SamplingParams(9, **WISHES["T+top-p"])
    shares = []
    for index in range(size + 1):
        start, count = (context, 1) if index else (0, CHUNK)
        table = tuple(range(each * index, each * index + each))
        spec = (SampleSpec(params, start + count),)
        shares.append(ScheduledSequence(index, [7] * count, start, table, spec))
    step = SchedulerOutput(0, tuple(shares))
    found: list[list[float]] = [[], []]
    for made in runners:
        made._sampler = Sampler(NullDraws())
    for _ in range(ROUNDS + 1):
        for made, times in zip(runners, found, strict=True):
            began = time.thread_time()
            for _ in range(steps):
                execute(made, step)
            times.append((time.thread_time() - began) / steps * 1e6)
    launched, pieces = (statistics.median(times[1:]) for times in found)
    return launched, pieces


def main() -> None:
    """Measure each kind of step, size, context and kind of draw."""
    parser = command_line(__doc__)
    parser.add_argument("--sizes", type=numbers(int), default=[1, 16, 64, 128])
    parser.add_argument("--contexts", type=numbers(int), default=[128, 1024, 8192])
    parser.add_argument("--steps", type=int, default=40, help="of a round")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rounds.MIN_ROWS = rounds.MAX_ROWS = 1 << 30  # the drafter reads all prompts in one step
    figures = ("executor_us .1f", "whole_step_us .1f")
    table = Table("step <11", "sequences", "context", "draw <10", *figures)
    lines = []
    for kind in ("launched", "graphs", "graphs+LoRA", "drafts", "simulated"):
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
    for size in options.sizes if find_spec("triton") else ():
        context = options.contexts[0]
        both = measure_mixed(size, context, options.steps)
        for kind, spent in zip(("mixed", "pieces"), both, strict=True):
            row = {"step": kind, "sequences": size, "context": context, "draw": "T+top-p"}
            table.add(**row, executor_us=spent, whole_step_us=None)
        lines.append(f"mixed, {size} sequences and {CHUNK} tokens: {both[1] / both[0]:.2f}")
    print("\n".join(lines))
    write_results(options, rows=table.rows, lines=lines)


if __name__ == "__main__":
    main()
