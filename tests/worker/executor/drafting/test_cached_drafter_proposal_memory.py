"""The distributions of drafts take bounded memory, by a rule that no drawn token can influence."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.model.tiny_llama import BLOCK_SIZE
from tests.support.model.toy_speculation import VOCAB
from tests.support.worker.draft_bench import Walker, share_of
from tests.support.worker.drawn_bench import PARAMS, TARGET
from worker.executor.drafting.cached_drafter import MAX_PROPOSAL_BYTES, CachedDrafter, bound_drawn
from worker.executor.drafting.interface import DraftRequest
from worker.executor.drafting.loading import ModelNetwork
from worker.executor.interface import execute
from worker.executor.model_runner import ModelRunner
from worker.types import SamplingParams, SchedulerOutput

DRAWS = SamplingParams(max_tokens=1, temperature=0.5)
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


def requests(*drafts: int, params: SamplingParams = DRAWS) -> list[DraftRequest]:
    return [DraftRequest(i, 1, 9, [0], params, count) for i, count in enumerate(drafts)]


def lengths(bounded: list[DraftRequest]) -> dict[int, int]:
    return {request.seq_id: request.num_drafts for request in bounded}


def test_a_common_batch_stays_unchanged() -> None:
    asked = requests(*[8] * 100)
    assert bound_drawn(asked, 49_152) == asked


def test_the_longest_runs_are_cut_first() -> None:
    room = 10 * 4 * 1000
    assert lengths(bound_drawn(requests(6, 1, 5, 2), 1000, room)) == {0: 4, 1: 1, 2: 3, 3: 2}
    assert lengths(bound_drawn(requests(*[3] * 4), 1000, 2 * 4 * 1000)) == {0: 1, 1: 1}
    assert bound_drawn(requests(2, 2), 1000, 0) == []


def test_greedy_requests_keep_their_drafts() -> None:
    greedy = requests(50, 60, params=GREEDY)
    assert bound_drawn([*greedy, *requests(4)], 1000, 3 * 4 * 1000) == [*greedy, *requests(3)]


@given(st.lists(st.integers(1, 40), max_size=30), st.integers(0, 200))
def test_the_bound_holds_and_all_of_it_is_used(drafts: list[int], room: int) -> None:
    """No request gets two drafts more than one that would take another."""
    found = lengths(bound_drawn(requests(*drafts), 7, room * 4 * 7 + 27))
    assert sum(found.values()) == min(sum(drafts), room)
    assert all(0 < count <= drafts[i] for i, count in found.items())
    cut = [found.get(i, 0) for i, count in enumerate(drafts) if found.get(i, 0) < count]
    assert not cut or max(found.values(), default=0) <= min(cut) + 1


def test_a_drafter_asks_its_network_for_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bound_drawn, "__defaults__", (5 * 4 * VOCAB,))
    assert MAX_PROPOSAL_BYTES == 256 << 20
    network, blocks = ModelNetwork(TARGET), (8, BLOCK_SIZE)
    drafter = CachedDrafter(lambda _: network, network, TARGET, blocks, "probabilistic")
    config = TARGET.config
    shape = (config.num_layers, 8, 2, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
    runner = ModelRunner(TARGET, lambda: TARGET, lambda: torch.zeros(shape), drafter)
    shares = [
        share_of(Walker(i, [2, 4, 2], table=table), 3, (), 3, PARAMS)
        for i, table in enumerate(([0, 1], [2, 3]))
    ]
    drafts = execute(runner, SchedulerOutput(0, tuple(shares))).drafts
    assert [len(drafts[i].token_ids) for i in (0, 1)] == [3, 2]
