"""Random requests, limits, caches and commands, and what an engine's answers must be then."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from tests.support.worker.paged_executor import CORRUPT, next_token, pooled
from worker.config import CacheConfig, SchedulerConfig
from worker.engine import pipeline, policies
from worker.engine.core import EngineCore
from worker.engine.messages import (
    AddRequest,
    Command,
    DumpCache,
    Pause,
    RequestOutput,
    ResetPrefixCache,
    Resume,
    Sleep,
    StepOutputs,
    WakeUp,
)
from worker.engine.scheduling.scheduler import Scheduler
from worker.executor.interface import Ticket
from worker.types import (
    FinishReason,
    ModelOutput,
    Pooling,
    RepetitionDetection,
    SamplingParams,
    SchedulerOutput,
)

END = 0


class EagerPipeline:
    """Runs a step as soon as it is submitted, long before its result is needed."""

    depth = 2

    def __init__(self, executor: Any) -> None:
        self._executor = executor
        self._tickets: deque[Ticket] = deque()

    def submit(self, step: SchedulerOutput) -> None:
        self._tickets.append(self._executor.submit(step))

    def wait(self) -> ModelOutput:
        return self._tickets.popleft().collect()

    def shutdown(self) -> None: ...


PIPELINES: dict[str, Callable[[Any], pipeline.Pipeline]] = {
    "inline": pipeline.InlinePipeline,
    "lazy": lambda executor: pipeline.InlinePipeline(executor, depth=2),
    "eager": EagerPipeline,
    "overlapped": pipeline.OverlappedPipeline,
}
# Those without threads of their own.
PIPES = ("eager", "inline", "lazy")


@dataclass
class Arrival:
    """`at_step` is the step before which it comes, `abort_at` those before which answers are
    aborted.
    """

    request: AddRequest
    at_step: int
    abort_at: tuple[int | None, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return (self.request.request_id, *self.request.branch_ids)


@dataclass
class Received:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: list[tuple[int, float]] = field(default_factory=list)
    endings: list[RequestOutput] = field(default_factory=list)

    def take(self, output: RequestOutput) -> None:
        assert not self.endings
        self.tokens += output.token_ids
        self.logprobs += [entry.logprobs[0] for entry in output.logprobs]
        self.prompt_logprobs += [(e.token_ids[0], e.logprobs[0]) for e in output.prompt_logprobs]
        if output.finish_reason is not None:
            self.endings.append(output)


def alone(request: AddRequest, index: int, limit: int) -> tuple[list[int], FinishReason]:
    """Return the answer by the definition: no blocks, no batch, no cache."""
    context, params = list(request.prompt_token_ids), request.params
    outputs: list[int] = []
    seed = params.seed + index
    while True:
        if seed >= CORRUPT and len(outputs) >= seed - CORRUPT:
            return outputs, FinishReason.ERROR
        early = len(outputs) < params.min_tokens
        ends = () if params.ignore_eos else (END,)
        token = next_token(context, seed, (*ends, *params.stop_token_ids) if early else ())
        context.append(token)
        outputs.append(token)
        if (token == END and not params.ignore_eos) or token in params.stop_token_ids:
            return outputs, FinishReason.STOP
        if len(outputs) == params.max_tokens or len(context) == limit:
            return outputs, FinishReason.LENGTH
        if len(outputs) >= params.min_tokens and repeats(outputs, params.repetition_detection):
            return outputs, FinishReason.REPETITION


def embedded(prompt: list[int], pooling: Pooling) -> list[float]:
    first = 0 if pooling is Pooling.MEAN else len(prompt) - 1
    sums = pooled([*enumerate(prompt)][first:])
    return [value / (len(prompt) - first) for value in sums]


def repeats(outputs: list[int], detection: RepetitionDetection | None) -> bool:
    if detection is None:
        return False
    sizes = range(detection.min_pattern_size, detection.max_pattern_size + 1)
    return any(
        len(outputs) >= size * detection.min_count
        and outputs[-size * detection.min_count :] == outputs[-size:] * detection.min_count
        for size in sizes
    )


# Few distinct tokens and stems make shared prefixes common.
prompts = st.builds(
    lambda stem, tail: stem + tail,
    st.sampled_from([[], [1] * 5, [1] * 8, [1, 2, 1, 2, 1, 2, 1, 2, 1], [3] * 16]),
    st.lists(st.integers(1, 2), min_size=1, max_size=7),
)
sampling = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 14),
    seed=st.sampled_from([0, 1, 2, 3, CORRUPT, CORRUPT + 3]),
    min_tokens=st.integers(0, 3),
    ignore_eos=st.booleans(),
    stop_token_ids=st.sampled_from([(), (), (6,)]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.5]),
    logprobs=st.sampled_from([None, 1]),
    prompt_logprobs=st.sampled_from([None, None, None, 2]),
    repetition_detection=st.sampled_from([None, None, RepetitionDetection(3, 1, 2)]),
)


@st.composite
def embeddings(draw: st.DrawFn, name: str) -> Arrival:
    pooling = draw(st.sampled_from(Pooling))
    salt, tenant = draw(st.sampled_from([None, "x"])), draw(st.sampled_from(["", "y"]))
    params = SamplingParams(max_tokens=1, temperature=0.0)
    request = AddRequest(name, draw(prompts), params, 0.0, 0, salt, tenant=tenant, pooling=pooling)
    abort_at = draw(st.sampled_from([None, None, None, *range(20)]))
    return Arrival(request, draw(st.integers(0, 12)), (abort_at,))


@st.composite
def arrivals(draw: st.DrawFn, sampling: st.SearchStrategy[SamplingParams] = sampling) -> Arrival:
    name = draw(st.uuids().map(str))
    if draw(st.sampled_from([False, False, False, True])):
        return draw(embeddings(name))
    branches = [f"{name}/{index}" for index in range(1, draw(st.sampled_from([1, 1, 2, 3])))]
    request = AddRequest(
        name,
        draw(prompts),
        draw(sampling),
        0.0,
        draw(st.sampled_from([0, 0, 0, 1, -1])),
        draw(st.sampled_from([None, None, None, "x"])),
        branches,
        draw(st.sampled_from(["", "", "y", "z"])),
    )
    aborts = st.sampled_from([None, None, None, *range(20)])
    return Arrival(request, draw(st.integers(0, 12)), tuple(draw(aborts) for _ in (0, *branches)))


loads = st.lists(arrivals(), min_size=1, max_size=8, unique_by=lambda a: a.request.request_id)
caches = st.builds(
    CacheConfig,
    num_blocks=st.integers(4, 20),
    block_size=st.sampled_from([1, 2, 4, 8]),
    enable_prefix_caching=st.sampled_from([True, True, False]),
    enable_partial_hits=st.booleans(),
    enable_fair_eviction=st.booleans(),
    watermark=st.sampled_from([0.0, 0.0, 0.2]),
)
limits_of_a_step = st.builds(
    SchedulerConfig,
    max_num_batched_tokens=st.integers(1, 24),
    max_num_seqs=st.integers(1, 6),
    max_model_len=st.integers(16, 64),
    long_prefill_token_threshold=st.integers(0, 6),
    enable_chunked_prefill=st.sampled_from([True, True, True, False]),
    policy=st.sampled_from(policies.POLICIES),
    waiting_order=st.sampled_from(policies.WAITING_ORDERS),
    victim=st.sampled_from(sorted(policies.VICTIM_POLICIES)),
    max_bypasses=st.integers(0, 4),
    in_batch_prefix_tokens=st.sampled_from([None, 1, 4]),
    reserve_full_prompt=st.sampled_from([True, True, False]),
)
orders_now_and_then = st.lists(
    st.tuples(
        st.integers(0, 25),
        st.sampled_from(
            [
                *(ResetPrefixCache(0, running) for running in (True, True, False)),
                *(Pause(0, mode) for mode in ("abort", "wait", "keep")),
                *(Sleep(0, level, "wait") for level in (0, 1)),
                *(Sleep(0, level, "keep") for level in (0, 1, 2)),
                Sleep(0, 1, "abort"),
                Resume(0),
                WakeUp(0),
                WakeUp(0, ["weights"]),
                DumpCache(0),
            ]
        ),
    ),
    max_size=4,
)
# What was preempted often enough comes back under a guarantee.
storms = st.builds(
    lambda first: [(first + 3 * i, ResetPrefixCache(0, True)) for i in range(3)], st.integers(1, 6)
)
commands = st.sampled_from([orders_now_and_then, orders_now_and_then, storms]).flatmap(lambda s: s)


@dataclass
class Scene:
    cache: CacheConfig
    limits: SchedulerConfig
    load: list[Arrival]
    orders: list[tuple[int, Command]]

    def run(
        self,
        scheduler: Scheduler,
        executor: Any,
        pipe: str,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> "Walk":
        core = EngineCore(scheduler, executor, clock, pipeline=PIPELINES[pipe](executor))
        try:
            return self.walk(core, scheduler)
        finally:
            core.shutdown()

    def walk(self, core: EngineCore, scheduler: Scheduler) -> "Walk":
        walk = Walk(core, scheduler, self.load)
        walk.run(self.limits, self.orders)
        walk.check(self.orders)
        return walk


scenes = st.builds(Scene, caches, limits_of_a_step, loads, commands)


class Walk:
    def __init__(self, core: EngineCore, scheduler: Scheduler, load: list[Arrival]) -> None:
        self.core = core
        self.scheduler = scheduler
        self.load = load
        self.received = {name: Received() for arrival in load for name in arrival.names}
        self.num_replies = 0

    def before(self, step: int) -> None:
        for arrival in self.load:
            if arrival.at_step == step:
                self.core.add(arrival.request)
            names = zip(arrival.names, arrival.abort_at, strict=True)
            self.core.abort([name for name, abort_at in names if abort_at == step])

    def step(self, limits: SchedulerConfig) -> StepOutputs | None:
        outputs = self.core.step()
        self.scheduler.check_integrity()
        self.num_replies += len(self.core.take_replies())
        if outputs is not None:
            assert outputs.num_scheduled_tokens <= limits.max_num_batched_tokens
            for output in outputs.outputs:
                self.received[output.request_id].take(output)
        return outputs

    def run(self, limits: SchedulerConfig, orders: list[tuple[int, Command]]) -> None:
        """Step to the end of everything; `orders` fall before their steps."""
        last = max([*(max(a.at_step, *(x or 0 for x in a.abort_at)) for a in self.load), 25])
        for step in range(last + 1):
            self.before(step)
            for at_step, command in orders:
                if at_step == step:
                    self.core.command(command)
            self.step(limits)
        self.core.command(WakeUp(0))
        self.core.command(Resume(0))
        for _ in range(5000):
            if not self.core.has_work:
                break
            self.step(limits)
        else:
            raise AssertionError("the scheduler makes no progress")
        assert self.num_replies == len(orders) + 2
        assert self.scheduler.blocks.usage == 0.0
        assert (self.scheduler.num_waiting, self.scheduler.num_in_flight) == (0, 0)

    def check(self, orders: list[tuple[int, Command]]) -> None:
        aborting = any(isinstance(c, Pause | Sleep) and c.mode == "abort" for _, c in orders)
        for arrival in self.load:
            for index in range(len(arrival.names)):
                check(arrival, index, self, aborting or arrival.abort_at[index] is not None)


def check(arrival: Arrival, index: int, walk: Walk, may_abort: bool) -> None:
    request, limit = arrival.request, walk.scheduler.max_model_len
    seen = walk.received[arrival.names[index]]
    (ending,) = seen.endings
    too_many = len(arrival.names) > walk.scheduler._limits.max_num_seqs
    num_known = len(request.prompt_token_ids) + (request.pooling is None)
    if num_known > limit or too_many:
        assert ending.finish_reason is FinishReason.ERROR
        assert seen.tokens == []
        return
    if request.pooling is not None:
        if ending.finish_reason is FinishReason.ABORT:
            assert may_abort
        else:
            assert ending.finish_reason is FinishReason.STOP
            assert ending.pooled == embedded(request.prompt_token_ids, request.pooling)
        assert not seen.tokens
        return
    expected, reason = alone(request, index, limit)
    siblings = [request.params.seed + i for i in range(len(arrival.names))]
    if ending.finish_reason is FinishReason.ABORT:
        assert may_abort
        assert seen.tokens == expected[: len(seen.tokens)]
    elif ending.finish_reason is FinishReason.ERROR:
        # The logits of the first token are those of all answers.
        assert (seen.tokens, reason) == (expected, reason) or CORRUPT in siblings
    else:
        assert (seen.tokens, ending.finish_reason) == (expected, reason)
    start = len(request.prompt_token_ids)
    if request.params.logprobs is not None:
        assert seen.logprobs == [-float(start + i) for i in range(len(seen.tokens))]
    if request.params.prompt_logprobs is not None and index == 0 and seen.tokens:
        targets = enumerate(request.prompt_token_ids[1:], 1)
        assert seen.prompt_logprobs == [(token, -float(p)) for p, token in targets]
    elif index == 0 and request.params.prompt_logprobs is None:
        assert not seen.prompt_logprobs
