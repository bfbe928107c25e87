"""`/generate` as SGLang and forge-infer have it, and batches of chats."""

from typing import Any

import pytest

from worker.sim import tokenizer as sim
from worker.types import FinishReason

PATH, BATCH = "/generate", "/v1/chat/completions/batch"
ENDS = [ord("h"), ord("i"), sim.IM_END_ID]


async def test_forge_has_its_own_form(bench: Any) -> None:
    answer = await bench.answer(PATH, {"prompt": "a"})
    assert answer == {"text": "hi", "prompt_tokens": 1, "completion_tokens": 3}
    await bench.answer(PATH, {"prompt": "a", "max_tokens": 5})
    params = [request.params for request in bench.engine.requests]
    assert [(p.temperature, p.max_tokens) for p in params] == [(0.0, 32), (0.0, 5)]


async def test_sglangs_fields_are_those_of_completions(bench: Any) -> None:
    sampling = {
        "max_new_tokens": 7,
        "min_new_tokens": 2,
        "temperature": 0.5,
        "stop_token_ids": [5],
        "sampling_seed": 3,
        "n": 1,
    }
    await bench.answer(PATH, {"text": "a", "sampling_params": sampling, "extra_key": "s"})
    [request] = bench.engine.requests
    params = request.params
    assert (params.max_tokens, params.min_tokens, params.temperature) == (7, 2, 0.5)
    assert (params.stop_token_ids, params.seed, request.cache_salt) == ((5,), 3, "s")
    await bench.answer(PATH, {"input_ids": [1, 2]})
    assert bench.engine.requests[1].prompt_token_ids == [1, 2]
    assert bench.engine.requests[1].params.max_tokens == 64 - 2  # of the 128, what fits
    await bench.answer(PATH, {"text": "a", "sampling_params": {"regex": "a+"}})
    assert bench.engine.requests[2].params.grammar is not None


@pytest.mark.parametrize(
    ("body", "places"),
    [
        ({"text": "a"}, None),
        ({"text": ["a"]}, [0]),
        ({"input_ids": [[1], [2]]}, [0, 1]),
        ({"text": "a", "sampling_params": {"n": 2}}, [0, 1]),
    ],
)
async def test_sglangs_streams_repeat_the_whole(
    bench: Any, body: dict[str, Any], places: list[int] | None
) -> None:
    body = {**body, "rid": "mine"}
    whole = await bench.answer(PATH, body)
    events = await bench.events(PATH, body)
    answers = [whole] if places is None else whole
    assert [answer["text"] for answer in answers] == ["hi"] * len(answers)
    info = answers[0]["meta_info"]
    assert info["id"] == "mine"
    assert info["finish_reason"] == {"type": "stop", "matched": sim.IM_END_ID}
    assert (answers[0]["output_ids"], info["completion_tokens"]) == (ENDS, 3)
    assert events[0]["text"] == "h"
    assert events[0]["meta_info"]["finish_reason"] is None
    for index, answer in enumerate(answers):
        *_, last = (event for event in events if event.pop("index", 0) == index)
        assert last == answer
        events = await bench.events(PATH, body)


async def test_sglangs_log_probabilities(bench: Any) -> None:
    bench.engine.steps = [
        bench.say("h", logprobs=[bench.logprob("h", ("x", -2.0))]),
        bench.say("i", FinishReason.LENGTH, logprobs=[bench.logprob("i", ("y", -3.0))]),
    ]
    asked = {"text": "a", "return_logprob": True, "top_logprobs_num": 1, "rid": "mine"}
    asked["return_text_in_logprobs"] = True
    whole = await bench.answer(PATH, asked)
    info = whole["meta_info"]
    assert info["output_token_logprobs"] == [[-0.5, ord("h"), "h"], [-0.5, ord("i"), "i"]]
    assert info["output_top_logprobs"] == [[[-2.0, ord("x"), "x"]], [[-3.0, ord("y"), "y"]]]
    assert info["finish_reason"] == {"type": "length", "length": 2}
    assert (await bench.events(PATH, asked))[-1] == whole


async def test_a_batch_answers_each_conversation(bench: Any) -> None:
    conversations = [[{"role": "user", "content": text}] for text in ("a", "b b")]
    answer = await bench.answer(BATCH, {"messages": conversations, "max_tokens": 4})
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["hi", "hi"]
    prompts = [len(request.prompt_token_ids) for request in bench.engine.requests]
    assert answer["usage"]["prompt_tokens"] == sum(prompts)
    assert {request.params.max_tokens for request in bench.engine.requests} == {4}
    parts = [request.request_id.rsplit("-", 2)[0] for request in bench.engine.requests]
    assert parts == [answer["id"]] * 2
