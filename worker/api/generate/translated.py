"""Bodies of other APIs → `Prepared`: each is a chat or a text completion in other words, and is
prepared as that and answered in its own form.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import msgspec

from worker.api.generate.frames import Frames, ResponseHead
from worker.api.generate.message_frames import MessageFrames
from worker.api.generate.open_sequences import response_of
from worker.api.generate.prepare import Prepared, RequestPreparer
from worker.api.generate.response_frames import ResponseFrames
from worker.api.generate.sglang_frames import ForgeFrames, SglangFrames, SglangLogprobs
from worker.api.generate.text import ModelText
from worker.api.http.arrival import Arrival
from worker.api.schema import messages, responses, sglang
from worker.api.schema.messages import CountTokensRequest, MessagesRequest
from worker.api.schema.parse import decode, plain
from worker.api.schema.requests import MAX_PROMPTS, BatchChatRequest, ChatRequest
from worker.api.schema.responses import ResponsesRequest
from worker.api.schema.sglang import ForgeRequest, SglangRequest
from worker.errors import RequestError

_encode = msgspec.json.Encoder(enc_hook=plain).encode
# What a field of a chat or completion is called in the others.
_OF_RESPONSES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format.json_schema.schema": "text.format.schema",
    "response_format": "text.format",
}
_OF_MESSAGES = {
    "response_format.json_schema.schema": "output_config.format.schema",
    "response_format": "output_config.format",
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
}
_OF_SGLANG = {
    "structured_outputs.json": "sampling_params.json_schema",
    "structured_outputs.grammar": "sampling_params.ebnf",
    "structured_outputs": "sampling_params",
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "cache_salt": "extra_key",
    "request_id": "rid",
}


class TranslatedPreparer:
    """What the Responses API, Anthropic's messages, SGLang's and forge-infer's `/generate` and
    batches of chats ask for.
    """

    def __init__(self, model: str, text: ModelText, preparer: RequestPreparer) -> None:
        """`model` is the name that answers carry."""
        self._model = model
        self._text = text
        self._preparer = preparer

    async def responses(self, body: bytes, arrival: Arrival) -> Prepared:
        """`POST /v1/responses`. Raises `RequestError` (400, 404)."""
        request = decode(body, ResponsesRequest)
        with _in_words(_OF_RESPONSES):
            chat = _encode(_given(responses.chat_of(request)))
            prepared = await self._preparer.chat(chat, arrival)
        frames = ResponseFrames(self._head("resp", prepared), responses.response_facts(request))
        return _answered(prepared, frames)

    async def messages(self, body: bytes, arrival: Arrival) -> Prepared:
        """`POST /v1/messages`. Raises `RequestError` (400, 404)."""
        request = decode(body, MessagesRequest)
        with _in_words(_OF_MESSAGES):
            turns = self._text.takes_system_turns
            chat = _encode(_given(messages.chat_of(request, system_turns=turns)))
            prepared = await self._preparer.chat(chat, arrival)
        return _answered(prepared, MessageFrames(self._head("msg", prepared)))

    async def generate(self, body: bytes, arrival: Arrival) -> Prepared:
        """`POST /generate`: forge-infer's, where there is a `prompt`. Raises `RequestError`."""
        most = self._text.limits.max_model_len
        if decode(body, _Shape).prompt is not msgspec.UNSET:
            forge = sglang.completion_of_forge(decode(body, ForgeRequest), most)
            prepared = await self._preparer.completion(_encode(forge), arrival)
            return replace(prepared, frames=ForgeFrames())
        request = decode(body, SglangRequest)
        with _in_words(_OF_SGLANG | {"prompt": "input_ids" if request.text is None else "text"}):
            completion = _encode(_given(sglang.completion_of(request, most)))
            prepared = await self._preparer.completion(completion, arrival)
        frames = SglangFrames(_own_id(prepared), single=sglang.is_single(request))
        prepared = _answered(prepared, frames, total_usage=False)
        shown = replace(prepared.shown, token_ids=True)
        if shown.new_logprobs is not None:
            num_top = int(request.top_logprobs_num or 0)
            named = self._text.tokenizer.token_bytes if request.return_text_in_logprobs else None
            shown = replace(shown, new_logprobs=lambda: SglangLogprobs(num_top, named))
        return replace(prepared, shown=shown)

    async def batch(self, body: bytes, arrival: Arrival) -> Prepared:
        """`POST /v1/chat/completions/batch`: a choice for each conversation, in order. Raises
        `RequestError` (400, 404).
        """
        request = decode(body, BatchChatRequest)
        conversations = request.messages
        for name, value in (("stream", request.stream), ("tools", request.tools)):
            if value:
                raise RequestError(f"Batches do not support `{name}`; leave it out", param=name)
        if request.n not in (None, 1):
            raise RequestError("Batches do not support `n` above 1; leave it out", param="n")
        if not 1 <= len(conversations) <= MAX_PROMPTS:
            reason = f"messages takes 1 to {MAX_PROMPTS} conversations, got {len(conversations)}"
            raise RequestError(reason, param="messages")
        name = arrival.request_id or request.request_id or secrets.token_hex(16)
        arrival = replace(arrival, request_id=name)
        fields = msgspec.to_builtins(request, enc_hook=plain)
        prepared = []
        for n, conversation in enumerate(fields["messages"]):
            with _in_words({"messages": f"messages[{n}]"}):
                chat = _encode(_given(fields | {"messages": conversation}))
                prepared.append(await self._preparer.chat(chat, arrival))
        asks = tuple(ask for one in prepared for ask in one.requests)
        return replace(prepared[0], requests=asks)

    def _head(self, kind: str, prepared: Prepared) -> ResponseHead:
        return ResponseHead(f"{kind}_{_own_id(prepared)}", self._model, int(time.time()))


def chat_of_messages(body: bytes, text: ModelText) -> ChatRequest:
    """The chat whose prompt a message has, of a body that counts its tokens."""
    request = decode(body, CountTokensRequest)
    with _in_words(_OF_MESSAGES):
        chat = messages.chat_of(request, system_turns=text.takes_system_turns)
        return decode(_encode(_given(chat)), ChatRequest)


class _Shape(msgspec.Struct):
    """What tells the two kinds of `/generate` apart."""

    prompt: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


def _given(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Without what the client did not say."""
    return {name: value for name, value in fields.items() if value is not None}


def _answered(prepared: Prepared, frames: Frames, *, total_usage: bool = True) -> Prepared:
    """Answered by these frames, which are told the counts at the beginning and at the end."""
    shown = replace(prepared.shown, usage=total_usage, continuous_usage=True)
    return replace(prepared, frames=frames, shown=shown)


def _own_id(prepared: Prepared) -> str:
    """The response's id as the client knows it, and may abort it: without a prefix."""
    return response_of(prepared.requests[0].request_id).partition("-")[2]


@contextmanager
def _in_words(names: Mapping[str, str]) -> Iterator[None]:
    """Errors name the fields of the client's API."""
    try:
        yield
    except RequestError as error:
        error.message = _renamed(error.message, names)
        error.param = None if error.param is None else _renamed(error.param, names)
        raise


def _renamed(text: str, names: Mapping[str, str]) -> str:
    """The fields that a text begins with, quotes or gives as its parameter, in another API's words;
    functions stand there without an envelope.
    """
    known = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    pattern = rf"(^|`|parameter=|body\.)({known})(?!\w)"
    text = re.sub(pattern, lambda found: found[1] + names[found[2]], text)
    return re.sub(r"(tools[\[.]\d+\]?)\.function\.", r"\1.", text)
