"""Drafters on the device draft as if they read every sequence anew, after any history.

Drawn drafts change no distribution, and theirs take bounded memory, by a rule that no drawn token
can influence.
"""

import dataclasses
import functools
import random
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.depth import by_depth, examples
from tests.support.model.eagle_heads import LAYOUTS, Published, TargetWeights, write_head
from tests.support.model.tiny_llama import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    TINY,
    empty_cache,
    states_of,
    step_of,
    tiny_llama,
)
from tests.support.model.toy_speculation import PROMPT, VOCAB, fit
from tests.support.worker.draft_bench import (
    Walk,
    Walker,
    drafts_of_head,
    drafts_of_model,
    make_bench,
    share_of,
    tiny_head,
)
from tests.support.worker.drawn_bench import DRAFT, PARAMS, BreaksLate, DrawnBench, exact
from tests.support.worker.drawn_bench import TARGET as DRAWN
from tests.support.worker.poisoned_graphs import PoisonedGraphs
from worker.executor.drafting.cached_drafter import MAX_PROPOSAL_BYTES, CachedDrafter, bound_drawn
from worker.executor.drafting.interface import DraftNetwork, DraftRequest
from worker.executor.drafting.loading import HeadNetwork, ModelNetwork
from worker.executor.interface import execute
from worker.executor.kv_cache import allocate
from worker.executor.model_runner import ModelRunner
from worker.models.eagle_head import load_eagle_head
from worker.ops.rejection import METHODS
from worker.types import SamplingParams, SchedulerOutput

# A head of its own, or the likeliest token would be the last one again.
UNTIED = dataclasses.replace(TINY, tied_head=False)
TARGET = tiny_llama(seed=1, config=UNTIED)
SMALL = tiny_llama(
    seed=2,
    config=dataclasses.replace(
        UNTIED, hidden_size=24, intermediate_size=40, num_layers=1, num_heads=3, num_kv_heads=1
    ),
)
HEAD = tiny_head(TARGET)

walks = given(st.integers(0, 2**32))


@walks
@examples(by_depth(1, 3))
def test_a_draft_model_drafts_as_if_it_read_everything_anew(seed: int) -> None:
    """The history has chunks, hits, copies, preemption, reused blocks and rejected drafts."""
    bench = make_bench(TARGET, ModelNetwork(SMALL))
    Walk(bench, functools.partial(drafts_of_model, SMALL), random.Random(seed)).run(num_steps=40)


@walks
@examples(by_depth(1, 3))
def test_a_head_drafts_as_if_it_read_everything_anew(seed: int) -> None:
    """The head's own positions are one less than the target's."""
    bench = make_bench(TARGET, HeadNetwork(HEAD))
    oracle = functools.partial(drafts_of_head, HEAD, TARGET)
    Walk(bench, oracle, random.Random(seed)).run(num_steps=40)


DEEP = tiny_llama(seed=1, config=dataclasses.replace(UNTIED, num_layers=6))


def drafts_of_published(
    head: Published, token_ids: Sequence[int], drafts: Sequence[int]
) -> list[int]:
    step = step_of(token_ids[:-1], 0, range(NUM_BLOCKS))
    with torch.inference_mode():
        _, states = DEEP.states_and_inputs(step, empty_cache(DEEP.config), range(7))
        return head.drafts(states, token_ids, len(drafts))


@pytest.mark.parametrize("layout", ["eagle", "eagle3", "eagle3, speculators"])
@walks
@examples(by_depth(1, 3))
def test_a_published_head_drafts_as_if_it_read_everything_anew(
    layout: str, tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    """The first draft follows from the target's states, later ones from the head's own."""
    path = write_head(tmp_path_factory.mktemp("head"), LAYOUTS[layout], DEEP.config)
    words, rows = (table.rows(torch.arange(61)) for table in (DEEP.embedding, DEEP.head))
    own = Published(path, TargetWeights(words, rows, DEEP.final_norm, 1e-5), 6)
    with torch.inference_mode():
        head = load_eagle_head(path, DEEP, LAYOUTS[layout].method)
    bench = make_bench(DEEP, HeadNetwork(head))
    oracle = functools.partial(drafts_of_published, own)
    Walk(bench, oracle, random.Random(seed)).run(num_steps=by_depth(20, 30))


@walks
@examples(by_depth(1, 2))
def test_every_draft_of_the_target_itself_is_accepted(seed: int) -> None:
    bench = make_bench(TARGET, ModelNetwork(TARGET))
    oracle = functools.partial(drafts_of_model, TARGET)
    walk = Walk(bench, oracle, random.Random(seed))
    walk.run(num_steps=40)
    assert walk.accepted == walk.verified > 0
    assert bench.num_steps == 40


class Counted(PoisonedGraphs):
    """Counts the replays that draft."""

    num_drafted = 0

    def timed(self, replay: Callable[[], None]) -> Callable[[], float]:
        self.num_drafted += 1
        return super().timed(replay)


@pytest.mark.parametrize("kind", ["model", "head", "target"])
@walks
@examples(by_depth(1, 2))
def test_graphs_draft_as_if_everything_was_read_anew(kind: str, seed: int) -> None:
    network, oracle = {
        "model": (ModelNetwork(SMALL), functools.partial(drafts_of_model, SMALL)),
        "head": (HeadNetwork(HEAD), functools.partial(drafts_of_head, HEAD, TARGET)),
        "target": (ModelNetwork(TARGET), functools.partial(drafts_of_model, TARGET)),
    }[kind]
    device = Counted()
    walk = Walk(make_bench(TARGET, network, device=device), oracle, random.Random(seed))
    for _ in range(by_depth(2, 6)):
        walk.run(num_steps=4)
        walk.go_on(num_steps=5)
    assert device.num_drafted > 3
    assert walk.verified > 0
    assert kind != "target" or walk.accepted == walk.verified


REQUESTS = by_depth(240, 720)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("breaks", [False, True], ids=["sound", "breaks-late"])
def test_drawn_drafts_leave_the_distribution_unchanged(method: str, breaks: bool) -> None:
    """Runs are cut at random, steps left out, sequences preempted; a break of the network ends
    some.
    """
    network: DraftNetwork = BreaksLate(frozenset({3, 4})) if breaks else ModelNetwork(DRAFT)
    bench = DrawnBench(network, method)
    found = fit(bench.outputs(REQUESTS, random.Random(4)), exact())
    assert found.p_value > 0.01
    assert found.variation < found.bound
    assert bench.num_accepted > REQUESTS / 4


def drawn_runner(network: DraftNetwork) -> tuple[ModelRunner, CachedDrafter]:
    blocks = (8, BLOCK_SIZE)
    drafter = CachedDrafter(lambda _: network, network, DRAWN, blocks, "probabilistic")
    cache = allocate(*blocks, DRAWN.config, torch.float32, DRAWN.device)
    return ModelRunner(DRAWN, lambda: DRAWN, lambda: cache, drafter), drafter


@pytest.mark.parametrize("raises", [False, True], ids=["no-numbers", "raises"])
def test_drafts_before_a_fault_keep_their_distributions(raises: bool) -> None:
    network = BreaksLate(frozenset(range(VOCAB)), raises=raises)
    runner, drafter = drawn_runner(network)
    walker = Walker(1, list(PROMPT), table=[0, 1, 2])
    share = share_of(walker, len(PROMPT), (), 3, PARAMS)
    output = execute(runner, SchedulerOutput(0, (share,)))
    drafts = output.drafts[1]
    assert len(drafts.token_ids) == 1
    walker.tokens.append(output.sampled[1][0].token_id)
    walker.computed = len(PROMPT)
    [q] = drafter.proposals([share_of(walker, 1, drafts.token_ids)]).values()
    with torch.inference_mode():
        logits = DRAWN.logits(states_of(DRAWN, walker.tokens)[-1:])
    torch.testing.assert_close(q, (logits / PARAMS.temperature).softmax(-1))


DRAWS = SamplingParams(max_tokens=1, temperature=0.5)
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


def asks(*drafts: int, params: SamplingParams = DRAWS) -> list[DraftRequest]:
    return [DraftRequest(i, 1, 9, [0], params, count) for i, count in enumerate(drafts)]


def lengths(bounded: list[DraftRequest]) -> dict[int, int]:
    return {request.seq_id: request.num_drafts for request in bounded}


def test_a_common_batch_stays_unchanged() -> None:
    asked = asks(*[8] * 100)
    assert bound_drawn(asked, 49_152) == asked


def test_the_longest_runs_are_cut_first() -> None:
    room = 10 * 4 * 1000
    assert lengths(bound_drawn(asks(6, 1, 5, 2), 1000, room)) == {0: 4, 1: 1, 2: 3, 3: 2}
    assert lengths(bound_drawn(asks(*[3] * 4), 1000, 2 * 4 * 1000)) == {0: 1, 1: 1}
    assert bound_drawn(asks(2, 2), 1000, 0) == []


def test_greedy_requests_keep_their_drafts() -> None:
    greedy = asks(50, 60, params=GREEDY)
    assert bound_drawn([*greedy, *asks(4)], 1000, 3 * 4 * 1000) == [*greedy, *asks(3)]


@given(st.lists(st.integers(1, 40), max_size=30), st.integers(0, 200))
def test_the_bound_holds_and_all_of_it_is_used(drafts: list[int], room: int) -> None:
    """No request gets two drafts more than one that would take another."""
    found = lengths(bound_drawn(asks(*drafts), 7, room * 4 * 7 + 27))
    assert sum(found.values()) == min(sum(drafts), room)
    assert all(0 < count <= drafts[i] for i, count in found.items())
    cut = [found.get(i, 0) for i, count in enumerate(drafts) if found.get(i, 0) < count]
    assert not cut or max(found.values(), default=0) <= min(cut) + 1


def test_a_drafter_asks_its_network_for_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bound_drawn, "__defaults__", (5 * 4 * VOCAB,))
    assert MAX_PROPOSAL_BYTES == 256 << 20
    runner, _ = drawn_runner(ModelNetwork(DRAWN))
    shares = [
        share_of(Walker(i, [2, 4, 2], table=table), 3, (), 3, PARAMS)
        for i, table in enumerate(([0, 1], [2, 3]))
    ]
    drafts = execute(runner, SchedulerOutput(0, tuple(shares))).drafts
    assert [len(drafts[i].token_ids) for i in (0, 1)] == [3, 2]
