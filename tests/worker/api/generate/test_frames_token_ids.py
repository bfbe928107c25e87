"""Token ids in, token ids out."""

from typing import Any

import pytest

from worker.sim import tokenizer as sim
from worker.types import FinishReason

PATH = "/inference/v1/generate"


async def test_an_answer_is_in_tokens(bench: Any) -> None:
    body = {"token_ids": [1, 2, 3], "request_id": "r"}
    answer = await bench.answer(PATH, body)
    text = await bench.answer(PATH, {**body, "output_mode": "text"})
    # Without a limit of its own, an answer may fill the context.
    assert bench.engine.requests[0].params.max_tokens == 61
    [choice] = answer["choices"]
    assert choice["token_ids"] == [ord("h"), ord("i"), sim.IM_END_ID]
    assert (choice["finish_reason"], "text" in choice) == ("stop", False)
    assert (answer["request_id"], answer["model"]) == ("r", "tiny")
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (3, 3)
    assert (text["choices"][0]["text"], text["output_mode"]) == ("hi", "text")


async def test_a_stream_is_in_tokens(bench: Any) -> None:
    body = {"token_ids": [1], "stream_options": {"include_usage": True}}
    *frames, last = await bench.events(PATH, body)
    drawn = [i for f in frames for c in f["choices"] for i in c["token_ids"]]
    assert drawn == [ord("h"), ord("i"), sim.IM_END_ID]
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 3)
    assert frames[-1]["choices"][0]["finish_reason"] == "stop"


async def test_log_probabilities_name_ids(bench: Any) -> None:
    entry = bench.logprob("h", ("i", -2.0))
    bench.engine.steps = [bench.say("h", FinishReason.LENGTH, logprobs=[entry])]
    body = {"token_ids": [1], "sampling_params": {"logprobs": 1, "max_tokens": 1}}
    answer = await bench.answer(PATH, body)
    [entry] = answer["choices"][0]["logprobs"]["content"]
    assert entry["token"] == "token_id:104"
    assert entry["top_logprobs"][0]["token"] == "token_id:105"


async def test_everything_a_client_library_sends_is_taken(bench: Any) -> None:
    """Client libraries send fields of the flat sampling parameters that mean nothing here."""
    sampling = {
        "detokenize": False,
        "output_kind": 2,
        "n": 2,
        "temperature": 1.0,
        "output_text_buffer_length": 0,
        "skip_clone": False,
        "flat_logprobs": False,
        "skip_reading_prefix_cache": False,
        "extra_args": None,
        "structured_outputs": None,
        "thinking_token_budget": None,
        "truncate_prompt_tokens": None,
    }
    body = {"token_ids": [1], "sampling_params": sampling, "features": None}
    answer = await bench.answer(PATH, body)
    assert [c["index"] for c in answer["choices"]] == [0, 1]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"features": {"mm_hashes": {}}}, "features"),
        ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
        ({"sampling_params": {"temperature": 9}}, "temperature"),
        ({"sampling_params": {"temp": 1}}, "body.sampling_params.temp"),
        ({"sampling_params": {"length_penalty": 2}}, "length_penalty"),
        ({"sampling_params": {"extra_args": {"a": 1}}}, "extra_args"),
        (
            {"sampling_params": {"structured_outputs": {"json": {"not": {}}}}},
            "structured_outputs.json",
        ),
        ({"sampling_params": {"thinking_token_budget": 8}}, "thinking_token_budget"),
        ({"token_ids": list(range(64))}, "max_tokens"),
        ({"token_ids": list(range(65))}, "input_tokens"),
        ({"token_ids": []}, None),
        ({"token_ids": [1, -1]}, "body.token_ids.1"),
    ],
)
async def test_unsupported_fields_are_refused(
    bench: Any, body: dict[str, Any], param: str | None
) -> None:
    answer = await bench.post(PATH, {"token_ids": [1], **body}, strict_fields=True)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
