"""Drawn drafts change no distribution, on their whole way through runner and drafter."""

import random

import pytest
import torch

from tests.depth import by_depth
from tests.support.model.tiny_llama import BLOCK_SIZE, states_of
from tests.support.model.toy_speculation import PROMPT, VOCAB, fit
from tests.support.worker.draft_bench import Walker, share_of
from tests.support.worker.drawn_bench import (
    DRAFT,
    FIVE,
    PARAMS,
    TARGET,
    BreaksLate,
    DrawnBench,
    exact,
)
from worker.executor.drafting.cached_drafter import CachedDrafter
from worker.executor.drafting.interface import DraftNetwork
from worker.executor.drafting.loading import ModelNetwork
from worker.executor.interface import execute
from worker.executor.model_runner import ModelRunner
from worker.ops.rejection import METHODS
from worker.types import SchedulerOutput

REQUESTS = by_depth(240, 1440)


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


@pytest.mark.parametrize("raises", [False, True], ids=["no-numbers", "raises"])
def test_drafts_before_a_fault_keep_their_distributions(raises: bool) -> None:
    network = BreaksLate(frozenset(range(VOCAB)), raises=raises)
    blocks = (8, BLOCK_SIZE)
    drafter = CachedDrafter(lambda _: network, network, TARGET, blocks, "probabilistic")
    shape = (FIVE.num_layers, blocks[0], 2, FIVE.num_kv_heads, BLOCK_SIZE, FIVE.head_dim)
    runner = ModelRunner(TARGET, lambda: TARGET, lambda: torch.zeros(shape), drafter)
    walker = Walker(1, list(PROMPT), table=[0, 1, 2])
    share = share_of(walker, len(PROMPT), (), 3, PARAMS)
    output = execute(runner, SchedulerOutput(0, (share,)))
    drafts = output.drafts[1]
    assert len(drafts.token_ids) == 1
    walker.tokens.append(output.sampled[1][0].token_id)
    walker.computed = len(PROMPT)
    [q] = drafter.proposals([share_of(walker, 1, drafts.token_ids)]).values()
    with torch.inference_mode():
        logits = TARGET.logits(states_of(TARGET, walker.tokens)[-1:])
    torch.testing.assert_close(q, (logits / PARAMS.temperature).softmax(-1))
