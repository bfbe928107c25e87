"""Runs of drafts equal plain decoding, whatever the rows that it would not reach contain."""

from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from tests.depth import worlds
from tests.support.model.single_draws import sample, verify
from worker.executor.answers import PendingAnswers, Verification
from worker.ops.rejection import METHODS
from worker.ops.sample import ALL_MASKED, NOT_NUMBERS, scores
from worker.types import Draw, ModelOutput, SampleSpec, SamplingParams, ScheduledSequence

VOCAB = 24
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


class Rows:
    def __init__(self, sequences: Sequence[ScheduledSequence]) -> None:
        self.sampled = list(sequences)
        self.scored: list[ScheduledSequence] = []
        self.silent: list[ScheduledSequence] = []
        self.pooled: list[ScheduledSequence] = []
        self.sampled_slots = np.arange(len(sequences), dtype=np.int32)
        self.num_logits = sum(1 + s.num_drafts for s in sequences)


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
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def run(
    hidden: torch.Tensor, *sequences: ScheduledSequence, tile_rows: int = 256, **changes: Any
) -> ModelOutput:
    batch: Any = Rows(sequences)
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
        drafts.append((outcome.token_id + (index >= num_good)) % VOCAB)
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
    output = run(torch.cat(parts), *sequences, tile_rows=tile_rows)
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
    whole = run(torch.cat((rows, other)), *sequences)
    assert len(whole.sampled[1]) == 3
    for row in range(5):
        spoiled = torch.cat((rows, other))
        spoiled[row, 7] = bad
        output = run(spoiled, *sequences)
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
    output = run(rows, drafted(1, [6, 6, 6], **changes))
    assert [draw.token_id for draw in output.sampled[1]] == [6]
    assert not output.failed
    stuck = drafted(1, [6, 6, 6], allowed_token_ids=(6,), bad_words=((6,),))
    assert run(rows, stuck).failed == {1: ALL_MASKED}


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
    output = run(torch.cat(parts), *sequences, proposals=proposals, method=method)
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
    sure = torch.full((3, VOCAB), 0.0)
    sure[range(3), drafts] = 90.0
    rows = torch.cat((sure, logits(1, 2)))
    q = sure.softmax(-1)
    for bad in range(4):
        spoiled = rows.clone()
        spoiled[bad, 0] = torch.nan
        sequences = (drafted(1, drafts), drafted(2, drafts))
        output = run(torch.cat((spoiled, rows)), *sequences, proposals={1: q, 2: q}, method=method)
        assert [draw.token_id for draw in output.sampled[2]][:3] == drafts
        if bad == 0:
            assert output.failed == {1: NOT_NUMBERS}
        else:
            assert [draw.token_id for draw in output.sampled[1]] == drafts[:bad]
    falling = torch.cat((rows[:1] * -1, rows[1:2] * torch.nan, rows[2:]))
    [draw] = run(falling, drafted(1, drafts), proposals={1: q}, method=method).sampled[1]
    assert draw.token_id != drafts[0]


def test_proposals_of_other_drafts_are_refused() -> None:
    with pytest.raises(ValueError, match="1 proposals"):
        run(logits(3), drafted(1, [1, 2]), proposals={1: torch.full((1, VOCAB), 1 / VOCAB)})


def test_verification_uses_the_sums_it_is_given() -> None:
    """The sums that were found to work take precedence over the device's default."""

    class Broken:
        def log_normalizers(self, scores: torch.Tensor) -> torch.Tensor:
            raise LookupError("these sums were asked")

    sequence = drafted(1, [3, 4], temperature=1.0)
    proposals = {1: torch.full((2, VOCAB), 1 / VOCAB)}
    broken: Any = Broken()
    with pytest.raises(LookupError):
        run(logits(3), sequence, proposals=proposals, sums=broken)
