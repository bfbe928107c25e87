"""Sampling: right frequencies for every parameter, draws that are a function of their seed."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.depth import examples, worlds
from tests.support.model import reference_ops as reference
from tests.support.model.single_draws import sample
from worker.ops.sample import ALL_MASKED, NOT_NUMBERS, Undrawable, adjust, adjusts, largest, scores
from worker.types import Draw, SampleSpec, SamplingParams

Logits = Callable[..., torch.Tensor]
ChiSquare = Callable[[list[int], list[float]], float]
GREEDY = SampleSpec(SamplingParams(max_tokens=1, temperature=0.0), 0)


def spec(
    position: int,
    *,
    seed: int = 7,
    banned: tuple[int, ...] = (),
    history: Sequence[int] = (),
    num_prompt: int = 0,
    **changes: Any,
) -> SampleSpec:
    params = SamplingParams(max_tokens=1, seed=seed, **changes)
    return SampleSpec(params, position, banned, history, num_prompt)


def tokens(
    logits: torch.Tensor, specs: Sequence[SampleSpec], rows: Sequence[int] | None = None
) -> list[int]:
    drawn = []
    for outcome in sample(logits, specs, rows):
        assert isinstance(outcome, Draw)
        drawn.append(outcome.token_id)
    return drawn


def frequencies(logits: torch.Tensor, draws: int, **changes: Any) -> list[int]:
    specs = [spec(position, **changes) for position in range(draws)]
    drawn = torch.tensor(tokens(logits[None], specs, [0] * draws))
    counts: list[int] = drawn.bincount(minlength=len(logits)).tolist()
    return counts


def test_greedy_takes_the_largest_and_the_first_of_equals() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0], [5.0, 1.0, -torch.inf]])
    assert tokens(logits, [GREEDY, GREEDY]) == [1, 0]


@pytest.mark.parametrize("vocab_size", [1, 7, 96, 320, 32000, 49152])
def test_the_largest_is_found_as_argmax_finds_it(draw_logits: Logits, vocab_size: int) -> None:
    logits = draw_logits(3, vocab_size)
    logits[1] = logits[1].round()
    logits[2] = -torch.inf
    values, ids = (part.tolist() for part in largest(logits))
    assert values == logits.amax(-1).tolist()
    assert ids == [row.tolist().index(float(row.max())) for row in logits]
    assert [part.tolist() for part in largest(logits.t().contiguous().t())] == [values, ids]


@pytest.mark.parametrize(
    "changes",
    [
        {"top_k": 4, "top_p": 0.7},
        {"min_p": 0.2},
        {"min_p": 0.05, "top_k": 6, "top_p": 0.9, "temperature": 1.4},
        {"logit_bias": ((0, 1.5), (3, -2.0)), "temperature": 0.8},
        {"repetition_penalty": 1.5, "history": [1, 2, 2, 5], "num_prompt": 2},
        {"frequency_penalty": 0.7, "presence_penalty": -0.4, "history": [1, 2, 2], "num_prompt": 1},
        {"allowed_token_ids": (1, 4, 6), "banned": (4,)},
        {"bad_words": ((2, 3), (0,)), "history": [2], "top_p": 0.9},
    ],
)
def test_frequencies_follow_the_twins_distribution(
    draw_logits: Logits, excess_chi_square: ChiSquare, changes: dict[str, Any]
) -> None:
    logits = draw_logits(8, seed=3, scale=1.0)
    counts = frequencies(logits, 2000, **changes)
    expected = reference.probabilities(logits, spec(0, **changes))
    assert excess_chi_square(counts, expected) < 5


@pytest.mark.parametrize("seed", range(worlds(8)))
def test_scores_have_the_twins_distribution(draw_logits: Logits, seed: int) -> None:
    logits = draw_logits(300, seed=seed)
    wanted = spec(
        6,
        seed=seed,
        temperature=0.7,
        top_k=40,
        top_p=0.95,
        min_p=0.001,
        repetition_penalty=1.2,
        history=[1, 9, 200, 9],
        num_prompt=2,
    )
    expected = torch.tensor(reference.probabilities(logits, wanted))
    assert torch.allclose(scores(logits, wanted).softmax(-1), expected, atol=1e-6)


def test_seeded_draws_are_what_they_always_were() -> None:
    """Clients rely on the tokens that seeds gave when sampling was first built."""
    logits = ((torch.arange(4 * 1000, dtype=torch.float64) * 7919) % 997 / 125).float().view(4, -1)
    specs = [
        spec(0, seed=1),
        spec(77, seed=-1, temperature=0.5),
        spec(1234, seed=2**62 + 3, top_p=0.9),
        spec(5, seed=9, top_k=20, top_p=0.5, temperature=1.5),
    ]
    assert tokens(logits, specs) == [613, 872, 416, 236]


@pytest.mark.parametrize("temperature", [1e-2, 1.0])
def test_forbidden_tokens_are_never_drawn(temperature: float) -> None:
    logits = torch.full((1, 300), -torch.inf)
    logits[0, 123] = -40.0
    specs = [spec(position, temperature=temperature) for position in range(50)]
    assert set(tokens(logits, specs, [0] * 50)) == {123}


def test_a_draw_depends_on_its_row_alone(draw_logits: Logits) -> None:
    logits = draw_logits(8, 5000, scale=1.0)
    variants: list[dict[str, Any]] = [{}, {"top_p": 0.9}, {"logprobs": 3}, {"temperature": 0.0}]
    specs = [
        spec(10 + i, seed=i, history=[i, 3], repetition_penalty=1 + i % 2, **variants[i % 4])
        for i in range(8)
    ]
    together = sample(logits, specs)
    assert [sample(logits[i : i + 1], [specs[i]])[0] for i in range(8)] == together
    assert sample(logits.flip(0), specs[::-1]) == together[::-1]


def test_several_draws_may_come_from_one_row(draw_logits: Logits) -> None:
    logits = draw_logits(2, 400, scale=1.0)
    before = logits.clone()
    specs = [spec(3, seed=seed, logit_bias=((seed, 2.0),)) for seed in range(6)]
    rows = [0, 1, 0, 0, 1, 0]
    drawn = tokens(logits, specs, rows)
    assert drawn == [tokens(logits[r : r + 1], [s])[0] for r, s in zip(rows, specs, strict=True)]
    assert torch.equal(logits, before)


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    wanted = spec(0, temperature=0.0, logit_bias=((2, 50.0),), logprobs=2, logprob_token_ids=(1,))
    [outcome] = sample(logits, [wanted])
    assert outcome == Draw(2, reference_of(logits[0], outcome, 2, (1,)))


def reference_of(
    logits: torch.Tensor, outcome: Draw | Undrawable, num_top: int, fixed: tuple[int, ...]
) -> Any:
    assert isinstance(outcome, Draw)
    assert outcome.logprobs is not None
    expected = reference.token_logprobs(logits, outcome.token_id, num_top, fixed)
    assert outcome.logprobs.logprobs == pytest.approx(expected.logprobs, abs=1e-6)
    assert (outcome.logprobs.token_ids, outcome.logprobs.rank) == (
        expected.token_ids,
        expected.rank,
    )
    return outcome.logprobs


def test_logprobs_are_given_to_those_who_ask(draw_logits: Logits) -> None:
    logits = draw_logits(4, 64)
    asked: list[dict[str, Any]] = [
        {},
        {"logprobs": 0},
        {"logprob_token_ids": (9, 8)},
        {"logprobs": -1},
    ]
    outcomes = sample(logits, [spec(1, **changes) for changes in asked])
    lengths = [
        len(o.logprobs.token_ids) if isinstance(o, Draw) and o.logprobs else None for o in outcomes
    ]
    assert lengths == [None, 1, 3, 65]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_are_not_numbers_are_refused_alone(
    draw_logits: Logits, bad: float, temperature: float
) -> None:
    logits = draw_logits(3, 256)
    specs = [spec(4, seed=i, temperature=temperature, logprobs=1) for i in range(3)]
    good = sample(logits, specs)
    logits[1, 200] = bad
    assert sample(logits, specs) == [good[0], Undrawable(NOT_NUMBERS), good[2]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_a_token_left_are_refused_alone(temperature: float) -> None:
    logits = torch.zeros(2, 3)
    masked = spec(0, temperature=temperature, allowed_token_ids=(1,), banned=(1,), logprobs=2)
    other = spec(0, temperature=temperature, allowed_token_ids=(1,))
    assert sample(logits, [masked, other]) == [Undrawable(ALL_MASKED), Draw(1)]
    logits[0] = -torch.inf
    assert sample(logits, [other, other]) == [Undrawable(NOT_NUMBERS), Draw(1)]


# ---- masks, bias and penalties ----

VOCAB = 12
TOKENS = st.integers(0, VOCAB - 1)


def said(prompt: list[int], output: list[int], **changes: Any) -> SampleSpec:
    history = [*prompt, *output]
    return spec(len(history), history=history, num_prompt=len(prompt), **changes)


def adjusted(logits: list[float], wanted: SampleSpec) -> list[float]:
    return [round(value, 5) for value in adjust(torch.tensor(logits).float(), wanted).tolist()]


@st.composite
def specs(draw: st.DrawFn) -> SampleSpec:
    prompt, output = draw(st.lists(TOKENS, max_size=8)), draw(st.lists(TOKENS, max_size=8))
    penalty = st.sampled_from([0.0, 0.0, -2.0, 0.5, 1.7])
    word = st.lists(TOKENS, min_size=1, max_size=3).map(tuple)
    made = said(
        prompt,
        output,
        banned=tuple(draw(st.lists(TOKENS, max_size=2))),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3, 0.5])),
        frequency_penalty=draw(penalty),
        presence_penalty=draw(penalty),
        logit_bias=tuple(draw(st.dictionaries(TOKENS, st.floats(-100, 100), max_size=3)).items()),
        bad_words=tuple(draw(st.lists(word, max_size=3))),
        allowed_token_ids=draw(st.none() | st.sets(TOKENS, min_size=1).map(tuple)),
    )
    masks = draw(st.lists(st.binary(min_size=1, max_size=4), max_size=2))
    return replace(made, masks=tuple(masks))


@given(specs(), st.integers(0, 1000))
@examples(150)
def test_any_mixture_agrees_with_its_twin(wanted: SampleSpec, seed: int) -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    before = logits.clone()
    result = adjust(logits, wanted)
    expected = torch.tensor(reference.adjust(logits, wanted), dtype=torch.float64)
    assert torch.allclose(result.double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(logits, before)
    if not adjusts(wanted):
        assert torch.equal(result, logits)


@pytest.mark.parametrize(
    ("output", "banned"),
    [([], []), ([7], [5]), ([7, 5], [6]), ([5, 7, 5], [6]), ([7, 7], [5]), ([5, 7], [5])],
)
def test_a_bad_word_is_cut_at_its_last_token(output: list[int], banned: list[int]) -> None:
    words = ((7, 5, 6), (7, 5))
    result = adjusted([0.0] * 8, said([1, 2], output, bad_words=words))
    assert [token for token, value in enumerate(result) if value == -torch.inf] == banned


def test_bad_words_do_not_begin_in_the_prompt() -> None:
    """The client's own words do not count, as in vLLM."""
    assert adjusted([1, 1, 1], said([0], [], bad_words=((0, 1),))) == [1, 1, 1]
    assert adjusted([1, 1, 1], said([0], [0], bad_words=((0, 1),))) == [1, -torch.inf, 1]
