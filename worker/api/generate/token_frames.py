"""`/inference/v1/generate`: token ids in, token ids out. For routers that tokenize elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from worker.api.generate.frames import Answer, Delta, Json, Usage
from worker.api.generate.logprobs import ChatLogprobs
from worker.api.generate.open_sequences import response_of
from worker.api.generate.prepare import RequestPreparer
from worker.api.generate.prepared import Prepared
from worker.api.generate.text import TextSide
from worker.api.http.arrival import Arrival
from worker.api.schema.generate_schema import GenerateRequest, TokenSampling
from worker.api.schema.parse import decode, plain
from worker.api.schema.prompts import room_for_output
from worker.api.schema.requests import CompletionRequest, refuse_unsupported
from worker.config import ApiConfig
from worker.errors import RequestError

_encode = msgspec.json.Encoder(enc_hook=plain).encode
_OF_COMPLETIONS = frozenset(CompletionRequest.__struct_fields__)
_UNSUPPORTED = ("features", "content_parts", "kv_transfer_params", "ec_transfer_params")


class TokenPreparer:
    """Bodies of `/inference/v1/generate` → `Prepared`: a text completion of token ids, which is
    checked as such and answered in another form.
    """

    def __init__(self, config: ApiConfig, text: TextSide, preparer: RequestPreparer) -> None:
        self._model = config.served_model_names[0]
        self._limits = text.limits
        self._token_bytes = text.tokenizer.token_bytes
        self._preparer = preparer

    async def prepare(self, body: bytes, arrival: Arrival) -> Prepared:
        """Without a limit the answer may fill the context. Raises `RequestError` (400, 404)."""
        request = decode(body, GenerateRequest)
        for name in _UNSUPPORTED:
            if getattr(request, name) not in (None, {}, []):
                raise RequestError(f"`{name}` is not supported yet; leave it out", param=name)
        sampling = request.sampling_params or TokenSampling()
        refuse_unsupported(sampling)
        if sampling.use_beam_search:
            message = "Beam search is not supported by token-level generation"
            raise RequestError(message, param="use_beam_search")
        arrival = replace(arrival, request_id=request.request_id or arrival.request_id)
        try:
            if sampling.truncate_prompt_tokens is None:
                room_for_output(len(request.token_ids), self._limits)  # before a look at each
            body = self._as_completion(request, sampling)
            prepared = await self._preparer.completion(body, arrival)
        except RequestError as error:
            if error.param is not None:
                error.param = error.param.replace("body.prompt", "body.token_ids", 1)
            error.message = error.message.replace("prompt[", "token_ids[", 1)
            raise  # in the words of the client
        shown = replace(prepared.shown, token_ids=True)
        if shown.new_logprobs is not None:
            shown = replace(
                shown, new_logprobs=lambda: ChatLogprobs(self._token_bytes, as_ids=True)
            )
        frames = TokenFrames(
            # As the client knows it, and as it may abort it: without the prefix of completions.
            response_of(prepared.requests[0].request_id).partition("-")[2],
            self._model,
            int(time.time()),
            with_text=request.output_mode == "text",
        )
        return replace(prepared, frames=frames, shown=shown)

    def _as_completion(self, request: GenerateRequest, sampling: TokenSampling) -> bytes:
        fields: dict[str, Any] = {
            name: value
            for name, value in msgspec.to_builtins(sampling, enc_hook=plain).items()
            if value is not None and name in _OF_COMPLETIONS
        }
        fields.setdefault("max_tokens", max(1, self._limits.max_model_len - len(request.token_ids)))
        for name in ("model", "stream", "stream_options", "cache_salt", "priority", "request_id"):
            fields[name] = getattr(request, name)
        fields["prompt"] = request.token_ids
        return _encode(fields)


class TokenFrames:
    """The wire form of token-level answers; see `sse.Frames`."""

    def __init__(self, request_id: str, model: str, created: int, *, with_text: bool) -> None:
        self._head: Json = {"request_id": request_id, "model": model, "created": created}
        self._with_text = with_text

    def opening(self, index: int, usage: Usage | None) -> bytes:
        """Nothing comes before the first tokens."""
        return b""

    def delta(self, delta: Delta) -> bytes:
        """See `Frames.delta`."""
        return self._frame([self._choice(delta.index, delta)], delta.usage, delta.metrics)

    def usage(self, usage: Usage, metrics: Json | None) -> bytes:
        """See `Frames.usage`."""
        return self._frame([], usage, metrics)

    def body(self, answers: Sequence[Answer], usage: Usage, metrics: Json | None) -> bytes:
        """See `Frames.body`."""
        return _encode(
            {
                **self._head,
                "choices": [self._choice(index, a) for index, a in enumerate(answers)],
                "usage": usage.body(),
                "prompt_logprobs": answers[0].prompt_logprobs if answers else None,
                "kv_transfer_params": None,
                "ec_transfer_params": None,
                "output_mode": "text" if self._with_text else "tokens",
                "metrics": metrics,
            }
        )

    def _choice(self, index: int, part: Delta | Answer) -> Json:
        ending = part.ending
        choice: Json = {
            "index": index,
            "token_ids": part.token_ids or [],
            "logprobs": part.logprobs,
            "finish_reason": None if ending is None else ending.finish_reason,
            "stop_reason": None if ending is None else ending.stop_reason,
        }
        if self._with_text:
            choice["text"] = part.text
        return choice

    def _frame(self, choices: list[Json], usage: Usage | None, metrics: Json | None) -> bytes:
        frame: Json = {**self._head, "choices": choices}
        if usage is not None:
            frame["usage"] = usage.body()
        if metrics is not None:
            frame["metrics"] = metrics
        return b"data: " + _encode(frame) + b"\n\n"
