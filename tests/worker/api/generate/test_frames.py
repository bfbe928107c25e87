"""Frames and bodies have exactly the bytes that clients of vLLM read."""

import json

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

HEAD = ResponseHead("id-1", "tiny", 7, "pointsman-1-abc")
USAGE = TokenCounts(3, 2, 1)
USAGE_JSON = {
    "prompt_tokens": 3,
    "total_tokens": 5,
    "completion_tokens": 2,
    "prompt_tokens_details": {"cached_tokens": 1},
}


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
    last = json.loads(frames.usage(USAGE, None).removeprefix(b"data: "))
    assert (last["choices"], last["usage"]) == ([], USAGE_JSON)
    delta = json.loads(frames.delta(Delta(0, "a", usage=USAGE)).removeprefix(b"data: "))
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
    chunk = json.loads(frames.delta(delta).removeprefix(b"data: "))
    assert chunk["choices"][0]["logprobs"] == fields
    assert chunk["choices"][0]["token_ids"] == [5, 6]
    assert chunk["metrics"] == {"queue_time_ms": 1.5}
    opening = json.loads(frames.opening(3, USAGE).removeprefix(b"data: "))
    assert opening["usage"] == USAGE_JSON
    place = opening if kind is ChatFrames else opening["choices"][0]
    assert place["prompt_token_ids"] == [3]


def test_a_continued_chat_begins_with_its_last_message() -> None:
    frames = ChatFrames(HEAD, PromptFacts(text="<p>"), role="user", echo="I am")
    role, echoed = (
        json.loads(frame.removeprefix(b"data: "))
        for frame in frames.opening(0, None).split(b"\n\n")[:2]
    )
    assert role["choices"][0]["delta"] == {"role": "user", "content": ""}
    assert role["prompt_text"] == "<p>"
    assert echoed["choices"][0]["delta"] == {"content": "I am"}
    body = json.loads(frames.body([Answer(" here", Ending("stop"))], USAGE, None))
    assert body["choices"][0]["message"]["content"] == "I am here"
    assert body["choices"][0]["message"]["role"] == "user"


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
