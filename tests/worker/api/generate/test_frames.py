"""Frames and bodies have exactly the bytes that clients of vLLM read, when they are due."""

import asyncio
import json
from typing import Any

import pytest

from worker.api.generate.frames import (
    DONE,
    Answer,
    Delta,
    Ending,
    PromptFacts,
    ResponseHead,
    TokenCounts,
)
from worker.api.http.exchange import error_body, error_frame
from worker.api.openai.chat import ChatFrames
from worker.api.openai.completions import CompletionFrames
from worker.errors import RequestError
from worker.types import FinishReason

HEAD = ResponseHead("id-1", "tiny", 7, "pointsman-1-abc")
USAGE = TokenCounts(3, 2, 1)
USAGE_JSON = {
    "prompt_tokens": 3,
    "total_tokens": 5,
    "completion_tokens": 2,
    "prompt_tokens_details": {"cached_tokens": 1},
}


def parsed(frame: bytes) -> Any:
    return json.loads(frame.removeprefix(b"data: "))


def test_the_first_chat_chunk_names_the_role() -> None:
    assert ChatFrames(HEAD).opening(0, None) == (
        b'data: {"id":"id-1","object":"chat.completion.chunk","created":7,"model":"tiny",'
        b'"choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,'
        b'"finish_reason":null}],"prompt_token_ids":null,"prompt_text":null}\n\n'
    )
    assert CompletionFrames(HEAD).opening(0, None) == b""


def test_a_chat_delta_carries_text_and_the_last_one_its_ending() -> None:
    frames = ChatFrames(HEAD)
    assert frames.delta(Delta(0, 'é"\n')) == (
        b'data: {"id":"id-1","object":"chat.completion.chunk","created":7,"model":"tiny",'
        b'"choices":[{"index":0,"delta":{"content":"\xc3\xa9\\"\\n"},"logprobs":null,'
        b'"finish_reason":null,"token_ids":null}]}\n\n'
    )
    assert frames.delta(Delta(0, "", Ending("stop", "END"))).endswith(
        b'"delta":{"content":""},"logprobs":null,"finish_reason":"stop","stop_reason":"END",'
        b'"token_ids":null}],"system_fingerprint":"pointsman-1-abc"}\n\n'
    )


def test_a_completion_delta_is_a_text() -> None:
    frames = CompletionFrames(HEAD)
    assert frames.delta(Delta(1, "a")) == (
        b'data: {"id":"id-1","object":"text_completion","created":7,"model":"tiny","choices":'
        b'[{"index":1,"text":"a","logprobs":null,"finish_reason":null,"stop_reason":null}]}\n\n'
    )
    assert b'"finish_reason":"stop","stop_reason":5}' in frames.delta(
        Delta(0, "", Ending("stop", 5))
    )


@pytest.mark.parametrize("kind", [ChatFrames, CompletionFrames])
def test_usage_comes_in_a_chunk_without_choices(
    kind: type[ChatFrames] | type[CompletionFrames],
) -> None:
    frames = kind(HEAD)
    last = parsed(frames.usage(USAGE, None))
    assert (last["choices"], last["usage"]) == ([], USAGE_JSON)
    delta = parsed(frames.delta(Delta(0, "a", usage=USAGE)))
    assert (len(delta["choices"]), delta["usage"]) == (1, USAGE_JSON)


def test_a_whole_chat_answer_has_every_null() -> None:
    body = json.loads(ChatFrames(HEAD).body([Answer("hi", Ending("length"))], USAGE, None))
    assert body["object"] == "chat.completion"
    choice = body["choices"][0]
    assert choice["message"] == {
        "role": "assistant",
        "content": "hi",
        **dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning")),
    }
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)
    assert body["usage"] == {**USAGE_JSON, "completion_tokens_details": None}
    assert body["system_fingerprint"] == "pointsman-1-abc"
    nulls = ("prompt_logprobs", "prompt_token_ids", "prompt_text", "kv_transfer_params")
    for name in (*nulls, "ec_transfer_params", "service_tier", "metrics"):
        assert body[name] is None
    assert choice["logprobs"] is choice["token_ids"] is choice["routed_experts"] is None


def test_a_whole_completion_has_a_choice_for_every_prompt() -> None:
    answers = [Answer("a", Ending("stop", "x")), Answer("b", Ending("length"))]
    body = json.loads(CompletionFrames(HEAD).body(answers, USAGE, None))
    assert [(c["index"], c["text"], c["stop_reason"]) for c in body["choices"]] == [
        (0, "a", "x"),
        (1, "b", None),
    ]


@pytest.mark.parametrize("kind", [ChatFrames, CompletionFrames])
def test_facts_that_were_asked_for_are_in_the_frames(
    kind: type[ChatFrames] | type[CompletionFrames],
) -> None:
    frames = kind(HEAD, PromptFacts([[1, 2], [3]], choices_each=2))
    fields = {"content": [{"token": "a"}]}
    delta = Delta(3, "a", Ending("stop"), fields, [5, 6], metrics={"queue_time_ms": 1.5})
    chunk = parsed(frames.delta(delta))
    assert chunk["choices"][0]["logprobs"] == fields
    assert chunk["choices"][0]["token_ids"] == [5, 6]
    assert chunk["metrics"] == {"queue_time_ms": 1.5}
    opening = parsed(frames.opening(3, USAGE))
    assert opening["usage"] == USAGE_JSON
    place = opening if kind is ChatFrames else opening["choices"][0]
    assert place["prompt_token_ids"] == [3]


def test_a_continued_chat_begins_with_its_last_message() -> None:
    frames = ChatFrames(HEAD, PromptFacts(text="<p>"), role="user", echo="I am")
    role, echoed = map(parsed, frames.opening(0, None).split(b"\n\n")[:2])
    assert role["choices"][0]["delta"] == {"role": "user", "content": ""}
    assert role["prompt_text"] == "<p>"
    assert echoed["choices"][0]["delta"] == {"content": "I am"}
    body = json.loads(frames.body([Answer(" here", Ending("stop"))], USAGE, None))
    message = body["choices"][0]["message"]
    assert (message["role"], message["content"]) == ("user", "I am here")


def test_cached_tokens_may_be_left_out() -> None:
    usage = TokenCounts(3, 2, None)
    assert b"prompt_tokens_details" not in CompletionFrames(HEAD).usage(usage, None)
    body = json.loads(CompletionFrames(HEAD).body([], usage, None))
    assert body["usage"]["prompt_tokens_details"] is None


def test_errors_have_openais_envelope() -> None:
    error = RequestError("no", param="n", status=404, type="NotFoundError")
    expected = {"error": {"message": "no", "type": "NotFoundError", "param": "n", "code": 404}}
    assert json.loads(error_body(error)) == expected
    assert error_frame(error) == b"data: " + error_body(error) + b"\n\n"
    assert DONE == b"data: [DONE]\n\n"


CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "hi"}]
END = FinishReason.LENGTH


async def stream(bench: Any, path: str = TEXT, **body: Any) -> list[Any]:
    settings = body.pop("settings", {})
    base = {"messages": USER} if path == CHAT else {"prompt": "a"}
    events: list[Any] = await bench.events(path, {**base, **body}, **settings)
    return events


@pytest.mark.parametrize("by_request", [False, True])
async def test_tokens_can_be_gathered_into_fewer_frames(bench: Any, by_request: bool) -> None:
    bench.engine.steps = [*(bench.say(c) for c in "abcdefg"), bench.say("h", END)]
    asked: dict[str, Any] = {"stream_interval": 3} if by_request else {}
    found = await stream(bench, settings={"stream_interval": 1 if by_request else 3}, **asked)
    assert [e["choices"][0]["text"] for e in found] == ["a", "bcd", "efg", "h"]


async def test_logprobs_come_with_their_tokens_exactly_once(bench: Any) -> None:
    euro = "€".encode()
    tokens = [*b"aEN", *euro, *b"b"]
    entries = [bench.logprob(t) for t in tokens]
    steps = [bench.say([t], logprobs=[e]) for t, e in zip(tokens, entries, strict=True)]
    bench.engine.steps = [*steps, bench.say("c", END, logprobs=[bench.logprob("c")])]
    found = await stream(bench, CHAT, stop="END", logprobs=True)
    choices = [e["choices"][0] for e in found[1:]]
    contents = [t for c in choices for t in c["logprobs"]["content"]]
    assert [t["bytes"][0] for t in contents] == [*tokens, ord("c")]
    assert "".join(c["delta"]["content"] for c in choices) == "aEN€bc"
    # Each comes with the step that drew it, whatever the text does.
    assert [len(c["logprobs"]["content"]) for c in choices] == [1] * len(choices)


async def test_text_offsets_continue_over_the_frames(bench: Any) -> None:
    bench.engine.steps = [
        bench.say("ab", logprobs=[bench.logprob("a", ("z", -2.0)), bench.logprob("b")]),
        bench.say("c", END, logprobs=[bench.logprob("c")]),
    ]
    first, second = (e["choices"][0]["logprobs"] for e in await stream(bench, logprobs=1))
    assert first == {
        "text_offset": [0, 1],
        "token_logprobs": [-0.5, -0.5],
        "tokens": ["a", "b"],
        "top_logprobs": [{"a": -0.5, "z": -2.0}, {"b": -0.5}],
    }
    assert second["text_offset"] == [2]


async def test_token_ids_are_streamed_when_asked(bench: Any) -> None:
    bench.engine.steps = [bench.say([0xE2]), bench.say([0x82, 0xAC]), bench.say("!", END)]
    found = await stream(bench, return_token_ids=True, prompt=[5, 6])
    choices = [e["choices"][0] for e in found]
    assert choices[0]["prompt_token_ids"] == [5, 6]
    assert [c["token_ids"] for c in choices] == [[], [0xE2], [0x82, 0xAC], [33]]
    assert [c["text"] for c in choices] == ["", "", "€", "!"]


async def test_an_echo_comes_with_the_first_text(bench: Any) -> None:
    bench.engine.steps = [
        bench.say([], prompt_logprobs=[bench.logprob("y")]),
        bench.say("a", logprobs=[bench.logprob("a")], prompt_logprobs=[bench.logprob("z")]),
        bench.say("b", END, logprobs=[bench.logprob("b")]),
    ]
    first, second = await stream(bench, prompt=[*b"xyz"], echo=True, logprobs=0)
    assert [e["choices"][0]["text"] for e in (first, second)] == ["xyza", "b"]
    logprobs = first["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["x", "y", "z", "a"]
    assert logprobs["token_logprobs"] == [None, -0.5, -0.5, -0.5]
    assert logprobs["text_offset"] == [0, 1, 2, 3]
    assert second["choices"][0]["logprobs"]["text_offset"] == [4]
    (request,) = bench.engine.requests
    assert request.params.prompt_logprobs == 0


async def test_a_branch_waits_for_the_prompt_it_echoes(bench: Any) -> None:
    """Only the first sequence reports the log probabilities of the prompt; all echo it."""
    ready = asyncio.Event()

    def script(request: Any, branch: int) -> list[Any]:
        own = [bench.logprob("a")]
        if branch == 1:
            return [bench.say("a", logprobs=own), bench.say("b", END, logprobs=own)]
        return [ready, bench.say("a", END, logprobs=own, prompt_logprobs=[bench.logprob("y")])]

    bench.engine.script = script
    asyncio.get_running_loop().call_later(0, ready.set)
    found = await stream(bench, prompt=[*b"xy"], echo=True, logprobs=0, n=2)
    firsts = {}
    for event in found:
        firsts.setdefault(event["choices"][0]["index"], event["choices"][0]["logprobs"]["tokens"])
    assert firsts == {0: ["x", "y", "a"], 1: ["x", "y", "a"]}


async def test_usage_can_be_forced_on_every_stream(bench: Any) -> None:
    found = await stream(bench, settings={"enable_force_include_usage": True})
    assert found[-1]["choices"] == []
    assert found[-1]["usage"]["completion_tokens"] == 3


async def test_continuous_usage_counts_from_the_opening_on(bench: Any) -> None:
    bench.engine.steps = [bench.say("a"), bench.say("b", END)]
    options = {"include_usage": True, "continuous_usage_stats": True}
    found = await stream(bench, CHAT, stream_options=options)
    assert [e["usage"]["completion_tokens"] for e in found] == [1, 1, 2, 2]
    assert len({e["usage"]["prompt_tokens"] for e in found}) == 1


@pytest.mark.parametrize("is_forced", [False, True])
async def test_continuous_usage_needs_usage(bench: Any, is_forced: bool) -> None:
    options = {"include_usage": False, "continuous_usage_stats": True}
    settings = {"enable_force_include_usage": is_forced}
    found = await stream(bench, CHAT, settings=settings, stream_options=options)
    assert [event.get("usage") is not None for event in found] == [is_forced] * len(found)


@pytest.mark.parametrize("with_usage", [False, True])
async def test_metrics_and_fingerprint_come_at_the_end(bench: Any, with_usage: bool) -> None:
    settings = {"enable_per_request_metrics": True, "system_fingerprint": "pointsman-1-abc"}
    options = {"stream_options": {"include_usage": True}} if with_usage else {}
    found = await stream(bench, CHAT, settings=settings, **options)
    assert [e for e in found if "metrics" in e] == found[-1:]
    metrics = found[-1]["metrics"]
    # The scripted engine schedules at 1 s, and gives its tokens between 2 s and 3 s.
    assert metrics["generation_time_ms"] == 1000.0
    assert metrics["mean_itl_ms"] == 500.0
    assert metrics["tokens_per_second"] == 2.0
    ends = [e for e in found if not e["choices"] or e["choices"][0]["finish_reason"]]
    assert [e for e in found if "system_fingerprint" in e] == ends


@pytest.mark.looptime
async def test_a_silent_stream_gets_comments(bench: Any) -> None:
    first, second = asyncio.Event(), asyncio.Event()
    bench.engine.steps = [first, bench.say("a"), second, bench.say("b", END)]
    loop = asyncio.get_running_loop()
    loop.call_later(25, first.set)
    loop.call_later(32, second.set)
    response = await bench.post(TEXT, {"prompt": "a", "stream": True}, sse_keep_alive_seconds=10.0)
    frames = response.text.split("\n\n")[:-1]
    kinds = ["comment" if f == ": keep-alive" else f[:14] for f in frames]
    assert kinds == ["comment", "comment", 'data: {"id":"c', 'data: {"id":"c', "data: [DONE]"]


@pytest.mark.looptime
async def test_a_failure_after_a_keep_alive_is_an_event(bench: Any) -> None:
    failing = asyncio.Event()
    bench.engine.steps = [failing, bench.say([], FinishReason.ERROR, error="corrupt")]
    asyncio.get_running_loop().call_later(15, failing.set)
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    body = json.dumps({"prompt": "a", "stream": True}).encode()
    received = iter([{"type": "http.request", "body": body}])

    async def receive() -> Any:
        for message in received:
            return message
        return await asyncio.Event().wait()

    scope = {"type": "http", "method": "POST", "path": TEXT, "query_string": b"", "headers": []}
    await bench.api(sse_keep_alive_seconds=10.0).app(scope, receive, send)
    head, comment, error = sent
    assert (head["status"], comment["body"]) == (200, b": keep-alive\n\n")
    assert json.loads(error["body"].removeprefix(b"data: "))["error"]["message"] == "corrupt"
    assert error["more_body"]
