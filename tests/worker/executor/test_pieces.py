"""Steps with parts of prompts, replayed in pieces around attention, answer as launched anew."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.model.tiny_llama import BLOCK_SIZE, CPU, TINY, tiny_llama
from tests.support.model.whole_engine import Way, run_way, tokens_of
from tests.support.worker.poisoned_graphs import PoisonedGraphs
from worker.engine.messages import AddRequest
from worker.executor.graphs import DecodeGraphs
from worker.executor.interface import execute
from worker.executor.kv_cache import allocate
from worker.executor.model_runner import ModelRunner
from worker.executor.pieces import StepPieces, piece_sizes
from worker.executor.state import DeviceState
from worker.executor.step_batch import StepBatch
from worker.models.llama import LlamaModel
from worker.models.loader import model_rope_table
from worker.ops.backends import Attention, AttentionShape, TorchBackend
from worker.ops.rope import RopeTable
from worker.ops.step import StepTensors
from worker.types import SampleSpec, SamplingParams, ScheduledSequence, SchedulerOutput

DEEP = replace(TINY, num_layers=3)
PLAIN = tiny_llama(config=DEEP)
BLOCKS, ROOM, SIZES = 60, (40, 64), (8, 16, 48)
CAPTURES = len(SIZES) * (1 + DEEP.num_layers)


def gemma() -> LlamaModel:
    """With windows that have their own rotation, norms everywhere, and a layer without rotation."""
    made = tiny_llama(config=replace(DEEP, embedding_scale=1.7, activation="gelu", post_norms=True))
    wide, narrow = torch.linspace(0.5, 1.5, 32), torch.linspace(0.7, 1.2, 8)
    layers = [
        replace(
            layer,
            query_norm=narrow,
            key_norm=narrow.flip(0),
            attention_norm=wide,
            branch_norm=wide.flip(0),
            window=None if index == 1 else 5,
            rotates=index < 2,
        )
        for index, layer in enumerate(made.layers)
    ]
    local = model_rope_table(replace(DEEP, rope_theta=50.0), DEEP.max_context, CPU)
    return replace(made, layers=tuple(layers), local_rope=local)


class LaunchedError(AssertionError):
    """The whole model was launched outside of a graph."""


class InPieces:
    """A model that runs whole only in graphs."""

    def __init__(self, model: LlamaModel, device: PoisonedGraphs) -> None:
        self._model, self._device = model, device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def states_and_inputs(self, *args: Any) -> tuple[Tensor, list[Tensor]]:
        raise LaunchedError


def make_runner(
    model: LlamaModel = PLAIN,
    device: PoisonedGraphs | None = None,
    num_blocks: int = BLOCKS,
    sizes: Sequence[int] = SIZES,
) -> ModelRunner:
    graphs = None if device is None else DecodeGraphs(device, (1, 2, 4), ROOM, piece_sizes=sizes)
    seen: Any = model if device is None else InPieces(model, device)

    def cache() -> Tensor:
        held = num_blocks + (device is not None)
        made = allocate(held, BLOCK_SIZE, model.config, torch.float32, CPU)
        if device is not None:
            device.spoilt = [made[:, -1]]
        return made

    return ModelRunner(seen, lambda: seen, cache, graphs=graphs)


WISHES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "top_k": 7},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.8, "top_p": 0.7, "repetition_penalty": 1.2},
    {"temperature": 0.0, "prompt_logprobs": 1},
]


def requests(count: int) -> list[AddRequest]:
    """Requests of which most share the beginning of their prompts."""
    draw = random.Random(3)
    stem = [draw.randrange(61) for _ in range(2 * BLOCK_SIZE)]
    made = []
    for index in range(count):
        own = [draw.randrange(61) for _ in range(1 + 5 * index % 28)]
        params = SamplingParams(
            3 + index % 9, seed=index, ignore_eos=True, **WISHES[index % len(WISHES)]
        )
        made.append(AddRequest(str(index), stem * (index % 3 > 0) + own, params, 0.0))
    return made


WAYS = {
    "alone": Way(BLOCKS, 48, 1, block_size=BLOCK_SIZE),
    "mixed, one step ahead": Way(BLOCKS, 48, 5, True, block_size=BLOCK_SIZE),
    "chunked": Way(BLOCKS, 7, 4, True, block_size=BLOCK_SIZE),
    "preempted": Way(16, 20, 8, True, block_size=BLOCK_SIZE, preempts=True),
    "with drafts": Way(BLOCKS, 48, 5, drafts=3, block_size=BLOCK_SIZE),
}


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("model", [PLAIN, gemma()], ids=["llama", "gemma"])
def test_an_engine_in_pieces_answers_the_same(model: LlamaModel, name: str) -> None:
    """No step launches the model as a whole, and the scratch block is spoilt before each piece."""
    way, asked = WAYS[name], requests(40)
    expected = run_way(make_runner(model, None, way.num_blocks), way, asked)
    device = PoisonedGraphs()
    found = run_way(make_runner(model, device, way.num_blocks), way, asked)
    assert tokens_of(found) == tokens_of(expected)
    assert found.keys() == expected.keys()


def share(seq_id: int, tokens: Sequence[int], start: int, blocks: range) -> ScheduledSequence:
    end = start + len(tokens)
    spec = SampleSpec(SamplingParams(9, seed=seq_id), end, num_prompt=end)
    return ScheduledSequence(seq_id, [*tokens], start, tuple(blocks), (spec,))


def mixed(counts: Sequence[int], starts: Sequence[int]) -> SchedulerOutput:
    """Return a step of sequences that have 12 blocks each."""
    shares = [
        share(
            n, [(7 * n + place) % 61 for place in range(count)], start, range(12 * n, 12 * n + 12)
        )
        for n, (count, start) in enumerate(zip(counts, starts, strict=True))
    ]
    return SchedulerOutput(0, tuple(shares))


STEPS = [
    mixed([20, 1, 9, 17], [0, 0, 0, 0]),
    mixed([1, 3, 1], [20, 1, 9]),
    mixed([9, 2, 4], [21, 4, 10]),
    mixed([5], [30]),
    mixed([6, 1, 1, 8], [35, 6, 14, 17]),
]


@torch.inference_mode()
def test_padded_rows_change_no_block() -> None:
    """Rows of larger steps before are not written again."""
    plain, device = make_runner(), PoisonedGraphs()
    padded = make_runner(device=device)
    for step in STEPS:
        device.calls.clear()
        assert execute(padded, step).sampled == execute(plain, step).sampled
        assert device.calls == ["replay"] * (1 + DEEP.num_layers)
        held, real = padded._cache, plain._cache
        assert held is not None
        assert real is not None
        assert torch.equal(held[:, :-1], real)


@torch.inference_mode()
@pytest.mark.parametrize("model", [PLAIN, gemma()], ids=["llama", "gemma"])
def test_states_that_enter_layers_are_those_of_the_model(model: LlamaModel) -> None:
    layers, device = (3, 0, 2, 0), PoisonedGraphs()
    caches = [allocate(BLOCKS, BLOCK_SIZE, DEEP, torch.float32, CPU) for _ in range(2)]
    pieces = StepPieces(device.capture, SIZES)
    pieces.capture(model, caches[0], layers)
    state = DeviceState(BLOCK_SIZE, CPU)
    for step in STEPS:
        tensors = StepBatch(step.sequences, state).tensors
        expected, inputs = model.states_and_inputs(tensors, caches[1], layers)
        found = pieces.states_and_inputs(tensors)
        assert found is not None
        assert torch.equal(found[0], expected)
        assert all(map(torch.equal, found[1], inputs))


class Launches(TorchDispatchMode):
    """Notes every operation of torch in `calls`, but for views, a replay's and attention's own."""

    def __init__(self, device: PoisonedGraphs) -> None:
        super().__init__()
        self.device = device
        self.is_attending = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = str(func).split(".")[1]
        is_view = name in {"slice", "detach", "view", "alias", "unbind", "select", "expand"}
        if not (is_view or self.is_attending or self.device.is_busy):
            self.device.calls.append(name)
        return func(*args, **(kwargs or {}))

    @contextmanager
    def attending(self) -> Iterator[None]:
        self.is_attending = True
        yield
        self.is_attending = False


class Noted(Attention):
    def __init__(self, inner: Attention, launches: Launches) -> None:
        self._inner, self._launches = inner, launches
        self.write = inner.write

    def run(self, *args: Any) -> Tensor:
        device = self._launches.device
        assert not device.is_busy, "a graph has no attention"
        device.calls.append("attention")
        with self._launches.attending():
            return self._inner.run(*args)


class NotingBackend(TorchBackend):
    def __init__(self, launches: Launches) -> None:
        self._launches = launches

    def plan(self, step: StepTensors, shape: AttentionShape, rope: RopeTable) -> Attention:
        with self._launches.attending():
            return Noted(super().plan(step, shape, rope), self._launches)


@torch.inference_mode()
def test_a_mixed_step_is_a_replay_and_an_attention_for_each_layer() -> None:
    device = PoisonedGraphs()
    launches = Launches(device)
    cache = allocate(BLOCKS, BLOCK_SIZE, DEEP, torch.float32, CPU)
    pieces = StepPieces(device.capture, SIZES)
    pieces.capture(replace(PLAIN, backend=NotingBackend(launches)), cache, ())
    state = DeviceState(BLOCK_SIZE, CPU)
    for step in STEPS:
        tensors = StepBatch(step.sequences, state).tensors
        device.calls.clear()
        with launches:
            assert pieces.states_and_inputs(tensors) is not None
        layer = ["replay", "attention", "copy_"]
        assert device.calls == ["stack", "copy_", *DEEP.num_layers * layer, "replay"]


@torch.inference_mode()
def test_steps_with_more_rows_or_with_adapters_are_launched_as_a_whole() -> None:
    runner = make_runner(device=PoisonedGraphs())
    execute(runner, mixed([20, 28], [0, 0]))
    with pytest.raises(LaunchedError):
        execute(runner, mixed([20, 29], [0, 0]))
    pieces = StepPieces(PoisonedGraphs().capture, SIZES)
    cache = allocate(BLOCKS, BLOCK_SIZE, DEEP, torch.float32, CPU)
    tensors = StepBatch(STEPS[0].sequences, DeviceState(BLOCK_SIZE, CPU)).tensors
    assert pieces.states_and_inputs(tensors) is None
    pieces.capture(PLAIN, cache, ())
    assert pieces.states_and_inputs(tensors) is not None
    adapters: Any = object()
    assert pieces.states_and_inputs(replace(tensors, adapters=adapters)) is None


def test_a_runner_that_slept_captures_pieces_again() -> None:
    device = PoisonedGraphs()
    runner = make_runner(device=device)
    whole = 3  # sizes of decode steps
    assert device.calls.count("capture") == whole + CAPTURES
    first = execute(runner, STEPS[0]).sampled
    runner.sleep(1)
    assert runner._graphs is not None
    assert runner._graphs.pieces._captured is None
    device.calls.clear()
    runner.wake(frozenset({"weights", "kv_cache"}))
    assert device.calls == ["renew", *["capture"] * (whole + CAPTURES)]
    assert execute(runner, STEPS[0]).sampled == first
    assert device.calls[-1] == "replay"


def test_sizes_pad_by_a_fifth_of_the_rows_at_most() -> None:
    sizes = piece_sizes(8192)
    assert sizes[-1] == 512
    below = dict(zip(sizes[1:], sizes, strict=False))
    assert all(1 - (least + 1) / size < 0.2 for size, least in below.items() if size > 256)
    assert piece_sizes(300) == (32, 64, 128, 256, 300)
    assert piece_sizes(256) == (32, 64, 128, 256)
    assert piece_sizes(20) == (20,)
