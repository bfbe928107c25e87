"""`POST /v1/embeddings` and `/pooling`: body → prompts → requests to the engine → frames."""

import base64
import math
import secrets
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from worker.api.generate.frames import Answer, Frames, ResponseHead, TokenCounts
from worker.api.generate.prepared import Prepared, Shown
from worker.api.http.arrival import Arrival
from worker.api.http.field_errors import fields_named
from worker.api.openai.checks import (
    RequestChecks,
    check_cache_salt,
    prompt_fields,
    prompts_of,
    response_id,
    truncated,
)
from worker.api.schema.embeddings import (
    Embedding,
    EmbeddingList,
    EmbeddingRequest,
    Pooled,
    PooledList,
    PoolingRequest,
)
from worker.api.schema.params import ModelLimits, TextParams, invalid
from worker.api.schema.parse import decode_supported
from worker.engine.messages import AddRequest
from worker.errors import RequestError
from worker.types import Pooling, SamplingParams

# Nothing is drawn; one token's room keeps the sequence from counting as complete.
_PARAMS = SamplingParams(max_tokens=1, temperature=0.0)
_IS_LITTLE_ENDIAN = array("H", [1]).tobytes() == b"\x01\x00"


@dataclass(frozen=True, slots=True)
class EmbeddingFrames(Frames):
    """Frames of embeddings, cut to `dimensions`, then scaled to length 1 if `normalizes`."""

    head: ResponseHead
    dimensions: int | None
    normalizes: bool
    as_base64: bool
    of_pooling: bool

    def body(
        self, answers: Sequence[Answer], usage: TokenCounts, metrics: dict[str, Any] | None
    ) -> bytes:
        head = self.head
        facts: dict[str, Any] = {"id": head.id, "created": head.created, "model": head.model}
        facts |= {"usage": usage.usage(whole=True), "metrics": metrics}
        values = [self._value(answer.pooled) for answer in answers]
        if self.of_pooling:
            pooled = [Pooled(index, value) for index, value in enumerate(values)]
            return msgspec.json.encode(PooledList(data=pooled, **facts))
        embeddings = [Embedding(index, value) for index, value in enumerate(values)]
        return msgspec.json.encode(EmbeddingList(data=embeddings, **facts))

    def numbers(self, pooled: Sequence[float]) -> list[float]:
        values = list(pooled[: self.dimensions])
        if self.normalizes:
            # A zero vector stays one.
            length = max(math.hypot(*values), 1e-12)
            values = [value / length for value in values]
        return values

    def _value(self, pooled: Sequence[float]) -> list[float] | str:
        values = self.numbers(pooled)
        if not self.as_base64:
            return values
        floats = array("f", values)
        # Clients decode the format's order, not the machine's.
        if not _IS_LITTLE_ENDIAN:
            floats.byteswap()
        return base64.b64encode(floats.tobytes()).decode()


class EmbeddingApi:
    def __init__(self, checks: RequestChecks) -> None:
        self._config = checks.config
        self._text = checks.text
        self._checks = checks

    async def embeddings(self, body: bytes, arrival: Arrival) -> Prepared:
        return await self.prepared(decode_supported(body, EmbeddingRequest), arrival, "embd")

    async def pooling(self, body: bytes, arrival: Arrival) -> Prepared:
        return await self.prepared(decode_supported(body, PoolingRequest), arrival, "pool")

    async def prepared(self, request: EmbeddingRequest, arrival: Arrival, kind: str) -> Prepared:
        self._checks.adapters.adapter_of(request.model)
        config, pooler = self._config, self._config.pooler
        self._check_dimensions(request.dimensions)
        check_cache_salt(request.cache_salt)
        named = response_id(kind, request.request_id, arrival)
        priority = self._checks.priority(request.priority, arrival)
        asked = (request.use_activation, request.normalize)
        head = ResponseHead(named, config.served_model_names[0], int(time.time()))
        frames = EmbeddingFrames(
            head,
            None if request.dimensions is None else int(request.dimensions),
            next((choice for choice in asked if choice is not None), pooler.use_activation),
            as_base64=request.encoding_format == "base64",
            of_pooling=isinstance(request, PoolingRequest),
        )
        requests = tuple(
            AddRequest(
                request_id=f"{named}-{index}-{secrets.token_hex(4)}",
                prompt_token_ids=ids,
                params=_PARAMS,
                arrival_seconds=arrival.seconds,
                priority=priority,
                cache_salt=request.cache_salt,
                tenant=arrival.tenant,
                pooling=Pooling[pooler.pooling_type],
            )
            for index, ids in enumerate(await self._prompts(request))
        )
        shown = Shown(
            cached_tokens=config.enable_prompt_tokens_details,
            metrics=config.enable_per_request_metrics,
        )
        return Prepared(requests, TextParams(), frames, stream=False, shown=shown)

    def _check_dimensions(self, dimensions: int | None) -> None:
        most = self._config.embedding_size
        if dimensions is None or (dimensions >= 1 and (most is None or dimensions <= most)):
            return
        limit = "at least 1" if most is None else f"in [1, {most}]"
        raise invalid("dimensions", dimensions, f"dimensions must be {limit}, got {dimensions}.")

    async def _prompts(self, request: EmbeddingRequest) -> list[list[int]]:
        limits = self._text.limits
        with fields_named({"prompt": "input"}):
            given = prompts_of(request.input)
            texts = [prompt for prompt in given if isinstance(prompt, str)]
            special = request.add_special_tokens is not False
            encoded = iter(await self._text.encode_all(texts, add_special_tokens=special))
            asked, side = request.truncate_prompt_tokens, request.truncation_side
            prompts = [
                truncated(next(encoded) if isinstance(p, str) else p, asked, side, 0, limits)
                for p in given
            ]
            for ids in prompts:
                _check_length(len(ids), limits)
            await self._checks.check_ids(prompts, prompt_fields(given, request.input))
        return prompts


def _check_length(num_tokens: int, limits: ModelLimits) -> None:
    if num_tokens == 0:
        raise RequestError("The input cannot be empty", param="input")
    if num_tokens > limits.max_model_len:
        raise RequestError(
            f"This model's maximum context length is {limits.max_model_len} tokens. However, your"
            f" input contains {num_tokens} input tokens. Please reduce its length, or send"
            " truncate_prompt_tokens.",
            param="input_tokens",
        )
