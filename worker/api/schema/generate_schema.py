"""Bodies of the token-level API: `/inference/v1/generate` takes what the render routes answer."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from worker.api.schema.parse import Whole
from worker.api.schema.requests import SamplingFields, StreamOptions

MAX_ABORTED_IDS = 1024


class TokenSampling(SamplingFields, kw_only=True):
    """`sampling_params`: vLLM's flat `SamplingParams`, for clients that send everything.

    Some of it is about how vLLM works inside (`output_kind` and the like) and has no meaning here;
    what would change the answer and is not built is refused as everywhere (`schema.NEUTRAL`).
    """

    logprobs: Whole | None = None
    truncate_prompt_tokens: Whole | None = None
    structured_outputs: Any = None
    extra_args: Any = None
    thinking_token_budget: Any = None
    skip_reading_prefix_cache: Any = None

    detokenize: bool | None = None
    flat_logprobs: bool | None = None
    skip_clone: bool | None = None
    output_kind: Any = None
    output_text_buffer_length: Any = None


class GenerateRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `POST /inference/v1/generate`. What a render route answered is one."""

    token_ids: list[int]
    sampling_params: TokenSampling | None = None
    model: str | None = None
    request_id: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    priority: Whole | None = None
    output_mode: Literal["tokens", "text"] | None = None
    return_token_ids: bool | None = None
    token_offsets: list[list[int]] | None = None
    content_parts: Any = None
    features: Any = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None


class AbortBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `POST /inference/v1/abort_requests`."""

    request_ids: Annotated[list[str], msgspec.Meta(max_length=MAX_ABORTED_IDS)]
