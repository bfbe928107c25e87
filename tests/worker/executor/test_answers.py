"""A step's answers: their order, the bound on logits, and failures of one sequence only."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.model import reference_ops as reference
from worker.executor.answers import PendingAnswers
from worker.ops.sample import ALL_MASKED, NOT_NUMBERS
from worker.types import ModelOutput, SampleSpec, SamplingParams, ScheduledSequence

VOCAB = 32
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


class Rows:
    def __init__(self, sequences: Sequence[ScheduledSequence]) -> None:
        self.sampled = [s for s in sequences if s.samples]
        self.scored = [s for s in sequences if s.prompt_targets]
        self.silent = [s for s in sequences if not s.samples]
        self.pooled: list[ScheduledSequence] = []
        self.sampled_slots = np.arange(len(self.sampled), dtype=np.int32)
        self.num_logits = sum(1 + s.num_drafts for s in self.sampled)
        self.num_logits += sum(len(s.prompt_targets) for s in self.scored)

    def __len__(self) -> int:
        return self.num_logits + len(self.silent)


class Head:
    def __init__(self) -> None:
        self.asked: list[int] = []

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        self.asked.append(len(hidden))
        return hidden.clone()


def run(
    *sequences: ScheduledSequence,
    spoil: dict[int, float] | None = None,
    tile_rows: int = 256,
) -> tuple[ModelOutput, list[int], torch.Tensor]:
    batch: Any = Rows(sequences)
    hidden = torch.randn(len(batch), VOCAB, generator=torch.Generator().manual_seed(2))
    for row, value in (spoil or {}).items():
        hidden[row, 7] = value
    head = Head()
    answers = PendingAnswers(batch, hidden, head, tile_rows=tile_rows)
    return answers.collect(), head.asked, hidden


def sampling(seq_id: int, *params: SamplingParams) -> ScheduledSequence:
    return ScheduledSequence(seq_id, [1], 40, range(4), tuple(SampleSpec(p, 41) for p in params))


def scored(
    seq_id: int, num_targets: int, top: int = 2, *, draws: bool = False
) -> ScheduledSequence:
    return ScheduledSequence(
        seq_id,
        [1] * 12,
        0,
        range(4),
        (SampleSpec(GREEDY, 12),) if draws else (),
        prompt_targets=list(range(num_targets)),
        num_prompt_logprobs=top,
    )


def test_draws_come_in_the_order_of_their_specs() -> None:
    biased = SamplingParams(max_tokens=1, temperature=0.0, logit_bias=((9, 99.0),))
    output, asked, hidden = run(sampling(5, GREEDY, biased, GREEDY), sampling(6, biased))
    best = int(hidden[0].argmax())
    assert [draw.token_id for draw in output.sampled[5]] == [best, 9, best]
    assert [draw.token_id for draw in output.sampled[6]] == [9]
    assert asked == [2]
    assert not output.failed


@pytest.mark.parametrize("tile_rows", [1, 5, 256])
def test_logits_are_made_a_bounded_number_at_a_time(tile_rows: int) -> None:
    sequences = (scored(1, 12), sampling(2, GREEDY), scored(3, 7, draws=True), sampling(4, GREEDY))
    output, asked, hidden = run(*sequences, tile_rows=tile_rows)
    assert max(asked) <= tile_rows
    assert sum(asked) == 3 + 12 + 7
    assert output == run(*sequences)[0]
    assert output.sampled.keys() == {2, 3, 4}
    assert {seq_id: len(rows) for seq_id, rows in output.prompt_logprobs.items()} == {1: 12, 3: 7}
    for row, found in enumerate(output.prompt_logprobs[1] + output.prompt_logprobs[3]):
        target = row if row < 12 else row - 12
        expected = reference.token_logprobs(hidden[3 + row], target, 2)
        assert (found.token_ids, found.rank) == (expected.token_ids, expected.rank)
        assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-5)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_sequence_with_bad_rows_fails_alone(value: float) -> None:
    sequences = (
        sampling(1, GREEDY, GREEDY),
        sampling(2, GREEDY),
        scored(3, 4, draws=True),
        scored(4, 5),
        scored(5, 0),
        scored(6, 0),
    )
    whole, _, _ = run(*sequences)
    # Rows: draws of 1, 2, 3; targets of 3 (4 rows) and 4 (5 rows); last rows of 4, 5, 6.
    for rows, failing in (((0,), 1), ((5,), 3), ((2,), 3), ((9,), 4), ((12,), 4), ((14,), 6)):
        output, _, _ = run(*sequences, spoil=dict.fromkeys(rows, value))
        assert output.failed == {failing: NOT_NUMBERS}
        left = {seq_id: draws for seq_id, draws in whole.sampled.items() if seq_id != failing}
        assert output.sampled == left
        assert output.prompt_logprobs.keys() == whole.prompt_logprobs.keys() - {failing}


def test_a_sequence_without_a_token_left_fails_alone() -> None:
    """One impossible draw of several is enough: a request's branches fail together."""
    nothing = SamplingParams(max_tokens=1, allowed_token_ids=(3,), bad_words=((3,),))
    output, _, _ = run(sampling(1, GREEDY, nothing), sampling(2, GREEDY))
    assert output.failed == {1: ALL_MASKED}
    assert output.sampled.keys() == {2}
