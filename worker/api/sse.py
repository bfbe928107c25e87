"""Response bodies and stream frames of chat and text completions, as bytes. Pure.

One frame is written per engine step and request, so everything constant over a stream is encoded
once, and a frame is a concatenation around the encoded text. Shapes are those of vLLM 0.32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from worker.errors import RequestError

DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a response; every prompt counts once."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def body(self) -> dict[str, Any]:
        """The `usage` object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "completion_tokens": self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a choice ended: OpenAI's `finish_reason`, and vLLM's `stop_reason` (the stop string, the
    stop token's id, or None).
    """

    finish_reason: str
    stop_reason: str | int | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """One complete choice of a response that is not streamed."""

    text: str
    ending: Ending


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """What every chunk of a response repeats. `created` is unix time."""

    id: str
    model: str
    created: int


class Frames(Protocol):
    """The wire form of one response: frames when streamed, one body when not."""

    def opening(self, index: int) -> bytes:
        """What comes before the first text of a choice; may be empty."""
        ...

    def delta(self, index: int, text: str, ending: Ending | None, usage: Usage | None) -> bytes:
        """A frame with new text; `ending` is set on a choice's last one, `usage` when asked for."""
        ...

    def usage(self, usage: Usage) -> bytes:
        """The frame after the last choice that carries the usage."""
        ...

    def body(self, answers: list[Answer], usage: Usage) -> bytes:
        """The JSON body of a response that is not streamed."""
        ...


def _stream_head(head: ResponseHead, kind: str) -> bytes:
    """`data: {…,` up to and with the key of the choices."""
    start = {"id": head.id, "object": kind, "created": head.created, "model": head.model}
    return b"data: " + _encode(start)[:-1] + b',"choices":['


def _tail(usage: Usage | None) -> bytes:
    if usage is None:
        return b"]}\n\n"
    return b'],"usage":' + _encode(usage.body()) + b"}\n\n"


class ChatFrames:
    """`chat.completion` and `chat.completion.chunk`."""

    def __init__(self, head: ResponseHead) -> None:
        self._head = head
        self._start = _stream_head(head, "chat.completion.chunk")

    def opening(self, index: int) -> bytes:
        """The chunk that names the role."""
        return (
            self._start
            + b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,' % index
            + b'"finish_reason":null}],"prompt_token_ids":null,"prompt_text":null}\n\n'
        )

    def delta(self, index: int, text: str, ending: Ending | None, usage: Usage | None) -> bytes:
        """See `Frames.delta`."""
        start = self._start + b'{"index":%d,"delta":{"content":' % index + _encode(text)
        if ending is None:
            end = b'},"logprobs":null,"finish_reason":null,"token_ids":null}'
        else:
            end = b'},"logprobs":null,"finish_reason":%b,"stop_reason":%b,"token_ids":null}' % (
                _encode(ending.finish_reason),
                _encode(ending.stop_reason),
            )
        return start + end + _tail(usage)

    def usage(self, usage: Usage) -> bytes:
        """See `Frames.usage`."""
        return self._start + _tail(usage)

    def body(self, answers: list[Answer], usage: Usage) -> bytes:
        """See `Frames.body`."""
        choices = [
            {
                "index": index,
                "message": {
                    "role": "assistant",
                    "content": answer.text,
                    "refusal": None,
                    "annotations": None,
                    "audio": None,
                    "function_call": None,
                    "reasoning": None,
                },
                "logprobs": None,
                "finish_reason": answer.ending.finish_reason,
                "stop_reason": answer.ending.stop_reason,
                "token_ids": None,
            }
            for index, answer in enumerate(answers)
        ]
        nulls = ("prompt_logprobs", "prompt_token_ids", "prompt_text")
        return _whole(self._head, "chat.completion", choices, usage, nulls)


class CompletionFrames:
    """`text_completion`, streamed or not."""

    def __init__(self, head: ResponseHead) -> None:
        self._head = head
        self._start = _stream_head(head, "text_completion")

    def opening(self, index: int) -> bytes:
        """Text completions have no role to announce."""
        return b""

    def delta(self, index: int, text: str, ending: Ending | None, usage: Usage | None) -> bytes:
        """See `Frames.delta`."""
        end = ending or Ending("", None)
        return (
            self._start
            + b'{"index":%d,"text":%b,"logprobs":null,"finish_reason":%b,"stop_reason":%b}'
            % (
                index,
                _encode(text),
                _encode(end.finish_reason or None),
                _encode(end.stop_reason),
            )
            + _tail(usage)
        )

    def usage(self, usage: Usage) -> bytes:
        """See `Frames.usage`."""
        return self._start + _tail(usage)

    def body(self, answers: list[Answer], usage: Usage) -> bytes:
        """See `Frames.body`."""
        choices = [
            {
                "index": index,
                "text": answer.text,
                "logprobs": None,
                "finish_reason": answer.ending.finish_reason,
                "stop_reason": answer.ending.stop_reason,
                "token_ids": None,
                "prompt_logprobs": None,
                "prompt_token_ids": None,
            }
            for index, answer in enumerate(answers)
        ]
        return _whole(self._head, "text_completion", choices, usage, ())


def _whole(
    head: ResponseHead,
    kind: str,
    choices: list[dict[str, Any]],
    usage: Usage,
    nulls: tuple[str, ...],
) -> bytes:
    details = {**usage.body(), "completion_tokens_details": None}
    return _encode(
        {
            "id": head.id,
            "object": kind,
            "created": head.created,
            "model": head.model,
            "choices": choices,
            "service_tier": None,
            "system_fingerprint": None,
            "usage": details,
            **dict.fromkeys(nulls),
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }
    )


def error_body(error: RequestError) -> bytes:
    """OpenAI's error envelope."""
    return _encode(
        {
            "error": {
                "message": error.message,
                "type": error.type,
                "param": error.param,
                "code": error.status,
            }
        }
    )


def error_frame(error: RequestError) -> bytes:
    """The error as the last event of a stream that has begun."""
    return b"data: " + error_body(error) + b"\n\n"
