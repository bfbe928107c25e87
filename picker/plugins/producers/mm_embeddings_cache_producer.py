"""mm-embeddings-cache-producer: guess which endpoint has encoded which images, videos and sounds.

It remembers, per endpoint, the content hashes of the multi-modal items it sent there
(`pre_request`, for all endpoints that the primary profile picked) and looks the items of each new
request up. An item counts 1 however often it occurs in the request. Nothing is asked of the
engines.

Memory per endpoint: the last `cacheSizeInMBPerServer` (4096) / 2 items, as one embedding takes
about 2 MiB; endpoints that leave or restart are forgotten. Requests may bring the hashes of their
items themselves; a long one is remembered by its digest.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from typing import Annotated

import msgspec

from picker.framework.attributes import (
    ENCODER_MATCHES,
    Attributes,
    EncoderMatch,
    encoder_matches_key,
)
from picker.framework.registry import Parameters, PluginType, named
from picker.plugins.producers.token_producer import TOKENIZED_PROMPT
from picker.tokenization.multimodal import distinct_items
from picker.types import Candidates, InferenceRequest, SchedulingResult

ITEM_MEBIBYTES = 2
MAX_ITEM = 128


class MmEmbeddingsCacheParameters(Parameters, frozen=True):
    cache_size_in_mb_per_server: Annotated[int, msgspec.Meta(ge=ITEM_MEBIBYTES)] = msgspec.field(
        default=4096, name="cacheSizeInMBPerServer"
    )


class MmEmbeddingsCacheProducer:
    """Sole owner of the memory of what each endpoint has encoded."""

    consumes = (TOKENIZED_PROMPT,)

    def __init__(self, name: str, parameters: MmEmbeddingsCacheParameters) -> None:
        self._capacity = parameters.cache_size_in_mb_per_server // ITEM_MEBIBYTES
        self._key = encoder_matches_key(name)
        self._encoded: dict[str, OrderedDict[str, None]] = {}
        self.produces = (self._key,)

    def remembered(self, key: str) -> tuple[str, ...]:
        """The items that endpoint `key` was sent, longest ago first."""
        return tuple(self._encoded.get(key, ()))

    def produce(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes
    ) -> InferenceRequest:
        """Write how many of the items each candidate has; nothing for a request without items."""
        items = _items(request)
        if not items:
            return request
        matched: dict[str, Counter[str]] = {}
        for candidate in candidates:
            encoded = self._encoded.get(candidate.key)
            if encoded is not None:
                # Whichever of the two is smaller is walked through: a client may send many items.
                found = Counter(items[item] for item in encoded.keys() & items.keys())
                if found:
                    matched[candidate.key] = found
        sizes = {key: float(found.total()) for key, found in matched.items()}
        attributes[self._key] = EncoderMatch(float(len(items)), sizes, matched)
        return request

    def pre_request(
        self, request: InferenceRequest, result: SchedulingResult, attributes: Attributes
    ) -> None:
        """Remember the items for every endpoint that the primary profile picked."""
        items = _items(request)
        profile = result.profiles.get(result.primary_profile)
        if not items or profile is None:
            return
        for scored in profile.picked:
            encoded = self._encoded.setdefault(scored.candidate.key, OrderedDict())
            for item in items:
                encoded[item] = None
                encoded.move_to_end(item)
            while len(encoded) > self._capacity:
                encoded.popitem(last=False)

    def endpoint_removed(self, key: str) -> None:
        """Forget what the endpoint was sent."""
        self._encoded.pop(key, None)


def _items(request: InferenceRequest) -> dict[str, str]:
    """The request's items by what they are remembered by, and their modalities."""
    return {_bounded(item): kind for item, kind in distinct_items(request.features).items()}


def _bounded(item: str) -> str:
    if len(item) <= MAX_ITEM:
        return item
    return hashlib.sha256(item.encode(errors="surrogatepass")).hexdigest()


PLUGIN = PluginType(
    "mm-embeddings-cache-producer",
    MmEmbeddingsCacheParameters,
    named(MmEmbeddingsCacheProducer),
    default_for=(ENCODER_MATCHES,),
)
