"""Responses of `/v1/responses`: the whole object, or its events, made by the same steps. Pure.

An item is announced, grows by deltas, and is sent whole at its end, before the next is announced.
"""

import secrets
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from worker.api.dialects.named_events import NamedEvents
from worker.api.generate.frames import Answer, Delta, Ending, ResponseHead, TokenCounts, encode
from worker.api.schema.answers import Count
from worker.api.tools.writer import CallDelta
from worker.types import FinishReason

Json = dict[str, Any]


class ResponsePart(msgspec.Struct, kw_only=True):
    """Part of `OutputItem`: a text, with log probabilities if they were asked for."""

    type: Literal["output_text", "reasoning_text"]
    text: str
    annotations: list[Any] | UnsetType = UNSET
    logprobs: list[Any] | UnsetType | None = UNSET


class OutputItem(msgspec.Struct, kw_only=True):
    """A message, reasoning, or a function call."""

    type: Literal["message", "reasoning", "function_call"]
    id: str
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"] | UnsetType = UNSET
    content: list[ResponsePart] | UnsetType = UNSET
    summary: list[Any] | UnsetType = UNSET
    call_id: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class InputTokensDetails(msgspec.Struct):
    """Part of `ResponseUsage`: the number of input tokens that came from a cache."""

    cached_tokens: Count


class OutputTokensDetails(msgspec.Struct):
    """Part of `ResponseUsage`. Reasoning tokens are not counted separately: the number is 0."""

    reasoning_tokens: Count = 0


class ResponseUsage(msgspec.Struct):
    """Token counts, under the names of this API."""

    input_tokens: Count
    input_tokens_details: InputTokensDetails
    output_tokens: Count
    output_tokens_details: OutputTokensDetails
    total_tokens: Count


class IncompleteDetails(msgspec.Struct):
    """The reason why a response is incomplete."""

    reason: str


class Response(msgspec.Struct, kw_only=True):
    """Answer of `/v1/responses`; it repeats fields of the request."""

    id: str
    object: Literal["response"] = "response"
    created_at: Count
    status: Literal["in_progress", "completed", "incomplete"]
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None
    error: None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    parallel_tool_calls: bool
    temperature: float | None
    top_p: float | None
    tools: list[Any]
    tool_choice: Any
    text: Any
    reasoning: Any
    metadata: Any
    user: str | None
    top_logprobs: int | None
    truncation: Literal["disabled"] = "disabled"
    previous_response_id: None = None
    background: Literal[False] = False
    store: Literal[False] = False
    service_tier: None = None
    metrics: Any = None


class ResponseFrames(NamedEvents):
    def __init__(self, head: ResponseHead, facts: Json) -> None:
        super().__init__(head)
        self._facts = facts
        self._items: list[OutputItem] = []
        self._open: int | None = None  # its place among the items
        self._broken: set[int] = set()  # no calls after all; the final response leaves them out
        self._entries: list[Any] = []  # log probabilities that no message has yet
        self._next_event = 0

    # ---- the wire ---------------------------------------------------------------------------

    def opening(self, index: int, usage: TokenCounts | None) -> bytes:
        response = self._response("in_progress", None, None)
        self._emit("response.created", response=response)
        self._emit("response.in_progress", response=response)
        return self._take()

    def usage(self, usage: TokenCounts, metrics: Json | None) -> bytes:
        status = self._status()
        self._emit(f"response.{status}", response=self._response(status, usage, metrics))
        return self._take()

    def body(self, answers: Sequence[Answer], usage: TokenCounts, metrics: Json | None) -> bytes:
        [answer] = answers
        self._add(answer)
        self._end(answer.ending)
        return encode(self._response(self._status(), usage, metrics))

    def _emit(self, kind: str, **fields: Any) -> None:
        super()._emit(kind, sequence_number=self._next_event, **fields)
        self._next_event += 1

    def _status(self) -> Literal["completed", "incomplete"]:
        return "completed" if self._incomplete() is None else "incomplete"

    def _incomplete(self) -> IncompleteDetails | None:
        reason = None if self._ending is None else self._ending.finish_reason
        if reason == FinishReason.LENGTH.value:
            return IncompleteDetails("max_output_tokens")
        return IncompleteDetails("abort") if reason == FinishReason.ABORT.value else None

    def _response(
        self,
        status: Literal["in_progress", "completed", "incomplete"],
        usage: TokenCounts | None,
        metrics: Json | None,
    ) -> Response:
        return Response(
            id=self._head.id,
            created_at=self._head.created,
            model=self._head.model,
            status=status,
            output=[item for n, item in enumerate(self._items) if n not in self._broken],
            usage=None if usage is None else _usage(usage),
            incomplete_details=self._incomplete(),
            metrics=metrics,
            **self._facts,
        )

    # ---- items ------------------------------------------------------------------------------

    def _add(self, part: Delta | Answer) -> None:
        self._entries += _entries(part.logprobs)
        if part.reasoning:
            self._grow_text(self._text_item("reasoning"), part.reasoning)
        for piece in self._in_order(part):
            if isinstance(piece, CallDelta):
                self._add_call(piece)
            elif self._is_open("message"):
                self._grow_text(self._text_item("message"), piece)
            else:  # blanks behind a call belong to no item
                begun = piece.lstrip() if self._items else piece
                self._grow_text(self._text_item("message"), begun)
        if self._entries and self._is_open("message"):
            self._grow_text(self._text_item("message"), "")

    def _is_open(self, kind: str) -> bool:
        return self._open is not None and self._items[self._open].type == kind

    def _text_item(self, kind: Literal["message", "reasoning"]) -> int:
        if self._open is not None and self._is_open(kind):
            return self._open
        if kind == "message":
            part = ResponsePart(type="output_text", text="", annotations=[], logprobs=[])
            item = OutputItem(type=kind, id=_new_id("msg"), status="in_progress", role="assistant")
        else:
            part = ResponsePart(type="reasoning_text", text="")
            item = OutputItem(type=kind, id=_new_id("rs"), status="in_progress", summary=[])
        item.content = []
        place = self._announce(item)
        self._emit("response.content_part.added", **self._at(place), content_index=0, part=part)
        item.content.append(part)
        return place

    def _grow_text(self, place: int, text: str) -> None:
        part = self._part(place)
        part.text += text
        fields: Json = {"content_index": 0, "delta": text}
        if isinstance(part.logprobs, list):
            fields["logprobs"], self._entries = self._entries, []
            part.logprobs += fields["logprobs"]
        self._emit(f"response.{part.type}.delta", **self._at(place), **fields)

    def _add_call(self, call: CallDelta) -> None:
        if call.name is not None:
            item = OutputItem(type="function_call", id=_new_id("fc"), status="in_progress")
            item.call_id, item.name, item.arguments = call.id or "", call.name, ""
            self._announce(item)
        place = self._open
        assert place is not None  # noqa: S101 (the first part of a call has its name)
        item = self._items[place]
        if call.broken:
            self._broken.add(place)
            self._close("incomplete")
        elif call.arguments:
            item.arguments = f"{item.arguments or ''}{call.arguments}"
            kind = "response.function_call_arguments.delta"
            self._emit(kind, **self._at(place), delta=call.arguments)

    def _announce(self, item: OutputItem) -> int:
        self._close("completed")
        self._items.append(item)
        place = self._open = len(self._items) - 1
        self._emit("response.output_item.added", output_index=place, item=item)
        return place

    def _end(self, ending: Ending) -> None:
        self._ending = ending
        if not self._items:  # an empty answer is a message too
            self._text_item("message")
        self._close(self._status())

    def _close(self, status: Literal["completed", "incomplete"]) -> None:
        if self._open is None:
            return
        place, self._open = self._open, None
        item = self._items[place]
        item.status = status
        if item.type == "function_call":
            fields = {"name": item.name, "arguments": item.arguments}
            self._emit("response.function_call_arguments.done", **self._at(place), **fields)
        else:
            part = self._part(place)
            texts: Json = {"content_index": 0, "text": part.text}
            if part.type == "output_text":
                texts["logprobs"] = part.logprobs
            self._emit(f"response.{part.type}.done", **self._at(place), **texts)
            self._emit("response.content_part.done", **self._at(place), content_index=0, part=part)
        self._emit("response.output_item.done", output_index=place, item=item)

    def _at(self, place: int) -> Json:
        return {"item_id": self._items[place].id, "output_index": place}

    def _part(self, place: int) -> ResponsePart:
        content = self._items[place].content
        assert content is not UNSET  # noqa: S101 (only of texts)
        return content[0]


def _new_id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(16)}"


def _entries(logprobs: Any) -> list[Any]:
    if isinstance(logprobs, msgspec.Raw):
        logprobs = msgspec.json.decode(logprobs)
    return [] if logprobs is None else list(logprobs["content"])


def _usage(usage: TokenCounts) -> ResponseUsage:
    return ResponseUsage(
        usage.prompt_tokens,
        InputTokensDetails(usage.cached_tokens or 0),
        usage.completion_tokens,
        OutputTokensDetails(),
        usage.prompt_tokens + usage.completion_tokens,
    )
