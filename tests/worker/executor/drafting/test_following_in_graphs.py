"""Steps that follow: launched while the drafts of the step before are being verified."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.depth import by_depth
from tests.support.model.tiny_llama import BLOCK_SIZE, TINY
from tests.support.model.whole_engine import outputs_of
from tests.support.worker.draft_bench import make_bench
from tests.support.worker.poisoned_graphs import PoisonedGraphs
from tests.worker.executor.drafting.test_captured_drafts import (
    MOST,
    NETWORKS,
    TARGET,
    decode,
    toy_runner,
)
from tests.worker.executor.test_graphs import unhindered
from worker.config import CacheConfig, SchedulerConfig, SpeculativeConfig
from worker.engine.core import EngineCore
from worker.engine.features.speculation import Speculation
from worker.engine.messages import AddRequest
from worker.engine.scheduling.scheduler import Scheduler
from worker.executor.interface import Executor, Ticket, execute, with_tokens
from worker.executor.model_runner import ModelRunner
from worker.models.llama import LlamaModel
from worker.types import SamplingParams, SchedulerOutput

WISHES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "top_k": 7},
    {"temperature": 0.8, "top_p": 0.7},
    {"temperature": 0.0, "stop_token_ids": tuple(range(8))},
    {"temperature": 1.0, "ignore_eos": True},
]


def requests(count: int, extra: Sequence[dict[str, Any]] = ()) -> list[AddRequest]:
    wishes = [*WISHES, *extra]
    return [
        AddRequest(
            str(index),
            [3 + (index * place) % 50 for place in range(1 + index % 6)],
            SamplingParams(
                max_tokens=1 + index * 7 % 23, seed=index, **wishes[index % len(wishes)]
            ),
            0.0,
        )
        for index in range(count)
    ]


@dataclass
class Watched(Executor):
    """A model runner whose steps are counted."""

    runner: ModelRunner
    counts: Counter[str] = field(default_factory=Counter)

    def submit(self, step: SchedulerOutput) -> Ticket:
        ticket = self.runner.submit(step)
        self.counts["steps"] += 1
        self.counts["following"] += step.follows
        self.counts["deferred"] += type(ticket).__name__ == "_Deferred"
        return ticket

    def shutdown(self) -> None:
        self.runner.shutdown()


Answers = dict[str, tuple[list[int], str | None]]


def answers(
    asked: Sequence[AddRequest],
    kind: str | None,
    num_blocks: int,
    at_once: int,
    target: LlamaModel = TARGET,
) -> tuple[Answers, Counter[str], Any]:
    """Return tokens and errors, counts of steps, and figures; `kind` None: without drafts."""
    device = None if kind is None else PoisonedGraphs()
    bench = make_bench(target, NETWORKS[kind or "target"], device=device)
    config = SpeculativeConfig("draft_model", MOST, enable_adaptive_verification=False)
    features = [Speculation(config, None, True)] if kind else []
    limits = SchedulerConfig(40, 4, 60)
    scheduler = Scheduler(
        CacheConfig(num_blocks, BLOCK_SIZE), limits, (TINY.vocab_size - 1,), features
    )
    watched = Watched(bench.runner)
    core = EngineCore(scheduler, watched, lambda: 0.0, overlap=True)
    found = {
        name: ([token for output in each for token in output.token_ids], each[-1].error)
        for name, each in outputs_of(core, asked, at_once=at_once).items()
    }
    stats = scheduler.stats()
    core.shutdown()
    return found, watched.counts, stats.speculation


@pytest.mark.parametrize("num_blocks", [20, 38])
@pytest.mark.parametrize("kind", by_depth(["head", "target"], [*NETWORKS]))
def test_answers_are_those_of_plain_steps(kind: str, num_blocks: int) -> None:
    asked = requests(by_depth(24, 36), [{"temperature": 0.7, "repetition_penalty": 1.3}])
    expected, _, _ = answers(asked, None, num_blocks, 1)
    found, counts, stats = answers(asked, kind, num_blocks, 1)
    assert found == expected
    assert stats.num_draft_tokens > 20
    assert counts["following"] > 0


def long_requests(count: int) -> list[AddRequest]:
    wishes: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.8}]
    return [
        AddRequest(
            str(index),
            [2 + index % 50, 3, 5],
            SamplingParams(40 + index % 5, seed=index, ignore_eos=True, **wishes[index % 2]),
            0.0,
        )
        for index in range(count)
    ]


@pytest.mark.parametrize("kind", by_depth(["published", "model", "target"], [*NETWORKS]))
def test_steady_steps_follow(kind: str) -> None:
    asked = long_requests(by_depth(6, 15))
    expected, _, _ = answers(asked, None, 38, 3)
    found, counts, stats = answers(asked, kind, 38, 3)
    assert found == expected
    assert counts["following"] > counts["steps"] / 3
    assert counts["deferred"] <= counts["following"] / 4
    assert kind != "target" or stats.num_accepted_tokens > stats.num_draft_tokens / 3


class FailingModel(LlamaModel):
    """The logits of a row are not numbers if the hidden state is of a kind that one in 20 is."""

    def logits(self, hidden: Tensor) -> Tensor:
        logits = super().logits(hidden)
        return logits.masked_fill((hidden.sum(1, keepdim=True) * 1e3).long() % 20 == 7, torch.nan)


def test_a_run_that_ends_at_logits_that_are_not_numbers_ends_there() -> None:
    target = FailingModel(**{one.name: getattr(TARGET, one.name) for one in fields(TARGET)})
    asked = long_requests(by_depth(30, 40))
    expected, _, _ = answers(asked, None, 38, 3, target)
    found, counts, stats = answers(asked, "target", 38, 3, target)
    assert found == expected
    failed = [len(tokens) for tokens, error in found.values() if error is not None]
    assert len(failed) > 5
    assert max(failed) > 3
    assert counts["following"] > 5
    assert stats.num_accepted_tokens > 20


def following(count: int, limit: int) -> SchedulerOutput:
    """Return the step that follows `decode` of sequences at position 1, for any drafts of that."""
    shares = [
        replace(share, token_ids=(), start=2, takes_pending=True, limit=limit)
        for share in decode([5] * count, 1, [[]] * count).sequences
    ]
    specs = [replace(share.samples[0], position=3) for share in shares]
    pairs = zip(shares, specs, strict=True)
    return SchedulerOutput(0, tuple(replace(share, samples=(spec,)) for share, spec in pairs))


@pytest.mark.parametrize("reads_states", [False, True])
@pytest.mark.parametrize(("limit", "num_drafts"), [(99, 3), (5, 2), (2, 0)])
def test_a_step_that_follows_is_one_copy_there_and_one_back(
    reads_states: bool, limit: int, num_drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = PoisonedGraphs()
    runner = toy_runner(reads_states, device)
    execute(runner, decode([5] * 3, 0, [[]] * 3))  # its drafts are not made by a graph
    ticket = runner.submit(decode([5] * 3, 1, [[]] * 3))
    device.calls.clear()
    with unhindered(device, monkeypatch):
        behind = runner.submit(following(3, limit))
    assert device.calls == ["send", "replay", "replay", "fetch"]
    before, after = ticket.collect(), behind.collect()
    twin = toy_runner(reads_states, PoisonedGraphs())
    execute(twin, decode([5] * 3, 0, [[]] * 3))
    assert execute(twin, decode([5] * 3, 1, [[]] * 3)) == before
    settled = with_tokens(following(3, limit), before)
    assert [share.num_drafts for share in settled.sequences] == [num_drafts] * 3
    assert execute(twin, settled) == after


def test_a_step_that_follows_drafts_of_the_eager_path_runs_when_they_are_known() -> None:
    device = PoisonedGraphs()
    runner = toy_runner(True, device)
    ticket = runner.submit(decode([5] * 2, 1, [[]] * 2))
    device.calls.clear()
    behind = runner.submit(following(2, 99))
    assert device.calls == []
    before, after = ticket.collect(), behind.collect()
    assert not after.may_be_followed
    twin = toy_runner(True, PoisonedGraphs())
    assert execute(twin, decode([5] * 2, 1, [[]] * 2)).drafts == before.drafts
    expected = execute(twin, with_tokens(following(2, 99), before))
    assert (after.sampled, after.drafts) == (expected.sampled, expected.drafts)


def test_a_step_behind_logits_that_are_not_numbers_runs_a_token_that_exists() -> None:
    device = PoisonedGraphs()
    target = FailingModel(**{one.name: getattr(TARGET, one.name) for one in fields(TARGET)})
    bench = make_bench(target, NETWORKS["target"], device=device)
    failing = 0
    for last in range(TINY.vocab_size):
        asked = decode([last], 0, [[]]).sequences[0]
        plain = replace(asked, num_to_draft=0, block_table=(0, 1))
        params = SamplingParams(max_tokens=9, temperature=0.9, top_p=0.8, seed=last)
        plain = replace(plain, samples=(replace(plain.samples[0], params=params),))
        spec = replace(plain.samples[0], position=2)
        ahead = replace(plain, token_ids=(), start=1, takes_pending=True, samples=(spec,))
        ticket = bench.runner.submit(SchedulerOutput(0, (plain,)))
        behind = bench.runner.submit(SchedulerOutput(0, (ahead,)))
        failing += bool(ticket.collect().failed)
        behind.collect()
    assert failing > 0
