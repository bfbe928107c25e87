"""Bodies and answers of `/v1/embeddings` and `/pooling`."""

from typing import Annotated, Any, Literal

import msgspec

from worker.api.schema.answers import Count, Usage
from worker.api.schema.parse import Whole, hint
from worker.api.schema.requests import CacheSalt, RequestId, only, says


class EmbeddingRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `POST /v1/embeddings`; `use_activation` (formerly `normalize`) scales to length 1."""

    input: Annotated[str | list[str | int | list[int]], says(minItems=1)]
    model: str | None = None
    dimensions: Annotated[Whole | None, says(minimum=1)] = None
    encoding_format: Literal["float", "base64"] | None = None
    use_activation: bool | None = None
    normalize: bool | None = None
    truncate_prompt_tokens: Annotated[Whole | None, says(minimum=-1)] = None
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None
    cache_salt: CacheSalt = None
    request_id: RequestId = None
    priority: Whole | None = None
    user: Annotated[str | None, hint()] = None
    embed_dtype: Annotated[str | None, only("float32")] = None
    endianness: Annotated[str | None, only("native", "little")] = None


class PoolingRequest(EmbeddingRequest, kw_only=True):
    """Body of `POST /pooling`."""

    task: Annotated[str | None, only("embed")] = None


class Embedding(msgspec.Struct):
    """The embedding of one input: numbers, or the base64 of little-endian float32 values."""

    index: Count
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class Pooled(msgspec.Struct):
    """The embedding of one input, in the form of `/pooling`."""

    index: Count
    data: list[float] | str
    object: Literal["pooling"] = "pooling"


class EmbeddingList(msgspec.Struct, kw_only=True):
    """Answer of `/v1/embeddings`: one embedding for each input, in order."""

    id: str
    object: Literal["list"] = "list"
    created: Count
    model: str
    data: list[Embedding]
    usage: Usage
    metrics: Any = None


class PooledList(EmbeddingList):
    """Answer of `/pooling`: one embedding for each input, in order."""

    data: list[Pooled]  # type: ignore[assignment]
