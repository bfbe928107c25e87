"""The whole answer of a request that is not streamed."""

from typing import Any

import pytest

from worker.types import FinishReason

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "hi"}]
END = FinishReason.LENGTH


async def whole(bench: Any, path: str = TEXT, **body: Any) -> Any:
    settings = body.pop("settings", {})
    base = {"messages": USER} if path == CHAT else {"prompt": "a"}
    response = await bench.post(path, {**base, **body}, **settings)
    assert response.status_code == 200, response.text
    return response.json()


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
