"""`POST /v1/chat/completions`: body → prompt → checks → request to the engine → frames."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from worker.api.generate.frames import (
    Answer,
    Delta,
    Frames,
    OpenAiFrames,
    PromptFacts,
    ResponseHead,
    TokenCounts,
    encode,
    fields_of_choice,
    or_null,
    whole_calls,
)
from worker.api.generate.logprobs import ChatLogprobs
from worker.api.generate.prepared import Prepared
from worker.api.generate.text import ChatPrompt, Encode
from worker.api.http.arrival import Arrival
from worker.api.openai.checks import Prompts, RequestChecks
from worker.api.schema.answers import ChatChoice, ChatCompletion, ChatMessageOut
from worker.api.schema.conversation import content_of
from worker.api.schema.parse import decode_supported
from worker.api.schema.requests import ChatRequest

Json = dict[str, Any]


class ChatApi:
    """Prepares conversations; without a limit the answer may fill the context."""

    def __init__(self, checks: RequestChecks, encode: Encode | None = None) -> None:
        self._checks = checks
        self._adapters = checks.adapters
        self._text = replace(checks.text, prompt_encoder=encode)
        self._plans = checks.plans
        self._token_bytes = checks.text.tokenizer.token_bytes

    async def __call__(self, body: bytes, arrival: Arrival) -> Prepared:
        return await self.prepared(decode_supported(body, ChatRequest), arrival)

    async def prepared(self, request: ChatRequest, arrival: Arrival) -> Prepared:
        adapter = self._adapters.adapter_of(request.model)
        special = bool(request.add_special_tokens)
        prompt = await self._text.chat_prompt(request.messages, request, add_special_tokens=special)
        return await self._checks.prepared(
            request,
            arrival,
            adapter,
            Prompts([prompt.ids], ["messages"]),
            self._plans.of_chat(request, prompt),
            partial(_frames, request, prompt),
            lambda as_ids: ChatLogprobs(self._token_bytes, as_ids=as_ids),
        )


def _frames(
    request: ChatRequest, prompt: ChatPrompt, head: ResponseHead, facts: PromptFacts
) -> Frames:
    if request.return_prompt_text:
        # Only chats have a rendered text to show.
        facts = replace(facts, text=prompt.text)
    last = request.messages[-1]
    role = "assistant" if prompt.opens_turn else last.role
    # An answer that continues the last message may begin with it.
    continues = request.echo and last.role == role
    return ChatFrames(head, facts, role, content_of(last) if continues else "")


@dataclass
class ChatFrames(OpenAiFrames):
    """Frames of a chat. `role` is whose turn it is; `echo` is the text that it continues."""

    role: str = "assistant"
    echo: str = ""
    kind = "chat.completion.chunk"

    def opening(self, index: int, usage: TokenCounts | None) -> bytes:
        counts = b"" if usage is None else b',"usage":' + encode(usage.usage())
        frame = (
            self.start
            + b'{"index":%d,"delta":{"role":%b,"content":""},"logprobs":null,'
            % (index, encode(self.role))
            + b'"finish_reason":null}],"prompt_token_ids":%b,"prompt_text":%b%b}\n\n'
            % (or_null(self.prompt.ids_of(index)), or_null(self.prompt.text), counts)
        )
        return frame + self.delta(Delta(index, self.echo, usage=usage)) if self.echo else frame

    def delta(self, delta: Delta) -> bytes:
        ids = or_null(delta.token_ids)
        start = self.start + b'{"index":%d,"delta":' % delta.index
        start += _chat_delta(delta) + b',"logprobs":' + or_null(delta.logprobs)
        ending = delta.ending
        if ending is None:
            end = b',"finish_reason":null,"token_ids":%b}' % ids
        else:
            end = b',"finish_reason":%b,"stop_reason":%b,"token_ids":%b}' % (
                encode(ending.finish_reason),
                encode(ending.stop_reason),
                ids,
            )
        return start + end + self.tail(delta.usage, delta.metrics, last=ending is not None)

    def body(self, answers: Sequence[Answer], usage: TokenCounts, metrics: Json | None) -> bytes:
        return encode(
            ChatCompletion(
                **self.fields_of_body(answers, usage, metrics),
                choices=[
                    ChatChoice(index=n, message=self._message(answer), **fields_of_choice(answer))
                    for n, answer in enumerate(answers)
                ],
                prompt_logprobs=answers[0].prompt_logprobs if answers else None,
                prompt_token_ids=self.prompt.ids_of(0),
                prompt_text=self.prompt.text,
            )
        )

    def _message(self, answer: Answer) -> ChatMessageOut:
        message = ChatMessageOut(self.role, self.echo + answer.text)
        calls = whole_calls(answer.calls)
        if calls:
            message.tool_calls = calls
        if answer.reasoning:
            message.reasoning = message.reasoning_content = answer.reasoning
        if calls or answer.reasoning:
            message.content = message.content or None
        return message


def _chat_delta(delta: Delta) -> bytes:
    """Return a chunk's delta. Each call has one entry, as clients take its first one as it is."""
    # The usual frame: no dictionary to build.
    if not delta.reasoning and not delta.calls:
        return b'{"content":' + encode(delta.text) + b"}"
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
    return encode(parts)
