"""What a request would ask of the engine, without asking: for routers that want the token ids, and
for prefill and decode on different workers.
"""

from __future__ import annotations

import time
from typing import Any, TypeVar

import msgspec

from worker.api.arrival import Arrival, arrival_of
from worker.api.exchange import Exchange
from worker.api.open_sequences import response_of
from worker.api.parse import decode, plain
from worker.api.prepare import RequestPreparer
from worker.api.prepared import Prepared
from worker.api.routes import Handler
from worker.api.schema import ChatRequest, CompletionRequest, GenerationFields
from worker.api.text import TextSide
from worker.config import ApiConfig
from worker.engine.messages import AddRequest

Json = dict[str, Any]
Offsets = list[tuple[int, int]]
_Generation = TypeVar("_Generation", bound=GenerationFields)


class RenderRoutes:
    """`/v1/completions/render` and `/v1/chat/completions/render`."""

    def __init__(self, config: ApiConfig, text: TextSide, preparer: RequestPreparer) -> None:
        self._config = config
        self._text = text
        self._preparer = preparer

    def handlers(self) -> dict[str, Handler]:
        """By the names of `routes.TEXT_ROUTES`."""
        return {"render_chat": self._chat, "render_completion": self._completion}

    async def _chat(self, exchange: Exchange) -> None:
        arrival = self._arrival(exchange)
        body = await exchange.json_body(self._config.max_body_bytes)
        request, body, with_offsets = _without_offsets(body, ChatRequest)
        prepared = await self._preparer.chat(body, arrival)
        offsets = None
        if with_offsets:
            prompt = self._text.render(request.messages, request)
            special = bool(request.add_special_tokens)
            offsets = self._offsets(prompt, special, prepared.requests[0])
        rendered = self._rendered(request, prepared, prepared.requests[0], offsets)
        await exchange.reply(msgspec.json.encode(rendered))

    async def _completion(self, exchange: Exchange) -> None:
        """One entry for each prompt, in order."""
        arrival = self._arrival(exchange)
        body = await exchange.json_body(self._config.max_body_bytes)
        request, body, with_offsets = _without_offsets(body, CompletionRequest)
        prepared = await self._preparer.completion(body, arrival)
        prompts = [request.prompt] if isinstance(request.prompt, str) else request.prompt
        special = request.add_special_tokens is not False
        rendered = []
        for n, ask in enumerate(prepared.requests):
            # A prompt of token ids came from no text.
            prompt = prompts[n] if with_offsets else None
            offsets = self._offsets(prompt, special, ask) if isinstance(prompt, str) else None
            rendered.append(self._rendered(request, prepared, ask, offsets))
        await exchange.reply(msgspec.json.encode(rendered))

    def _arrival(self, exchange: Exchange) -> Arrival:
        return arrival_of(exchange, exchange.request_id, time.monotonic(), self._config.api_keys)

    def _offsets(self, prompt: str, special: bool, ask: AddRequest) -> Offsets | None:
        """The characters each token came from; None for a prompt that was cut."""
        ids, offsets = self._text.tokenizer.encode_with_offsets(prompt, add_special_tokens=special)
        return offsets if ids == ask.prompt_token_ids else None

    def _rendered(
        self,
        request: GenerationFields,
        prepared: Prepared,
        ask: AddRequest,
        offsets: Offsets | None,
    ) -> Json:
        response_id = response_of(ask.request_id)
        several = len(prepared.requests) > 1
        options = request.stream_options
        return {
            "request_id": response_id + (f"-{prepared.requests.index(ask)}" if several else ""),
            "token_ids": ask.prompt_token_ids,
            "token_offsets": offsets,
            "features": None,
            "content_parts": None,
            "sampling_params": sampling_fields(request, prepared, ask),
            "model": self._config.served_model_names[0],
            "stream": prepared.stream,
            "stream_options": None if options is None else msgspec.to_builtins(options),
            "cache_salt": ask.cache_salt,
            "priority": ask.priority,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "output_mode": "tokens",
            "return_token_ids": request.return_token_ids,
        }


def _without_offsets(body: bytes, kind: type[_Generation]) -> tuple[_Generation, bytes, bool]:
    """The request, a body without `return_token_offsets` (which only these routes know), and
    whether it was asked for.
    """
    request = decode(body, kind)
    if not request.return_token_offsets:
        return request, body, False
    request.return_token_offsets = None
    return request, msgspec.json.encode(request, enc_hook=plain), True


def sampling_fields(request: GenerationFields, prepared: Prepared, ask: AddRequest) -> Json:
    """vLLM's flat `SamplingParams`. The seed is the request's own, not one drawn for it."""
    params, text = ask.params, prepared.text
    repetition = params.repetition_detection
    return {
        "n": 1 + len(ask.branch_ids),
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "repetition_penalty": params.repetition_penalty,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "seed": None if request.seed is None else int(request.seed),
        "stop": list(text.stop),
        "stop_token_ids": list(params.stop_token_ids),
        "bad_words": request.bad_words or [],
        "ignore_eos": params.ignore_eos,
        "max_tokens": params.max_tokens,
        "min_tokens": params.min_tokens,
        "logprobs": params.logprobs,
        "prompt_logprobs": params.prompt_logprobs,
        "logprob_token_ids": list(params.logprob_token_ids) or None,
        "detokenize": True,
        "skip_special_tokens": text.skip_special_tokens,
        "spaces_between_special_tokens": True,
        "include_stop_str_in_output": text.include_stop,
        "logit_bias": {str(i): bias for i, bias in params.logit_bias} or None,
        "allowed_token_ids": (
            None if params.allowed_token_ids is None else list(params.allowed_token_ids)
        ),
        "repetition_detection": None if repetition is None else msgspec.to_builtins(repetition),
    }
