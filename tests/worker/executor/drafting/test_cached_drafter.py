"""Drafters on the device draft as if they read every sequence anew, after any history."""

import dataclasses
import functools
import random

from hypothesis import given
from hypothesis import strategies as st

from tests.depth import by_depth, examples
from tests.support.model.tiny_llama import TINY, tiny_llama
from tests.support.worker.draft_bench import (
    Walk,
    drafts_of_head,
    drafts_of_model,
    make_bench,
    tiny_head,
)
from worker.executor.drafting.loading import HeadNetwork, ModelNetwork

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
@examples(by_depth(1, 6))
def test_a_draft_model_drafts_as_if_it_read_everything_anew(seed: int) -> None:
    """The history has chunks, hits, copies, preemption, reused blocks and rejected drafts."""
    bench = make_bench(TARGET, ModelNetwork(SMALL))
    Walk(bench, functools.partial(drafts_of_model, SMALL), random.Random(seed)).run(num_steps=40)


@walks
@examples(by_depth(1, 6))
def test_a_head_drafts_as_if_it_read_everything_anew(seed: int) -> None:
    """The head's own positions are one less than the target's."""
    bench = make_bench(TARGET, HeadNetwork(HEAD))
    oracle = functools.partial(drafts_of_head, HEAD, TARGET)
    Walk(bench, oracle, random.Random(seed)).run(num_steps=40)


@walks
@examples(by_depth(1, 4))
def test_every_draft_of_the_target_itself_is_accepted(seed: int) -> None:
    bench = make_bench(TARGET, ModelNetwork(TARGET))
    oracle = functools.partial(drafts_of_model, TARGET)
    walk = Walk(bench, oracle, random.Random(seed))
    walk.run(num_steps=40)
    assert walk.accepted == walk.verified > 0
    assert bench.num_steps == 40
