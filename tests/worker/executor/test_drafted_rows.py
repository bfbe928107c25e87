"""Rows of drafts are the rows that plain decoding gives, in any company."""

from __future__ import annotations

import random

import pytest
from measured_sums import is_measured

from worker.executor.interface import Executor
from worker.types import Draw, SampleSpec, SamplingParams, ScheduledSequence, SchedulerOutput

PARAMS = SamplingParams(max_tokens=1, temperature=0.0, logprobs=3)
BLOCKS = 12
NUM_PROMPTS, NUM_TOKENS = 4, 28


def share(
    index: int, tokens: list[int], start: int, end: int, num_drafts: int = 0
) -> ScheduledSequence:
    """Tokens `start` to `end` of a sequence in blocks of its own, the last ones as drafts."""
    spec = SampleSpec(PARAMS, end - num_drafts)
    table = range(index * BLOCKS, (index + 1) * BLOCKS)
    return ScheduledSequence(index, tokens[start:end], start, table, (spec,), num_drafts=num_drafts)


@pytest.mark.model
def test_runs_of_drafts_draw_what_single_tokens_do(float32_executor: Executor) -> None:
    """Token and log probabilities of every draw of every accepted run are those of decoding, alone
    and among others that run one token, as many drafts as they like, or half of a prompt.
    """
    rng = random.Random(21)
    prompts = [
        [rng.randrange(17, 49152) for _ in range(rng.choice([3, 15, 40, 130]))]
        for _ in range(NUM_PROMPTS)
    ]
    truth: list[list[Draw]] = []
    for prompt in prompts:
        tokens, draws, start = list(prompt), [], 0
        while len(draws) < NUM_TOKENS:
            step = SchedulerOutput(0, (share(0, tokens, start, len(tokens)),))
            [draw] = float32_executor.execute(step).sampled[0]
            start = len(tokens)
            tokens.append(draw.token_id)
            draws.append(draw)
        truth.append(draws)
    found: list[list[Draw]] = [[] for _ in prompts]
    while any(len(draws) < NUM_TOKENS - 12 for draws in found):
        shares = []
        for index, prompt in enumerate(prompts):
            tokens = [*prompt, *(draw.token_id for draw in truth[index])]
            known = len(prompt) + len(found[index])
            num_drafts = rng.choice([0, 1, 2, 4, 7, 11]) if found[index] else 0
            if known + num_drafts <= len(tokens) - 1 and (found[index] or rng.random() < 0.5):
                first = known - 1 if found[index] else 0
                shares.append(share(index, tokens, first, known + num_drafts, num_drafts))
        for index, draws in float32_executor.execute(
            SchedulerOutput(0, tuple(shares))
        ).sampled.items():
            found[index] += draws
    for draws, expected in zip(found, truth, strict=True):
        assert_drawn_alike(draws, expected[: len(draws)])


def assert_drawn_alike(draws: list[Draw], expected: list[Draw]) -> None:
    """To the bit where sums are; elsewhere the same tokens, and as likely but for rounding."""
    if is_measured():
        assert draws == expected
        return
    assert [draw.token_id for draw in draws] == [draw.token_id for draw in expected]
    assert [drawn_logprob(draw) for draw in draws] == pytest.approx(
        [drawn_logprob(draw) for draw in expected], abs=1e-3
    )


def drawn_logprob(draw: Draw) -> float:
    """Of the token itself, without the likeliest ones beside it."""
    assert draw.logprobs is not None
    return draw.logprobs.logprobs[0]
