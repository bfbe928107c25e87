"""`POST /inference/v1/generate`: a text completion of token ids, answered in token ids."""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

from msgspec import UNSET

from worker.api.generate.frames import DONE, Answer, Delta, Frames, TokenCounts, encode
from worker.api.generate.logprobs import ChatLogprobs
from worker.api.generate.open_sequences import own_id
from worker.api.generate.prepared import Prepared
from worker.api.http.arrival import Arrival
from worker.api.http.field_errors import fields_named
from worker.api.openai.checks import RequestChecks, room_for_output
from worker.api.openai.completions import CompletionApi
from worker.api.schema.answers import Generated, TokenChoice
from worker.api.schema.parse import Whole, decode_supported, refuse_unsupported
from worker.api.schema.requests import (
    CompletionRequest,
    GenerateRequest,
    TokenSampling,
    fields_shared,
)

Json = dict[str, Any]
_NAMES = {"prompt": "token_ids", "vllm_xargs": "extra_args"}


class TokenApi:
    """Prepares token-level requests; without a limit the answer may fill the context."""

    def __init__(self, checks: RequestChecks, completions: CompletionApi) -> None:
        self._model = checks.config.served_model_names[0]
        self._limits = checks.text.limits
        self._token_bytes = checks.text.tokenizer.token_bytes
        self._completions = completions

    async def __call__(self, body: bytes, arrival: Arrival) -> Prepared:
        request = decode_supported(body, GenerateRequest)
        sampling = request.sampling_params or TokenSampling()
        refuse_unsupported(sampling)
        arrival = replace(arrival, request_id=request.request_id or arrival.request_id)
        with fields_named(_NAMES):
            if sampling.truncate_prompt_tokens is None:
                room_for_output(len(request.token_ids), self._limits)  # before a look at each
            completion = self._completion(request, sampling)
            prepared = await self._completions.prepared(completion, arrival)
        # The answer is token ids, whatever the body says.
        shown = replace(prepared.shown, token_ids=True)
        if shown.new_logprobs is not None:
            new_logprobs = partial(ChatLogprobs, self._token_bytes, as_ids=True)
            shown = replace(shown, new_logprobs=new_logprobs)
        adapter = prepared.requests[0].adapter
        frames = TokenFrames(
            own_id(prepared.requests[0].request_id),
            self._model if adapter is None else adapter.name,
            int(time.time()),
            with_text=request.output_mode == "text",
        )
        return replace(prepared, frames=frames, shown=shown)

    def _completion(self, request: GenerateRequest, sampling: TokenSampling) -> CompletionRequest:
        fields = fields_shared(request, CompletionRequest)
        fields |= fields_shared(sampling, CompletionRequest)
        # Text completions default to 16 tokens; this route does not.
        if sampling.max_tokens is None:
            room = self._limits.max_model_len - len(request.token_ids)
            fields["max_tokens"] = Whole(max(1, room))
        return CompletionRequest(
            prompt=cast(list[str | int | list[int]], request.token_ids),
            vllm_xargs=sampling.extra_args,
            **fields,
        )


class TokenFrames(Frames):
    done = DONE

    def __init__(self, request_id: str, model: str, created: int, *, with_text: bool) -> None:
        self._head: Json = {"request_id": request_id, "model": model, "created": created}
        self._with_text = with_text

    def opening(self, index: int, usage: TokenCounts | None) -> bytes:
        return b""

    def delta(self, delta: Delta) -> bytes:
        return self._frame([self._choice(delta.index, delta)], delta.usage, delta.metrics)

    def usage(self, usage: TokenCounts, metrics: Json | None) -> bytes:
        return self._frame([], usage, metrics)

    def body(self, answers: Sequence[Answer], usage: TokenCounts, metrics: Json | None) -> bytes:
        return encode(
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
        return b"data: " + encode(frame) + b"\n\n"
