"""Frames and bodies have exactly the bytes that clients of vLLM read."""

from __future__ import annotations

import json

import pytest

from worker.api.sse import (
    DONE,
    Answer,
    ChatFrames,
    CompletionFrames,
    Ending,
    ResponseHead,
    Usage,
    error_body,
    error_frame,
)
from worker.errors import RequestError

HEAD = ResponseHead("id-1", "tiny", 7)
USAGE = Usage(3, 2, 1)
USAGE_JSON = {
    "prompt_tokens": 3,
    "total_tokens": 5,
    "completion_tokens": 2,
    "prompt_tokens_details": {"cached_tokens": 1},
}


def test_the_first_chat_chunk_names_the_role() -> None:
    """The opening chunk is byte for byte vLLM's."""
    assert ChatFrames(HEAD).opening(0) == (
        b'data: {"id":"id-1","object":"chat.completion.chunk","created":7,"model":"tiny",'
        b'"choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,'
        b'"finish_reason":null}],"prompt_token_ids":null,"prompt_text":null}\n\n'
    )
    assert CompletionFrames(HEAD).opening(0) == b""


def test_a_chat_delta_carries_text_and_the_last_one_its_ending() -> None:
    """`stop_reason` appears only on a choice's last chunk."""
    frames = ChatFrames(HEAD)
    assert frames.delta(0, 'é"\n', None, None) == (
        b'data: {"id":"id-1","object":"chat.completion.chunk","created":7,"model":"tiny",'
        b'"choices":[{"index":0,"delta":{"content":"\xc3\xa9\\"\\n"},"logprobs":null,'
        b'"finish_reason":null,"token_ids":null}]}\n\n'
    )
    assert frames.delta(0, "", Ending("stop", "END"), None).endswith(
        b'"delta":{"content":""},"logprobs":null,"finish_reason":"stop","stop_reason":"END",'
        b'"token_ids":null}]}\n\n'
    )


def test_a_completion_delta_is_a_text() -> None:
    """Text chunks carry both reasons, null until the end."""
    frames = CompletionFrames(HEAD)
    assert frames.delta(1, "a", None, None) == (
        b'data: {"id":"id-1","object":"text_completion","created":7,"model":"tiny","choices":'
        b'[{"index":1,"text":"a","logprobs":null,"finish_reason":null,"stop_reason":null}]}\n\n'
    )
    assert b'"finish_reason":"stop","stop_reason":5}' in frames.delta(
        0, "", Ending("stop", 5), None
    )


@pytest.mark.parametrize("kind", [ChatFrames, CompletionFrames])
def test_usage_comes_in_a_chunk_without_choices(
    kind: type[ChatFrames] | type[CompletionFrames],
) -> None:
    """The usage chunk, and a delta with usage, are valid JSON with the counts."""
    frames = kind(HEAD)
    last = json.loads(frames.usage(USAGE).removeprefix(b"data: "))
    assert (last["choices"], last["usage"]) == ([], USAGE_JSON)
    delta = json.loads(frames.delta(0, "a", None, USAGE).removeprefix(b"data: "))
    assert (len(delta["choices"]), delta["usage"]) == (1, USAGE_JSON)


def test_a_whole_chat_answer_has_every_null() -> None:
    """Keys are present with null where there is nothing to say."""
    body = json.loads(ChatFrames(HEAD).body([Answer("hi", Ending("length"))], USAGE))
    assert body["object"] == "chat.completion"
    choice = body["choices"][0]
    assert choice["message"] == {
        "role": "assistant",
        "content": "hi",
        **dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning")),
    }
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)
    assert body["usage"] == {**USAGE_JSON, "completion_tokens_details": None}
    assert {"service_tier", "system_fingerprint", "prompt_logprobs", "metrics"} <= body.keys()


def test_a_whole_completion_has_a_choice_for_every_prompt() -> None:
    """Choices are in the order of the prompts."""
    answers = [Answer("a", Ending("stop", "x")), Answer("b", Ending("length"))]
    body = json.loads(CompletionFrames(HEAD).body(answers, USAGE))
    assert [(c["index"], c["text"], c["stop_reason"]) for c in body["choices"]] == [
        (0, "a", "x"),
        (1, "b", None),
    ]


def test_errors_have_openais_envelope() -> None:
    """The same envelope is a body before the first byte and an event after it."""
    error = RequestError("no", param="n", status=404, type="NotFoundError")
    expected = {"error": {"message": "no", "type": "NotFoundError", "param": "n", "code": 404}}
    assert json.loads(error_body(error)) == expected
    assert error_frame(error) == b"data: " + error_body(error) + b"\n\n"
    assert DONE == b"data: [DONE]\n\n"
