"""Routing by the images, videos and sounds that endpoints have encoded before.

mm-embeddings-cache-producer: guess which endpoint has encoded which media. It remembers the content
hashes of the multi-modal items that it sent to each endpoint (`pre_request`, for all endpoints that
the primary profile picked) and looks up those of each new request. An endpoint's memory has the
last `cacheSizeInMBPerServer` / 2 items, because an embedding takes about 2 MiB.

mm-embeddings-cache-scorer: prefer endpoints that have encoded the request's media.

    score = Σ sizes of the items encoded there / Σ sizes of all items

An item is counted once however often it occurs. Without items or matches: 0.0.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

from picker.decisions.decision import Decision
from picker.decisions.steps import Meter, PluginStep
from picker.framework.attributes import (
    ENCODER_MATCHES,
    Attributes,
    DataKey,
    EncoderMatch,
    encoder_matches_key,
)
from picker.framework.registry import Parameters, PluginType
from picker.metrics.label_caps import OVERFLOW
from picker.metrics.picker_metrics import MODALITIES, PickerMetrics
from picker.plugins.producers.token_producer import TOKENIZED_PROMPT
from picker.telemetry.meters import found, picked_endpoint
from picker.tokenization.multimodal import distinct_items, modalities
from picker.types import Candidates, InferenceRequest, SchedulingResult

ITEM_MEBIBYTES = 2
MAX_ITEM = 128


class MmEmbeddingsCacheParameters(Parameters, frozen=True):
    cache_size_in_mb_per_server: Annotated[int, msgspec.Meta(ge=ITEM_MEBIBYTES)] = msgspec.field(
        default=4096, name="cacheSizeInMBPerServer"
    )


class MmEmbeddingsCacheProducer:
    consumes = (TOKENIZED_PROMPT,)

    def __init__(self, name: str, parameters: MmEmbeddingsCacheParameters) -> None:
        self._capacity = parameters.cache_size_in_mb_per_server // ITEM_MEBIBYTES
        self._key = encoder_matches_key(name)
        self._encoded: dict[str, OrderedDict[str, None]] = {}
        self.produces = (self._key,)

    def remembered(self, key: str) -> tuple[str, ...]:
        """Return the items that were sent to endpoint `key`, the least recent first."""
        return tuple(self._encoded.get(key, ()))

    def produce(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes
    ) -> InferenceRequest:
        items = _items(request)
        if not items:
            return request
        matched: dict[str, Counter[str]] = {}
        for candidate in candidates:
            encoded = self._encoded.get(candidate.key)
            if encoded is not None:
                # The intersection iterates over the smaller set: a client may send many items.
                found = Counter(items[item] for item in encoded.keys() & items.keys())
                if found:
                    matched[candidate.key] = found
        sizes = {key: float(found.total()) for key, found in matched.items()}
        attributes[self._key] = EncoderMatch(float(len(items)), sizes, matched)
        return request

    def pre_request(
        self, request: InferenceRequest, result: SchedulingResult, attributes: Attributes
    ) -> None:
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
        self._encoded.pop(key, None)

    def meter(self, point: str, labels: tuple[str, str], metrics: PickerMetrics) -> Meter | None:
        name, plugin_type = labels
        if point != "PreRequest":
            return None
        return EncoderCaches(self._key, metrics, (plugin_type, name))


def _items(request: InferenceRequest) -> dict[str, str]:
    """Return the modalities of the request's items, by the text under which each is remembered."""
    return {_bounded(item): kind for item, kind in distinct_items(request.features).items()}


def _bounded(item: str) -> str:
    if len(item) <= MAX_ITEM:
        return item
    return hashlib.sha256(item.encode(errors="surrogatepass")).hexdigest()


@dataclass(frozen=True, slots=True)
class EncoderCaches:
    """Counts the multi-modal items of requests, and those that the endpoint had encoded before."""

    key: DataKey[EncoderMatch]
    metrics: PickerMetrics
    labels: tuple[str, str]  # the plugin's type and name

    def __call__(self, decision: Decision, step: PluginStep) -> None:
        request, endpoint = decision.request, picked_endpoint(decision)
        match = found(decision, self.key)
        if match is None or request is None or endpoint is None:
            return
        series, labels = self.metrics.plugins, self.labels
        matched = match.modalities.get(endpoint.key, {})
        asked = modalities(request.features)
        for kind, items in asked.items():
            modality = kind if kind in MODALITIES else OVERFLOW
            series.encoder_cache_queries_total.labels(*labels, modality).inc(items)
            series.encoder_cache_hits_total.labels(*labels, modality, endpoint.name).inc(
                matched.get(kind, 0)
            )
        ratio = sum(matched.values()) / max(1, sum(asked.values()))
        series.encoder_cache_hit_ratio.labels(*labels).observe(ratio)


class MmEmbeddingsCacheScorerParameters(Parameters, frozen=True):
    producer_name: str = "mm-embeddings-cache-producer"


class MmEmbeddingsCacheScorer:
    def __init__(self, parameters: MmEmbeddingsCacheScorerParameters) -> None:
        self._key = encoder_matches_key(parameters.producer_name)
        self.consumes = (self._key,)

    def score(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes
    ) -> Sequence[float]:
        match = attributes.get(self._key)
        if match is None or match.requested <= 0:
            return [0.0] * len(candidates)
        return [
            min(match.matched.get(candidate.key, 0.0) / match.requested, 1.0)
            for candidate in candidates
        ]


PLUGINS = (
    PluginType(
        "mm-embeddings-cache-producer", MmEmbeddingsCacheProducer, default_for=(ENCODER_MATCHES,)
    ),
    PluginType("mm-embeddings-cache-scorer", MmEmbeddingsCacheScorer),
)
