"""Ranges and defaults of the request fields."""

from __future__ import annotations

import random

import msgspec
import pytest

from worker.api import params
from worker.api.params import ModelLimits
from worker.api.schema import ChatMessage, ChatRequest, CompletionRequest, ContentPart
from worker.errors import RequestError

LIMITS = ModelLimits(max_model_len=100, vocab_size=50)


def request(**fields: object) -> CompletionRequest:
    """A completion request with some fields."""
    return msgspec.convert({"prompt": "x", **fields}, CompletionRequest)


def sampling(**fields: object) -> params.SamplingParams:
    """The sampling parameters of a request with 10 tokens to draw."""
    return params.sampling_params(request(**fields), 10, LIMITS, random.Random(0))


def test_defaults_are_those_of_the_openai_api() -> None:
    """A request that says nothing samples at temperature 1 with every filter off."""
    got = sampling()
    assert (got.temperature, got.top_p, got.top_k, got.min_tokens) == (1.0, 1.0, 0, 0)
    assert got.max_tokens == 10
    assert got.seed == random.Random(0).getrandbits(63)


@pytest.mark.parametrize(
    ("asked", "used"), [(0, 0.0), (1e-6, 0.0), (0.001, 0.01), (0.5, 0.5), (2, 2.0)]
)
def test_small_temperatures_are_greedy_or_raised(asked: float, used: float) -> None:
    """Below 1e-5 is greedy; between that and 0.01 is raised to 0.01."""
    got = sampling(temperature=asked, top_p=0.5, top_k=3)
    assert got.temperature == used
    assert (got.top_p, got.top_k) == ((1.0, 0) if used == 0 else (0.5, 3))


def test_seeds_are_kept_and_minus_one_means_none() -> None:
    """A given seed is used as it is; -1 asks for a drawn one."""
    assert sampling(seed=5).seed == 5
    assert sampling(seed=-1).seed == sampling().seed
    assert sampling(top_k=-1).top_k == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 2.1},
        {"temperature": -0.1},
        {"top_p": 0},
        {"top_p": 1.1},
        {"top_k": -2},
        {"min_tokens": 11},
        {"min_tokens": -1},
        {"seed": 1 << 63},
        {"stop_token_ids": [50]},
        {"stop_token_ids": [-1]},
    ],
)
def test_values_out_of_range_are_refused(fields: dict[str, object]) -> None:
    """A value outside its range is a 400 naming the field."""
    with pytest.raises(RequestError) as caught:
        sampling(**fields)
    assert caught.value.param == next(iter(fields))


@pytest.mark.parametrize("stop", [[""], ["x"] * 17, ["y" * 257]])
def test_stop_strings_are_bounded(stop: list[str]) -> None:
    """At most 16 non-empty stop strings of at most 256 bytes."""
    with pytest.raises(RequestError) as caught:
        params.text_params(request(stop=stop))
    assert caught.value.param == "stop"


def test_one_stop_string_needs_no_list() -> None:
    """`stop` is a string or a list of them."""
    assert params.text_params(request(stop="a")).stop == ("a",)
    assert params.text_params(request(stop=["a", "b"])).stop == ("a", "b")


def test_the_output_limit_is_checked_and_defaults_to_none() -> None:
    """`max_completion_tokens` wins; 0 and more than the context are refused."""
    assert params.requested_max_tokens(request(), None, LIMITS) is None
    assert params.requested_max_tokens(request(max_tokens=5), 7, LIMITS) == 7
    with pytest.raises(RequestError, match="at least 1"):
        params.requested_max_tokens(request(max_tokens=0), None, LIMITS)
    with pytest.raises(RequestError, match="max_tokens=101 cannot be greater"):
        params.requested_max_tokens(request(max_tokens=101), None, LIMITS)


def test_a_prompt_must_leave_room() -> None:
    """The message of a prompt that is too long begins as clients expect."""
    assert params.room_for_output(99, LIMITS) == 1
    for length in (100, 500):
        with pytest.raises(
            RequestError, match=r"^This model's maximum context length is 100 tokens\."
        ):
            params.room_for_output(length, LIMITS)
    with pytest.raises(RequestError, match="cannot be empty"):
        params.room_for_output(0, LIMITS)
    with pytest.raises(RequestError, match=r"^This model's maximum context length"):
        params.check_prompt_chars("x" * 1601, LIMITS)


def test_text_parts_are_joined_and_others_refused() -> None:
    """Content is a string or text parts; an image is refused by its type."""
    parts = [ContentPart("text", "a"), ContentPart("text", "b")]
    assert params.template_messages([ChatMessage(role="user", content=parts)]) == [
        {"role": "user", "content": "a\nb"}
    ]
    with pytest.raises(RequestError, match="image_url") as caught:
        params.template_messages([ChatMessage(role="user", content=[ContentPart("image_url")])])
    assert caught.value.param == "messages[0].content[0].type"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "robot", "content": ""}, "messages[0].role"),
        ({"role": "assistant", "tool_calls": [{}]}, "messages[0].tool_calls"),
        ({"role": "tool", "content": "x", "tool_call_id": "1"}, "messages[0].tool_call_id"),
    ],
)
def test_turns_that_cannot_be_rendered_are_refused(message: dict[str, object], param: str) -> None:
    """Unknown roles and tool calls are 400s that name the turn."""
    with pytest.raises(RequestError) as caught:
        params.template_messages(msgspec.convert([message], list[ChatMessage]))
    assert caught.value.param == param


def test_an_answer_of_ours_can_be_sent_back() -> None:
    """The nulls our own answers carry are accepted in the next turn."""
    turn = {"role": "assistant", "content": "x", "refusal": None, "annotations": None}
    body = {"messages": [{**turn, "audio": None, "function_call": None, "reasoning": None}]}
    request = msgspec.convert(body, ChatRequest)
    assert params.template_messages(request.messages) == [{"role": "assistant", "content": "x"}]


@pytest.mark.parametrize("messages", [[], [ChatMessage(role="user", content="x")] * 4097])
def test_the_number_of_messages_is_bounded(messages: list[ChatMessage]) -> None:
    """No messages, or more than 4,096, are refused."""
    with pytest.raises(RequestError, match="messages"):
        params.template_messages(messages)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2]], [[1], [2]])],
)
def test_prompts_come_in_four_forms(
    prompt: str | list[str | int | list[int]], expected: list[str | list[int]]
) -> None:
    """A string, strings, token ids, or lists of token ids."""
    assert params.prompts_of(prompt) == expected


@pytest.mark.parametrize("prompt", [[], ["a", 1], [[1], "a"], ["a"] * 65])
def test_other_prompts_are_refused(prompt: list[str | int | list[int]]) -> None:
    """Nothing, mixtures, and too many prompts are 400s."""
    with pytest.raises(RequestError) as caught:
        params.prompts_of(prompt)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("salt", ["", "x" * 129, "a@b", "a/b"])
def test_salts_are_bounded(salt: str) -> None:
    """An empty, long or ambiguous cache salt is refused."""
    with pytest.raises(RequestError) as caught:
        params.check_cache_salt(salt)
    assert caught.value.param == "cache_salt"


@pytest.mark.parametrize("ids", [[50], [-1], [1, 99]])
def test_token_ids_of_a_prompt_must_exist(ids: list[int]) -> None:
    """Ids outside the vocabulary never reach the engine."""
    with pytest.raises(RequestError):
        params.check_token_ids(ids, LIMITS)
