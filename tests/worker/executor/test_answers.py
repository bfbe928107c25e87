"""A step's answers: their order, the bound on logits, failures of one sequence only, and drafts.

Runs of drafts equal plain decoding, whatever the rows that it would not reach contain.
"""

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
import torch

from tests.depth import worlds
from tests.support.model import reference_ops as reference
from tests.support.model.single_draws import AnsweredRows, sample, verify
from worker.executor.answers import PendingAnswers, Verification
from worker.ops.rejection import METHODS
from worker.ops.sample import ALL_MASKED, NOT_NUMBERS, scores
from worker.types import Draw, ModelOutput, SampleSpec, SamplingParams, ScheduledSequence

VOCAB, SMALL = 32, 24
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


class Head:
    def __init__(self) -> None:
        self.asked: list[int] = []

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        self.asked.append(len(hidden))
        return hidden.clone()


def run(
    *sequences: ScheduledSequence, spoil: dict[int, float] | None = None, tile_rows: int = 256
) -> tuple[ModelOutput, list[int], torch.Tensor]:
    batch: Any = AnsweredRows(sequences)
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


# ---- runs of drafts ----

PROMPT = (3, 5, 3, 8)
WISHES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.8, "logprobs": 2},
    {"temperature": 0.7, "logprobs": 0},
    {"top_k": 4, "top_p": 0.8, "min_p": 0.02, "logprob_token_ids": (7, 1)},
    {"frequency_penalty": 1.5, "presence_penalty": 0.5, "temperature": 1.4},
    {"bad_words": ((3,), (5, 6), (1, 2)), "logit_bias": ((6, 3.0),), "logprobs": -1},
    {"allowed_token_ids": (1, 2, 3, 4, 5, 6), "min_tokens": 3},
]


def drafted(
    seq_id: int, drafts: Sequence[int], history: Sequence[int] = PROMPT, **changes: Any
) -> ScheduledSequence:
    params = SamplingParams(max_tokens=9, **{"seed": seq_id, **changes})
    output = 4
    spec = SampleSpec(
        params,
        len(PROMPT) + 1,
        (0, 2) if params.min_tokens > 1 else (),
        [*history, output] if history is PROMPT else history,
        len(PROMPT),
    )
    return ScheduledSequence(
        seq_id, [output, *drafts], len(PROMPT), [0], (spec,), num_drafts=len(drafts)
    )


def logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, SMALL, generator=torch.Generator().manual_seed(seed)) * 2


def verified(
    hidden: torch.Tensor, *sequences: ScheduledSequence, tile_rows: int = 256, **changes: Any
) -> ModelOutput:
    batch: Any = AnsweredRows(sequences)
    assert batch.num_logits == len(hidden)
    verification = Verification(**changes)
    return PendingAnswers(batch, hidden, torch.clone, verification, tile_rows=tile_rows).collect()


def plainly(rows: torch.Tensor, sequence: ScheduledSequence) -> list[Draw]:
    [spec] = sequence.samples
    drafts, drawn = sequence.drafts, []
    for index, row in enumerate(rows):
        [outcome] = sample(row[None], [spec.after([draw.token_id for draw in drawn])])
        assert isinstance(outcome, Draw)
        drawn.append(outcome)
        if index < len(drafts) and outcome.token_id != drafts[index]:
            break
    return drawn


def drafts_for(
    rows: torch.Tensor, changes: dict[str, Any], seq_id: int, num_good: int
) -> list[int]:
    drafts: list[int] = []
    [spec] = drafted(seq_id, [], **changes).samples
    for index, row in enumerate(rows[:-1]):
        [outcome] = sample(row[None], [spec.after(drafts)])
        assert isinstance(outcome, Draw)
        drafts.append((outcome.token_id + (index >= num_good)) % SMALL)
    return drafts


@pytest.mark.parametrize("tile_rows", [1, 7, 256])
@pytest.mark.parametrize("seed", range(worlds(4)))
def test_runs_equal_plain_decoding(seed: int, tile_rows: int) -> None:
    draw = Random(seed)
    sequences, parts, lengths = [], [], []
    for seq_id, changes in enumerate(WISHES * 3):
        rows = logits(1 + draw.randrange(5), seed * 100 + seq_id)
        num_good = draw.randrange(5)
        drafts = drafts_for(rows, changes, seq_id, num_good)
        sequences.append(drafted(seq_id, drafts, **changes))
        parts.append(rows)
        lengths.append(min(num_good, len(drafts)) + 1)
    output = verified(torch.cat(parts), *sequences, tile_rows=tile_rows)
    assert not output.failed
    for sequence, rows, length in zip(sequences, parts, lengths, strict=True):
        assert list(output.sampled[sequence.seq_id]) == plainly(rows, sequence)
        assert len(output.sampled[sequence.seq_id]) == length


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bad_row_counts_when_plain_decoding_would_reach_it(
    bad: float, temperature: float
) -> None:
    """A bad row behind the run has no effect; inside, the tokens before it are valid."""
    changes = {"temperature": temperature}
    rows, other = logits(5, 5), logits(2, 6)
    drafts = drafts_for(rows, changes, 1, 2)
    sequences = (drafted(1, drafts, **changes), drafted(2, [1], **changes))
    whole = verified(torch.cat((rows, other)), *sequences)
    assert len(whole.sampled[1]) == 3
    for row in range(5):
        spoiled = torch.cat((rows, other))
        spoiled[row, 7] = bad
        output = verified(spoiled, *sequences)
        assert output.sampled[2] == whole.sampled[2]
        if row == 0:
            assert output.failed == {1: NOT_NUMBERS}
            assert 1 not in output.sampled
        else:
            assert not output.failed
            assert output.sampled[1] == whole.sampled[1][: min(row, 3)]


def test_a_row_without_a_token_left_counts_in_the_same_way() -> None:
    changes = {"allowed_token_ids": (6,), "bad_words": ((6, 6),)}
    rows = logits(4, 5)
    output = verified(rows, drafted(1, [6, 6, 6], **changes))
    assert [draw.token_id for draw in output.sampled[1]] == [6]
    assert not output.failed
    stuck = drafted(1, [6, 6, 6], allowed_token_ids=(6,), bad_words=((6,),))
    assert verified(rows, stuck).failed == {1: ALL_MASKED}


@pytest.mark.parametrize("method", METHODS)
def test_drafts_with_proposals_are_verified_against_them(method: str) -> None:
    """Greedy drafts and drafts without q stay coupled."""
    proposals, sequences, parts = {}, [], []
    for seq_id, changes in enumerate(WISHES * 2):
        rows = logits(1 + seq_id % 5, seq_id)
        count = len(rows) - 1
        q = (rows[:count] + logits(count, 50 + seq_id)).softmax(-1)
        drafts = q.argmax(-1).tolist()
        sequences.append(drafted(seq_id, drafts, **changes))
        parts.append(rows)
        if count and seq_id % 4:
            proposals[seq_id] = q
    output = verified(torch.cat(parts), *sequences, proposals=proposals, method=method)
    judged = 0
    for sequence, rows in zip(sequences, parts, strict=True):
        [spec] = sequence.samples
        drawn = [draw.token_id for draw in output.sampled[sequence.seq_id]]
        if sequence.seq_id not in proposals or spec.params.temperature == 0:
            assert drawn == [draw.token_id for draw in plainly(rows, sequence)]
            continue
        judged += 1
        prepared = torch.stack(
            [scores(row, spec.after(sequence.drafts[:i])) for i, row in enumerate(rows)]
        )
        q = proposals[sequence.seq_id]
        seed, position = spec.params.seed, spec.position
        verdict = verify(list(sequence.drafts), prepared, q, seed, position, method)
        assert tuple(drawn) == verdict.token_ids
        asked = spec.params.logprobs is not None
        assert all((draw.logprobs is not None) >= asked for draw in output.sampled[sequence.seq_id])
    assert judged > 5


@pytest.mark.parametrize("method", METHODS)
def test_a_bad_row_ends_a_verified_run_before_it(method: str) -> None:
    drafts = [1, 2, 3]
    sure = torch.full((3, SMALL), 0.0)
    sure[range(3), drafts] = 90.0
    rows = torch.cat((sure, logits(1, 2)))
    q = sure.softmax(-1)
    for bad in range(4):
        spoiled = rows.clone()
        spoiled[bad, 0] = torch.nan
        sequences = (drafted(1, drafts), drafted(2, drafts))
        output = verified(
            torch.cat((spoiled, rows)), *sequences, proposals={1: q, 2: q}, method=method
        )
        assert [draw.token_id for draw in output.sampled[2]][:3] == drafts
        if bad == 0:
            assert output.failed == {1: NOT_NUMBERS}
        else:
            assert [draw.token_id for draw in output.sampled[1]] == drafts[:bad]
    falling = torch.cat((rows[:1] * -1, rows[1:2] * torch.nan, rows[2:]))
    [draw] = verified(falling, drafted(1, drafts), proposals={1: q}, method=method).sampled[1]
    assert draw.token_id != drafts[0]


def test_proposals_of_other_drafts_are_refused() -> None:
    with pytest.raises(ValueError, match="1 proposals"):
        verified(logits(3), drafted(1, [1, 2]), proposals={1: torch.full((1, SMALL), 1 / SMALL)})
