"""Extractors: read pages about endpoints (`scrape.sources.Extractor`).

core-metrics-extractor: load and other numbers from a metrics page.

The names of series depend on the endpoint's engine. The endpoint's label `engineLabelKey`
(`llm-d.ai/engine-type`, else the legacy `inference.networking.k8s.io/engine-type`) names it; if the
label is absent or unknown, `defaultEngine` does. `engineConfigs` adds engines or redefines built-in
ones by name. A spec is `name` or `name{label=value,…}`, and empty for a number that the engine does
not report. `customMetrics` become attributes `<attributeKey>/core-metrics-extractor`.

models-data-extractor: an endpoint's models, from its `/v1/models`.

Attribute `/v1/models/models-data-extractor`: a tuple of `ServedModel`, in the endpoint's order,
without entries that have no id; after a body that is not a list of models, the previous ones
remain.
"""

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from picker.framework.attributes import MODELS_ATTRIBUTE, ServedModel
from picker.framework.registry import Parameters, PluginType
from picker.scrape.engines import (
    BLOCK_SIZE_LABEL,
    DEFAULT_ENGINE,
    ENGINE_LABELS,
    ENGINES,
    NUM_BLOCKS_LABEL,
    RESERVED_NAME,
    EngineSeries,
    EngineTable,
    Series,
    parse_series,
)
from picker.scrape.extract import extract
from picker.scrape.sources import ExtractError, Extraction, Scrape
from picker.types import Endpoint

TYPE = "core-metrics-extractor"


class CustomMetric(Parameters, frozen=True):
    attribute_key: str
    metric_spec: str


class EngineConfig(Parameters, frozen=True):
    name: str
    queued_requests_spec: str = ""
    running_requests_spec: str = ""
    kv_usage_spec: str = ""
    lora_spec: str = ""
    cache_info_spec: str = ""
    cache_block_size_label_name: str = ""
    cache_num_blocks_label_name: str = ""
    cache_block_size_spec: str = ""
    cache_num_blocks_spec: str = ""
    custom_metrics: tuple[CustomMetric, ...] = ()


class CoreMetricsParameters(Parameters, frozen=True):
    default_engine: str = DEFAULT_ENGINE
    engine_label_key: str | None = None
    engine_configs: tuple[EngineConfig, ...] = ()


class CoreMetricsExtractor:
    def __init__(self, table: EngineTable) -> None:
        self._table = table

    def extract(self, scrape: Scrape) -> Extraction:
        return extract(scrape, self._table.of(scrape.endpoint.labels))

    def series(self, endpoint: Endpoint) -> Sequence[str]:
        return self._table.of(endpoint.labels).all_names


def _extractor(parameters: CoreMetricsParameters) -> CoreMetricsExtractor:
    engines = dict(ENGINES)
    configured: set[str] = set()
    for config in parameters.engine_configs:
        if not config.name or config.name == RESERVED_NAME:
            raise ValueError(f"an engine cannot be called '{config.name}'")
        if config.name in configured:
            raise ValueError(f"the engine '{config.name}' is configured twice")
        configured.add(config.name)
        engines[config.name] = _engine(config)
    default = parameters.default_engine
    if default not in engines:
        raise ValueError(f"unknown defaultEngine '{default}', allowed: {', '.join(engines)}")
    # A configured key comes first and does not turn off the legacy one.
    own = parameters.engine_label_key
    keys = (own, *ENGINE_LABELS[1:]) if own else ENGINE_LABELS
    return CoreMetricsExtractor(EngineTable(MappingProxyType(engines), keys, default))


def _engine(config: EngineConfig) -> EngineSeries:
    try:
        return EngineSeries(
            waiting=parse_series(config.queued_requests_spec),
            running=parse_series(config.running_requests_spec),
            kv_usage=parse_series(config.kv_usage_spec),
            lora=parse_series(config.lora_spec),
            cache_info=parse_series(config.cache_info_spec),
            block_size_label=config.cache_block_size_label_name or BLOCK_SIZE_LABEL,
            num_blocks_label=config.cache_num_blocks_label_name or NUM_BLOCKS_LABEL,
            block_size=parse_series(config.cache_block_size_spec),
            num_blocks=parse_series(config.cache_num_blocks_spec),
            custom=tuple(_custom(metric) for metric in config.custom_metrics),
        )
    except ValueError as error:
        raise ValueError(f"engine '{config.name}': {error}") from error


def _custom(metric: CustomMetric) -> tuple[str, Series]:
    series = parse_series(metric.metric_spec)
    if series is None or not metric.attribute_key:
        raise ValueError("a custom metric needs an attributeKey and a metricSpec")
    return f"{metric.attribute_key}/{TYPE}", series


class ModelsDataExtractor(Parameters, frozen=True):
    def extract(self, scrape: Scrape) -> Extraction:
        try:
            body = msgspec.json.decode(scrape.page)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ExtractError(f"the list of models is not valid JSON: {error}") from None
        entries = body.get("data") if isinstance(body, dict) else None
        if not isinstance(entries, list):
            raise ExtractError("the list of models has no list 'data'")
        named = [one for one in entries if isinstance(one, dict) and _text(one, "id")]
        models = tuple(map(_model, named))
        skipped = len(entries) - len(models)
        problems = (f"{skipped} models without an id",) if skipped else ()
        names = frozenset(one.id for one in models)
        return Extraction(attributes={MODELS_ATTRIBUTE: models}, problems=problems, models=names)


def _model(entry: dict[str, Any]) -> ServedModel:
    created = entry.get("created")
    return ServedModel(
        id=entry["id"],
        object=_text(entry, "object"),
        created=created if isinstance(created, int) and not isinstance(created, bool) else 0,
        owned_by=_text(entry, "owned_by"),
        parent=_text(entry, "parent"),
    )


def _text(entry: dict[str, Any], key: str) -> str:
    value = entry.get(key)
    return value if isinstance(value, str) else ""


PLUGINS = (PluginType(TYPE, _extractor), PluginType("models-data-extractor", ModelsDataExtractor))
