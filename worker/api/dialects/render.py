"""`/v1/completions/render` and `/v1/chat/completions/render`: engine requests that are not sent."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Literal, TypeVar

import msgspec

from worker.api.generate.open_sequences import response_of
from worker.api.generate.prepared import Prepared
from worker.api.http.arrival import Arrival, arrival_of
from worker.api.http.exchange import Exchange
from worker.api.http.off_loop import off_loop_when_large
from worker.api.openai.chat import ChatApi
from worker.api.openai.checks import prompts_of
from worker.api.openai.completions import CompletionApi
from worker.api.routes.generation import GenerationRoutes
from worker.api.schema.answers import Counts, JsonArray, JsonObject
from worker.api.schema.parse import decode, refuse_unsupported
from worker.api.schema.requests import ChatRequest, CompletionRequest, GenerationFields
from worker.api.schema.routes import Handler, text_route
from worker.engine.messages import AddRequest
from worker.tokenizer.tokenizer import Tokenizer

Json = dict[str, Any]
# Token ids, and their offsets as JSON: a pair of numbers for each of a million tokens is what the
# garbage collector would look at again and again.
Encoding = tuple[list[int], msgspec.Raw]
_Generation = TypeVar("_Generation", bound=GenerationFields)


class Rendered(msgspec.Struct, kw_only=True):
    """The request to the engine, in a form that `/inference/v1/generate` accepts."""

    request_id: str
    token_ids: Counts
    token_offsets: JsonArray
    features: None = None
    content_parts: None = None
    sampling_params: JsonObject
    model: str
    stream: bool
    stream_options: JsonObject
    cache_salt: str | None
    priority: int
    kv_transfer_params: None = None
    ec_transfer_params: None = None
    output_mode: Literal["tokens"] = "tokens"
    return_token_ids: bool | None


class Renderer:
    def __init__(self, generation: GenerationRoutes) -> None:
        self._checks = generation.checks
        self._config = generation.checks.config
        self._tokenizer = generation.checks.text.tokenizer

    async def chat(self, exchange: Exchange) -> None:
        arrival = self._arrival(exchange)
        body = await exchange.json_body(self._config.max_body_bytes)
        request, recorder = self._asked(body, ChatRequest)
        encode = None if recorder is None else recorder.encode
        prepared = await ChatApi(self._checks, encode).prepared(request, arrival)
        # Of all that is encoded for a chat, the conversation is the first.
        encoding = None if recorder is None else recorder.first()
        [entry] = await self._rendered(request, prepared, [encoding])
        await exchange.reply(entry)

    async def completion(self, exchange: Exchange) -> None:
        arrival = self._arrival(exchange)
        body = await exchange.json_body(self._config.max_body_bytes)
        request, recorder = self._asked(body, CompletionRequest)
        encode = None if recorder is None else recorder.encode
        prepared = await CompletionApi(self._checks, encode).prepared(request, arrival)
        encodings: Sequence[Encoding | None] = [None] * len(prepared.requests)
        if recorder is not None:
            special = request.add_special_tokens is not False
            prompts = prompts_of(request.prompt)
            encodings = [recorder.of(p, special) if isinstance(p, str) else None for p in prompts]
        entries = await self._rendered(request, prepared, encodings)
        await exchange.reply(b"[" + b",".join(entries) + b"]")

    def _asked(
        self, body: bytes, kind: type[_Generation]
    ) -> tuple[_Generation, OffsetsRecorder | None]:
        request = decode(body, kind)
        records, request.return_token_offsets = request.return_token_offsets, None
        refuse_unsupported(request)
        return request, OffsetsRecorder(self._tokenizer) if records else None

    def _arrival(self, exchange: Exchange) -> Arrival:
        return arrival_of(exchange, exchange.request_id, time.monotonic(), self._config.api_keys)

    async def _rendered(
        self, request: GenerationFields, prepared: Prepared, encodings: Sequence[Encoding | None]
    ) -> list[bytes]:
        several = len(prepared.requests) > 1

        def entries() -> list[bytes]:
            return [
                msgspec.json.encode(
                    self._entry(request, prepared, ask, f"-{n}" if several else "", encoding)
                )
                for n, (ask, encoding) in enumerate(zip(prepared.requests, encodings, strict=True))
            ]

        num_tokens = sum(len(ask.prompt_token_ids) for ask in prepared.requests)
        return await off_loop_when_large(num_tokens, entries)

    def _entry(
        self,
        request: GenerationFields,
        prepared: Prepared,
        ask: AddRequest,
        suffix: str,
        encoding: Encoding | None,
    ) -> Rendered:
        return Rendered(
            request_id=response_of(ask.request_id) + suffix,
            token_ids=ask.prompt_token_ids,
            token_offsets=encoding[1] if encoding and encoding[0] == ask.prompt_token_ids else None,
            sampling_params=sampling_fields(request, prepared, ask),
            model=self._config.served_model_names[0] if ask.adapter is None else ask.adapter.name,
            stream=prepared.stream,
            stream_options=request.stream_options,
            cache_salt=ask.cache_salt,
            priority=ask.priority,
            return_token_ids=request.return_token_ids,
        )


class OffsetsRecorder:
    """Encodes texts and records the offsets of their tokens, so that each text is encoded once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._encodings: dict[tuple[str, bool], Encoding] = {}

    def first(self) -> Encoding | None:
        return next(iter(self._encodings.values()), None)

    def of(self, text: str, add_special_tokens: bool) -> Encoding | None:
        return self._encodings.get((text, add_special_tokens))

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Encode a text as `Tokenizer.encode` does; called from a thread if the texts are long."""
        encode = self._tokenizer.encode_with_offsets
        ids, offsets = encode(text, add_special_tokens=add_special_tokens)
        encoding = ids, msgspec.Raw(msgspec.json.encode(offsets))
        self._encodings.setdefault((text, add_special_tokens), encoding)
        return ids


def sampling_fields(request: GenerationFields, prepared: Prepared, ask: AddRequest) -> Json:
    """Return vLLM's flat `SamplingParams`. The seed is the request's own, not the drawn one."""
    params, text = ask.params, prepared.text
    constraint = prepared.constraint
    fields = msgspec.to_builtins(params)
    del fields["grammar"], fields["logits_processors"]
    return {
        **fields,
        "structured_outputs": None if constraint is None else constraint.outputs,
        "extra_args": request.vllm_xargs or None,
        "n": 1 + len(ask.branch_ids),
        "seed": None if request.seed is None else int(request.seed),
        "stop": list(text.stop),
        "bad_words": request.bad_words or [],
        "logprob_token_ids": list(params.logprob_token_ids) or None,
        "detokenize": True,
        "skip_special_tokens": text.skip_special_tokens,
        "spaces_between_special_tokens": True,
        "include_stop_str_in_output": text.include_stop,
        "logit_bias": {str(i): bias for i, bias in params.logit_bias} or None,
    }


ROUTES = (
    text_route(
        "/v1/completions/render",
        "render_completion",
        "What /v1/completions would ask of the engine, one entry a prompt",
        CompletionRequest,
        list[Rendered],
    ),
    text_route(
        "/v1/chat/completions/render",
        "render_chat",
        "What /v1/chat/completions would ask of the engine",
        ChatRequest,
        Rendered,
    ),
)


def handlers(generation: GenerationRoutes) -> dict[str, Handler]:
    renderer = Renderer(generation)
    return {"render_chat": renderer.chat, "render_completion": renderer.completion}
