"""The effects of a drafter on the device on a step: its drafts and its time, never its faults."""

import logging
import random
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from tests.support.model.tiny_llama import BLOCK_SIZE, NUM_BLOCKS, TINY, tiny_llama
from tests.support.worker.draft_bench import (
    GREEDY,
    VOCABULARY,
    Bench,
    Walker,
    drafts_of_model,
    make_bench,
    share_of,
)
from worker.executor.drafting.draft_cache import DraftCache
from worker.executor.drafting.interface import DraftNetwork, DraftRequest
from worker.executor.drafting.loading import ModelNetwork
from worker.executor.drafting.rounds import most_rows, plan_catch_up
from worker.models.llama import StepTensors
from worker.types import ModelOutput, SamplingParams

UNTIED = replace(TINY, tied_head=False)
TARGET = tiny_llama(seed=1, config=UNTIED)
SMALL = tiny_llama(seed=2, config=UNTIED)
RANDOM = SamplingParams(max_tokens=1, temperature=1.0, seed=5)
PROMPT = [5, 17, 42, 3, 9, 33, 21]


@dataclass
class Faulty:
    """A draft model that raises, or whose logits are nan, while a fault is set."""

    raises: bool = False
    spoils: bool = False
    network: DraftNetwork = field(default_factory=lambda: ModelNetwork(SMALL))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.network, name)

    def run(
        self, features: torch.Tensor | None, step: StepTensors, kv_cache: torch.Tensor
    ) -> torch.Tensor:
        states = self.network.run(features, step, kv_cache)
        if self.raises:
            raise RuntimeError("the device is out of memory")
        if self.spoils:
            for layer in kv_cache:
                layer.view(-1, layer.shape[-1]).index_fill_(0, step.slots, torch.nan)
            states = torch.full_like(states, torch.nan)
        return states


def go(bench: Bench, walker: Walker, num_to_draft: int, params: SamplingParams = GREEDY) -> None:
    drafts = walker.drafts
    count = len(walker.tokens) - walker.computed
    bench.take(walker, len(walker.tokens) + len(drafts) + 1 + num_to_draft)
    share = share_of(walker, count, drafts, num_to_draft, params)
    bench.update(walker, share, bench.step([share]))


def assert_drafted(walker: Walker) -> None:
    assert walker.drafts
    assert walker.drafts == drafts_of_model(SMALL, walker.tokens, walker.drafts)


def test_drafts_come_with_their_step_and_its_time() -> None:
    bench = make_bench(TARGET, ModelNetwork(SMALL))
    walkers = [Walker(i, PROMPT[i:]) for i in range(3)]
    for walker in walkers:
        bench.take(walker, 20)
    shares = [share_of(w, len(w.tokens), (), n) for w, n in zip(walkers, (0, 2, 5), strict=True)]
    output = bench.step(shares)
    drafted = {seq_id: len(drafts.token_ids) for seq_id, drafts in output.drafts.items()}
    assert drafted == {1: 2, 2: 5}
    assert output.drafting_seconds > 0
    without = bench.step([share_of(Walker(9, PROMPT, table=[30, 31]), 7)])
    assert (without.drafts, without.drafting_seconds) == ({}, 0.0)


def test_nothing_is_drafted_beyond_the_block_table() -> None:
    """The last draft may be at the first position without a block, since it is verified later."""
    bench = make_bench(TARGET, ModelNetwork(SMALL))
    walker = Walker(1, [*PROMPT, 8, 9, 10], table=[3, 4, 5])  # 12 positions; the draw is at 10
    share = share_of(walker, 10, (), 9)
    before = bench.drafter._cache.kv.clone() if bench.drafter._cache else None
    assert bench.update(walker, share, bench.step([share])) == 0
    assert len(walker.drafts) == 2
    assert bench.drafter._cache is not None
    assert before is not None
    changed = (bench.drafter._cache.kv != before).flatten(2).any(-1).any(0).nonzero().flatten()
    assert changed.tolist() == [3, 4, 5]


def test_catching_up_is_bounded_and_continues_where_it_stopped() -> None:
    """Short sequences go first; the long one is read over several steps."""
    cache = DraftCache(SMALL.config, 0, (NUM_BLOCKS, BLOCK_SIZE), torch.float32, TARGET.device)
    requests = [
        DraftRequest(1, 7, 41, range(12), GREEDY, 2),
        DraftRequest(2, 7, 6, range(12, 16), GREEDY, 2),
    ]
    read, run = [], []
    for _ in range(3):
        plan = plan_catch_up(cache, requests, 0, max_rows=18)
        read.append([(s.request.seq_id, s.start, s.end) for s in plan.behind])
        run.append([(s.request.seq_id, s.start, s.end) for s in plan.ready])
        for span in [*plan.behind, *plan.ready]:
            cache.mark(span.known_slots, True)
    # Four rows, of two drafts and two tokens drawn, belong to the round itself.
    assert read == [[(2, 0, 2), (1, 0, 16)], [(1, 16, 34)], [(1, 34, 37)]]
    assert run == [[(2, 2, 6)], [(2, 5, 6)], [(2, 5, 6), (1, 37, 41)]]
    assert all(span.is_complete for span in plan.ready)


@pytest.mark.parametrize(
    ("num_step_tokens", "rows"), [(1, 64), (5, 64), (32, 64), (100, 200), (4096, 2048)]
)
def test_catching_up_is_bounded_by_the_step(num_step_tokens: int, rows: int) -> None:
    """A step of few tokens is expected to be short, and reading must not make it seem to hang."""
    assert most_rows(num_step_tokens) == rows


def test_a_long_prompt_waits_for_its_drafts() -> None:
    bench = make_bench(TARGET, ModelNetwork(SMALL))
    rng = random.Random(1)
    walker = Walker(1, [rng.randrange(VOCABULARY) for _ in range(145)])
    go(bench, walker, num_to_draft=0)
    drafted, read = [], []
    for _ in range(4):
        bench.take(walker, len(walker.tokens) + len(walker.drafts) + 4)
        share = share_of(walker, 1, walker.drafts, 3)
        output = bench.step([share])
        bench.update(walker, share, output)
        drafted.append(len(walker.drafts))
        read.append(output.catch_up_seconds > 0)
    assert (drafted, read) == ([0, 0, 3, 3], [True, True, True, False])
    assert output.drafting_seconds > 0
    assert_drafted(walker)


def test_rows_that_are_not_numbers_are_read_again() -> None:
    network = Faulty(spoils=True)
    bench = make_bench(TARGET, network)
    walker = Walker(1, [*PROMPT, *PROMPT])
    go(bench, walker, num_to_draft=3)
    assert walker.last_drafts is None
    network.spoils = False
    go(bench, walker, num_to_draft=3)
    assert_drafted(walker)


def test_a_drafter_that_raises_is_logged_once_and_recovers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    network = Faulty(raises=True)
    bench = make_bench(TARGET, network)
    walker = Walker(1, list(PROMPT))
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            go(bench, walker, num_to_draft=3)
            assert walker.last_drafts is None
    assert len(walker.tokens) == len(PROMPT) + 3
    assert [record.exc_info is not None for record in caplog.records] == [True]
    network.raises = False
    go(bench, walker, num_to_draft=3)
    assert_drafted(walker)


def test_a_drafter_whose_numbers_break_spoils_nothing_for_good() -> None:
    network = Faulty(spoils=True)
    bench = make_bench(TARGET, network)
    first, second = Walker(1, list(PROMPT)), Walker(2, [1, 2, 3])
    go(bench, first, num_to_draft=3)
    assert first.last_drafts is None
    network.spoils = False
    bench.drop(first)  # its blocks are free, and it begins again
    for walker in (second, first, second):
        go(bench, walker, num_to_draft=3)
        assert_drafted(walker)


def test_drawn_drafts_are_verified_with_their_distributions() -> None:
    bench = make_bench(TARGET, ModelNetwork(SMALL), "probabilistic")
    walker, greedy = Walker(1, list(PROMPT)), Walker(2, [4, 5])
    for one, params in ((walker, RANDOM), (greedy, GREEDY)):
        bench.take(one, 20)
        share = share_of(one, len(one.tokens), (), 3, params)
        bench.update(one, share, bench.step([share]))
        drafts = one.drafts
        exact = share_of(one, 1, drafts, 0, params)
        held = dict(bench.drafter._proposals)
        found = bench.drafter.proposals([exact])
        if one is greedy:
            assert found == {}
            continue
        assert found[1].shape == (3, VOCABULARY)
        assert found[1].sum(dim=-1).tolist() == pytest.approx([1, 1, 1])
        assert bench.drafter.proposals([exact]) == {}
        for wanted, changed in ((2, drafts[:2]), (0, [drafts[0], drafts[1] ^ 1]), (0, [])):
            bench.drafter._proposals = dict(held)
            q = bench.drafter.proposals([share_of(one, 1, changed, 0, params)]).get(1)
            assert (0 if q is None else len(q)) == wanted
        bench.drafter._proposals = dict(held)
        assert bench.drafter.proposals([replace(exact, start=exact.start + 1)]) == {}


def outputs(bench: Bench) -> list[ModelOutput]:
    walker, found = Walker(1, list(PROMPT)), []
    for _ in range(3):
        bench.take(walker, 30)
        share = share_of(walker, len(walker.tokens) - walker.computed, walker.drafts, 3)
        output = bench.step([share])
        found.append(replace(output, drafting_seconds=0.0, catch_up_seconds=0.0))
        bench.update(walker, share, found[-1])
    bench.drop(walker)
    return found


@pytest.mark.parametrize("level", [1, 2])
def test_a_drafter_sleeps_and_wakes_with_its_target(level: int) -> None:
    bench = make_bench(TARGET, ModelNetwork(SMALL))
    before = outputs(bench)
    assert any(output.drafts for output in before)
    bench.runner.sleep(level)
    assert bench.drafter._cache is None
    assert (bench.drafter.weights is None) == (level == 2)
    bench.runner.wake(frozenset({"kv_cache"}))
    bench.runner.wake(frozenset({"weights"}))
    assert outputs(bench) == before
