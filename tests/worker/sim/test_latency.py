"""The duration of a simulated step follows its model's formula, in any order of calls."""

import dataclasses
import random
import statistics

import pytest

from worker.sim.config import SimConfig
from worker.sim.latency import MODELS, Capacity, build_model, is_decoding
from worker.types import SampleSpec, SamplingParams, ScheduledSequence, SchedulerOutput

CAPACITY = Capacity(max_num_seqs=5, kv_tokens=1000)
LLM_D = SimConfig(latency_model="llm-d", inter_token_latency_seconds=0.012)
BY_TOKEN = dataclasses.replace(
    LLM_D, prefill_overhead_seconds=0.03, prefill_per_token_seconds=0.00025
)
CONSTANT = SimConfig(latency_model="constant", inter_token_latency_seconds=0.012)
LINEAR = SimConfig(
    prefill_tokens_per_second=100.0,
    prefill_context_seconds=0.001,
    decode_base_seconds=10.0,
    decode_per_sequence_seconds=0.5,
    kv_read_seconds=0.25,
)
DYNAMO = SimConfig(latency_model="dynamo")


def prompt(num_tokens: int, start: int = 0, seed: int = 0, last: bool = True) -> ScheduledSequence:
    end = start + num_tokens
    samples = (SampleSpec(SamplingParams(9, seed=seed), end, num_prompt=end),) if last else ()
    return ScheduledSequence(1, [7] * num_tokens, start, [0], samples)


def decode(context: int, seed: int = 0) -> ScheduledSequence:
    sample = SampleSpec(SamplingParams(9, seed=seed), context, num_prompt=1)
    return ScheduledSequence(2, [7], context - 1, [0], (sample,))


def verify(context: int, num_drafts: int, seed: int = 0) -> ScheduledSequence:
    plain = decode(context, seed)
    tokens = [7] * (1 + num_drafts)
    return dataclasses.replace(plain, token_ids=tokens, num_drafts=num_drafts)


def seconds(config: SimConfig, *sequences: ScheduledSequence) -> float:
    return build_model(config, CAPACITY).seconds(SchedulerOutput(1, sequences))


def test_a_first_token_is_not_decoding() -> None:
    assert not is_decoding(prompt(1, start=31))
    assert not is_decoding(prompt(1, last=False))
    assert is_decoding(decode(32))
    assert is_decoding(verify(32, 4))
    assert not is_decoding(prompt(5))


def test_drafts_cost_a_prompts_rows_in_the_linear_model() -> None:
    plain = 10 + 0.5 + 8 * 0.25
    drafts = 3 * 0.01 + 0.001 * (9 + 10 + 11) + 3 * 0.25
    assert seconds(LINEAR, verify(8, 3)) == pytest.approx(plain + drafts)
    assert seconds(LINEAR, verify(8, 3), decode(4)) == pytest.approx(plain + drafts + 0.5 + 1.0)


def test_drafts_are_free_in_the_constant_model() -> None:
    config = dataclasses.replace(CONSTANT, inter_token_latency_std_seconds=0.002)
    assert seconds(config, verify(9, 5)) == seconds(config, decode(9))


def test_drafts_cost_the_time_per_token_in_the_llm_d_model() -> None:
    assert seconds(BY_TOKEN, verify(9, 4)) == pytest.approx(0.012 + 4 * 0.00025)
    loaded = dataclasses.replace(BY_TOKEN, time_factor_under_load=2.0)
    assert seconds(loaded, *[verify(9, 4)] * 5) == pytest.approx(2 * (0.012 + 4 * 0.00025))
    fixed = dataclasses.replace(BY_TOKEN, time_to_first_token_seconds=0.1)
    assert seconds(fixed, verify(9, 4)) == pytest.approx(0.012)


def test_drafts_cost_the_prompt_polynomial_in_the_dynamo_model() -> None:
    def rows(count: int) -> float:
        return (4.209989e-7 * count + 1.518344e-2) * count / 1e3

    def decoding(context: int) -> float:
        usage = context / CAPACITY.kv_tokens
        return max(1.0, (-25.74 * usage + 54.01) * usage + 5.74) / 1e3

    assert seconds(DYNAMO, verify(100, 8)) == pytest.approx(rows(8) + decoding(108))
    assert seconds(DYNAMO, verify(100, 8), prompt(50)) == pytest.approx(
        rows(58) + 16.50142e-3 + decoding(108)
    )


def test_the_linear_model_sums_the_parts_of_a_step() -> None:
    """a + b·prompt tokens + c·pairs of token and context + base + d·decoding + e·tokens read."""
    config = dataclasses.replace(LINEAR, step_overhead_seconds=1.0)
    assert seconds(config) == 1.0
    assert seconds(config, prompt(10)) == pytest.approx(1 + 0.1 + 0.001 * 55)
    assert seconds(config, decode(8), decode(4)) == pytest.approx(1 + 10 + 2 * 0.5 + 12 * 0.25)
    mixed = seconds(config, prompt(10), decode(8))
    assert mixed == pytest.approx(1 + 0.1 + 0.055 + 10 + 0.5 + 2.0)


def test_a_linear_prompt_costs_the_same_in_any_chunks() -> None:
    """The attention term counts each token's own context."""
    config = SimConfig(prefill_context_seconds=1e-4)
    rng = random.Random(3)
    for _ in range(20):
        cuts = sorted(rng.sample(range(1, 200), 5))
        parts = zip([0, *cuts], [*cuts, 200], strict=True)
        chunks = [prompt(end - start, start, last=end == 200) for start, end in parts]
        assert sum(seconds(config, c) for c in chunks) == pytest.approx(
            seconds(config, prompt(200))
        )


def test_the_constant_model_takes_the_longer_of_prompts_and_decoding() -> None:
    config = dataclasses.replace(
        CONSTANT, time_to_first_token_seconds=0.1, time_factor_under_load=3.0
    )
    assert seconds(config, decode(5), decode(9)) == pytest.approx(0.012)
    assert seconds(config, prompt(10), decode(9), prompt(500)) == pytest.approx(0.1)
    assert seconds(config, prompt(10, last=False)) == 0.0


@pytest.mark.parametrize("running", [1, 2, 5])
def test_the_llm_d_model_slows_down_with_load(running: int) -> None:
    config = dataclasses.replace(LLM_D, time_factor_under_load=2.0)
    factor = 1 + (2.0 - 1) * (running - 1) / 4
    assert seconds(config, *[decode(5)] * running) == pytest.approx(0.012 * factor)


def test_llm_d_prompts_cost_by_uncached_token_unless_a_first_token_time_is_set() -> None:
    """The published rule is a constant if the time to first token or its std is given."""
    config = BY_TOKEN
    whole = seconds(config, prompt(256))
    assert whole == pytest.approx(0.094)
    # 200 tokens are cached, so only the rest runs.
    assert seconds(config, prompt(56, start=200)) == pytest.approx(0.044)
    parts = seconds(config, prompt(200, last=False)) + seconds(config, prompt(56, start=200))
    assert parts == pytest.approx(whole)
    fixed = dataclasses.replace(
        LLM_D, time_to_first_token_seconds=0.1, prefill_overhead_seconds=0.03
    )
    assert seconds(fixed, prompt(256)) == seconds(fixed, prompt(1)) == pytest.approx(0.1)


def test_noise_is_normal_clamped_and_preserves_the_mean() -> None:
    config = dataclasses.replace(
        CONSTANT, inter_token_latency_seconds=0.0005, inter_token_latency_std_seconds=0.00015
    )
    drawn = [seconds(config, decode(5 + n, seed=n)) for n in range(20_000)]
    assert min(drawn) >= 0.3 * 0.0005 - 1e-12
    assert max(drawn) <= 1.7 * 0.0005 + 1e-12
    assert statistics.fmean(drawn) == pytest.approx(0.0005, rel=0.01)
    assert statistics.stdev(drawn) == pytest.approx(0.00015, rel=0.03)


def test_a_prompts_std_is_at_most_30_percent_of_its_mean() -> None:
    config = dataclasses.replace(LLM_D, prefill_per_token_seconds=0.001, prefill_std_seconds=0.3)
    for num_tokens, std in ((100, 0.03), (10_000, 0.3)):
        drawn = [seconds(config, prompt(num_tokens, seed=n)) for n in range(5_000)]
        assert statistics.fmean(drawn) == pytest.approx(num_tokens / 1000, rel=0.02)
        assert statistics.stdev(drawn) == pytest.approx(std, rel=0.05)


def test_noise_depends_on_seeds_and_position_alone() -> None:
    config = dataclasses.replace(
        CONSTANT, inter_token_latency_seconds=0.01, inter_token_latency_std_seconds=0.003
    )
    alone = [seconds(config, decode(9, seed=n)) for n in range(8)]
    assert [seconds(config, decode(9, seed=n)) for n in reversed(range(8))] == alone[::-1]
    assert len(set(alone)) == 8
    together = seconds(config, *(decode(9, seed=n) for n in range(8)))
    assert together == pytest.approx(statistics.fmean(alone))
    assert seconds(dataclasses.replace(config, seed=1), decode(9)) != alone[0]


def test_the_dynamo_model_has_the_published_polynomials() -> None:
    assert seconds(DYNAMO, prompt(2000)) == pytest.approx(
        (4.209989e-7 * 2000**2 + 1.518344e-2 * 2000 + 16.50142) / 1e3
    )
    half = (-25.74 * 0.25 + 54.01 * 0.5 + 5.74) / 1e3
    assert seconds(DYNAMO, decode(200), decode(300)) == pytest.approx(half)
    both = seconds(DYNAMO, prompt(10), decode(500))
    assert both == pytest.approx(seconds(DYNAMO, prompt(10)) + half)
    fast = dataclasses.replace(DYNAMO, speedup_ratio=2.0, decode_speedup_ratio=4.0)
    assert seconds(fast, decode(500)) == pytest.approx(half / 8)
    full = (-25.74 + 54.01 + 5.74) / 1e3
    assert seconds(DYNAMO, decode(5000)) == pytest.approx(full)
    assert seconds(DYNAMO) == 0.0


@pytest.mark.parametrize("name", sorted(MODELS))
def test_every_model_takes_an_empty_step(name: str) -> None:
    assert seconds(SimConfig(latency_model=name)) == 0.0


def test_a_worker_with_one_slot_has_no_load() -> None:
    """The load factor does not divide by zero."""
    config = dataclasses.replace(LLM_D, time_factor_under_load=2.0)
    model = build_model(config, Capacity(max_num_seqs=1, kv_tokens=16))
    assert model.seconds(SchedulerOutput(1, (decode(5),))) == pytest.approx(0.012)
