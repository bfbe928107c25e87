"""Bodies of the token-level API: `/inference/v1/generate` takes what the render routes answer."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from worker.api.parse import Whole
from worker.api.schema import SamplingFields, StreamOptions

MAX_ABORTED_IDS = 1024


class TokenSampling(SamplingFields, kw_only=True):
    """`sampling_params`: vLLM's flat `SamplingParams`. `detokenize` and `output_kind` have no
    meaning for answers in tokens, and are taken for the sake of clients that send everything.
    """

    logprobs: Whole | None = None
    detokenize: bool | None = None
    output_kind: Any = None


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
