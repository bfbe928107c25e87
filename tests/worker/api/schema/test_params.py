"""Ranges and defaults of the request fields."""

import random

import msgspec
import pytest

from worker.api.schema import params
from worker.api.schema.params import ModelLimits, SamplingContext
from worker.api.schema.parse import decode
from worker.api.schema.requests import CompletionRequest
from worker.errors import RequestError
from worker.types import RepetitionDetection

LIMITS = ModelLimits(max_model_len=100, vocab_size=50)


def request(**fields: object) -> CompletionRequest:
    return decode(msgspec.json.encode({"prompt": "x", **fields}), CompletionRequest)


def sampling(
    logprobs: int | None = None, defaults: dict[str, float] | None = None, **fields: object
) -> params.SamplingParams:
    context = SamplingContext(LIMITS, lambda text: [ord(c) % 50 for c in text], defaults or {})
    return params.sampling_params(request(**fields), 10, logprobs, context, random.Random(0))


def test_defaults_are_those_of_the_openai_api() -> None:
    got = sampling()
    assert (got.temperature, got.top_p, got.top_k, got.min_tokens) == (1.0, 1.0, 0, 0)
    assert got.max_tokens == 10
    assert got.seed == random.Random(0).getrandbits(63)


@pytest.mark.parametrize(
    ("asked", "used"), [(0, 0.0), (1e-6, 0.0), (0.001, 0.01), (0.5, 0.5), (2, 2.0)]
)
def test_small_temperatures_are_greedy_or_raised(asked: float, used: float) -> None:
    got = sampling(temperature=asked, top_p=0.5, top_k=3)
    assert got.temperature == used
    assert (got.top_p, got.top_k) == ((1.0, 0) if used == 0 else (0.5, 3))


def test_a_seed_is_used_and_minus_one_means_none() -> None:
    assert sampling(seed=5).seed == 5
    assert sampling(seed=-1).seed == sampling().seed
    assert sampling(top_k=-1).top_k == 0


def test_every_sampling_field_reaches_the_engine() -> None:
    got = sampling(
        logprobs=3,
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.2,
        logit_bias={"7": 200, "8": -3},
        allowed_token_ids=[3, 4, 3],
        stop_token_ids=[9.0, 9],
        prompt_logprobs=2,
        logprob_token_ids=[11],
        min_tokens=2,
        ignore_eos=True,
        repetition_detection={"max_pattern_size": 4, "min_count": 3},
    )
    assert (got.temperature, got.top_p, got.top_k, got.min_p) == (0.5, 0.9, 5, 0.1)
    assert (got.presence_penalty, got.frequency_penalty, got.repetition_penalty) == (0.5, -0.5, 1.2)
    assert got.logit_bias == ((7, 100.0), (8, -3.0))
    assert (got.allowed_token_ids, got.stop_token_ids) == ((3, 4), (9,))
    assert (got.logprobs, got.prompt_logprobs, got.logprob_token_ids) == (3, 2, (11,))
    assert (got.min_tokens, got.ignore_eos) == (2, True)
    assert got.repetition_detection == RepetitionDetection(4, 1, 3)
    # The engine gets plain numbers, whatever the parser made of them.
    assert all(type(i) is int for i in (*got.stop_token_ids, got.top_k, got.min_tokens))


def test_the_request_wins_over_the_models_defaults() -> None:
    defaults = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1}
    got = sampling(defaults=defaults, top_p=0.5)
    assert (got.temperature, got.top_p, got.top_k) == (0.6, 0.5, 20)
    assert (got.repetition_penalty, got.min_p) == (1.1, 0.0)


def test_bad_words_are_banned_with_and_without_a_space_before() -> None:
    got = sampling(bad_words=["AB", " AB", "C"]).bad_words
    assert got == ((15, 16), (32, 15, 16), (17,), (32, 17))


def test_fixed_tokens_bring_logprobs_with_them() -> None:
    assert sampling(logprob_token_ids=[1]).logprobs == 0
    assert sampling().logprobs is None


# Fields without a `param` of their own, as in vLLM.
NAMELESS = (
    *("top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("min_tokens", "repetition_detection"),
)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": 2.1}, r"must be in \[0, 2\], got 2.1. \(parameter=temperature, value=2.1"),
        ({"top_p": 0}, r"top_p must be in \(0, 1\], got 0"),
        ({"top_k": -2}, r"top_k must be 0 \(disable\), or at least 1, got -2"),
        ({"presence_penalty": 2.5}, r"presence_penalty must be in \[-2, 2\], got 2.5"),
        ({"repetition_penalty": 0}, "repetition_penalty must be greater than zero, got 0.0"),
        ({"min_tokens": 11}, "min_tokens must be less than or equal to max_tokens=10, got 11"),
        ({"min_tokens": -1}, "min_tokens must be greater than or equal to 0, got -1"),
        ({"stop_token_ids": [50]}, "got 50"),
        ({"stop_token_ids": [-1]}, "got -1"),
        ({"allowed_token_ids": []}, "allowed_token_ids is not None and empty!"),
        ({"allowed_token_ids": [50]}, "got 50"),
        ({"logit_bias": {"50": 1}}, r"token_id\(s\) \[50\] in logit_bias contain out-of-vocab"),
        ({"logit_bias": {"x": 1}}, "must be a token id"),
        ({"logit_bias": {"-1": 1}}, "must be a token id"),
        ({"logit_bias": {"1" * 5000: 1}}, "must be a token id"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "at most 1024 entries"),
        ({"bad_words": [""]}, "bad_words cannot contain an empty string"),
        ({"bad_words": ["x"] * 129}, "at most 128 words"),
        ({"bad_words": ["x" * 600]}, "at most 1024 tokens"),
        ({"bad_words": ["x" * 100_000]}, "at most 1024 tokens"),
        ({"prompt_logprobs": 21}, "Requested prompt logprobs of 21, which is greater than max"),
        ({"prompt_logprobs": -1}, "Requested prompt logprobs of 50, which is greater than max"),
        ({"prompt_logprobs": -2}, "must be a positive value or -1"),
        ({"logprob_token_ids": [0] * 129}, "at most 128 ids"),
        ({"logprob_token_ids": [50]}, "got 50"),
        ({"stop_token_ids": [3, 4.5]}, "Expected `int`, got 4.5"),
        ({"allowed_token_ids": [10**500]}, "more than 64 bits"),
        ({"allowed_token_ids": [1] * 51}, "at most 50 ids, got 51"),
        ({"stop_token_ids": [1] * 51}, "at most 50 ids, got 51"),
        ({"repetition_detection": {"max_pattern_size": -1}}, "must hold"),
        ({"repetition_detection": {"max_pattern_size": 2, "min_count": 1}}, "at least 2"),
        ({"repetition_detection": {"max_pattern_size": 60}}, "fit the context"),
    ],
)
def test_values_out_of_range_are_refused(fields: dict[str, object], message: str) -> None:
    """The message names the field if vLLM has no `param` for it."""
    with pytest.raises(RequestError, match=message) as caught:
        sampling(**fields)  # type: ignore[arg-type]
    (name,) = fields
    has_none = name in NAMELESS or fields == {"bad_words": [""]}
    assert caught.value.param == (None if has_none else name)
    assert name in f"{caught.value.param} {caught.value.message}"


def test_a_pattern_of_no_tokens_is_not_looked_for() -> None:
    assert sampling(repetition_detection={"max_pattern_size": 0}).repetition_detection is None


def test_a_worker_may_allow_the_whole_vocabulary() -> None:
    unlimited = ModelLimits(max_model_len=100, vocab_size=50, max_logprobs=-1)
    assert params.check_logprobs("logprobs", -1, unlimited) == -1
    with pytest.raises(RequestError, match="Requested sample logprobs of 50"):
        params.check_logprobs("logprobs", -1, LIMITS)


def test_several_answers_need_randomness() -> None:
    assert params.num_sequences(request(), 1.0) == 1
    assert params.num_sequences(request(n=16), 1.0) == 16
    for n, temperature, message in (
        (2, 0.0, "n must be 1 when using greedy sampling, got 2."),
        (0, 1.0, "n must be at least 1, got 0."),
        (17, 1.0, "n must be at most 16, got 17."),
    ):
        with pytest.raises(RequestError, match=message):
            params.num_sequences(request(n=n), temperature)


@pytest.mark.parametrize(
    ("stop", "param"), [([""], None), (["x"] * 17, "body.stop"), (["y" * 257], "stop")]
)
def test_stop_strings_are_bounded(stop: list[str], param: str | None) -> None:
    with pytest.raises(RequestError, match="stop") as caught:
        params.text_params(request(stop=stop))
    assert caught.value.param == param


def test_stop_strings_are_taken_up_to_their_limits() -> None:
    strings = ["é" * 128, *map(str, range(15))]
    assert params.text_params(request(stop=strings)).stop == tuple(strings)
    assert params.text_params(request(stop="a")).stop == ("a",)


@pytest.mark.parametrize(("num_likeliest", "num_tokens"), [(3, 10), (-1, 4)])
def test_the_log_probabilities_of_prompts_are_bounded(
    num_likeliest: int, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    each = 1 + (50 if num_likeliest == -1 else num_likeliest)
    monkeypatch.setattr(params, "MAX_PROMPT_LOGPROBS", each * num_tokens)
    params.check_prompt_logprobs_size(num_likeliest, num_tokens, "logprobs", LIMITS)
    with pytest.raises(RequestError, match=f"would be {each * (num_tokens + 1)} "):
        params.check_prompt_logprobs_size(num_likeliest, num_tokens + 1, "logprobs", LIMITS)
