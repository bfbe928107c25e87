"""A batch draws what its rows draw one by one, by torch and by the native kernel."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.depth import by_depth, examples
from tests.support.model import reference_ops as reference
from tests.support.model.single_draws import draw
from worker.ops import sample
from worker.ops.cpu.native import NativeDraws, open_kernels
from worker.ops.noise import Purpose, Stream, gumbel_noise, philox
from worker.ops.sample import DrawState, Sampler, choose, draw_rows, draw_table
from worker.types import SampleSpec, SamplingParams

Logits = Callable[..., torch.Tensor]
ChiSquare = Callable[[list[int], list[float]], float]

TRUNCATIONS: list[dict[str, Any]] = [
    {"min_p": min_p, "top_k": top_k, "top_p": top_p}
    for min_p, top_k, top_p in itertools.product((0.0, 0.03), (0, 3, 30), (1.0, 0.9, 0.4))
]
ADJUSTMENTS: list[dict[str, Any]] = [
    {},
    {"logit_bias": ((0, 1.5), (3, -2.0))},
    {"repetition_penalty": 1.5, "frequency_penalty": 0.3, "presence_penalty": -0.4},
    {"allowed_token_ids": tuple(range(0, 90, 2))},
    {"bad_words": ((2, 3), (0,))},
]
HISTORY = (1, 2, 2, 5, 2)


@pytest.fixture(scope="module", params=["torch", "native"])
def sampler(request: pytest.FixtureRequest) -> Sampler:
    if request.param == "torch":
        return Sampler(draw_rows)
    kernels = open_kernels(2)
    if kernels is None:
        pytest.skip("the native kernels are not built, or not for this CPU")
    return Sampler(NativeDraws(kernels))


def spec(position: int, seed: int = 7, banned: tuple[int, ...] = (), **changes: Any) -> SampleSpec:
    return SampleSpec(
        SamplingParams(max_tokens=1, seed=seed, **changes), position, banned, HISTORY, 2
    )


@pytest.mark.parametrize("adjustment", ADJUSTMENTS)
@pytest.mark.parametrize("vocab_size", by_depth([1003], [90, 1003, 4096]))
def test_a_batch_draws_what_rows_draw(
    sampler: Sampler, draw_logits: Logits, vocab_size: int, adjustment: dict[str, Any]
) -> None:
    specs = [
        spec(place, seed, temperature=heat, **truncation, **adjustment)
        for place, (seed, heat, truncation) in enumerate(
            itertools.product(range(-2, 3), (0.0, 0.3, 1.0, 2.5), TRUNCATIONS)
        )
    ]
    rows = [index % 16 for index in range(len(specs))]
    logits = torch.cat([draw_logits(8, vocab_size, scale=scale) for scale in (0.5, 4.0)])
    logits[3] = logits[3].round()
    logits[5, 7:] = -torch.inf
    drawn = sampler.launch(logits, rows, specs).collect()
    assert drawn == [draw(logits[row], s) for row, s in zip(rows, specs, strict=True)]
    alone = [
        sampler.launch(logits[row : row + 1], [0], [s]).collect()[0]
        for row, s in zip(rows[:48], specs[:48], strict=True)
    ]
    assert alone == drawn[:48]


@given(
    st.integers(0, 2**32),
    st.sampled_from(TRUNCATIONS),
    st.sampled_from(ADJUSTMENTS),
    st.sampled_from([0.0, 1e-3, 0.7, 1.0, 30.0]),
    st.sampled_from([1, 2, 63, 64, 65, 300, 1500]),
    st.sampled_from([0.0, 0.2, 3.0, 1e30]),
    st.sampled_from([None, torch.nan, torch.inf, -torch.inf]),
)
@examples(400)
def test_any_batch_draws_what_rows_draw(
    sampler: Sampler,
    seed: int,
    truncation: dict[str, Any],
    adjustment: dict[str, Any],
    heat: float,
    vocab_size: int,
    scale: float,
    spoiled: float | None,
) -> None:
    if vocab_size < 90:
        adjustment = {}
    logits = torch.randn(3, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale
    logits[1] = logits[1].round()
    if spoiled is not None:
        logits[2, seed % vocab_size] = spoiled
    banned = (seed % vocab_size,) if seed % 3 == 0 else ()
    specs = [
        spec(seed % 1000 + i, seed, banned, temperature=heat, **truncation, **adjustment)
        for i in range(3)
    ]
    expected = [draw(row, s) for row, s in zip(logits, specs, strict=True)]
    assert sampler.launch(logits, range(3), specs).collect() == expected


@pytest.mark.parametrize("truncation", TRUNCATIONS)
def test_batches_follow_the_exact_distribution(
    sampler: Sampler, draw_logits: Logits, excess_chi_square: ChiSquare, truncation: dict[str, Any]
) -> None:
    logits = draw_logits(40, seed=3, scale=1.0)
    specs = [spec(place, temperature=0.8, **truncation) for place in range(4000)]
    drawn = torch.tensor(sampler.launch(logits[None], [0] * 4000, specs).collect())
    counts = drawn.bincount(minlength=40).tolist()
    assert excess_chi_square(counts, reference.probabilities(logits, specs[0])) < 5


def test_rows_of_a_reduced_vocabulary_use_the_noise_of_its_tokens(
    sampler: Sampler, draw_logits: Logits
) -> None:
    ids = torch.randperm(3200, generator=torch.Generator().manual_seed(3))[:640].sort().values
    logits = draw_logits(64, 640, scale=1.0)
    for purpose, offset in ((Purpose.SAMPLE, 0), (Purpose.DRAFT, 3)):
        stream = Stream(purpose, offset, ids, 3200)
        specs = [spec(i, **TRUNCATIONS[i % len(TRUNCATIONS)]) for i in range(64)]
        drawn = sampler.launch(logits, range(64), specs, stream).collect()
        assert drawn == [choose(row, s, stream) for row, s in zip(logits, specs, strict=True)]


def test_undecided_rows_are_rare(
    sampler: Sampler, draw_logits: Logits, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = draw_logits(64, 3000)
    wishes = [{}, {"top_p": 0.9}, {"top_k": 40, "top_p": 0.95}, {"min_p": 0.02}]
    specs = [spec(i, **wishes[i % 4]) for i in range(640)]
    again: list[SampleSpec] = []

    def counted(row: torch.Tensor, wanted: SampleSpec, stream: Stream) -> Any:
        again.append(wanted)
        return choose(row, wanted, stream)

    monkeypatch.setattr(sample, "choose", counted)
    sampler.launch(logits, [i % 64 for i in range(640)], specs)
    assert len(again) <= 1
    num_before = len(again)
    sampler.launch(logits, [0], [spec(0, temperature=1e-60)])
    assert len(again) == num_before + (sampler.kernel is not draw_rows)


@pytest.mark.parametrize("vocab_size", [97, 3000])
def test_a_device_decides_by_itself(draw_logits: Logits, vocab_size: int) -> None:
    """Some draws have two tokens whose sums are equal in float32, or differ in the last place."""
    count = 1000
    logits = draw_logits(count, vocab_size, scale=2.0)
    specs = [
        spec(place, place * 0x9E3779B97F4A7C15, temperature=1.0, **TRUNCATIONS[place % 18])
        for place in range(count)
    ]
    num_close = 0
    for row, wanted in zip(logits[::4], specs[::4], strict=True):
        noise = gumbel_noise(wanted.params.seed, wanted.position, vocab_size)
        one, other = row.topk(2).indices.tolist()
        row[one] = (row[other] + noise[other]) - noise[one]
        sums = (row + noise)[[one, other]]
        num_close += bool((sums[0] - sums[1]).abs() < 3e-6)
    assert num_close > 200
    expected = [choose(row, wanted) for row, wanted in zip(logits, specs, strict=True)]
    table = draw_table(range(count), specs)
    tokens, states = draw_rows(logits, None, table, Stream()).tolist()
    assert states == [DrawState.DRAWN] * count
    assert tokens == expected
    exact = [draw(row, wanted) for row, wanted in zip(logits, specs, strict=True)]
    assert exact == expected


def test_devices_make_the_words_that_numpy_makes() -> None:
    seeds, places = [0, 1, 2**63 + 5, -1], [0, 7, 2**40, 2**63 - 1]
    stream = Stream(Purpose.DRAFT, 2**63 + 9)
    keys = torch.tensor([(seed + 2**63) % 2**64 - 2**63 for seed in seeds])
    words = philox(keys, torch.tensor(places), torch.arange(1, 6)[None], stream)
    for seed, place, row in zip(seeds, places, words.flatten(1), strict=True):
        counter = (place << 128) + (int(Purpose.DRAFT) << 192) + ((2**63 + 9) << 64)
        expected = np.random.Philox(key=seed % 2**64, counter=counter).random_raw(20)
        assert row.tolist() == expected.view(np.uint32).tolist()


def test_temperatures_that_float32_takes_for_zero_are_no_mistake(sampler: Sampler) -> None:
    logits = torch.tensor([[1.0, 2.0, 0.5, -math.inf]])
    wanted = spec(3, temperature=1e-60)
    assert sampler.launch(logits, [0], [wanted]).collect() == [draw(logits[0], wanted)]
