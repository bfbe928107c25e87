"""Decode steps replayed from graphs answer as steps that are launched individually."""

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.depth import by_depth
from tests.support.model.whole_engine import outputs_of, tokens_of
from tests.support.worker.poisoned_graphs import PoisonedGraphs
from worker.config import CacheConfig, EngineConfig, SchedulerConfig, SpeculativeConfig
from worker.engine.core import EngineCore
from worker.engine.drafters.interface import DraftContext, Drafter
from worker.engine.features.adapters import Adapters, AdapterSlots
from worker.engine.features.grammars import ConstrainedOutputs
from worker.engine.features.speculation import Speculation
from worker.engine.messages import AddRequest, Vocabulary
from worker.engine.scheduling.scheduler import Scheduler
from worker.errors import ConfigError
from worker.executor.adapters import DeviceAdapters, ReadAdapter
from worker.executor.graphs import DecodeGraphs, _Key, _keys, graph_sizes
from worker.executor.interface import execute
from worker.executor.model_runner import ModelRunner
from worker.executor.start import choose_graphs
from worker.ops.backends import TORCH
from worker.ops.lora import AdapterStore, Owners
from worker.ops.step import StepAdapters, StepTensors
from worker.types import (
    Adapter,
    Drafts,
    SampleSpec,
    SamplingParams,
    ScheduledSequence,
    SchedulerOutput,
)

VOCABULARY, BLOCK, NUM_SLOTS = 90, 4, 2
ROOM = (40, 16)
WISHES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9},
    {"temperature": 0.0},
    {"temperature": 1.1, "top_k": 7, "top_p": 0.8},
    {"temperature": 0.8, "top_p": 0.7},
    {"temperature": 0.7, "min_p": 0.05},
]
ADJUSTED: list[dict[str, Any]] = [
    {"temperature": 0.8, "repetition_penalty": 1.4},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.0, "logit_bias": ((5, 3.0),)},
]
BANS = [*WISHES, {"temperature": 1.0, "min_tokens": 3, "stop_token_ids": tuple(range(60))}]
MOST = 3
DRAFTED = {
    "plain": WISHES,
    "stopped": [{**wish, "stop_token_ids": tuple(range(8))} for wish in WISHES],
    "adjusted": WISHES + ADJUSTED,
    "banned": BANS,
    "constrained": [
        *WISHES,
        {"temperature": 0.9, "grammar": "start: /([a-m]{2}[N-Z])+/"},
        {"temperature": 0.0, "grammar": "start: /[1-9]+/"},
    ],
}


class ToyModel:
    """Replaces `LlamaModel`: logits are a function of all tokens so far, which the cache stores."""

    config = SimpleNamespace(vocab_size=VOCABULARY)
    device = torch.device("cpu")
    kernels = None
    native = None
    backend = TORCH

    def hidden(self, step: StepTensors, cache: Tensor) -> Tensor:
        return self.states_and_inputs(step, cache, ())[0].index_select(0, step.sample_rows)

    def states_and_inputs(
        self, step: StepTensors, cache: Tensor, _: Sequence[int]
    ) -> tuple[Tensor, list[Tensor]]:
        keys = cache[0, :, 0, 0, :, 0]
        keys[step.slots // BLOCK, step.slots % BLOCK] = step.token_ids.float()
        rows = torch.arange(len(step.token_ids))
        owners = torch.searchsorted(step.query_starts[1:].long(), rows, right=True)
        held = keys[step.block_tables[owners]].flatten(1)
        places = torch.arange(held.shape[1])[None]
        contexts = step.context_lens[owners]
        seen = (places <= step.positions[:, None]) & (places < contexts[:, None])
        sums = (torch.where(seen, held, 0.0) * (places * 7 % 13 + 1)).sum(1, keepdim=True)
        if step.adapters is not None:
            step.adapters.add(0, "down", sums, sums)
        return sums, []

    def normed(self, hidden: Tensor) -> Tensor:
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return 3 * torch.sin(hidden * torch.arange(1, VOCABULARY + 1) * 0.7)


class ToyAdapters(AdapterStore):
    """An adapter shifts the sums of its rows. Slots are filled in place, as on a GPU."""

    def __init__(self) -> None:
        self._shifts = torch.zeros(NUM_SLOTS + 1)  # the last: of rows without an adapter

    def prepared(self, layers: Any) -> Any:
        return layers

    def put(self, slot: int, prepared: Any) -> None:
        self._shifts[slot] = 0.0 if prepared is None else prepared

    def plan(self, owners: Owners) -> StepAdapters:
        return self.plan_rows(torch.from_numpy(owners))

    def plan_rows(self, owners: Tensor) -> StepAdapters:
        return ToyStep(self._shifts, owners)


@dataclass
class ToyStep(StepAdapters):
    shifts: Tensor
    owners: Tensor
    native = None

    def add(self, layer: int, product: str, x: Tensor, y: Tensor) -> None:
        y += self.shifts[self.owners.long()][:, None]


def make_runner(
    device: PoisonedGraphs | None,
    num_blocks: int = 64,
    sizes: tuple[int, ...] = (1, 2, 4, 8),
    room: tuple[int, int] = ROOM,
    most_drafts: int = 0,
    has_adapters: bool = False,
) -> ModelRunner:
    """Blocks are nan until they are written."""
    model: Any = ToyModel()
    adapters = DeviceAdapters(model.config, 1, ToyAdapters()) if has_adapters else None
    graphs = None
    if device is not None:
        plan = None if adapters is None else adapters.plan_rows
        graphs = DecodeGraphs(device, sizes, room, most_drafts, plan)

    def cache() -> Tensor:
        made = torch.full((1, num_blocks + (graphs is not None), 2, 1, BLOCK, 1), torch.nan)
        if device is not None:
            device.spoilt = [made[:, -1]]
        return made

    return ModelRunner(model, lambda: model, cache, graphs=graphs, adapters=adapters)


def requests(wishes: list[dict[str, Any]], count: int) -> list[AddRequest]:
    draw = random.Random(5)
    made = []
    for index in range(count):
        prompt = [7, 8, 9, 10][: index % 5] + [draw.randrange(90) for _ in range(1 + index % 7)]
        params = SamplingParams(
            max_tokens=4 + index % 17, seed=index, **wishes[index % len(wishes)]
        )
        made.append(AddRequest(str(index), prompt, params, 0.0))
    return made


def read_toy(adapter: Adapter) -> Future[Any]:
    read: Future[Any] = Future()
    read.set_result(ReadAdapter(adapter.number, adapter.number / 7))
    return read


def adapted(asked: list[AddRequest]) -> list[AddRequest]:
    """Requests for more adapters than there are slots, one after the other, and for none."""
    return [
        msgspec.structs.replace(request, adapter=Adapter(f"a{n % 5}", "", n % 5) if n % 5 else None)
        for n, request in enumerate(asked)
    ]


class Foresees:
    """Drafts the known continuation, spoils it now and then, and never ends it."""

    def __init__(self, known: dict[str, list[Any]], asked: list[AddRequest]) -> None:
        self._texts = [(r.prompt_token_ids, known[r.request_id]) for r in asked]

    def propose(self, context: DraftContext, num_tokens: int) -> Drafts | None:
        own = [*context.token_ids]
        draw = random.Random(len(own) + context.seq_id)
        for prompt, output in self._texts:
            text = [*prompt, *(token for token in output if isinstance(token, int))]
            if len(prompt) == context.num_prompt and text[: len(own)] == own:
                drafts = (text[len(own) :] + [1] * num_tokens)[: draw.randrange(num_tokens + 1)]
                drafts = [89 - d if draw.random() < 0.15 else d for d in drafts]
                return Drafts(len(own), tuple(drafts), (0.5,) * len(drafts)) if drafts else None
        return None

    def end(self, context: DraftContext, learns: bool) -> None: ...

    def learn(self, num_tokens: int) -> None: ...


def answers(
    runner: ModelRunner,
    asked: list[AddRequest],
    num_blocks: int,
    overlap: bool,
    drafter: Drafter | None = None,
) -> dict[str, list[Any]]:
    speculation = None
    if drafter is not None:
        config = SpeculativeConfig("ngram", MOST, enable_adaptive_verification=False)
        speculation = Speculation(config, drafter, False)
    limits = SchedulerConfig(12, 8, 64)
    adapters = Adapters(AdapterSlots(NUM_SLOTS, NUM_SLOTS, read_toy))
    scheduler = Scheduler(CacheConfig(num_blocks, BLOCK), limits, (89,), [adapters, speculation])
    core = EngineCore(scheduler, runner, lambda: 0.0, overlap)
    core.take_vocabulary(Vocabulary([bytes((33 + n,)) for n in range(90)], [89], [89]))
    for request in asked:
        constrained = scheduler.find(ConstrainedOutputs)
        if request.params.grammar is not None and constrained is not None:
            constrained.grammars.compile(request.params.grammar).result()
    outputs = outputs_of(core, asked, at_once=2)
    logprobs = {name: [entry for o in own for entry in o.logprobs] for name, own in outputs.items()}
    stats = scheduler.stats()
    assert bool(stats.scheduler.num_preemptions) == (num_blocks < 20)
    if drafter is not None:
        assert 20 < stats.speculation.num_accepted_tokens < stats.speculation.num_draft_tokens - 5
    core.shutdown()
    return {name: own + logprobs[name] for name, own in tokens_of(outputs).items()}


PREEMPTED = pytest.param(17, id="preempted")
ROOMS = by_depth([PREEMPTED], [pytest.param(64, id="roomy"), PREEMPTED])


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    "wishes", [WISHES, WISHES + ADJUSTED, BANS], ids=["plain", "adjusted", "banned"]
)
@pytest.mark.parametrize("num_blocks", ROOMS)
def test_an_engine_on_graphs_answers_the_same(
    wishes: list[dict[str, Any]], overlap: bool, num_blocks: int
) -> None:
    asked = requests(wishes, 30)
    expected = answers(make_runner(None, num_blocks), asked, num_blocks, overlap)
    device = PoisonedGraphs()
    runner = make_runner(device, num_blocks)
    device.calls.clear()
    assert answers(runner, asked, num_blocks, overlap) == expected
    assert device.calls.count("send") > 10


@pytest.mark.parametrize("num_blocks", ROOMS)
@pytest.mark.parametrize("wishes", ["plain", "stopped", "adjusted", "banned", "constrained"])
def test_steps_with_drafts_are_replayed(wishes: str, num_blocks: int) -> None:
    asked = requests(DRAFTED[wishes], 30)
    expected = answers(make_runner(None, num_blocks), asked, num_blocks, overlap=False)
    device = PoisonedGraphs()
    runner = make_runner(device, num_blocks, most_drafts=MOST)
    device.calls.clear()
    assert answers(runner, asked, num_blocks, True, Foresees(expected, asked)) == expected
    assert device.calls.count("send") > 4


@pytest.mark.parametrize("wishes", ["plain", "adjusted", "constrained"])
@pytest.mark.parametrize("drafts", [0, MOST])
def test_steps_with_adapters_are_replayed(wishes: str, drafts: int) -> None:
    """Adapters of several requests, none of others; they change slots while graphs exist."""
    asked = adapted(requests(DRAFTED[wishes], 30))
    expected = answers(make_runner(None, has_adapters=True), asked, 64, overlap=False)
    assert expected != answers(make_runner(None), asked, 64, overlap=False)
    device = PoisonedGraphs()
    runner = make_runner(device, most_drafts=drafts, has_adapters=True)
    device.calls.clear()
    drafter = Foresees(expected, asked) if drafts else None
    assert answers(runner, asked, 64, True, drafter) == expected
    assert device.calls.count("send") > 4


def drafted(counts: Sequence[int], at: int = 3) -> SchedulerOutput:
    shares = []
    for index, count in enumerate(counts):
        spec = SampleSpec(SamplingParams(max_tokens=9, seed=index), at + 1, num_prompt=1)
        table = (8 * index,)
        tokens = [index + 3, *[1] * count]
        shares.append(ScheduledSequence(index, tokens, at, table, (spec,), num_drafts=count))
    return SchedulerOutput(0, tuple(shares))


def test_a_step_with_drafts_is_one_copy_there_and_one_back(monkeypatch: pytest.MonkeyPatch) -> None:
    device = PoisonedGraphs()
    runner = make_runner(device, most_drafts=MOST)
    for counts in ([2], [0, 1, MOST], [0, 2, 1, 0, MOST, 1]):
        device.calls.clear()
        with unhindered(device, monkeypatch):
            ticket = runner.submit(drafted(counts, at=0))
        assert device.calls == ["send", "replay", "fetch"]
        assert len(ticket.collect().sampled) == len(counts)


def test_steps_with_more_drafts_or_rows_than_captured_are_launched_anew() -> None:
    device = PoisonedGraphs()
    runner = make_runner(device, most_drafts=1)
    device.calls.clear()
    execute(runner, drafted([2], at=0))
    assert not device.calls
    assert _keys([100], 15) == [_Key(100, 1)]
    assert _keys([1, 16], 15) == [_Key(16, 16), _Key(1, 16), _Key(16, 1), _Key(1, 1)]


def test_tables_that_outgrow_their_room_are_captured_again() -> None:
    asked = requests(WISHES, 30)
    expected = answers(make_runner(None), asked, 64, overlap=True)
    device = PoisonedGraphs()
    runner = make_runner(device, room=(3, 1))
    assert answers(runner, asked, 64, overlap=True) == expected
    assert device.calls.count("renew") > 2


def test_steps_larger_than_all_sizes_are_launched_anew() -> None:
    asked = requests(WISHES, 20)
    expected = answers(make_runner(None), asked, 64, overlap=True)
    device = PoisonedGraphs()
    assert answers(make_runner(device, sizes=(2, 4)), asked, 64, overlap=True) == expected


def decode(step: int, wishes: list[dict[str, Any]], ahead: bool) -> SchedulerOutput:
    shares = []
    for index, wish in enumerate(wishes):
        made = SamplingParams(max_tokens=99, seed=index, **wish)
        params = PARAMS.setdefault((index, repr(wish)), made)
        table = tuple(range(8 * index, 8 * index + step // BLOCK + 1))
        spec = (SampleSpec(params, step + 1, num_prompt=1),)
        tokens = [] if ahead else [index + 3]
        shares.append(ScheduledSequence(index, tokens, step, table, spec, takes_pending=ahead))
    return SchedulerOutput(step, tuple(shares))


PARAMS: dict[Any, SamplingParams] = {}


class NoLaunches(TorchDispatchMode):
    """Refuses all of torch's operations except during a replay, and reads of values at any time."""

    def __init__(self, device: PoisonedGraphs) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = str(func)
        is_read = "_local_scalar_dense" in name or "nonzero" in name
        is_view = name.split(".")[1] in {"slice", "detach", "view", "alias"}
        assert is_view or (self._device.is_busy and not is_read), f"{name} waits, or may"
        return func(*args, **(kwargs or {}))


@contextmanager
def unhindered(device: PoisonedGraphs, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the host and the device met")

    with monkeypatch.context() as patch, NoLaunches(device):
        for name in ("tolist", "item", "cpu", "__int__", "__float__", "__bool__", "__index__"):
            patch.setattr(torch.Tensor, name, refuse)
        for name in ("tensor", "from_numpy", "as_tensor"):
            patch.setattr(torch, name, refuse)
        yield


@pytest.mark.parametrize("wishes", [{"temperature": 0.0}, WISHES[1], WISHES[3], WISHES[4]])
@pytest.mark.parametrize("count", [1, 5, 8])
def test_a_steady_step_is_one_copy_there_and_one_back(
    count: int, wishes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = PoisonedGraphs()
    runner = make_runner(device)
    tickets = [runner.submit(decode(0, [wishes] * count, ahead=False))]
    for step in range(1, 10):
        device.calls.clear()
        ahead = decode(step, [wishes] * count, ahead=True)
        with unhindered(device, monkeypatch):
            tickets.append(runner.submit(ahead))
        assert device.calls == ["send", "replay", "fetch"]
        assert len(tickets.pop(0).collect().sampled) == count


def test_a_steady_step_with_adapters_is_one_copy_there_and_one_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Slots are filled and emptied between steps, which see it, with adapters or without."""

    def run(device: PoisonedGraphs | None) -> list[Any]:
        runner = make_runner(device, has_adapters=True)
        found = [execute(runner, decode(0, WISHES, ahead=False)).sampled]
        first, second, third = (ReadAdapter(0, shift) for shift in (0.3, 0.7, 2.1))
        puts = {1: ((0, first), (1, second)), 4: ((1, None),), 6: ((0, third),)}
        for number in range(1, 10):
            step = decode(number, WISHES, ahead=True)
            slots = [None] * 6 if number == 8 else [0, None, 1, 0, 0, None]
            shares = zip(step.sequences, slots, strict=True)
            sequences = tuple(replace(share, adapter_slot=slot) for share, slot in shares)
            runner.submit(SchedulerOutput(0, (), adapters=puts.get(number, ())))
            if device is None:
                found.append(execute(runner, SchedulerOutput(number, sequences)).sampled)
                continue
            device.calls.clear()
            with unhindered(device, monkeypatch):
                ticket = runner.submit(SchedulerOutput(number, sequences))
            assert device.calls == ["send", "replay", "fetch"]
            found.append(ticket.collect().sampled)
        return found

    assert run(PoisonedGraphs()) == run(None)


@pytest.mark.parametrize("wishes", [WISHES, [{"temperature": 0.9, "logprobs": 2}] * 3])
def test_answers_that_are_collected_late_are_those_of_their_step(
    wishes: list[dict[str, Any]],
) -> None:
    def late(runner: ModelRunner) -> list[Any]:
        tickets = [runner.submit(decode(0, wishes, ahead=False))]
        found = []
        for step in range(1, 10):
            tickets.append(runner.submit(decode(step, wishes, ahead=True)))
            found.append(tickets.pop(0).collect().sampled)
        return found

    assert late(make_runner(PoisonedGraphs())) == late(make_runner(None))


def test_the_guard_refuses_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    device = PoisonedGraphs()
    for act in (
        lambda x: x.item(),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: x.clone(),
        lambda x: torch.tensor([1]),
        bool,
    ):
        with pytest.raises(AssertionError), unhindered(device, monkeypatch):
            act(torch.ones(1))
        reading = device.capture
        with pytest.raises(AssertionError), unhindered(device, monkeypatch):
            reading(lambda: torch.ones(3).nonzero(), torch.ones(1))  # type: ignore[arg-type]


def test_rows_that_are_no_numbers_fail_alone() -> None:
    device = PoisonedGraphs()
    runner = make_runner(device)
    step = decode(0, WISHES[:3], ahead=False)
    lost = ScheduledSequence(7, [1], 2, (60,), step.sequences[0].samples)
    output = execute(runner, SchedulerOutput(0, (*step.sequences, lost)))
    assert list(output.sampled) == [0, 1, 2]
    assert list(output.failed) == [7]


def test_a_runner_that_slept_captures_again() -> None:
    device = PoisonedGraphs()
    runner = make_runner(device)
    first = execute(runner, decode(0, WISHES[:3], ahead=False)).sampled
    device.calls.clear()
    runner.sleep(2)
    runner.wake(frozenset({"weights"}))
    assert not device.calls
    runner.wake(frozenset({"kv_cache"}))
    assert device.calls.count("capture") == 4
    assert execute(runner, decode(0, WISHES[:3], ahead=False)).sampled == first
    assert device.calls[-3:] == ["send", "replay", "fetch"]


def test_only_an_engine_with_adapters_captures_steps_with_them() -> None:
    captures = []
    for has_adapters in (False, True):
        device = PoisonedGraphs()
        make_runner(device, has_adapters=has_adapters)
        captures.append(device.calls.count("capture"))
    assert captures == [4, 4 * 2]


def test_sizes() -> None:
    assert graph_sizes(1) == (1,)
    assert graph_sizes(6) == (1, 2, 4, 6)
    assert graph_sizes(8) == (1, 2, 4, 8)
    assert graph_sizes(30) == (1, 2, 4, 8, 16, 24, 30)
    assert np.diff(graph_sizes(256)[3:]).tolist() == [8] * 31


def test_graphs_are_for_a_gpu_and_for_steps_that_come() -> None:
    cpu = torch.device("cpu")
    assert choose_graphs(EngineConfig("torch", "m"), TORCH, cpu) is None
    config = EngineConfig("torch", "m", cuda_graph_sizes=(1, 500))
    with pytest.raises(ConfigError, match="--cuda-graph-sizes up to 500"):
        choose_graphs(config, TORCH, cpu)


def test_a_step_replayed_draws_from_its_masks() -> None:
    step = decode(0, WISHES[:2], ahead=False)
    mask = bytes([0, 0b100100, *[0] * 10])
    masked = tuple(
        replace(sequence, samples=(replace(sequence.samples[0], masks=(mask,) * (index == 1)),))
        for index, sequence in enumerate(step.sequences)
    )
    outputs = [
        execute(make_runner(device), SchedulerOutput(0, masked)).sampled
        for device in (PoisonedGraphs(), None)
    ]
    assert outputs[0] == outputs[1]
    assert outputs[0][1][0].token_id in {10, 13}
