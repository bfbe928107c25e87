"""What vLLM's own tests ask of rejection sampling, asked of verification here, coupled or not."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from worker.executor.answers import answer
from worker.ops.rejection import METHODS
from worker.types import ModelOutput, SampleSpec, SamplingParams, ScheduledSequence

WAYS = ("coupled", *METHODS)


class Rows:
    """What `answer` reads of an `InputBatch`."""

    def __init__(self, sequences: Sequence[ScheduledSequence]) -> None:
        self.sampled = list(sequences)
        self.scored: list[ScheduledSequence] = []
        self.silent: list[ScheduledSequence] = []
        self.num_logits = sum(1 + s.num_drafts for s in sequences)


def drafted(
    seq_id: int,
    drafts: Sequence[int],
    output: Sequence[int] = (),
    banned: tuple[int, ...] = (),
    **changes: Any,
) -> ScheduledSequence:
    """A sequence after the prompt [0, 0] and `output`, with drafts."""
    tokens = [0, 0, *output]
    params = SamplingParams(max_tokens=9, **{"seed": seq_id, **changes})
    spec = SampleSpec(params, len(tokens), banned, tokens if params.needs_history else (), 2)
    return ScheduledSequence(
        seq_id, [tokens[-1], *drafts], len(tokens) - 1, [0], (spec,), num_drafts=len(drafts)
    )


def verified(
    logits: torch.Tensor,
    sequences: Sequence[ScheduledSequence],
    proposals: dict[int, torch.Tensor],
    way: str,
) -> ModelOutput:
    """The output of a step whose rows of logits these are."""
    batch: Any = Rows(sequences)
    known = {} if way == "coupled" else proposals
    return answer(batch, logits, torch.clone, known, "standard" if way == "coupled" else way)


def tokens_of(output: ModelOutput, seq_id: int) -> list[int]:
    """What a sequence drew."""
    return [draw.token_id for draw in output.sampled[seq_id]]


def preferring(favourites: Sequence[int], size: int = 6, margin: float = 9.0) -> torch.Tensor:
    """Rows in which one token after the other is by far the likeliest, and the next id next."""
    rows = torch.zeros(len(favourites), size)
    for row, token in zip(rows, favourites, strict=True):
        row[token] = 2 * margin
        row[(token + 1) % size] = margin
    return rows


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("temperature", [0.0, 0.01])
def test_a_draft_repeated_is_penalized_for_the_drafts_before_it(
    temperature: float, way: str
) -> None:
    """With a frequency penalty the second 1 falls because of the first, which is only a draft."""
    rows = preferring([1, 1, 1], margin=1.0)
    q = preferring([1, 1], margin=90.0).softmax(-1)
    plain = drafted(1, [1, 1], temperature=temperature)
    assert tokens_of(verified(rows, [plain], {1: q}, way), 1) == [1, 1, 1]
    once = drafted(2, [1, 1], temperature=temperature, frequency_penalty=1.5)
    assert tokens_of(verified(rows, [once], {2: q}, way), 2) == [1, 2]
    present = drafted(3, [1, 1], temperature=temperature, presence_penalty=1.5)
    assert tokens_of(verified(rows, [present], {3: q}, way), 3) == [1, 2]
    repeated = drafted(4, [1, 1], temperature=temperature, repetition_penalty=4.0)
    assert tokens_of(verified(rows, [repeated], {4: q}, way), 4) == [1, 2]


@pytest.mark.parametrize("way", WAYS)
def test_bad_words_are_those_of_each_request_and_see_its_drafts(way: str) -> None:
    """A word that a draft begins cannot be completed; others in the batch have other words."""
    rows = preferring([1, 2, 3])
    q = preferring([1, 2], margin=90.0).softmax(-1)
    words: list[tuple[tuple[int, ...], ...]] = [(), ((1, 2),), ((2, 3),), ((1,),), ((5, 1, 2),)]
    sequences = [
        drafted(i, [1, 2], output=[5], bad_words=bad, temperature=0.01)
        for i, bad in enumerate(words)
    ]
    output = verified(rows.repeat(len(words), 1), sequences, dict.fromkeys(range(5), q), way)
    found = [tokens_of(output, i) for i in range(5)]
    assert found == [[1, 2, 3], [1, 3], [1, 2, 4], [2], [1, 3]]


@pytest.mark.parametrize("way", WAYS)
def test_only_allowed_ids_stand_in_place_of_drafts(way: str) -> None:
    """A draft outside is replaced by the likeliest token inside."""
    rows = preferring([1, 3, 3])
    q = preferring([1, 3], margin=90.0).softmax(-1)
    for allowed, expected in (((1, 4), [1, 4]), ((2, 4), [2]), ((1, 3), [1, 3, 3])):
        sequence = drafted(1, [1, 3], allowed_token_ids=allowed, temperature=0.01)
        assert tokens_of(verified(rows, [sequence], {1: q}, way), 1) == expected


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("num_output", "expected"), [(0, [1, 0]), (1, [1, 5, 5]), (2, [1, 5, 5])])
def test_stop_tokens_are_banned_up_to_the_least_length_and_no_further(
    num_output: int, expected: list[int], way: str
) -> None:
    """With min_tokens 2 the drafted stop stands from the third output on, wherever a run starts."""
    rows = preferring([1, 5, 5])
    q = preferring([1, 5], margin=90.0).softmax(-1)
    sequence = drafted(
        1,
        [1, 5],
        output=[3] * num_output,
        banned=(5,) if num_output < 2 else (),
        min_tokens=2,
        stop_token_ids=(5,),
        temperature=0.01,
    )
    assert tokens_of(verified(rows, [sequence], {1: q}, way), 1) == expected


def test_every_way_of_drafting_shares_a_batch() -> None:
    """Greedy, coupled and judged sequences answer as they do alone."""
    rows = torch.randn(24, 6, generator=torch.Generator().manual_seed(2))
    q = torch.full((2, 6), 1 / 6)
    sequences = [
        drafted(i, [i % 6, (i + 1) % 6], temperature=(0.0, 1.0)[i % 2], top_k=4) for i in range(8)
    ]
    proposals = dict.fromkeys((1, 2, 5), q)
    together = verified(rows, sequences, proposals, "block")
    for i, (sequence, start) in enumerate(zip(sequences, itertools.count(0, 3), strict=False)):
        alone = verified(rows[start : start + 3], [sequence], proposals, "block")
        assert together.sampled[i] == alone.sampled[i]
