"""The simulator's time and tokens are functions of the step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from worker.config import SimConfig
from worker.executor.sim_runner import SimExecutor
from worker.types import ModelOutput, SampleSpec, SamplingParams, ScheduledSequence, SchedulerOutput

CONFIG = SimConfig(
    prefill_tokens_per_second=1000.0,
    decode_base_seconds=0.5,
    decode_per_sequence_seconds=0.125,
    step_overhead_seconds=2.0,
)


def sequence(
    seq_id: int, tokens: list[int], start: int, sample: bool = True, **spec: float
) -> ScheduledSequence:
    """A share of a step that samples the next position."""
    params = SamplingParams(100, **spec)  # type: ignore[arg-type]
    drawn = (SampleSpec(params, start + len(tokens)),) if sample else ()
    return ScheduledSequence(seq_id, tokens, start, [0], drawn)


def drawn(output: ModelOutput) -> list[int]:
    """The one token of every sequence that has one, in the order of the step."""
    return [draw.token_id for draws in output.sampled.values() for draw in draws]


@pytest.mark.parametrize(
    ("sequences", "seconds"),
    [
        ((sequence(1, [1] * 100, 0),), 2.1),
        ((sequence(1, [1] * 100, 0, sample=False),), 2.1),
        ((sequence(1, [1], 7),), 2.625),
        ((sequence(1, [1], 7), sequence(2, [1], 9), sequence(3, [1] * 50, 0)), 2.8),
    ],
)
def test_a_step_takes_what_the_latency_model_says(
    sequences: tuple[ScheduledSequence, ...], seconds: float
) -> None:
    """Prefill by the token, decoding by the step and the sequence; `time_scale` stretches both."""
    waits: list[float] = []
    for scale in (1.0, 0.5, 0.0):
        executor = SimExecutor(replace(CONFIG, time_scale=scale), waits.append)
        executor.execute(SchedulerOutput(1, sequences))
    assert waits == pytest.approx([seconds, seconds / 2])


def test_only_sampling_sequences_get_a_token_and_it_is_a_word() -> None:
    """A chunk short of the prompt's end has none; ids stay in the configured range."""
    executor = SimExecutor(SimConfig(first_word_id=300, num_words=5), lambda _: None)
    step = SchedulerOutput(
        1,
        (
            sequence(0, [1, 2], 0, sample=False),
            *(sequence(i, [i], 3) for i in range(1, 100)),
        ),
    )
    output = executor.execute(step)
    assert sorted(output.sampled) == list(range(1, 100))
    assert set(drawn(output)) == {300, 301, 302, 303, 304}


def test_tokens_do_not_depend_on_chunking_or_company() -> None:
    """The same last token, position and seed give the same draw."""
    executor = SimExecutor(SimConfig(), lambda _: None)
    whole = executor.execute(SchedulerOutput(1, (sequence(1, [4, 5, 6], 0, seed=9),)))
    part = executor.execute(
        SchedulerOutput(2, (sequence(7, [6], 2, seed=9), sequence(8, [6], 2, seed=10)))
    )
    assert whole.sampled[1] == part.sampled[7]
    assert part.sampled[7] != part.sampled[8]


def test_greedy_requests_ignore_their_seed() -> None:
    """Temperature 0 is one answer, whatever the seed; another simulator seed is another answer."""
    step = SchedulerOutput(1, tuple(sequence(i, [6], 2, seed=i, temperature=0.0) for i in range(8)))
    answers = [
        set(drawn(SimExecutor(SimConfig(seed=seed), lambda _: None).execute(step)))
        for seed in (0, 1)
    ]
    assert [len(answer) for answer in answers] == [1, 1]
    assert answers[0] != answers[1]


def test_answers_end_by_themselves_after_the_mean_length() -> None:
    """The end token comes with probability 1 / mean_output_tokens, and only when one is known."""
    step = SchedulerOutput(1, tuple(sequence(i, [i], i % 97, seed=i) for i in range(10_000)))
    for end_token_id, least, most in ((7, 400, 600), (None, 0, 0)):
        config = SimConfig(time_scale=0, end_token_id=end_token_id, mean_output_tokens=20.0)
        draws = drawn(SimExecutor(config, lambda _: None).execute(step))
        assert least <= draws.count(7) <= most
        assert all(draw >= config.first_word_id for draw in draws if draw != 7)
