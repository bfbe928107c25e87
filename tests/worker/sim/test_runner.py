"""The simulator's steps take the modelled time, draw valid tokens, and fail on command."""

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.depth import examples
from tests.support.model.whole_engine import outputs_of, tokens_of
from worker.config import CacheConfig, EngineConfig, SchedulerConfig
from worker.engine.core import EngineCore
from worker.engine.messages import AddRequest
from worker.engine.scheduling.scheduler import Scheduler
from worker.errors import ConfigError
from worker.sim import tokenizer as sim_tokens
from worker.sim.config import SimConfig
from worker.sim.runner import (
    RealTime,
    SimExecutor,
    SimLimits,
    TokenCache,
    build_sim_executor,
    spoken,
)
from worker.types import ModelOutput, SampleSpec, SamplingParams, ScheduledSequence, SchedulerOutput

CONFIG = SimConfig(
    prefill_tokens_per_second=1000.0,
    decode_base_seconds=0.5,
    decode_per_sequence_seconds=0.125,
    step_overhead_seconds=2.0,
)


def sequence(
    seq_id: int, tokens: list[int], start: int, sample: bool = True, **spec: object
) -> ScheduledSequence:
    params = SamplingParams(**{"max_tokens": 100} | spec)  # type: ignore[arg-type]
    num_prompt = start + len(tokens) - (start > 0)
    asked = (SampleSpec(params, start + len(tokens), num_prompt=num_prompt),) if sample else ()
    return ScheduledSequence(seq_id, tokens, start, [0], asked)


def drawn(output: ModelOutput) -> list[int]:
    return [draw.token_id for draws in output.sampled.values() for draw in draws]


def no_wait(seconds: float, follows: bool) -> None: ...


def instant(
    config: SimConfig | None = None, crash: Callable[[], None] = lambda: None
) -> SimExecutor:
    return SimExecutor(replace(config or SimConfig(), time_scale=0.0), no_wait, SimLimits(), crash)


def timed(config: SimConfig = CONFIG) -> tuple[SimExecutor, list[float]]:
    waits: list[float] = []
    return SimExecutor(config, lambda seconds, follows: waits.append(seconds)), waits


@pytest.mark.parametrize(
    ("sequences", "seconds"),
    [
        ((sequence(1, [1] * 100, 0),), 2.1),
        ((sequence(1, [1] * 100, 0, sample=False),), 2.1),
        ((sequence(1, [1], 7),), 2.625),
        ((sequence(1, [1], 7), sequence(2, [1], 9), sequence(3, [1] * 50, 0)), 2.8),
    ],
)
def test_a_step_takes_the_modelled_time(
    sequences: tuple[ScheduledSequence, ...], seconds: float
) -> None:
    for scale, expected in ((1.0, [seconds]), (0.5, [seconds / 2]), (0.0, [])):
        sim, waits = timed(replace(CONFIG, time_scale=scale))
        sim.execute(SchedulerOutput(1, sequences))
        assert waits == pytest.approx(expected)


def test_only_sampling_sequences_get_a_token_and_it_is_a_word() -> None:
    shares = sequence(0, [1, 2], 0, sample=False), *(sequence(i, [i], 3) for i in range(1, 100))
    sim = instant(SimConfig(first_word_id=300, num_words=5))
    output = sim.execute(SchedulerOutput(1, shares))
    assert sorted(output.sampled) == list(range(1, 100))
    assert set(drawn(output)) == {300, 301, 302, 303, 304}


def test_tokens_do_not_depend_on_chunking_or_the_batch() -> None:
    sim = instant()
    whole = sim.execute(SchedulerOutput(1, (sequence(1, [4, 5, 6], 0, seed=9),)))
    parts = sequence(7, [6], 2, seed=9), sequence(8, [6], 2, seed=10)
    part = sim.execute(SchedulerOutput(2, parts))
    assert whole.sampled[1] == part.sampled[7]
    assert part.sampled[7] != part.sampled[8]


def test_every_sample_and_prompt_target_gets_log_probabilities() -> None:
    specs = tuple(
        SampleSpec(SamplingParams(9, seed=seed, logprobs=2), 3, num_prompt=3) for seed in (1, 2, 3)
    )
    share = ScheduledSequence(
        1, [4, 5, 6], 0, [0], specs, prompt_targets=[5, 6], num_prompt_logprobs=1
    )
    output = instant().execute(SchedulerOutput(1, (share,)))
    assert len(output.sampled[1]) == 3
    for draw in output.sampled[1]:
        assert draw.logprobs is not None
        assert draw.logprobs.token_ids[0] == draw.token_id
    assert [entry.token_ids[0] for entry in output.prompt_logprobs[1]] == [5, 6]


def test_a_sequence_without_an_allowed_token_fails_alone() -> None:
    stuck = sequence(1, [4], 2, allowed_token_ids=(5,), logit_bias=((5, -100.0),))
    output = instant().execute(SchedulerOutput(1, (stuck, sequence(2, [4], 2))))
    assert "no token to draw" in output.failed[1]
    assert list(output.sampled) == [2]


def serve(config: SimConfig, prompts: list[list[int]], overlap: bool) -> list[list[int]]:
    limits = SchedulerConfig(max_num_batched_tokens=24, max_num_seqs=6, max_model_len=96)
    scheduler = Scheduler(CacheConfig(num_blocks=14, block_size=8), limits, ())
    sim = SimExecutor(config, no_wait, SimLimits(14, 8, 6))
    core = EngineCore(scheduler, sim, lambda: 0.0, overlap)
    requests = [
        AddRequest(
            str(number), prompt, SamplingParams(len(prompt), temperature=0.0, ignore_eos=True), 0.0
        )
        for number, prompt in enumerate(prompts)
    ]
    answers = tokens_of(outputs_of(core, requests))
    assert scheduler.stats().scheduler.num_preemptions > 0
    scheduler.check_integrity()
    core.shutdown()
    return list(answers.values())


@pytest.mark.parametrize("overlap", [False, True])
def test_the_real_scheduler_preserves_an_echo(overlap: bool) -> None:
    rng = random.Random(5)
    prefixes = [[rng.randrange(256, 1280) for _ in range(21)] for _ in range(3)]
    prompts = [
        rng.choice(prefixes) + [rng.randrange(256, 1280) for _ in range(rng.randrange(1, 20))]
        for _ in range(40)
    ]
    config = SimConfig(mode="echo", time_scale=0.0)
    assert serve(config, prompts, overlap) == prompts


def test_settings_change_between_steps() -> None:
    sim, waits = timed()
    step = SchedulerOutput(1, (sequence(1, [1], 7),))
    sim.execute(step)
    sim.configure({"sim": {"decode_base_seconds": 1.5}})
    sim.execute(step)
    sim.configure({"slow_factor": 2})
    sim.execute(step)
    assert waits == pytest.approx([2.625, 3.625, 7.25])


@pytest.mark.parametrize(
    "settings",
    [
        {"sim": {"decode_base": 1.0}},
        {"sim": {"latency_model": "other"}},
        {"sim": {"time_scale": "fast"}},
        {"sim": {"mode": "echo"}},
        {"slow_factor": "x"},
        {"volume": 11},
        {"sim": {"time_scale": 0.0}, "hang_seconds": "long"},
    ],
)
def test_invalid_settings_change_nothing(settings: dict[str, object]) -> None:
    sim, waits = timed()
    with pytest.raises(ConfigError):
        sim.configure(settings)
    sim.execute(SchedulerOutput(1, (sequence(1, [1], 7),)))
    assert waits == pytest.approx([2.625])


@contextmanager
def hanging(sim: SimExecutor, execute: Callable[[], object]) -> Iterator[None]:
    thread = threading.Thread(target=execute)
    thread.start()
    while not sim.is_hanging:
        thread.join(0.001)
    yield
    sim.configure({"hang_seconds": 0.0})
    thread.join()


def test_a_hang_blocks_one_step_until_it_is_released() -> None:
    sim = instant()
    sim.configure({"hang_seconds": 3600.0})
    results: list[ModelOutput] = []
    step = SchedulerOutput(1, (sequence(1, [1], 7),))
    with hanging(sim, lambda: results.append(sim.execute(step))):
        assert not results
    assert drawn(results[0])
    assert drawn(sim.execute(step)) == drawn(results[0])


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"crash_after_tokens": 5}, 3),
        ({"crash_after_requests": 2}, 2),
        ({"crash_after_tokens": 0}, 0),
    ],
)
def test_a_crash_follows_its_count(settings: dict[str, object], steps: int) -> None:
    crashes: list[int] = []
    sim = instant(crash=lambda: crashes.append(done))
    done = 0
    sim.configure(settings)
    for done in range(1, 6):  # noqa: B007 (read by the crash)
        sim.execute(SchedulerOutput(1, (sequence(1, [1, 2], 0), sequence(2, [1], 7))))
    assert crashes == [steps]


def test_the_configuration_decides_the_number_of_blocks() -> None:
    config = EngineConfig("sim", None, num_blocks_override=7)
    assert build_sim_executor(config)[1] == 7
    assert build_sim_executor(replace(config, num_blocks_override=None))[1] == 4096


def test_real_time_steps_add_up_to_the_modelled_time() -> None:
    """The time between steps counts towards the next step."""
    now, slept = [0.0], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds + 0.0001  # timers are late

    wait = RealTime(lambda: now[0], sleep, catch_up_seconds=0.1)
    for number in range(1000):
        now[0] += 0.0205 if number == 500 else 0.0003  # the engine's own work
        wait(0.001, True)
    assert now[0] == pytest.approx(1.0, abs=0.001)
    now[0] += 5.0  # idle, then stopped for a while
    for follows, limit in ((False, 0.0011), (True, 0.0011), (True, 5.001)):
        before = now[0]
        now[0] += limit - 0.0011
        wait(0.001, follows)
        assert now[0] - before <= limit + 1e-9
    wait(0.2, True)
    assert slept[-1] == pytest.approx(0.2 - 0.1 + 0.001, abs=0.01)


def test_a_step_with_a_decoding_sequence_follows_the_one_before() -> None:
    """A step of prompts alone may come after a pause."""
    seen: list[bool] = []
    sim = SimExecutor(CONFIG, lambda seconds, follows: seen.append(follows))
    sim.execute(SchedulerOutput(1, (sequence(1, [1] * 9, 0),)))
    sim.execute(SchedulerOutput(2, (sequence(2, [1] * 9, 0), sequence(1, [1], 9))))
    assert seen == [False, True]


def test_a_step_reports_its_time_while_it_runs_but_not_while_it_hangs() -> None:
    """A watchdog can distinguish a slow model from a hung device."""
    reported: list[float] = []
    sim = SimExecutor(CONFIG, lambda seconds, follows: reported.append(sim.modelled_seconds))
    step = SchedulerOutput(1, (sequence(1, [1] * 100, 0),))
    sim.execute(step)
    sim.configure({"slow_factor": 1000.0, "hang_seconds": 60.0})
    with hanging(sim, lambda: sim.execute(step)):
        reported.append(sim.modelled_seconds)
    assert reported == pytest.approx([2.1, 0.0, 2100.0])
    assert sim.modelled_seconds == 0.0


def test_an_engine_reports_the_time_of_its_running_step() -> None:
    reported: list[float] = []
    sim = SimExecutor(CONFIG, lambda seconds, follows: reported.append(core.modelled_seconds))
    scheduler = Scheduler(CacheConfig(num_blocks=14, block_size=8), SchedulerConfig(), ())
    core = EngineCore(scheduler, sim, lambda: 0.0)
    core.add(AddRequest("a", [1] * 50, SamplingParams(1), 0.0))
    while core.has_work:
        core.step()
    assert reported == pytest.approx([2.05])
    assert core.modelled_seconds == 0.0


@pytest.mark.parametrize(
    "settings",
    [
        {"time_scale": 1e9, "time_to_first_token_seconds": 86_400.0, "latency_model": "constant"},
        {"prefill_tokens_per_second": 5e-324},
        {"speedup_ratio": 5e-324, "latency_model": "dynamo"},
        {"mean_output_tokens": 5e-324},
    ],
)
def test_no_setting_overflows_a_timer(settings: dict[str, object]) -> None:
    """A timer for a step of millions of years would raise and end the engine."""
    sim, waits = timed(SimConfig())
    sim.configure({"sim": settings, "slow_factor": 1e9})
    sim.execute(SchedulerOutput(1, (sequence(1, [1] * 100, 0),)))
    assert 0 < waits[0] <= 86_400.0


# ---- what an echo reads: blocks through tables, copies and shared prefixes ----

TURN, END = 90, 91


def test_chunks_follow_the_block_table_across_blocks() -> None:
    cache = TokenCache(num_blocks=4, block_size=4)
    cache.write(ScheduledSequence(1, [1, 2, 3], 0, [3, 0, 2]))
    cache.write(ScheduledSequence(1, [4, 5, 6, 7, 8, 9], 3, [3, 0, 2]))
    own = ScheduledSequence(1, [9], 8, [3, 0, 2])
    assert cache.echo(own, 9, None, None) == tuple(range(1, 10))
    other = ScheduledSequence(2, [9], 8, [3, 0, 1])  # shares the first two blocks
    assert cache.echo(other, 8, None, None) == tuple(range(1, 9))


def test_copies_can_swap_two_blocks() -> None:
    cache = TokenCache(num_blocks=2, block_size=2)
    cache.write(ScheduledSequence(1, [1, 2, 3, 4], 0, [0, 1]))
    cache.copy(((0, 1), (1, 0)))
    assert cache.echo(ScheduledSequence(2, [0], 3, [0, 1]), 4, None, None) == (3, 4, 1, 2)


def test_an_echo_is_read_once() -> None:
    """Later writes to its blocks do not change a running answer."""
    cache = TokenCache(num_blocks=1, block_size=4)
    sequence = ScheduledSequence(1, [5, 6], 0, [0])
    cache.write(sequence)
    assert cache.echo(sequence, 2, None, None) == (5, 6)
    cache.write(ScheduledSequence(2, [8, 8], 0, [0]))
    assert cache.echo(sequence, 2, None, None) == (5, 6)


def test_a_conversation_echoes_its_last_turn() -> None:
    prompt = [TURN, 1, 10, 21, 22, END, 10, TURN, 2, 10, 31, 10, 32, END, 10, TURN, 3, 10]
    assert spoken(prompt, TURN, END) == (31, 10, 32)
    assert spoken([TURN, 7, 8, END], TURN, END) == (7, 8)
    assert spoken([5, 6, 7], TURN, END) == (5, 6, 7)
    assert spoken([5, END, 7], None, END) == (5, 7)
    assert spoken([5, 6], None, None) == (5, 6)


# ---- drafts ----


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
    expected = decoded(instant(config), PROMPT, 45, **spec)
    sim = instant(config)
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
    output = instant().execute(SchedulerOutput(1, (share,)))
    assert (drawn(output), output.failed) == ([300], {})
    alone = ScheduledSequence(1, [300], 2, [0], (spec.after([300]),))
    assert list(instant().execute(SchedulerOutput(1, (alone,))).failed) == [1]


def test_a_crash_counts_accepted_drafts_as_tokens() -> None:
    crashes: list[int] = []
    sim = instant(SimConfig(mode="echo"), crash=lambda: crashes.append(1))
    first = SampleSpec(SamplingParams(100), 4, num_prompt=4)
    prompt = ScheduledSequence(1, [300, 301, 302, 303], 0, [0], (first,))
    sim.execute(SchedulerOutput(1, (prompt,)))
    sim.configure({"crash_after_tokens": 3})
    spec = SampleSpec(SamplingParams(100), 5, num_prompt=4)
    share = ScheduledSequence(1, [300, 301, 302], 4, [0], (spec,), num_drafts=2)
    output = sim.execute(SchedulerOutput(2, (share,)))
    assert (drawn(output), crashes) == ([301, 302, 303], [1])
