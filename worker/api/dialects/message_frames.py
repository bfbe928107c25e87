"""Answers of `/v1/messages`: the whole message, or its events, made by the same steps. Pure."""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from worker.api.dialects.named_events import NamedEvents
from worker.api.generate.frames import Answer, Delta, Ending, ResponseHead, TokenCounts, encode
from worker.api.schema.answers import TOOL_CALLS_ENDED, Count
from worker.api.tools.writer import CallDelta
from worker.types import FinishReason

Json = dict[str, Any]
_StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class ContentBlock(msgspec.Struct, kw_only=True):
    """One block of an answer. Clients expect `citations` and `signature`."""

    type: Literal["text", "tool_use", "thinking"]
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    signature: str | UnsetType = UNSET
    id: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    input: Any | UnsetType = UNSET


class MessagesUsage(msgspec.Struct):
    """Token counts. As in Anthropic's API, `input_tokens` leaves out those from a cache."""

    input_tokens: Count
    output_tokens: Count
    cache_creation_input_tokens: Count = 0
    cache_read_input_tokens: Count = 0


class Message(msgspec.Struct, kw_only=True):
    """Answer of `/v1/messages`: the whole message, or its state when a stream begins."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[ContentBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: MessagesUsage


class MessageFrames(NamedEvents):
    def __init__(self, head: ResponseHead) -> None:
        super().__init__(head)
        self._blocks: list[ContentBlock] = []
        self._next_index = 0  # in the stream, which has broken calls too
        self._open: ContentBlock | None = None
        self._arguments = ""  # of the last call, so far

    def opening(self, index: int, usage: TokenCounts | None) -> bytes:
        counts = MessagesUsage(0, 0) if usage is None else _usage(usage)
        counts.output_tokens = 0
        self._emit("message_start", message=self._message([], None, counts))
        self._emit("ping")
        return self._take()

    def usage(self, usage: TokenCounts, metrics: Json | None) -> bytes:
        reason, sequence = _stop(self._ending)
        changed = {"stop_reason": reason, "stop_sequence": sequence}
        self._emit("message_delta", delta=changed, usage=_usage(usage))
        self._emit("message_stop")
        return self._take()

    def body(self, answers: Sequence[Answer], usage: TokenCounts, metrics: Json | None) -> bytes:
        [answer] = answers
        self._add(answer)
        self._end(answer.ending)
        return encode(self._message(self._blocks, answer.ending, _usage(usage)))

    def _message(
        self, blocks: list[ContentBlock], ending: Ending | None, usage: MessagesUsage
    ) -> Message:
        reason, sequence = _stop(ending)
        return Message(
            id=self._head.id,
            model=self._head.model,
            content=blocks,
            stop_reason=reason,
            stop_sequence=sequence,
            usage=usage,
        )

    def _add(self, part: Delta | Answer) -> None:
        if part.reasoning:
            self._text("thinking", part.reasoning)
        for piece in self._in_order(part):
            if isinstance(piece, CallDelta):
                self._call(piece)
            else:
                self._text("text", piece)

    def _end(self, ending: Ending) -> None:
        self._ending = ending
        if not self._blocks:  # an empty answer has a block too
            self._begin(ContentBlock(type="text", text=""))
        self._close()

    def _text(self, kind: Literal["text", "thinking"], text: str) -> None:
        block = self._open
        if block is None or block.type != kind:
            block = ContentBlock(type=kind)
            setattr(block, kind, "")
            if kind == "thinking":
                block.signature = ""
            if self._blocks:  # blanks behind a call belong to no block
                text = text.lstrip()
            self._begin(block)
        setattr(block, kind, getattr(block, kind) + text)
        self._grow({"type": f"{kind}_delta", kind: text})

    def _call(self, call: CallDelta) -> None:
        if call.name is not None:
            self._begin(ContentBlock(type="tool_use", id=call.id or "", name=call.name, input={}))
            self._arguments = ""
        if call.arguments:
            self._arguments += call.arguments
            self._grow({"type": "input_json_delta", "partial_json": call.arguments})
        if call.broken:
            self._close()
            self._blocks.pop()

    def _begin(self, block: ContentBlock) -> None:
        self._close()
        self._open = block
        self._blocks.append(block)
        self._emit("content_block_start", index=self._next_index, content_block=block)

    def _grow(self, delta: Json) -> None:
        self._emit("content_block_delta", index=self._next_index, delta=delta)

    def _close(self) -> None:
        if self._open is None:
            return
        if self._open.type == "tool_use":
            self._open.input = _object(self._arguments)
        self._emit("content_block_stop", index=self._next_index)
        self._next_index += 1
        self._open = None


def _stop(ending: Ending | None) -> tuple[_StopReason | None, str | None]:
    if ending is None:
        return None, None
    if ending.finish_reason == TOOL_CALLS_ENDED:
        return "tool_use", None
    if ending.finish_reason == FinishReason.LENGTH.value:
        return "max_tokens", None
    if ending.finish_reason == FinishReason.STOP.value and isinstance(ending.stop_reason, str):
        return "stop_sequence", ending.stop_reason
    return "end_turn", None


def _usage(usage: TokenCounts) -> MessagesUsage:
    cached = usage.cached_tokens or 0
    return MessagesUsage(
        usage.prompt_tokens - cached, usage.completion_tokens, cache_read_input_tokens=cached
    )


def _object(arguments: str) -> Any:
    """Return the arguments as an object; if the call was cut, their text is its only member."""
    try:
        value = msgspec.json.decode(arguments or "{}")
    except msgspec.DecodeError:
        value = None
    return value if isinstance(value, dict) else {"_incomplete": arguments}
