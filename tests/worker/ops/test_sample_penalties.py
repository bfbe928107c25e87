"""Masks, bias and penalties change logits as their definitions say, in vLLM's order."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.depth import examples
from tests.support.model import reference_ops as reference
from worker.ops.sample import adjust, adjusts
from worker.types import SampleSpec, SamplingParams

VOCAB = 12
TOKENS = st.integers(0, VOCAB - 1)
NONE = -torch.inf


def spec(
    prompt: list[int] | None = None,
    output: list[int] | None = None,
    banned: tuple[int, ...] = (),
    masks: tuple[bytes, ...] = (),
    **changes: Any,
) -> SampleSpec:
    history = [*(prompt or []), *(output or [])]
    params = SamplingParams(max_tokens=9, **changes)
    return SampleSpec(params, len(history), banned, history, len(prompt or []), masks)


def adjusted(logits: list[float], wanted: SampleSpec) -> list[float]:
    return [round(value, 5) for value in adjust(torch.tensor(logits).float(), wanted).tolist()]


@st.composite
def specs(draw: st.DrawFn) -> SampleSpec:
    prompt, output = draw(st.lists(TOKENS, max_size=8)), draw(st.lists(TOKENS, max_size=8))
    penalty = st.sampled_from([0.0, 0.0, -2.0, 0.5, 1.7])
    word = st.lists(TOKENS, min_size=1, max_size=3).map(tuple)
    return spec(
        prompt,
        output,
        tuple(draw(st.lists(TOKENS, max_size=2))),
        tuple(draw(st.lists(st.binary(min_size=1, max_size=4), max_size=2))),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3, 0.5])),
        frequency_penalty=draw(penalty),
        presence_penalty=draw(penalty),
        logit_bias=tuple(draw(st.dictionaries(TOKENS, st.floats(-100, 100), max_size=3)).items()),
        bad_words=tuple(draw(st.lists(word, max_size=3))),
        allowed_token_ids=draw(st.none() | st.sets(TOKENS, min_size=1).map(tuple)),
    )


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
    result = adjusted([0.0] * 8, spec([1, 2], output, bad_words=words))
    assert [token for token, value in enumerate(result) if value == NONE] == banned


def test_bad_words_do_not_begin_in_the_prompt() -> None:
    """The client's own words do not count, as in vLLM."""
    assert adjusted([1, 1, 1], spec([0], [], bad_words=((0, 1),))) == [1, 1, 1]
    assert adjusted([1, 1, 1], spec([0], [0], bad_words=((0, 1),))) == [1, NONE, 1]
