"""The plugin types this program has, found in the tree: one file, one type, one `PLUGIN`."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType
from typing import Any

from picker import plugins
from picker.errors import ConfigError
from picker.framework.registry import PluginType, Registry

_REFERENCE_TYPES = """
    label-selector-filter by-label-selector by-label decode-filter prefill-filter encode-filter
    session-affinity-filter endpoint-attribute-filter utilization-filter topology-affinity-filter
    prefix-cache-affinity-filter slo-headroom-tier-filter header-based-testing-filter
    running-requests-size-scorer lora-affinity-scorer load-aware-scorer token-load-scorer
    active-request-scorer context-length-aware session-affinity-scorer
    header-label-affinity-scorer no-hit-lru-scorer latency-scorer mm-embeddings-cache-scorer
    endpoint-attribute-scorer topology-affinity-scorer precise-prefix-cache-scorer
    disagg-profile-handler pd-profile-handler data-parallel-profile-handler header-profile-handler
    prefix-based-pd-decider always-disagg-pd-decider always-disagg-multimodal-decider
    disagg-headers-handler prefill-header-handler
    precise-prefix-cache-producer burst-prefix-cache-producer inflight-load-producer
    mm-embeddings-cache-producer session-id-producer predicted-latency-producer
    p2p-source-producer agent-identity latency-slo-admitter probabilistic-admitter
    request-attribute-reporter disaggregatedset-rollout-screener
    destination-endpoint-served-verifier
    models-data-source models-data-extractor topology-extractor dcgm-data-source dcgm-extractor
    k8s-notification-source endpoint-notification-source
    utilization-detector concurrency-detector
    global-strict-fairness-policy round-robin-fairness-policy fcfs-ordering-policy
    edf-ordering-policy slo-deadline-ordering-policy static-usage-limit-policy
    priority-holdback-policy soft-reflective-ceiling-policy
    anthropic-parser vllmhttp-parser sglanghttp-parser vllmgrpc-parser vertexai-parser
"""
# Without a file here, but known: the answer to using one is "not supported yet", not "unknown".
NOT_SUPPORTED_YET = frozenset(_REFERENCE_TYPES.split())


def builtin_plugins() -> Registry:
    """All plugin types under `picker.plugins`.

    Raises `ConfigError` for a file whose `PLUGIN` is not called like the file.
    """
    return Registry(
        _row(importlib.import_module(info.name))
        for info in pkgutil.walk_packages(plugins.__path__, f"{plugins.__name__}.")
        if not info.ispkg
    )


def _row(module: ModuleType) -> PluginType[Any]:
    row = getattr(module, "PLUGIN", None)
    expected = module.__name__.rpartition(".")[2].replace("_", "-")
    if not isinstance(row, PluginType) or row.name != expected:
        raise ConfigError(f"{module.__name__} must define PLUGIN, the plugin type '{expected}'")
    return row
