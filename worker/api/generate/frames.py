"""Response bodies and stream frames: the interface, and the parts that APIs share. Pure.

A frame is written per engine step and request, so what is constant over a stream is encoded once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Protocol

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
    """Every prompt counts once. `cached_tokens` None: not shown."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None

    def usage(self, *, whole: bool = False) -> Usage:
        """Return the `usage` object of a frame, without unknown fields, or of a `whole` body."""
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
    """One whole choice. `calls` are all parts of them, `pooled` the embedding of the prompt,
    `kv_transfer` the parameters for a decode elsewhere, of a prompt whose KV is retained.
    """

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
    """The facts of the prompts; `choices_each` choices follow from each prompt."""

    token_ids: Sequence[Sequence[int]] | None = None
    text: str | None = None
    choices_each: int = 1

    def ids_of(self, index: int) -> Sequence[int] | None:
        return None if self.token_ids is None else self.token_ids[index // self.choices_each]


class Frames(Protocol):
    """The wire form of one response: frames when streamed, one body when not."""

    @property
    def done(self) -> bytes: ...

    def opening(self, index: int, usage: TokenCounts | None) -> bytes:
        """The frames before the first text of a choice; may be empty."""
        ...

    def delta(self, delta: Delta) -> bytes: ...

    def usage(self, usage: TokenCounts, metrics: Json | None) -> bytes:
        """The frame after the last choice that carries the usage."""
        ...

    def body(
        self, answers: Sequence[Answer], usage: TokenCounts, metrics: Json | None
    ) -> bytes: ...


class WholeFrames:
    """The methods of `Frames` that streams use, for answers that are never streamed."""

    done = b""

    def opening(self, index: int, usage: TokenCounts | None) -> bytes:
        raise NotImplementedError

    def delta(self, delta: Delta) -> bytes:
        raise NotImplementedError

    def usage(self, usage: TokenCounts, metrics: Json | None) -> bytes:
        raise NotImplementedError


def tail(
    head: ResponseHead, usage: TokenCounts | None, metrics: Json | None, *, last: bool
) -> bytes:
    """`last`: the tail of a choice's last frame, or of the usage's."""
    # The usual frame: nothing to encode.
    if not last and usage is None:
        return b"]}\n\n"
    tail = b"]"
    if last and head.fingerprint is not None:
        tail += b',"system_fingerprint":' + encode(head.fingerprint)
    if usage is not None:
        tail += b',"usage":' + encode(usage.usage())
    if metrics is not None:
        tail += b',"metrics":' + encode(metrics)
    return tail + b"}\n\n"


def or_null(value: object) -> bytes:
    return b"null" if value is None else encode(value)


class OpenAiFrames:
    done = DONE
    kind: ClassVar[str]
    head: ResponseHead

    @cached_property
    def start(self) -> bytes:
        """`data: {…,` of a chunk, up to and with the key of the choices."""
        head = self.head
        fields = {"id": head.id, "object": self.kind, "created": head.created, "model": head.model}
        return b"data: " + encode(fields)[:-1] + b',"choices":['

    def usage(self, usage: TokenCounts, metrics: Json | None) -> bytes:
        return self.start + tail(self.head, usage, metrics, last=True)


def whole_calls(parts: Sequence[CallDelta]) -> list[ToolCallOut]:
    """Join the parts into calls, without the broken ones."""
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


def in_order(text: str, calls: Sequence[CallDelta], start: int) -> Iterator[str | CallDelta]:
    """Return text and calls in order. The text begins behind `start` characters of content."""
    taken = 0
    for call in calls:
        before = call.content_before - start
        if before > taken:
            yield text[taken:before]
            taken = before
        yield call
    if taken < len(text):
        yield text[taken:]


def fields_of_body(head: ResponseHead, usage: TokenCounts, metrics: Json | None) -> Json:
    return {
        "id": head.id,
        "created": head.created,
        "model": head.model,
        "system_fingerprint": head.fingerprint,
        "usage": usage.usage(whole=True),
        "metrics": metrics,
    }


def fields_of_choice(answer: Answer) -> Json:
    return {
        "logprobs": answer.logprobs,
        "finish_reason": answer.ending.finish_reason,
        "stop_reason": answer.ending.stop_reason,
        "token_ids": answer.token_ids,
    }
