"""A step of ints becomes the tensors its sequences mean."""

import torch

from worker.executor.state import DeviceState
from worker.executor.step_batch import StepBatch
from worker.types import SampleSpec, SamplingParams, ScheduledSequence

CPU = torch.device("cpu")
SPECS = (SampleSpec(SamplingParams(max_tokens=1, temperature=0.0), 0),)


def batch(*sequences: ScheduledSequence) -> StepBatch:
    return StepBatch(sequences, DeviceState(4, CPU))


def test_rows_follow_the_step() -> None:
    tensors = batch(
        ScheduledSequence(1, [7, 8, 9], 2, [5, 3], SPECS),
        ScheduledSequence(2, [4], 5, [1, 2, 9], SPECS),
        ScheduledSequence(3, [6], 0, [9]),
    ).tensors
    assert tensors.token_ids.tolist() == [7, 8, 9, 4, 6]
    assert tensors.positions.tolist() == [2, 3, 4, 5, 0]
    assert tensors.slots.tolist() == [22, 23, 12, 9, 36]
    assert tensors.query_starts.tolist() == [0, 3, 4, 5]
    assert tensors.context_lens.tolist() == [5, 6, 1]
    assert tensors.block_tables.tolist()[:2] == [[5, 3], [1, 2]]
    assert tensors.block_tables.tolist()[2][0] == 9
    assert tensors.sample_rows.tolist() == [2, 3, 4]


def test_every_draft_has_a_row_to_be_judged_by() -> None:
    made = batch(
        ScheduledSequence(1, [7, 8, 9], 2, [5, 3], SPECS, num_drafts=2),
        ScheduledSequence(2, [4], 5, [1, 2], SPECS),
        ScheduledSequence(3, [6], 0, [9]),
        ScheduledSequence(4, [1, 2], 0, [8], SPECS, prompt_targets=[2]),
    )
    assert [s.seq_id for s in made.sampled] == [1, 2, 4]
    tokens = made.tensors.token_ids[made.tensors.sample_rows].tolist()
    assert tokens == [7, 8, 9, 4, 2, 1, 6]
    assert made.num_logits == 6


def test_a_pending_token_is_what_the_step_before_left() -> None:
    state = DeviceState(4, CPU)
    first = StepBatch(
        [
            ScheduledSequence(1, [7], 2, [5], SPECS),
            ScheduledSequence(2, [4, 4], 0, [1]),
            ScheduledSequence(3, [9], 4, [2, 3], SPECS),
        ],
        state,
    )
    state.remember(first.sampled_slots, torch.tensor([70, 90]))
    tensors = StepBatch(
        [
            ScheduledSequence(3, [], 5, [2, 3], SPECS, takes_pending=True),
            ScheduledSequence(2, [5], 2, [1], SPECS),
            ScheduledSequence(1, [], 3, [5], SPECS, takes_pending=True),
        ],
        state,
    ).tensors
    assert tensors.token_ids.tolist() == [90, 5, 70]
    assert tensors.positions.tolist() == [5, 2, 3]
    assert tensors.slots.tolist() == [13, 6, 23]
    assert tensors.sample_rows.tolist() == [0, 1, 2]
    assert state.last_token(1) == 70
