"""From a body to engine requests, and from outputs of sequences side by side to an answer."""

import asyncio
from typing import Any

import pytest

from tests.worker.conftest import events_of
from worker.engine.messages import AddRequest
from worker.errors import EngineDeadError
from worker.sim import tokenizer as sim
from worker.types import FinishReason

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "hi"}]
END = FinishReason.LENGTH
WITH_USAGE = {"stream_options": {"include_usage": True}}


async def whole(bench: Any, path: str = TEXT, **body: Any) -> Any:
    settings = body.pop("settings", {})
    base = {"messages": USER} if path == CHAT else {"prompt": "a"}
    return await bench.answer(path, {**base, **body}, **settings)


async def choices_of(bench: Any, stream: bool, **body: Any) -> list[Any]:
    if not stream:
        return list((await whole(bench, **body))["choices"])
    events = await bench.events(TEXT, {"prompt": "a", **body})
    return [choice for event in events for choice in event["choices"]]


async def test_a_chat_is_rendered_run_and_answered(bench: Any) -> None:
    body = await whole(bench, CHAT, model="alias")
    (choice,) = body["choices"]
    assert (body["model"], choice["message"]["content"]) == ("tiny", "hi")
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
    (request,) = bench.engine.requests
    prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert request.prompt_token_ids == sim.SimTokenizer().encode(prompt, add_special_tokens=False)
    # Without a limit of its own, an answer may fill the context.
    assert request.params.max_tokens == 64 - len(request.prompt_token_ids)
    assert body["usage"]["completion_tokens"] == 3
    assert body["usage"]["prompt_tokens"] == len(request.prompt_token_ids)
    assert bench.engine.aborted == []


async def test_a_chat_streams_role_text_and_ending(bench: Any) -> None:
    response = await bench.post(CHAT, {"messages": USER, "stream": True, **WITH_USAGE})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    role, first, last, usage = events_of(response.text)
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [c["choices"][0]["delta"] for c in (first, last)] == [{"content": "h"}, {"content": "i"}]
    assert [c["choices"][0]["finish_reason"] for c in (first, last)] == [None, "stop"]
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 3)
    assert len({(e["id"], e["created"]) for e in (role, first, last, usage)}) == 1


async def test_token_ids_are_a_prompt(bench: Any) -> None:
    await whole(bench, prompt=[5, 6, 7])
    await whole(bench, prompt=[[5], [6]])
    assert [r.prompt_token_ids for r in bench.engine.requests] == [[5, 6, 7], [5], [6]]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_across_chunks_ends_and_aborts(bench: Any, stream: bool) -> None:
    never = asyncio.Event()
    bench.engine.steps = [bench.say(t) for t in ("one E", "N", "D two")] + [never]
    choices = await choices_of(bench, stream, stop=["END"])
    assert "".join(c["text"] for c in choices) == "one "
    assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("stop", "END")
    assert bench.engine.aborted == [bench.engine.requests[0].request_id]


async def test_a_stop_token_of_the_client_is_reported(bench: Any) -> None:
    bench.engine.steps = [bench.say("ab", FinishReason.STOP, stop_token=ord("b"))]
    (choice,) = (await whole(bench, stop_token_ids=[ord("b")]))["choices"]
    assert (choice["text"], choice["stop_reason"]) == ("a", ord("b"))


async def test_characters_cut_by_tokens_arrive_whole(bench: Any) -> None:
    raw = "€".encode()
    bench.engine.steps = [*(bench.say([b]) for b in raw), bench.say([raw[0]], END)]
    assert [c["text"] for c in await choices_of(bench, True)] == ["€", "�"]


async def test_the_clients_request_id_is_in_ours(bench: Any) -> None:
    async with bench.client(enable_request_id_headers=True) as client:
        first = await client.post(TEXT, json={"prompt": "a"}, headers={"x-request-id": "r-1"})
        await client.post(CHAT, json={"messages": USER}, headers={"x-request-id": "r-1"})
    third = await whole(bench, request_id="r-2")
    assert (first.json()["id"], first.headers["x-request-id"]) == ("cmpl-r-1", "r-1")
    assert third["id"] == "cmpl-r-2"
    ids = [r.request_id for r in bench.engine.requests]
    assert ids[1].startswith("chatcmpl-r-1")
    assert len(set(ids)) == 3


async def test_max_tokens_is_clamped_to_the_room(bench: Any) -> None:
    await whole(bench, prompt=[1] * 60, max_tokens=50)
    await whole(bench)
    assert [r.params.max_tokens for r in bench.engine.requests] == [4, 16]


@pytest.mark.parametrize("model", [None, "", "tiny", "alias", "/models/tiny"])
async def test_every_name_of_the_model_is_taken(bench: Any, model: str | None) -> None:
    await whole(bench, model=model)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("failure", ["dies", "error", "abort"])
async def test_a_failure_before_the_first_token_has_a_status(
    bench: Any, stream: bool, failure: str
) -> None:
    step, status, kind = {
        "dies": (EngineDeadError("gone"), 503, "ServiceUnavailableError"),
        "error": (bench.say([], FinishReason.ERROR, error="no blocks"), 500, "InternalServerError"),
        # Refusals at admission have another type, "Service Unavailable".
        "abort": (
            bench.say([], FinishReason.ABORT, error="we stop"),
            503,
            "ServiceUnavailableError",
        ),
    }[failure]
    bench.engine.steps = [step]
    api = bench.api()
    async with bench.client_of(api) as client:
        response = await client.post(TEXT, json={"prompt": "a", "stream": stream})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["type"]) == (status, status, kind)
    assert ("retry-after" in response.headers) is (status == 503)
    reason = "abort" if failure == "abort" else "error"
    assert f'finished_reason="{reason}"}} 1\n' in api.page()


async def test_a_chat_shows_how_likely_its_tokens_were(bench: Any) -> None:
    bench.engine.steps = [
        bench.say(
            "ab", logprobs=[bench.logprob("a", ("a", -0.5), ("z", -2.0)), bench.logprob("b")]
        ),
        bench.say("c", END, logprobs=[bench.logprob("c")]),
    ]
    body = await whole(bench, CHAT, logprobs=True, top_logprobs=2)
    content = body["choices"][0]["logprobs"]["content"]
    assert [t["token"] for t in content] == ["a", "b", "c"]
    assert [t["token"] for t in content[0]["top_logprobs"]] == ["a", "z"]
    assert bench.engine.requests[0].params.logprobs == 2
    silent = await whole(bench, CHAT)
    assert silent["choices"][0]["logprobs"] is None


async def test_tokens_can_be_named_by_their_ids(bench: Any) -> None:
    bench.engine.steps = [bench.say("a", END, logprobs=[bench.logprob("a")])]
    flag = {"return_tokens_as_token_ids": True}
    by_request = await whole(bench, logprobs=0, return_tokens_as_token_ids=True)
    by_flag = await whole(bench, logprobs=0, settings=flag)
    neither = await whole(bench, logprobs=0, return_tokens_as_token_ids=False, settings=flag)
    names = [b["choices"][0]["logprobs"]["tokens"] for b in (by_request, by_flag, neither)]
    assert names == [["token_id:97"], ["token_id:97"], ["a"]]


async def test_prompt_logprobs_are_where_each_endpoint_has_them(bench: Any) -> None:
    bench.engine.steps = [
        bench.say([], prompt_logprobs=[bench.logprob("y", ("q", -1.0))]),
        bench.say("a", prompt_logprobs=[bench.logprob("z")]),
        bench.say("b", END),
    ]
    text = await whole(bench, prompt=[*b"xyz"], prompt_logprobs=1)
    first, second, third = text["choices"][0]["prompt_logprobs"]
    assert first is None
    assert second["121"] == {"logprob": -0.5, "rank": 1, "decoded_token": "y"}
    assert second["113"] == {"logprob": -1.0, "rank": 1, "decoded_token": "q"}
    assert list(third) == ["122"]
    chat = await whole(bench, CHAT, prompt_logprobs=1)
    assert chat["prompt_logprobs"][1] == second
    assert chat["choices"][0]["logprobs"] is None


async def test_an_echo_without_an_answer_scores_the_prompt(bench: Any) -> None:
    own = [bench.logprob("a")]
    scores = [bench.logprob("y"), bench.logprob("z")]
    bench.engine.steps = [bench.say("a", END, logprobs=own, prompt_logprobs=scores)]
    body = await whole(bench, prompt=[*b"xyz"], echo=True, max_tokens=0, logprobs=1)
    (choice,) = body["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("xyz", "length")
    assert choice["logprobs"]["tokens"] == ["x", "y", "z"]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]
    assert (body["usage"]["completion_tokens"], body["usage"]["total_tokens"]) == (0, 3)
    (request,) = bench.engine.requests
    assert (request.params.max_tokens, request.params.prompt_logprobs) == (1, 1)


async def test_an_echo_repeats_the_prompt_as_it_was_given(bench: Any) -> None:
    bench.engine.steps = [bench.say("!", END)]
    body = await whole(bench, prompt=["Hello  there", "x"], echo=True)
    assert [c["text"] for c in body["choices"]] == ["Hello  there!", "x!"]


async def test_cached_tokens_are_reported_unless_switched_off(bench: Any) -> None:
    bench.engine.steps = [bench.say("x", END, cached=16)]
    reported = await whole(bench)
    secret = await whole(bench, settings={"enable_prompt_tokens_details": False})
    assert reported["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}
    assert secret["usage"]["prompt_tokens_details"] is None
    assert list(reported["usage"]) == [
        "prompt_tokens",
        "total_tokens",
        "completion_tokens",
        "prompt_tokens_details",
        "completion_tokens_details",
    ]


async def test_a_requests_own_metrics_are_reported_when_switched_on(bench: Any) -> None:
    body = await whole(bench, settings={"enable_per_request_metrics": True})
    assert (await whole(bench))["metrics"] is None
    metrics = body["metrics"]
    assert set(metrics) == {
        "time_to_first_token_ms",
        "generation_time_ms",
        "queue_time_ms",
        "mean_itl_ms",
        "tokens_per_second",
        "speculative_decoding",
    }
    assert metrics["time_to_first_token_ms"] - metrics["queue_time_ms"] == 1000.0
    assert metrics["speculative_decoding"] is None


@pytest.mark.parametrize(("echo", "stream"), [(False, False), (True, False), (True, True)])
async def test_a_prompts_log_probabilities_are_written_once_for_all_answers(
    bench: Any, watched: Any, echo: bool, stream: bool
) -> None:
    size, rivals = 800, 20
    scores = [bench.logprob("y", *((i, -1.0 - i) for i in range(1, rivals + 1)))] * (size - 1)

    def script(request: Any, branch: int) -> list[Any]:
        reported = [] if branch else scores
        return [bench.say("a", END, logprobs=[bench.logprob("a")], prompt_logprobs=reported)]

    bench.engine.script = script
    asked = {"echo": True, "logprobs": rivals} if echo else {"prompt_logprobs": rivals}
    body = {"prompt": [121] * size, "max_tokens": 1, "n": 16, "stream": stream, **asked}
    api = bench.api(max_model_len=1024)
    async with bench.client_of(api) as client:
        response = await client.post(TEXT, json=body)
    assert response.status_code == 200
    # Offsets and names of the prompt's own tokens, and its rivals: once.
    assert size * rivals <= watched.elsewhere["token_bytes"] <= size * (rivals + 4)
    # The echoed text, and the answers.
    assert watched.on_loop["token_bytes"] < 1.2 * size
    if not stream:
        choices = response.json()["choices"]
        name = "logprobs" if echo else "prompt_logprobs"
        assert [c[name] for c in choices] == [choices[0][name]] * 16


def outputs_of(bench: Any) -> None:
    """Make each sequence say its prompt's first token and its number; later ones end first."""

    def script(request: AddRequest, branch: int) -> list[Any]:
        name = f"{request.prompt_token_ids[0]}.{branch}"
        words = [bench.say(" " * (3 - branch))] * (3 - branch)
        return [*words, bench.say(name, FinishReason.LENGTH, cached=1)]

    bench.engine.script = script


def texts_of(choices: list[Any]) -> dict[int, str]:
    texts: dict[int, str] = {}
    for choice in choices:
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return texts


@pytest.mark.parametrize("stream", [False, True])
async def test_choices_are_numbered_by_prompt_then_answer(bench: Any, stream: bool) -> None:
    outputs_of(bench)
    asked: dict[str, Any] = {"prompt": [[1, 2], [7]], "n": 3}
    if stream:
        *events, last = await bench.events(TEXT, {**asked, **WITH_USAGE})
        choices, usage = [event["choices"][0] for event in events], last["usage"]
    else:
        body = await bench.answer(TEXT, asked)
        choices, usage = body["choices"], body["usage"]
        assert [c["index"] for c in choices] == list(range(6))
    texts = texts_of(choices)
    assert len([c for c in choices if c["finish_reason"]]) == 6
    expected = ["1.0", "1.1", "1.2", "7.0", "7.1", "7.2"]
    assert [texts[i].strip() for i in range(6)] == expected
    assert len({request.request_id for request in bench.engine.requests}) == 2
    # Three prompt tokens, whatever n; each answer 3 bytes of name and its spaces.
    assert usage["prompt_tokens"] == 3
    assert usage["completion_tokens"] == 2 * (3 * 3 + 9 + 4 + 1)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2}


async def test_a_streamed_chat_opens_every_answer_once(bench: Any) -> None:
    outputs_of(bench)
    events = await bench.events(CHAT, {"messages": USER, "n": 3})
    choices = [event["choices"][0] for event in events]
    assert sorted(c["index"] for c in choices if "role" in c["delta"]) == [0, 1, 2]
    assert sorted(c["index"] for c in choices if c["finish_reason"]) == [0, 1, 2]


async def test_the_last_record_of_a_request_carries_its_n(bench: Any) -> None:
    outputs_of(bench)
    api = bench.api()
    async with bench.client_of(api) as client:
        await client.post(TEXT, json={"prompt": [[1], [2]], "n": 3})
    page = api.page()
    assert 'finished_reason="length"} 6\n' in page
    assert 'vllm:request_params_n_count{model_name="tiny",engine="0"} 2\n' in page
    assert 'vllm:request_params_n_sum{model_name="tiny",engine="0"} 6' in page
    longest = "vllm:request_max_num_generation_tokens"
    assert f'{longest}_sum{{model_name="tiny",engine="0"}} 24' in page


@pytest.mark.parametrize("stream", [False, True])
async def test_one_answers_failure_ends_them_all(bench: Any, stream: bool) -> None:
    never = asyncio.Event()

    def script(request: AddRequest, branch: int) -> list[Any]:
        if branch == 1:
            return [bench.say([], FinishReason.ERROR, error="corrupt")]
        return [never]

    bench.engine.script = script
    api = bench.api()
    async with bench.client_of(api) as client:
        response = await client.post(TEXT, json={"prompt": "a", "n": 3, "stream": stream})
    assert (response.status_code, response.json()["error"]["message"]) == (500, "corrupt")
    (request,) = bench.engine.requests
    assert sorted(bench.engine.aborted) == sorted([request.request_id, request.branch_ids[1]])
    page = api.page()
    assert 'finished_reason="error"} 1\n' in page
    assert 'finished_reason="abort"} 2\n' in page


async def test_an_engine_that_is_gone_fails_every_sequence_once(bench: Any) -> None:
    def gone(request: AddRequest, branch: int) -> list[Any]:
        raise EngineDeadError("gone")

    bench.engine.script = gone
    api = bench.api()
    async with bench.client_of(api) as client:
        response = await client.post(TEXT, json={"prompt": "a", "n": 2})
    assert response.status_code == 503
    assert 'finished_reason="error"} 2\n' in api.page()


async def test_a_stop_string_ends_one_answer_and_not_the_others(bench: Any) -> None:
    def script(request: AddRequest, branch: int) -> list[Any]:
        if branch == 0:
            return [bench.say("aENDb"), asyncio.Event()]
        return [bench.say("xyz"), bench.say("!", FinishReason.LENGTH)]

    bench.engine.script = script
    choices = await choices_of(bench, False, n=2, stop="END")
    said = [(choice["text"], choice["stop_reason"]) for choice in choices]
    assert said == [("a", "END"), ("xyz!", None)]
    assert bench.engine.aborted == [bench.engine.requests[0].request_id]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_abort_by_id_ends_the_answers_it_names(bench: Any, stream: bool) -> None:
    saw, aborted = asyncio.Event(), asyncio.Event()

    def script(request: AddRequest, branch: int) -> list[Any]:
        saw.set()
        if branch == 0:
            return [aborted, bench.say([], FinishReason.ABORT)]
        if branch == 1:
            return [bench.say("x"), aborted, bench.say([], FinishReason.ABORT)]
        return [bench.say("y", FinishReason.LENGTH)]

    bench.engine.script = script
    asked = {"prompt": [1, 2], "n": 3, "stream": stream, "request_id": "mine", "echo": True}
    asked |= {"logprobs": 0}
    async with bench.client() as client, asyncio.TaskGroup() as group:
        answer = group.create_task(client.post(TEXT, json=asked))
        await saw.wait()
        (request,) = bench.engine.requests
        named = {"request_ids": [request.request_id, request.branch_ids[0]]}
        await client.post("/abort_requests", json=named)
        aborted.set()
        response = await answer
    events = events_of(response.text) if stream else [response.json()]
    parts = [choice for event in events for choice in event["choices"]]
    ends = {p["index"]: p["finish_reason"] for p in parts if p["finish_reason"]}
    assert ends == {0: "abort", 1: "abort", 2: "length"}
    assert texts_of(parts) == {0: "\1\2", 1: "\1\2x", 2: "\1\2y"}
    # What is not known of the echoed prompt is null.
    firsts = [next(p for p in parts if p["index"] == i)["logprobs"] for i in range(3)]
    assert [f["token_logprobs"][:2] for f in firsts] == [[None, None]] * 3
