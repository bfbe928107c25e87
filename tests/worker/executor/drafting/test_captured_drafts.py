"""Steps beside a drafter on the device are replayed from graphs, drafts included."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.depth import by_depth
from tests.support.model.eagle_heads import Layout, write_head
from tests.support.model.tiny_llama import BLOCK_SIZE, TINY, tiny_llama
from tests.support.model.whole_engine import outputs_of, tokens_of
from tests.support.worker.draft_bench import make_bench, tiny_head
from tests.support.worker.poisoned_graphs import PoisonedGraphs
from tests.worker.executor.test_graphs import BLOCK, ROOM, VOCABULARY, ToyModel, unhindered
from worker.config import CacheConfig, SchedulerConfig, SpeculativeConfig
from worker.engine.core import EngineCore
from worker.engine.features.grammars import ConstrainedOutputs
from worker.engine.features.speculation import Speculation
from worker.engine.messages import AddRequest, Vocabulary
from worker.engine.scheduling.scheduler import Scheduler
from worker.executor.drafting.cached_drafter import CachedDrafter
from worker.executor.drafting.interface import DraftNetwork
from worker.executor.drafting.loading import HeadNetwork, ModelNetwork
from worker.executor.graphs import DecodeGraphs, GraphDevice
from worker.executor.interface import execute
from worker.executor.model_runner import ModelRunner
from worker.models.eagle_head import load_eagle_head
from worker.ops.step import StepTensors
from worker.types import SampleSpec, SamplingParams, ScheduledSequence, SchedulerOutput

TARGET = tiny_llama(seed=1, config=TINY)
MOST = 4
LAYOUT = Layout("eagle3", {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]})


@torch.inference_mode()
def published_head() -> DraftNetwork:
    with TemporaryDirectory() as folder:
        path = write_head(Path(folder), LAYOUT, TINY)
        return HeadNetwork(load_eagle_head(path, TARGET, LAYOUT.method))


NETWORKS: dict[str, DraftNetwork] = {
    "published": published_head(),
    "model": ModelNetwork(tiny_llama(seed=2, config=TINY)),
    "head": HeadNetwork(tiny_head(TARGET)),
    "target": ModelNetwork(TARGET),
}
WISHES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "top_k": 7},
    {"temperature": 0.0, "stop_token_ids": tuple(range(8))},
    {"temperature": 0.8, "top_p": 0.7},
    {"temperature": 0.0, "logprobs": 1},
    {"temperature": 0.7, "repetition_penalty": 1.3},
    {"temperature": 0.0, "grammar": "start: /([0-9][A-Z])+/"},
]


def requests(count: int) -> list[AddRequest]:
    return [
        AddRequest(
            str(index),
            [3 + (index * place) % 50 for place in range(1 + index % 6)],
            SamplingParams(max_tokens=4 + index % 13, seed=index, **WISHES[index % len(WISHES)]),
            0.0,
        )
        for index in range(count)
    ]


def answers(
    asked: Sequence[AddRequest], network: DraftNetwork | None, device: GraphDevice | None
) -> tuple[dict[str, list[int]], Any]:
    """Run an engine with a cache so small that it preempts."""
    bench = make_bench(TARGET, network or NETWORKS["target"], device=device)
    config = SpeculativeConfig("draft_model", MOST, enable_adaptive_verification=False)
    features = [Speculation(config, None, True)] if network is not None else []
    scheduler = Scheduler(
        CacheConfig(9, BLOCK_SIZE), SchedulerConfig(24, 4, 32), (TINY.vocab_size - 1,), features
    )
    core = EngineCore(scheduler, bench.runner, lambda: 0.0, overlap=True)
    count = TINY.vocab_size
    core.take_vocabulary(
        Vocabulary([bytes((33 + n,)) for n in range(count)], [count - 1], [count - 1])
    )
    constrained = scheduler.find(ConstrainedOutputs)
    for request in asked:
        if request.params.grammar is not None and constrained is not None:
            constrained.grammars.compile(request.params.grammar).result()
    found = tokens_of(outputs_of(core, asked, at_once=2))
    stats = scheduler.stats()
    core.shutdown()
    assert stats.scheduler.num_preemptions > 0
    return found, stats.speculation if network is not None else None


@pytest.mark.parametrize("kind", by_depth(["head", "published", "target"], [*NETWORKS]))
def test_an_engine_that_drafts_in_graphs_answers_the_same(kind: str) -> None:
    asked = requests(by_depth(14, 60))
    expected, _ = answers(asked, None, None)
    _, eager = answers(asked, NETWORKS[kind], None)
    device = PoisonedGraphs()
    found, stats = answers(asked, NETWORKS[kind], device)
    assert found == expected
    assert stats.num_draft_tokens > 20
    assert stats.num_accepted_tokens == pytest.approx(eager.num_accepted_tokens, rel=0.1, abs=5)
    assert kind != "target" or stats.num_accepted_tokens > 20


class Guesses:
    """A network without attention: its logits follow from a token and the state before it."""

    config = replace(TINY, num_layers=1, hidden_size=1)
    draft_vocab = torch.arange(0, VOCABULARY, 2)
    max_positions, layers = 60, ()

    def __init__(self, reads_states: bool) -> None:
        self.reads_states = reads_states

    def reduce(self, states: Tensor, _: Sequence[Tensor]) -> Tensor:
        return states

    def run(self, features: Tensor | None, step: StepTensors, _: Tensor) -> Tensor:
        own = step.token_ids[:, None].float()
        return own if features is None else own + features

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.sin(hidden * torch.arange(1, 1 + len(self.draft_vocab)))


class Target(ToyModel):
    """The target of `Guesses`."""

    config: Any = replace(TINY, vocab_size=VOCABULARY, hidden_size=1)
    dtype = torch.float32


def toy_runner(reads_states: bool, device: PoisonedGraphs) -> ModelRunner:
    blocks, network = (30, BLOCK), Guesses(reads_states)
    model: Any = Target()
    drafter = CachedDrafter(lambda _: network, network, model, blocks, "greedy")
    graphs = DecodeGraphs(device, (1, 2, 4), ROOM, MOST)
    return ModelRunner(
        model, lambda: model, lambda: torch.zeros(1, 30, 2, 1, BLOCK, 1), drafter, graphs=graphs
    )


def decode(lasts: Sequence[int], start: int, drafts: Sequence[Sequence[int]]) -> SchedulerOutput:
    """Return a step of a sequence for each of `drafts`, all at `start`, that asks for drafts."""
    shares = []
    for index, (last, own) in enumerate(zip(lasts, drafts, strict=True)):
        spec = SampleSpec(SamplingParams(max_tokens=9, temperature=0.0), start + 1, num_prompt=1)
        table = tuple(range(6 * index, 6 * index + 6))
        share = ScheduledSequence(index, [last, *own], start, table, (spec,), num_drafts=len(own))
        shares.append(replace(share, num_to_draft=3))
    return SchedulerOutput(0, tuple(shares))


@pytest.mark.parametrize("reads_states", [False, True])
def test_a_steady_step_that_drafts_is_one_copy_there_and_one_back(
    reads_states: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = PoisonedGraphs()
    runner = toy_runner(reads_states, device)
    output = execute(runner, decode([5] * 3, 1, [[]] * 3))
    assert set(output.drafts) == {0, 1, 2}
    for start in range(2, 7):
        lasts = [output.sampled[index][0].token_id for index in range(3)]
        wrong = [[1 - last % 2] for last in lasts] if start % 2 else [[]] * 3
        device.calls.clear()
        with unhindered(device, monkeypatch):
            ticket = runner.submit(decode(lasts, start, wrong))
        assert device.calls == ["send", "replay", "replay", "fetch"]
        output = ticket.collect()
        assert [len(own.token_ids) for own in output.drafts.values()] == [3] * 3
        assert output.drafting_seconds > 0


def test_sequences_with_rows_to_read_are_drafted_for_without_a_graph() -> None:
    device = PoisonedGraphs()
    runner = toy_runner(True, device)
    first = execute(runner, decode([5] * 2, 1, [[]] * 2))
    last = first.sampled[0][0].token_id
    # Sequence 1 leaves out a step.
    second = execute(runner, decode([last], 2, [[]]))
    device.calls.clear()
    output = execute(runner, decode([second.sampled[0][0].token_id, last], 3, [[]] * 2))
    assert device.calls == ["send", "replay", "fetch"]
    assert set(output.drafts) == {0, 1}
