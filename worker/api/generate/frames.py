"""Response bodies and stream frames of chat and text completions, as bytes. Pure.

One frame is written per engine step and request, so everything constant over a stream is encoded
once, and a frame is a concatenation around the encoded text. Shapes are those of vLLM 0.32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from msgspec import UNSET

from worker.api.schema.answers import (
    ChatChoice,
    ChatCompletion,
    ChatMessageOut,
    FunctionOut,
    Generated,
    PromptDetails,
    TextChoice,
    TextCompletion,
    TokenChoice,
    ToolCallOut,
    Usage,
)
from worker.api.tools.writer import CallDelta

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

_encode = msgspec.json.Encoder().encode
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Token counts of a response; every prompt counts once. `cached_tokens` None: not shown."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None

    def usage(self, *, whole: bool = False) -> Usage:
        """The `usage` object of a frame, without what is not known, or of a `whole` body."""
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
    """Why a choice ended: OpenAI's `finish_reason`, and vLLM's `stop_reason` (the stop string, the
    stop token's id, or None).
    """

    finish_reason: str
    stop_reason: str | int | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """What one frame adds to one choice; `ending` is set on its last one, `usage` and `metrics`
    when they go with it. `token_ids` None: not asked for.
    """

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
    """One complete choice of a response that is not streamed. `calls` are all parts of them;
    `pooled` is the embedding of the prompt, where that was asked for; `usage` counts this choice.
    `kv_transfer` are the parameters for a decode elsewhere, of a prompt whose KV is kept.
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
    """What every chunk of a response repeats. `created` is unix time; `fingerprint` goes with a
    choice's last chunk and with the usage.
    """

    id: str
    model: str
    created: int
    fingerprint: str | None = None


@dataclass(frozen=True, slots=True)
class PromptFacts:
    """What a response tells of its prompts, in order: their token ids when asked for, and of a chat
    its text. `choices_each` choices follow from each.
    """

    token_ids: Sequence[Sequence[int]] | None = None
    text: str | None = None
    choices_each: int = 1

    def ids_of(self, index: int) -> Sequence[int] | None:
        """The prompt of a choice."""
        return None if self.token_ids is None else self.token_ids[index // self.choices_each]


class Frames(Protocol):
    """The wire form of one response: frames when streamed, one body when not."""

    @property
    def done(self) -> bytes:
        """What ends a stream, after all else."""
        ...

    def opening(self, index: int, usage: TokenCounts | None) -> bytes:
        """What comes before the first text of a choice; may be empty."""
        ...

    def delta(self, delta: Delta) -> bytes:
        """A frame with new text."""
        ...

    def usage(self, usage: TokenCounts, metrics: Json | None) -> bytes:
        """The frame after the last choice that carries the usage."""
        ...

    def body(self, answers: Sequence[Answer], usage: TokenCounts, metrics: Json | None) -> bytes:
        """The JSON body of a response that is not streamed."""
        ...


class WholeFrames:
    """What `Frames` has for streams, of answers that are never streamed."""

    done = b""

    def opening(self, index: int, usage: TokenCounts | None) -> bytes:
        """Never called."""
        raise NotImplementedError

    def delta(self, delta: Delta) -> bytes:
        """Never called."""
        raise NotImplementedError

    def usage(self, usage: TokenCounts, metrics: Json | None) -> bytes:
        """Never called."""
        raise NotImplementedError


def _tail(
    head: ResponseHead, usage: TokenCounts | None, metrics: Json | None, *, last: bool
) -> bytes:
    """What follows the choices. `last`: of a choice, or of all."""
    if not last and usage is None:
        return b"]}\n\n"
    tail = b"]"
    if last and head.fingerprint is not None:
        tail += b',"system_fingerprint":' + _encode(head.fingerprint)
    if usage is not None:
        tail += b',"usage":' + _encode(usage.usage())
    if metrics is not None:
        tail += b',"metrics":' + _encode(metrics)
    return tail + b"}\n\n"


def _or_null(value: object) -> bytes:
    return b"null" if value is None else _encode(value)


class _OpenAiFrames:
    """What chats and text completions have in common. `kind` is the object that a chunk is."""

    done = DONE

    def __init__(self, head: ResponseHead, prompt: PromptFacts | None, kind: str) -> None:
        self._head = head
        self._prompt = prompt or PromptFacts()
        start = {"id": head.id, "object": kind, "created": head.created, "model": head.model}
        # `data: {…,` up to and with the key of the choices.
        self._start = b"data: " + _encode(start)[:-1] + b',"choices":['

    def usage(self, usage: TokenCounts, metrics: Json | None) -> bytes:
        return self._start + _tail(self._head, usage, metrics, last=True)


class ChatFrames(_OpenAiFrames):
    """`chat.completion` and `chat.completion.chunk`. `role` is whose turn the answer is; `echo` is
    the text of the last message, when the answer continues it and should begin with it.
    """

    def __init__(
        self,
        head: ResponseHead,
        prompt: PromptFacts | None = None,
        *,
        role: str = "assistant",
        echo: str = "",
    ) -> None:
        super().__init__(head, prompt, "chat.completion.chunk")
        self._role = role
        self._echo = echo

    def opening(self, index: int, usage: TokenCounts | None) -> bytes:
        """The chunk that names the role, and one with the text to begin with."""
        counts = b"" if usage is None else b',"usage":' + _encode(usage.usage())
        frame = (
            self._start
            + b'{"index":%d,"delta":{"role":%b,"content":""},"logprobs":null,'
            % (index, _encode(self._role))
            + b'"finish_reason":null}],"prompt_token_ids":%b,"prompt_text":%b%b}\n\n'
            % (_or_null(self._prompt.ids_of(index)), _or_null(self._prompt.text), counts)
        )
        return frame + self.delta(Delta(index, self._echo, usage=usage)) if self._echo else frame

    def delta(self, delta: Delta) -> bytes:
        ids = _or_null(delta.token_ids)
        start = self._start + b'{"index":%d,"delta":' % delta.index
        start += _chat_delta(delta) + b',"logprobs":' + _or_null(delta.logprobs)
        ending = delta.ending
        if ending is None:
            end = b',"finish_reason":null,"token_ids":%b}' % ids
        else:
            end = b',"finish_reason":%b,"stop_reason":%b,"token_ids":%b}' % (
                _encode(ending.finish_reason),
                _encode(ending.stop_reason),
                ids,
            )
        return start + end + _tail(self._head, delta.usage, delta.metrics, last=ending is not None)

    def body(self, answers: Sequence[Answer], usage: TokenCounts, metrics: Json | None) -> bytes:
        return _encode(
            ChatCompletion(
                **_facts(self._head, usage, metrics),
                choices=[
                    ChatChoice(
                        index=index,
                        message=self._message(answer),
                        **_of_choice(answer),
                    )
                    for index, answer in enumerate(answers)
                ],
                prompt_logprobs=answers[0].prompt_logprobs if answers else None,
                prompt_token_ids=self._prompt.ids_of(0),
                kv_transfer_params=answers[0].kv_transfer if answers else None,
                prompt_text=self._prompt.text,
            )
        )

    def _message(self, answer: Answer) -> ChatMessageOut:
        message = ChatMessageOut(self._role, self._echo + answer.text)
        calls = whole_calls(answer.calls)
        if calls:
            message.tool_calls = calls
        if answer.reasoning:
            message.reasoning = message.reasoning_content = answer.reasoning
        if calls or answer.reasoning:
            message.content = message.content or None
        return message


def _chat_delta(delta: Delta) -> bytes:
    """The `delta` of a chunk. Reasoning has both its names; all that is new of one call is one
    entry, because clients take the first entries that they see as they are.
    """
    if not delta.reasoning and not delta.calls:
        return b'{"content":' + _encode(delta.text) + b"}"
    parts: Json = {"content": delta.text} if delta.text else {}
    if delta.reasoning:
        parts |= {"reasoning": delta.reasoning, "reasoning_content": delta.reasoning}
    entries: dict[int, Json] = {}
    for call in delta.calls:
        if call.broken:
            entries.pop(call.index, None)
            continue
        entry = entries.setdefault(call.index, {"index": call.index, "function": {}})
        if call.name is not None:
            entry |= {"id": call.id, "type": "function"}
            entry["function"]["name"] = call.name
        function = entry["function"]
        function["arguments"] = function.get("arguments", "") + call.arguments
    if entries:
        parts["tool_calls"] = list(entries.values())
    return _encode(parts)


def whole_calls(parts: Sequence[CallDelta]) -> list[ToolCallOut]:
    """The calls that parts add up to, without the broken ones."""
    calls: dict[int, ToolCallOut] = {}
    for part in parts:
        if part.broken:
            del calls[part.index]
        elif part.name is not None:
            calls[part.index] = ToolCallOut(part.id or "", FunctionOut(part.name, part.arguments))
        else:
            calls[part.index].function.arguments += part.arguments
    return list(calls.values())


def in_order(text: str, calls: Sequence[CallDelta], start: int) -> Iterator[str | CallDelta]:
    """Text and parts of calls, one after the other as the answer has them. The text begins behind
    `start` characters of content.
    """
    taken = 0
    for call in calls:
        before = call.content_before - start
        if before > taken:
            yield text[taken:before]
            taken = before
        yield call
    if taken < len(text):
        yield text[taken:]


class CompletionFrames(_OpenAiFrames):
    """`text_completion`, streamed or not."""

    def __init__(self, head: ResponseHead, prompt: PromptFacts | None = None) -> None:
        super().__init__(head, prompt, "text_completion")

    def opening(self, index: int, usage: TokenCounts | None) -> bytes:
        """Text completions have no role to announce; token ids of the prompt come by themselves."""
        ids = self._prompt.ids_of(index)
        if ids is None:
            return b""
        choice = b'{"index":%d,"text":"","logprobs":null,"finish_reason":null,"stop_reason":null,'
        facts = b'"prompt_token_ids":%b,"token_ids":[]}' % _encode(ids)
        return self._start + choice % index + facts + _tail(self._head, usage, None, last=False)

    def delta(self, delta: Delta) -> bytes:
        end = delta.ending or Ending("", None)
        ids = b"" if delta.token_ids is None else b',"token_ids":' + _encode(delta.token_ids)
        return (
            self._start
            + b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b,"stop_reason":%b%b}'
            % (
                delta.index,
                _encode(delta.text),
                _or_null(delta.logprobs),
                _encode(end.finish_reason or None),
                _encode(end.stop_reason),
                ids,
            )
            + _tail(self._head, delta.usage, delta.metrics, last=delta.ending is not None)
        )

    def body(self, answers: Sequence[Answer], usage: TokenCounts, metrics: Json | None) -> bytes:
        return _encode(
            TextCompletion(
                **_facts(self._head, usage, metrics),
                choices=[
                    TextChoice(
                        index=index,
                        text=answer.text,
                        prompt_logprobs=answer.prompt_logprobs,
                        prompt_token_ids=self._prompt.ids_of(index),
                        **_of_choice(answer),
                    )
                    for index, answer in enumerate(answers)
                ],
                kv_transfer_params=answers[0].kv_transfer if answers else None,
            )
        )


class TokenFrames:
    """Token-level answers: token ids, and text only where it is asked for."""

    done = DONE

    def __init__(self, request_id: str, model: str, created: int, *, with_text: bool) -> None:
        self._head: Json = {"request_id": request_id, "model": model, "created": created}
        self._with_text = with_text

    def opening(self, index: int, usage: TokenCounts | None) -> bytes:
        """Nothing comes before the first tokens."""
        return b""

    def delta(self, delta: Delta) -> bytes:
        return self._frame([self._choice(delta.index, delta)], delta.usage, delta.metrics)

    def usage(self, usage: TokenCounts, metrics: Json | None) -> bytes:
        return self._frame([], usage, metrics)

    def body(self, answers: Sequence[Answer], usage: TokenCounts, metrics: Json | None) -> bytes:
        return _encode(
            Generated(
                **self._head,
                choices=[self._choice(index, answer) for index, answer in enumerate(answers)],
                usage=usage.usage(),
                prompt_logprobs=answers[0].prompt_logprobs if answers else None,
                kv_transfer_params=answers[0].kv_transfer if answers else None,
                output_mode="text" if self._with_text else "tokens",
                metrics=metrics,
            )
        )

    def _choice(self, index: int, part: Delta | Answer) -> TokenChoice:
        return TokenChoice(
            index,
            part.token_ids or [],
            part.logprobs,
            None if part.ending is None else part.ending.finish_reason,
            None if part.ending is None else part.ending.stop_reason,
            part.text if self._with_text else UNSET,
        )

    def _frame(
        self, choices: list[TokenChoice], usage: TokenCounts | None, metrics: Json | None
    ) -> bytes:
        frame: Json = {**self._head, "choices": choices}
        if usage is not None:
            frame["usage"] = usage.usage()
        if metrics is not None:
            frame["metrics"] = metrics
        return b"data: " + _encode(frame) + b"\n\n"


def _facts(head: ResponseHead, usage: TokenCounts, metrics: Json | None) -> Json:
    """What the body of any response says besides its choices."""
    return {
        "id": head.id,
        "created": head.created,
        "model": head.model,
        "system_fingerprint": head.fingerprint,
        "usage": usage.usage(whole=True),
        "metrics": metrics,
    }


def _of_choice(answer: Answer) -> Json:
    return {
        "logprobs": answer.logprobs,
        "finish_reason": answer.ending.finish_reason,
        "stop_reason": answer.ending.stop_reason,
        "token_ids": answer.token_ids,
    }
