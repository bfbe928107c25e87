"""A step of ints becomes the tensors its sequences mean."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.executor.input_batch import CacheLayout, InputBatch
from worker.types import SampleSpec, SamplingParams, ScheduledSequence

CPU = torch.device("cpu")
SPECS = (SampleSpec(SamplingParams(max_tokens=1, temperature=0.0), 0),)


def batch(*sequences: ScheduledSequence) -> InputBatch:
    """A batch over blocks of 4 tokens."""
    return InputBatch(sequences, CacheLayout(4, 1, 600, sharing=1), torch.float32, CPU)


def test_rows_follow_the_attention_plan() -> None:
    """Single tokens come first by context, then chunks; every row knows its token and slot."""
    made = batch(
        ScheduledSequence(1, [7, 8, 9], 2, [5, 3], SPECS),
        ScheduledSequence(2, [4], 5, [1, 2], SPECS),
        ScheduledSequence(3, [6], 0, [9]),
    )
    assert [s.seq_id for s in made.order] == [3, 2, 1]
    tensors = made.tensors
    assert tensors.token_ids.tolist() == [6, 4, 7, 8, 9]
    assert tensors.positions.tolist() == [0, 5, 2, 3, 4]
    # Block b of one KV head is the planes 2b (keys) and 2b + 1 (values), of 4 rows each.
    assert tensors.slots.tolist() == [72, 76, 17, 21, 42, 46, 43, 47, 24, 28]
    assert tensors.sample_rows.tolist() == [1, 4, 0]
    assert [s.seq_id for s in made.sampled] == [2, 1]


def test_every_draft_has_a_row_to_be_judged_by() -> None:
    """The known token's row and each draft's are sampled, one behind the other, in `sampled`'s
    order; what is scored or silent comes after them.
    """
    made = batch(
        ScheduledSequence(1, [7, 8, 9], 2, [5, 3], SPECS, num_drafts=2),
        ScheduledSequence(2, [4], 5, [1, 2], SPECS),
        ScheduledSequence(3, [6], 0, [9]),
        ScheduledSequence(4, [1, 2], 0, [8], SPECS, prompt_targets=[2]),
    )
    tokens = made.tensors.token_ids[made.tensors.sample_rows].tolist()
    rows = {s.seq_id: s.token_ids[-1 - s.num_drafts :] for s in made.sampled}
    assert rows == {1: [7, 8, 9], 2: [4], 4: [2]}
    assert tokens == [t for s in made.sampled for t in rows[s.seq_id]] + [1, 6]
    assert made.num_logits == 6


def test_masks_show_the_past_and_nothing_else() -> None:
    """A query sees the keys at positions up to its own."""
    plan = batch(
        ScheduledSequence(1, [0, 0], 3, [0, 1]), ScheduledSequence(2, [0], 6, [2, 3])
    ).tensors.attention
    assert (plan.groups[0].mask[0, 0, 0] == 0).nonzero().flatten().tolist() == list(range(7))
    span = plan.spans[0]
    assert (span.mask[0, 0] == 0).sum(dim=-1).tolist() == [4, 5, 4, 5]
    tile = batch(ScheduledSequence(1, [0] * 34, 3, range(10))).tensors.attention.chunks[0].tiles[0]
    assert (tile.mask[0, 0] == 0).sum(dim=-1).tolist() == [*range(4, 38), 37, 37]


def test_far_contexts_are_not_padded_to_each_other() -> None:
    """A short sequence beside a long one is a group of its own."""
    plan = batch(
        *[ScheduledSequence(i, [0], 9, [0, 1, 2]) for i in range(3)],
        ScheduledSequence(9, [0], 999, list(range(250))),
    ).tensors.attention
    assert [group.num_sequences for group in plan.groups] == [3, 1]


def test_what_a_call_copies_is_bounded() -> None:
    """Many long contexts are several calls, also when they are equally long."""
    table = list(range(2000)) * 4
    made = batch(*[ScheduledSequence(i, [0], 31_999, table) for i in range(9)])
    assert [g.num_sequences for g in made.tensors.attention.groups] == [4, 4, 1]


@given(st.lists(st.tuples(st.integers(0, 2000), st.integers(1, 600)), min_size=1, max_size=8))
@settings(max_examples=60, deadline=None)
def test_the_plan_covers_every_row_once(spans: list[tuple[int, int]]) -> None:
    """Groups and tiles together have exactly the rows of the step, and read enough blocks."""
    made = batch(
        *[
            ScheduledSequence(i, [0] * count, start, range((start + count) // 4 + 1), SPECS)
            for i, (start, count) in enumerate(spans)
        ]
    )
    plan = made.tensors.attention
    rows = sum(group.num_sequences for group in plan.groups)
    rows += sum(span.num_rows for span in plan.spans)
    assert all(span.mask.shape[2] % 32 in (0, *range(4, 32)) for span in plan.spans)
    for chunk in plan.chunks:
        rows += sum(tile.num_queries for tile in chunk.tiles)
        assert all(tile.mask.shape[-1] <= len(chunk.planes) * 2 for tile in chunk.tiles)
        assert all(tile.mask.shape[-2] >= 4 for tile in chunk.tiles)
    assert rows == len(made.tensors.token_ids) == sum(count for _, count in spans)
    assert len(made.sampled) == len(spans)
