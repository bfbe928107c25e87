"""core-metrics-extractor: which engine's series names apply. Settings only; the extraction is
`datalayer.extract`.

`defaultEngine` (vllm) is assumed for endpoints without the label `llm-d.ai/engine-type`.
`engineLabelKey` and `engineConfigs` are not supported yet.
"""

from __future__ import annotations

from typing import Any

from picker.datalayer.extract import DEFAULT_ENGINE, ENGINES
from picker.framework.registry import Parameters, PluginType
from picker.framework.services import Services


class CoreMetricsExtractor(Parameters, frozen=True):
    """`parameters` of a core-metrics-extractor, and the plugin itself."""

    default_engine: str = DEFAULT_ENGINE
    engine_label_key: str | None = None
    engine_configs: tuple[Any, ...] = ()


def _create(
    _name: str, parameters: CoreMetricsExtractor, _services: Services
) -> CoreMetricsExtractor:
    if parameters.engine_label_key is not None or parameters.engine_configs:
        raise ValueError("engineLabelKey and engineConfigs are not supported yet")
    if parameters.default_engine not in ENGINES:
        known = ", ".join(ENGINES)
        raise ValueError(f"unknown defaultEngine '{parameters.default_engine}', allowed: {known}")
    return parameters


PLUGIN = PluginType("core-metrics-extractor", CoreMetricsExtractor, _create)
