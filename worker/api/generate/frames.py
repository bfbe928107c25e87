"""Response bodies and stream frames: the interface, and the parts that APIs share. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import msgspec
from msgspec import UNSET

from worker.api.schema.answers import FunctionOut, PromptDetails, ToolCallOut, Usage
from worker.api.tools.writer import CallDelta

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

encode = msgspec.json.Encoder().encode
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Token counts that include every prompt once. `cached_tokens` None: not shown."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None

    def usage(self, *, whole: bool = False) -> Usage:
        """Return the `usage` of a frame, without null fields, or of a `whole` body, with them."""
        # vLLM's bodies have nulls where its frames have no field.
        absent = None if whole else UNSET
        return Usage(
            self.prompt_tokens,
            self.prompt_tokens + self.completion_tokens,
            self.completion_tokens,
            absent if self.cached_tokens is None else PromptDetails(self.cached_tokens),
            None if whole else UNSET,
        )


@dataclass(frozen=True, slots=True)
class Ending:
    """OpenAI's `finish_reason`, and vLLM's `stop_reason`: a stop string, or a token's id."""

    finish_reason: str
    stop_reason: str | int | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """The part of one choice in one frame; the last one has the `ending`."""

    index: int
    text: str
    ending: Ending | None = None
    logprobs: Json | msgspec.Raw | None = None
    token_ids: Sequence[int] | None = None
    usage: TokenCounts | None = None
    metrics: Json | None = None
    reasoning: str = ""
    calls: Sequence[CallDelta] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """One whole choice; `pooled` is its embedding, `kv_transfer` is for another worker's decode."""

    text: str
    ending: Ending
    logprobs: Json | msgspec.Raw | None = None
    token_ids: Sequence[int] | None = None
    prompt_logprobs: msgspec.Raw | None = None
    reasoning: str = ""
    calls: Sequence[CallDelta] = ()
    pooled: Sequence[float] = ()
    usage: TokenCounts | None = None
    kv_transfer: Json | None = None


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """The fields that every chunk repeats; only the last ones show the `fingerprint`."""

    id: str
    model: str
    created: int
    fingerprint: str | None = None


@dataclass(frozen=True, slots=True)
class PromptFacts:
    """Facts about the prompts; each prompt has `choices_each` choices."""

    token_ids: Sequence[Sequence[int]] | None = None
    text: str | None = None
    choices_each: int = 1

    def ids_of(self, index: int) -> Sequence[int] | None:
        return None if self.token_ids is None else self.token_ids[index // self.choices_each]


_NO_FACTS = PromptFacts()


class Frames:
    """The wire form of one response. Responses that are never streamed implement only `body`."""

    done: bytes = b""

    def opening(self, index: int, usage: TokenCounts | None) -> bytes:
        raise NotImplementedError

    def delta(self, delta: Delta) -> bytes:
        raise NotImplementedError

    def usage(self, usage: TokenCounts, metrics: Json | None) -> bytes:
        raise NotImplementedError

    def body(self, answers: Sequence[Answer], usage: TokenCounts, metrics: Json | None) -> bytes:
        raise NotImplementedError


def or_null(value: object) -> bytes:
    return b"null" if value is None else encode(value)


@dataclass
class OpenAiFrames(Frames):
    head: ResponseHead
    prompt: PromptFacts = _NO_FACTS
    done = DONE
    kind: ClassVar[str]

    @cached_property
    def start(self) -> bytes:
        """The beginning of a chunk, `data: {…,`, up to and including the key of the choices."""
        # A frame is written per engine step and request: what is constant is encoded once.
        head = self.head
        fields = {"id": head.id, "object": self.kind, "created": head.created, "model": head.model}
        return b"data: " + encode(fields)[:-1] + b',"choices":['

    def usage(self, usage: TokenCounts, metrics: Json | None) -> bytes:
        return self.start + self.tail(usage, metrics, last=True)

    def tail(self, usage: TokenCounts | None, metrics: Json | None, *, last: bool) -> bytes:
        """Return a frame's end; `last` marks a choice's last frame and the one with the usage."""
        # The usual frame: nothing to encode.
        if not last and usage is None:
            return b"]}\n\n"
        tail = b"]"
        if last and self.head.fingerprint is not None:
            tail += b',"system_fingerprint":' + encode(self.head.fingerprint)
        if usage is not None:
            tail += b',"usage":' + encode(usage.usage())
        if metrics is not None:
            tail += b',"metrics":' + encode(metrics)
        return tail + b"}\n\n"

    def fields_of_body(
        self, answers: Sequence[Answer], usage: TokenCounts, metrics: Json | None
    ) -> Json:
        return {
            "id": self.head.id,
            "created": self.head.created,
            "model": self.head.model,
            "system_fingerprint": self.head.fingerprint,
            "usage": usage.usage(whole=True),
            "metrics": metrics,
            "kv_transfer_params": answers[0].kv_transfer if answers else None,
        }


def whole_calls(parts: Sequence[CallDelta]) -> list[ToolCallOut]:
    calls: dict[int, ToolCallOut] = {}
    for part in parts:
        # A broken call may have been sent in part; the whole answer has its text instead.
        if part.broken:
            del calls[part.index]
        elif part.name is not None:
            calls[part.index] = ToolCallOut(part.id or "", FunctionOut(part.name, part.arguments))
        else:
            calls[part.index].function.arguments += part.arguments
    return list(calls.values())


def fields_of_choice(answer: Answer) -> Json:
    return {
        "logprobs": answer.logprobs,
        "finish_reason": answer.ending.finish_reason,
        "stop_reason": answer.ending.stop_reason,
        "token_ids": answer.token_ids,
    }
