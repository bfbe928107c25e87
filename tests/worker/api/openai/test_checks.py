"""From a body to what the engine is asked, and every refusal before it."""

import asyncio
import random
from datetime import datetime
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.depth import examples
from worker.api.generate.adapters import ServedAdapters
from worker.api.generate.prepared import Prepared
from worker.api.generate.text import ModelText
from worker.api.http.arrival import Arrival
from worker.api.openai import checks
from worker.api.openai.chat import ChatApi
from worker.api.openai.checks import RequestChecks, response_id
from worker.api.openai.completions import CompletionApi
from worker.api.schema.params import ModelLimits
from worker.api.schema.parse import decode
from worker.api.schema.requests import MAX_REQUEST_ID_CHARS, ChatRequest, CompletionRequest
from worker.config import ApiConfig, EngineConfig
from worker.engine.process.client import EngineClient
from worker.errors import RequestError
from worker.sim import tokenizer as sim
from worker.tokenizer.chat import ChatTemplate
from worker.types import BeamParams, KvSource, SamplingParams

LIMITS = ModelLimits(max_model_len=100, vocab_size=50)
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "hi"}]


def ids_of(text: str) -> list[int]:
    return sim.SimTokenizer().encode(text, add_special_tokens=False)


class Unseen(list[int]):
    """Fail the test when an id is read."""

    def __iter__(self) -> Any:
        raise AssertionError("each was looked at")


async def asked(bench: Any, path: str, settings: dict[str, Any] | None = None, **body: Any) -> Any:
    base = {"messages": USER} if path == CHAT else {"prompt": "a"}
    response = await bench.post(path, {**base, **body}, **(settings or {}))
    assert response.status_code == 200, response.text
    return bench.engine.requests[-1]


async def refused(bench: Any, path: str, **body: Any) -> dict[str, Any]:
    base = {"messages": USER} if path == CHAT else {"prompt": "a"}
    settings = body.pop("settings", {})
    response = await bench.post(path, {**base, **body}, **settings)
    assert response.status_code == 400, response.text
    assert bench.engine.requests == []
    error: dict[str, Any] = response.json()["error"]
    return error


async def test_floats_that_are_whole_numbers_are_taken(bench: Any) -> None:
    request = await asked(bench, TEXT, max_tokens=3.0, top_k=5.0, seed=7.0)
    assert (request.params.max_tokens, request.params.top_k, request.params.seed) == (3, 5, 7)


async def test_the_models_defaults_fill_in_for_the_request(bench: Any) -> None:
    settings = {"default_sampling": [("temperature", 0.6), ("top_k", 7), ("max_tokens", 5)]}
    request = await asked(bench, CHAT, settings)
    assert (request.params.temperature, request.params.top_k) == (0.6, 7)
    assert request.params.max_tokens == 5
    request = await asked(bench, CHAT, settings, temperature=0.9, max_tokens=9)
    assert (request.params.temperature, request.params.max_tokens) == (0.9, 5)


async def test_several_answers_are_branches_of_one_request(bench: Any) -> None:
    request = await asked(bench, TEXT, n=3, temperature=1.0)
    assert request.branch_ids == [f"{n}_{request.request_id}" for n in (1, 2)]


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_a_beam_search_is_asked_of_the_engine(bench: Any, path: str) -> None:
    settings = {"default_sampling": [("temperature", 0.6), ("repetition_penalty", 1.3)]}
    beams = {"use_beam_search": True, "n": 2, "temperature": 0, "top_p": 0.5, "max_tokens": 5}
    request = await asked(bench, path, settings, **beams)
    assert request.params == SamplingParams(5, 0.0, beam=BeamParams(2))
    assert len(request.branch_ids) == 1
    wider = {"best_of": 8, "length_penalty": 0.5, "early_stopping": "never", "ignore_eos": True}
    request = await asked(bench, path, settings, **beams, **wider)
    beam = BeamParams(8, 0.5, "never")
    assert request.params == SamplingParams(5, 0.0, ignore_eos=True, beam=beam)
    assert len(request.branch_ids) == 1


async def test_a_beam_search_of_token_ids_shows_log_probabilities(bench: Any) -> None:
    sampling = {"use_beam_search": True, "best_of": 3, "logprobs": 2, "early_stopping": True}
    body = {"token_ids": [5, 6], "sampling_params": {**sampling, "max_tokens": 4}}
    await bench.answer("/inference/v1/generate", body)
    request = bench.engine.requests[-1]
    assert request.params.beam == BeamParams(3, 1.0, True, num_shown=2)
    assert (request.params.logprobs, request.branch_ids) == (2, [])


async def test_the_leg_that_runs_a_prompt_does_not_search(bench: Any) -> None:
    body = {"prompt": [1, 2], "use_beam_search": True, "n": 2, "best_of": 4}
    body |= {"bootstrap_host": "10.0.0.1", "bootstrap_port": 7, "bootstrap_room": 5}
    for role in ("kv_producer", "kv_consumer"):
        await bench.answer(TEXT, body, kv_role=role)
    assert [r.params.beam for r in bench.engine.requests] == [None, BeamParams(4)]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stream", True),
        ("stop", "x"),
        ("stop_token_ids", [1]),
        ("presence_penalty", 0.5),
        ("frequency_penalty", -0.5),
        ("repetition_penalty", 1.1),
        ("logit_bias", {"1": 5}),
        ("bad_words", ["x"]),
        ("min_tokens", 1),
        ("allowed_token_ids", [1]),
        ("logprob_token_ids", [1]),
        ("repetition_detection", {"max_pattern_size": 2}),
        ("resume", {}),
        ("best_of", 1),
        ("best_of", 17),
        ("length_penalty", 10.5),
        ("length_penalty", -11),
        ("response_format", {"type": "json_object"}),
        ("guided_regex", "a"),
    ],
)
async def test_fields_that_exclude_a_beam_search_are_named(
    bench: Any, name: str, value: Any
) -> None:
    error = await refused(bench, TEXT, use_beam_search=True, n=2, **{name: value})
    assert error["param"] == name


@pytest.mark.parametrize(
    ("name", "value"),
    [("best_of", 2), ("best_of", 4), ("length_penalty", 0.5), ("early_stopping", True)],
)
async def test_fields_of_a_beam_search_are_refused_without_one(
    bench: Any, name: str, value: Any
) -> None:
    error = await refused(bench, TEXT, **{name: value})
    assert error["param"] == name
    neutral = {"best_of": 3, "length_penalty": 1.0, "early_stopping": False}
    request = await asked(bench, TEXT, n=3, **neutral, use_beam_search=False)
    assert request.params.beam is None


async def test_answers_to_several_prompts_are_bounded(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.api.schema.params.MAX_PROMPTS", 4)
    error = await refused(bench, TEXT, n=2, temperature=1.0, prompt=["a", "b", "c"])
    assert error["message"].startswith("n × the number of prompts must be at most 4.")
    await asked(bench, TEXT, n=2, temperature=1.0, prompt=["a", "b"])
    assert len(bench.engine.requests) == 2


def test_a_request_id_may_be_as_long_as_the_limit() -> None:
    arrival = Arrival(None, 0.0)
    longest = "x" * MAX_REQUEST_ID_CHARS
    assert response_id("cmpl", longest, arrival) == f"cmpl-{longest}"
    for refused_id in (f"{longest}x", ""):
        with pytest.raises(RequestError, match="printable characters"):
            response_id("cmpl", refused_id, arrival)


async def test_prompts_without_a_seed_draw_for_themselves(bench: Any) -> None:
    await asked(bench, TEXT, prompt=["a", "a"])
    first, second = (r.params.seed for r in bench.engine.requests)
    assert first != second
    await asked(bench, TEXT, prompt=["a", "a"], seed=5)
    assert [r.params.seed for r in bench.engine.requests[2:]] == [5, 5]


async def test_headers_name_the_tenant_and_the_priority(bench: Any) -> None:
    headers = {"x-gateway-inference-fairness-id": "team-a", "x-vllm-priority": "-3"}
    async with bench.client() as client:
        await client.post(TEXT, json={"prompt": "a", "priority": 4}, headers=headers)
        await client.post(TEXT, json={"prompt": "a", "priority": 4})
        wrong = {"x-vllm-priority": "high"}
        bad = await client.post(TEXT, json={"prompt": "a"}, headers=wrong)
    first, second = bench.engine.requests
    assert (first.tenant, first.priority) == ("team-a", -3)
    assert (second.tenant, second.priority) == ("", 4)
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "x-vllm-priority")


@pytest.mark.parametrize("priority", [-(2**63) - 1, 2**63])
async def test_a_priority_has_at_most_64_bits(bench: Any, priority: int) -> None:
    async with bench.client() as client:
        headers = {"x-vllm-priority": str(priority)}
        by_header = await client.post(TEXT, json={"prompt": "a"}, headers=headers)
        by_body = await client.post(TEXT, json={"prompt": "a", "priority": priority})
        bounds = [{"x-vllm-priority": str(p)} for p in (-(2**63), 2**63 - 1)]
        taken = [await client.post(TEXT, json={"prompt": "a"}, headers=h) for h in bounds]
    assert [r.status_code for r in (by_header, by_body, *taken)] == [400, 400, 200, 200]
    assert [r.priority for r in bench.engine.requests] == [-(2**63), 2**63 - 1]


async def test_with_several_api_keys_each_is_a_tenant(bench: Any) -> None:
    async with bench.client(api_keys=["secret-a", "secret-b"]) as client:
        for key in ("secret-a", "secret-b"):
            headers = {"authorization": f"Bearer {key}"}
            await client.post(TEXT, json={"prompt": "a"}, headers=headers)
    assert [r.tenant for r in bench.engine.requests] == ["key-0", "key-1"]


async def test_a_prompt_is_truncated_when_asked(bench: Any) -> None:
    request = await asked(bench, TEXT, prompt=[1, 2, 3, 4], truncate_prompt_tokens=2)
    assert request.prompt_token_ids == [3, 4]
    request = await asked(bench, CHAT, truncate_prompt_tokens=3)
    prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert request.prompt_token_ids == ids_of(prompt)[-3:]
    request = await asked(bench, TEXT, prompt=[1] * 100, truncate_prompt_tokens=-1, max_tokens=4)
    assert (len(request.prompt_token_ids), request.params.max_tokens) == (60, 4)


async def test_a_chat_can_continue_its_last_message(bench: Any) -> None:
    messages = [*USER, {"role": "assistant", "content": "well said"}]
    body = {"messages": messages, "continue_final_message": True, "echo": True}
    answer = await bench.answer(CHAT, body)
    refusal = await bench.post(CHAT, {**body, "add_generation_prompt": True})
    assert answer["choices"][0]["message"]["content"] == "well saidhi"
    (request,) = bench.engine.requests
    prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nwell said"
    assert request.prompt_token_ids == ids_of(prompt)
    assert refusal.status_code == 400
    assert refusal.json()["error"]["message"].startswith("Cannot set both")


async def test_facts_of_the_prompt_are_returned_when_asked(bench: Any) -> None:
    facts = {"return_token_ids": True}
    chat = await bench.answer(CHAT, {"messages": USER, "return_prompt_text": True, **facts})
    text = await bench.answer(TEXT, {"prompt": [[5], [6]], **facts})
    rendered = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert chat["prompt_text"] == rendered
    assert chat["prompt_token_ids"] == ids_of(rendered)
    assert chat["choices"][0]["token_ids"] == [ord("h"), ord("i"), sim.IM_END_ID]
    assert [c["prompt_token_ids"] for c in text["choices"]] == [[5], [6]]


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        (CHAT, {"top_logprobs": 2}, "top_logprobs", "`logprobs` must be set to true"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "logprobs", "greater than max allowed"),
        (CHAT, {"logprobs": True, "top_logprobs": -2}, "top_logprobs", "positive value or -1"),
        (TEXT, {"logprobs": 21}, "logprobs", "Requested sample logprobs of 21"),
        (TEXT, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "not available when"),
        (TEXT, {"temperature": 3}, "temperature", " (parameter=temperature, value=3.0)"),
        (TEXT, {"n": 2, "temperature": 0}, None, "n must be 1 when using greedy sampling, got 2."),
        (TEXT, {"n": 16, "prompt": ["a"] * 65}, "n", "must be at most 1024"),
        (TEXT, {"request_id": "a\nb"}, "request_id", "printable characters"),
        (CHAT, {"max_tokens": 0, "echo": True}, "max_tokens", "at least 1"),
        (TEXT, {"min_tokens": 17}, None, "less than or equal to max_tokens=16"),
        (TEXT, {"kv_transfer_params": {"a": 1}}, "kv_transfer_params", "--kv-transfer-config"),
        (CHAT, {"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "regex"),
        (CHAT, {"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs", "tokenize"),
        (TEXT, {"priority": 1, "settings": {"enable_priority": False}}, "priority", "not enabled"),
    ],
)
async def test_each_mistake_is_named(
    bench: Any, path: str, body: dict[str, Any], param: str | None, message: str
) -> None:
    error = await refused(bench, path, **body)
    assert error["param"] == param
    assert message in error["message"]
    assert (error["type"], error["code"]) == ("BadRequestError", 400)


@pytest.mark.parametrize("path", [TEXT, "/inference/v1/generate"])
async def test_two_workers_of_a_room_share_one_body(bench: Any, path: str) -> None:
    sampling: dict[str, Any] = {"max_tokens": 7, "min_tokens": 3}
    body: dict[str, Any] = {"prompt": [1, 2, 3], **sampling}
    if path != TEXT:
        body = {"token_ids": [1, 2, 3], "sampling_params": sampling}
    body |= {"bootstrap_host": "10.0.0.1", "bootstrap_port": 7, "bootstrap_room": 1 << 62}
    for role in ("kv_producer", "kv_consumer"):
        await bench.answer(path, body, kv_role=role)
    first, second = bench.engine.requests
    name = f"room {1 << 62}"
    assert (first.keeps_kv, first.kv_name, first.kv_source) == (True, name, None)
    assert (first.params.max_tokens, first.params.min_tokens) == (1, 0)
    assert (second.keeps_kv, second.kv_source) == (False, KvSource("10.0.0.1", 7, None, name, 3))
    assert (second.params.max_tokens, second.params.min_tokens) == (7, 3)


async def test_a_short_prompt_does_not_excuse_min_tokens_of_a_long_one(bench: Any) -> None:
    error = await refused(bench, TEXT, prompt=[[1], [1] * 60], max_tokens=32, min_tokens=16)
    assert error["message"].startswith("min_tokens must be less than or equal to max_tokens=4")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt_logprobs": 20, "n": 16}, "prompt_logprobs"),
        ({"prompt_logprobs": 20, "prompt": [[1] * 4000] * 16}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 20, "n": 16}, "logprobs"),
        ({"prompt_logprobs": -1, "settings": {"max_logprobs": -1}}, "prompt_logprobs"),
    ],
)
async def test_a_prompts_log_probabilities_are_bounded(
    bench: Any, body: dict[str, Any], param: str
) -> None:
    settings = {"max_model_len": 8192, **body.pop("settings", {})}
    asked = {"prompt": [1] * 8000, "max_tokens": 1, "settings": settings, **body}
    error = await refused(bench, TEXT, **asked)
    assert error["param"] == param
    assert "more than 1048576" in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (TEXT, {"model": "x" * 100_000}, 404),
        (CHAT, {"messages": [{"role": "x" * 100_000, "content": "hi"}]}, 400),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "x" * 100_000}]}]}, 400),
        (TEXT, {"x" * 100_000: 1}, 400),
        (TEXT, {"truncation_side": "x" * 100_000}, 400),
    ],
)
async def test_errors_are_short_whatever_was_sent(
    bench: Any, path: str, body: dict[str, Any], status: int
) -> None:
    base = {"messages": USER} if path == CHAT else {"prompt": "a"}
    response = await bench.post(path, {**base, **body}, strict_fields=True)
    assert response.status_code == status
    assert len(response.content) < 1000


async def test_texts_that_are_long_together_are_encoded_in_a_thread(
    bench: Any, watched: Any
) -> None:
    settings = {"max_model_len": 256}
    await asked(bench, TEXT, settings, prompt=["a" * 100] * 50, max_tokens=1)
    assert (watched.elsewhere["encode"], watched.on_loop["encode"]) == (50, 0)
    await asked(bench, TEXT, settings, prompt=[[97] * 100] * 50, max_tokens=1, echo=True)
    assert (watched.elsewhere["decode"], watched.on_loop["decode"]) == (50, 0)
    await asked(bench, TEXT, settings, prompt="hi", max_tokens=1)
    assert (watched.elsewhere["encode"], watched.on_loop["encode"]) == (50, 1)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)
VALUES = JSON | st.sampled_from(
    [0, -1, 1, 2.0, 1e308, 2**63, -(2**63), 10**40, "", "x", [], {}, ["a"], [1], [1.0], {"1": 5}]
)


@given(
    fields=st.dictionaries(
        st.sampled_from(
            sorted({*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__})
        ),
        VALUES,
        max_size=3,
    ),
    is_chat=st.booleans(),
)
@examples(300)
def test_any_values_are_prepared_or_refused(fields: dict[str, Any], is_chat: bool) -> None:
    config = ApiConfig(("tiny",), 64, sim.VOCAB_SIZE)
    template = ChatTemplate(sim.CHAT_TEMPLATE, bos_token="", eos_token="", now=datetime.now)
    text = ModelText(sim.SimTokenizer(), template, ModelLimits(64, sim.VOCAB_SIZE))
    client = EngineClient(EngineConfig("sim", None))
    adapters = ServedAdapters(client, config.served_model_names, has_files=False)
    shared = RequestChecks(config, text, random.Random(0), adapters)
    base: dict[str, Any] = {"messages": USER} if is_chat else {"prompt": "a"}
    body = msgspec.json.encode({**base, **fields})
    prepare = ChatApi(shared) if is_chat else CompletionApi(shared)
    outcome: Prepared | RequestError
    try:
        outcome = asyncio.run(prepare(body, Arrival(None, 0.0)))
    except RequestError as error:
        outcome = error
    if isinstance(outcome, Prepared):
        assert msgspec.msgpack.encode(outcome.requests)
    else:
        assert 400 <= outcome.status < 500
        assert outcome.message


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {}, None),
        (TEXT, {"prompt": "hi"}, None),
        (TEXT, {"prompt": ["hi", "there"]}, None),
        (TEXT, {"prompt": [1], "bad_words": ["hi"]}, "bad_words"),
    ],
)
async def test_text_the_model_has_no_embedding_for_is_refused(
    bench: Any, path: str, body: dict[str, Any], param: str | None
) -> None:
    rows = min(ids_of("hi"))
    error = await refused(bench, path, settings={"vocab_size": rows}, **body)
    assert error["param"] == param
    assert f"[0, {rows})" in error["message"]


async def test_a_smaller_embedding_serves_the_text_it_knows(bench: Any) -> None:
    settings = {"vocab_size": max(ids_of("hi")) + 1}
    request = await asked(bench, TEXT, settings, prompt="hi", bad_words=["hi"])
    assert request.prompt_token_ids == ids_of("hi")


def test_a_prompt_must_leave_room() -> None:
    assert checks.room_for_output(99, LIMITS) == 1
    for length in (100, 500):
        with pytest.raises(RequestError, match=r"^This model's maximum context length is 100 tok"):
            checks.room_for_output(length, LIMITS)
    with pytest.raises(RequestError, match="cannot be empty"):
        checks.room_for_output(0, LIMITS)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2]], [[1], [2]])],
)
def test_prompts_come_in_four_forms(
    prompt: str | list[str | int | list[int]], expected: list[str | list[int]]
) -> None:
    assert checks.prompts_of(prompt) == expected


def test_the_number_of_prompts_is_bounded() -> None:
    with pytest.raises(RequestError, match="prompt") as caught:
        checks.prompts_of(["a"] * 1025)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    ("ids", "param"),
    [([50], None), ([1, 99], None), ([1, -1], "body.prompt.1"), ([1 << 63], "body.prompt.0")],
)
def test_token_ids_of_a_prompt_must_exist(ids: list[int], param: str | None) -> None:
    with pytest.raises(RequestError, match="Token id") as caught:
        checks.check_token_ids(ids, LIMITS)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("asked", "side", "max_tokens", "expected"),
    [
        (None, None, 1, list(range(120))),
        (3, None, 1, [117, 118, 119]),
        (3, "left", 1, [117, 118, 119]),
        (3, "right", 1, [0, 1, 2]),
        (100, None, 1, list(range(20, 120))),
        (-1, None, 10, list(range(30, 120))),
        (-1, None, 100, [119]),
    ],
)
def test_a_prompt_is_truncated_at_the_side_asked_for(
    asked: int | None, side: str | None, max_tokens: int, expected: list[int]
) -> None:
    assert checks.truncated(list(range(120)), asked, side, max_tokens, LIMITS) == expected


@pytest.mark.parametrize("prompt", [Unseen([1] * 100), [Unseen([1] * 100), [1]]])
def test_too_many_token_ids_are_refused_by_their_number(prompt: Any) -> None:
    with pytest.raises(RequestError, match="contains 100 input tokens"):
        checks.prompts_of(prompt, LIMITS)


def test_the_output_limit_is_checked_and_defaults_to_none() -> None:
    def limit(**fields: int) -> int | None:
        body = msgspec.json.encode({"messages": USER, **fields})
        return checks.max_tokens_of(decode(body, ChatRequest), LIMITS)

    assert limit() is None
    assert limit(max_tokens=5, max_completion_tokens=7) == 7
    with pytest.raises(RequestError, match="at least 1"):
        limit(max_tokens=0)
    with pytest.raises(RequestError, match="max_tokens=101 cannot be greater"):
        limit(max_tokens=101)


@pytest.mark.parametrize("salt", ["", "x" * 129, "a@b", "a/b"])
def test_salts_are_bounded(salt: str) -> None:
    with pytest.raises(RequestError) as caught:
        checks.check_cache_salt(salt)
    assert caught.value.param == "cache_salt"
