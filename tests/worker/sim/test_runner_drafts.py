"""Drafts give the simulator's usual tokens in fewer steps."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.depth import examples
from worker.config import SimConfig
from worker.sim.runner import SimExecutor, SimLimits
from worker.tokenizer import sim as sim_tokens
from worker.types import ModelOutput, SampleSpec, SamplingParams, ScheduledSequence, SchedulerOutput


def drawn(output: ModelOutput) -> list[int]:
    return [draw.token_id for draws in output.sampled.values() for draw in draws]


def executor(
    config: SimConfig | None = None, crash: Callable[[], None] = lambda: None
) -> SimExecutor:
    return SimExecutor(config or SimConfig(), lambda seconds, follows: None, SimLimits(), crash)


def decoded(sim: SimExecutor, prompt: list[int], count: int, **spec: Any) -> list[int]:
    tokens = list(prompt)
    params = SamplingParams(**{"max_tokens": 100} | spec)
    start = 0
    for _ in range(count):
        asked = asked_after(params, tokens, len(prompt))
        step = ScheduledSequence(1, tokens[start:], start, [0, 1, 2, 3], (asked,))
        tokens += drawn(sim.execute(SchedulerOutput(1, (step,))))
        start = len(tokens) - 1
    return tokens[len(prompt) :]


def asked_after(params: SamplingParams, tokens: list[int], num_prompt: int) -> SampleSpec:
    position = len(tokens)
    banned = (sim_tokens.IM_END_ID,) if position - num_prompt < params.min_tokens else ()
    history = tuple(tokens) if params.needs_history else ()
    return SampleSpec(params, position, banned, history, num_prompt)


PROMPT = [300, 301, 302, 303, 300, 301, 302]
CASES: list[tuple[str, dict[str, Any]]] = [
    ("random", {"temperature": 0.0}),
    ("random", {"seed": 7, "min_tokens": 9}),
    ("random", {"seed": 8, "logprobs": 2, "allowed_token_ids": (300, 301)}),
    ("random", {"seed": 9, "bad_words": ((300, 301), (302,)), "logit_bias": ((300, 100.0),)}),
    ("echo", {"seed": 1}),
]


@pytest.mark.parametrize(("mode", "spec"), CASES)
@given(guesses=st.lists(st.lists(st.booleans(), max_size=4), min_size=3, max_size=8))
@examples(30)
def test_drafts_do_not_change_answers(
    mode: str, spec: dict[str, Any], guesses: list[list[bool]]
) -> None:
    config = SimConfig(mode=mode, mean_output_tokens=10.0, end_token_id=sim_tokens.IM_END_ID)
    expected = decoded(executor(config), PROMPT, 45, **spec)
    sim = executor(config)
    tokens = [*PROMPT, *decoded(sim, PROMPT, 1, **spec)]
    params = SamplingParams(**{"max_tokens": 100} | spec)
    for guess in guesses:
        known, position = len(tokens) - len(PROMPT), len(tokens)
        drafts = [expected[known + n] + (not right) for n, right in enumerate(guess)]
        asked = asked_after(params, tokens, len(PROMPT))
        share = ScheduledSequence(
            *(1, [tokens[-1], *drafts], position - 1, [0, 1, 2, 3], (asked,)),
            num_drafts=len(drafts),
        )
        draws = sim.execute(SchedulerOutput(1, (share,))).sampled[1]
        num_accepted = (*guess, False).index(False)
        assert [draw.token_id for draw in draws] == expected[known : known + num_accepted + 1]
        assert all((draw.logprobs is not None) == ("logprobs" in spec) for draw in draws)
        tokens += [draw.token_id for draw in draws]


def test_a_run_of_drafts_ends_where_no_token_is_allowed() -> None:
    spec = SampleSpec(
        SamplingParams(9, allowed_token_ids=(300,), bad_words=((300, 300, 300),)),
        position=2,
        history=(7, 300),
        num_prompt=1,
    )
    share = ScheduledSequence(1, [300, 300, 300], 1, [0], (spec,), num_drafts=2)
    output = executor().execute(SchedulerOutput(1, (share,)))
    assert (drawn(output), output.failed) == ([300], {})
    alone = ScheduledSequence(1, [300], 2, [0], (spec.after([300]),))
    assert list(executor().execute(SchedulerOutput(1, (alone,))).failed) == [1]


def test_a_crash_counts_accepted_drafts_as_tokens() -> None:
    crashes: list[int] = []
    sim = executor(SimConfig(mode="echo"), crash=lambda: crashes.append(1))
    first = SampleSpec(SamplingParams(100), 4, num_prompt=4)
    prompt = ScheduledSequence(1, [300, 301, 302, 303], 0, [0], (first,))
    sim.execute(SchedulerOutput(1, (prompt,)))
    sim.configure({"crash_after_tokens": 3})
    spec = SampleSpec(SamplingParams(100), 5, num_prompt=4)
    share = ScheduledSequence(1, [300, 301, 302], 4, [0], (spec,), num_drafts=2)
    output = sim.execute(SchedulerOutput(2, (share,)))
    assert (drawn(output), crashes) == ([301, 302, 303], [1])
