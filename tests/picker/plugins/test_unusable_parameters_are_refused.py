"""Invalid parameters are refused when a plugin is created, by a message that names them."""

from collections.abc import Mapping
from math import inf, nan
from typing import Any

import msgspec
import pytest

from tests.support.picker.plugin_scenes import configured

LOWER = {"type": "linear_lower_is_better"}
HUGE = 10**400  # no float holds it
MINE = {"name": "mine", "queuedRequestsSpec": "queued"}
NO_KEY = {"name": "a", "customMetrics": [{"attributeKey": "", "metricSpec": "b"}]}


def _index(config: Mapping[str, Any]) -> dict[str, Any]:
    return {"indexerConfig": config}


def _pods(config: Mapping[str, Any]) -> dict[str, Any]:
    return {"kvEventsConfig": {"podDiscoveryConfig": config}}


def _normalized(normalization: Mapping[str, Any]) -> dict[str, Any]:
    return {"attributeKey": "a", "algorithm": {**LOWER, "normalization": normalization}}


def _compared(**change: Any) -> dict[str, Any]:
    threshold = {"operator": "LessThan", "value": 1}
    return {"attribute": "a", "algorithm": {"type": "threshold", "threshold": threshold}, **change}


def _compared_by(algorithm: Mapping[str, Any]) -> dict[str, Any]:
    return _compared(algorithm={"type": "threshold", **algorithm})


def _limits(**limits: float) -> dict[str, Any]:
    names = ((metric.replace("_", "-"), value) for metric, value in limits.items())
    return {"conditions": [{"metric": metric, "maxValue": value} for metric, value in names]}


def _session(**config: Any) -> dict[str, Any]:
    return {"strategy": "session_id", "sessionIdConfig": config}


# By plugin type: parameters, and what the message says.
REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "active-request-scorer": [
        ({"idleThreshold": -1}, "idleThreshold"),
        ({"maxBusyScore": 1.5}, "maxBusyScore"),
        ({"maxBusyScore": -0.1}, "maxBusyScore"),
    ],
    "agent-identity": [({"additionalSessionHeaders": ["x", " "]}, "additionalSessionHeaders")],
    "approx-prefix-cache-producer": [
        ({"blockSizeTokens": -1}, "blockSizeTokens"),
        ({"blockSizeTokens": 0, "autoTune": False}, "blockSizeTokens must"),
        ({"blockSize": 128}, "blockSize is deprecated and must"),
        ({"hashSeed": -1}, "hashSeed"),
        ({"lruCapacityPerServer": 0}, "lruCapacityPerServer"),
        ({"maxPrefixTokensToMatch": -1}, "maxPrefixTokensToMatch"),
        ({"maxPrefixBlocksToMatch": -1}, "maxPrefixBlocksToMatch"),
    ],
    "by-label": [
        ({"label": "", "validValues": ["a"]}, "label"),
        ({"label": "k"}, "validValues"),
        ({"validValues": ["a"]}, "label"),
        ({"label": "k", "validValues": "a"}, "validValues"),
    ],
    "concurrency-detector": [
        ({"maxConcurrency": 0}, "maxConcurrency"),
        ({"maxTokenConcurrency": 0}, "maxTokenConcurrency"),
        ({"headroom": -0.5}, "headroom"),
        ({"headroom": 1e308}, "headroom must"),
        ({"maxConcurrency": HUGE, "headroom": 0.5}, "must"),
        ({"maxTokenConcurrency": HUGE, "headroom": 0.5}, "must"),
    ],
    "core-metrics-extractor": [
        ({"defaultEngine": "x"}, "unknown defaultEngine 'x', allowed: vllm"),
        ({"engineConfigs": [{"name": "default"}]}, "cannot be called 'default'"),
        ({"engineConfigs": [{"name": ""}]}, "cannot be called ''"),
        ({"engineConfigs": [MINE, MINE]}, "'mine' is configured twice"),
        ({"engineConfigs": [{"name": "a", "loraSpec": "b{"}]}, "engine 'a': .* closing brace"),
        ({"engineConfigs": [NO_KEY]}, "needs an attributeKey and a metricSpec"),
    ],
    "data-parallel-profile-handler": [
        ({"primaryPort": port}, "primaryPort") for port in (0, -1, 65536)
    ],
    "deficit-round-robin-fairness-policy": [
        ({"quantumTokens": 0}, "quantumTokens"),
        ({"quantumTokens": HUGE}, "quantumTokens"),
        ({"maxDebtTokens": 0}, "maxDebtTokens"),
        ({"maxDebtTokens": 10**13}, "maxDebtTokens"),
        ({"defaultWeight": 0}, "defaultWeight"),
        ({"defaultWeight": inf}, "defaultWeight"),
        *(({"weights": {"a": weight}}, "weight") for weight in (-1, 0.0001, 1001, nan, "heavy")),
        ({"completionTokenWeight": -1}, "completionTokenWeight"),
        ({"cachedTokenWeight": nan}, "cachedTokenWeight"),
        ({"cachedTokenWeight": 10**6}, "cachedTokenWeight"),
    ],
    "disagg-profile-handler": [
        ({"stageOrder": "sideways"}, "stageOrder"),
        ({"stageOrder": "prefill", "deciders": {"prefill": "d"}}, "deciders.prefill"),
        ({"profiles": {}, "decodeProfile": "d"}, "profiles and decodeProfile"),
        ({"deciders": {}, "deciderPluginName": "d"}, "deciders and deciderPluginName"),
        ({"stageOrder": "decode", "encodeProfile": "e"}, "stageOrder and encodeProfile"),
        (
            {"prefillDeciderPluginName": "a", "deciderPluginName": "b"},
            "prefillDeciderPluginName and deciderPluginName",
        ),
        ({"profiles": {"decode": "x", "prefill": "x"}}, "profiles"),
        ({"decodeProfile": "prefill"}, "decodeProfile"),
        ({"profiles": {"decoder": "x"}}, "decoder"),
        ({"stages": {}}, "stages"),
    ],
    "endpoint-attribute-filter": [
        (_compared(attribute=""), "attribute"),
        (_compared(attribute="a/b"), "attribute"),
        (_compared(onMissing="pass"), "onMissing"),
        (_compared(algorithm={"type": "range"}), "algorithm"),
        (_compared_by({}), "threshold"),
        (_compared_by({"threshold": {"operator": "<", "value": 1}}), "operator"),
        (_compared_by({"threshold": {"operator": "Equal"}}), "value"),
    ],
    "endpoint-attribute-scorer": [
        ({"attributeKey": "a", "algorithm": {"type": "quadratic"}}, "quadratic"),
        ({"attributeKey": "", "algorithm": LOWER}, "name of"),
        ({"attributeKey": "a/b", "algorithm": LOWER}, "producer"),
        ({"algorithm": LOWER}, "attributeKey"),
        (_normalized({"fixedRange": {"min": 1, "max": 1}}), "fixedRange"),
        (_normalized({"fixedRange": {"min": 0, "max": 1}, "adaptiveRange": {}}), "not both"),
        (_normalized({"fixedRange": {"min": 0}}), "max"),
    ],
    "inflight-load-producer": [
        ({"outputRatio": -1.0}, "outputRatio"),
        ({"outputRatio": nan}, "outputRatio"),
        ({"maxEstimatedOutputTokens": -1}, "maxEstimatedOutputTokens"),
    ],
    "label-selector-filter": [
        ({"matchLabels": {"not ok": "x"}}, "matchLabels"),
        ({"matchLabel": {}}, "matchLabel"),
    ],
    "metrics-data-source": [
        ({"scheme": "ftp"}, "scheme must be http or https"),
        ({"path": "metrics"}, "path must begin with '/'"),
        ({"path": "/a\r\nhost: b"}, "path must begin"),
        ({"path": "/a b"}, "path must begin"),
        ({"port": 0}, "port must be within"),
        ({"interval": "fast"}, "no duration"),
        ({"interval": "0"}, "interval must be more than nothing"),
        ({"clientCertPath": "c"}, "go together"),
    ],
    "models-data-source": [({"port": 1}, "port")],
    "no-hit-lru-scorer": [({"lruSize": 0}, "lruSize")],
    "pd-profile-handler": [
        ({"primaryPort": -1}, "primaryPort"),
        ({"primaryPort": 65536}, "primaryPort"),
        ({"prefillProfile": "decode"}, "prefillProfile"),
    ],
    "precise-prefix-cache-producer": [
        ({"tokenProcessorConfig": {"hashAlgorithm": "xxhash"}}, "cbor-fnv, xxh64"),
        ({"tokenProcessorConfig": {"hashAlgorithm": "sha256"}}, "hashAlgorithm"),
        ({"tokenProcessorConfig": {"blockSizeTokens": 0}}, "blockSizeTokens"),
        (_index({"kvBlockIndexConfig": {"redisConfig": {}}}), "every replica"),
        (_index({"kvBlockIndexConfig": {"costAwareMemoryConfig": {}}}), "costAwareMemoryConfig"),
        (_index({"kvBlockIndexConfig": {"inMemoryConfig": {"size": 0}}}), "size"),
        (_index({"tokenizersPoolConfig": {}}), "token-producer"),
        *(
            (_index({"kvCacheBackendConfigs": [{"name": "gpu", "weight": weight}]}), "weight")
            for weight in (-1, nan)
        ),
        ({"kvEventsConfig": {"engineType": "tgi"}}, "tgi"),
        ({"kvEventsConfig": {"discoverPods": False}}, "zmqEndpoint"),
        (_pods({"socketPort": 0}), "socketPort"),
        (_pods({"replaySocketPort": -1}), "replaySocketPort"),
        (_pods({"podLabelSelector": "=="}), "label"),
        ({"speculativeTTL": "soon"}, "duration"),
    ],
    "precise-prefix-cache-scorer": [({"speculativeTTL": "soon"}, "duration")],
    "prefix-based-pd-decider": [({name: -1}, name) for name in ("nonCachedTokens", "promptTokens")],
    "prefix-cache-scorer": [
        ({"matchLengthWeight": 1.5}, "matchLengthWeight"),
        ({"matchLengthWeight": -0.1}, "matchLengthWeight"),
        ({"matchLengthScaleTokens": 0}, "matchLengthScaleTokens"),
    ],
    "prefix-cache-affinity-filter": [
        ({"affinityThreshold": 1.01}, "affinityThreshold"),
        ({"affinityThreshold": nan}, "affinityThreshold"),
        ({"explorationProbability": -0.1}, "explorationProbability"),
        ({"explorationProbability": 1.1}, "explorationProbability"),
        ({"peakPrefillThroughput": 0}, "peakPrefillThroughput"),
        ({"ttftSource": "oracle"}, "ttftSource"),
        ({"maxTtftPenaltyMs": 1}, "maxTtftPenaltyMs"),
    ],
    "priority-holdback-policy": [
        ({}, "minCeiling"),
        ({"minCeiling": 1}, "minCeiling"),
        ({"minCeiling": -0.1}, "minCeiling"),
        ({"minCeiling": nan}, "minCeiling"),
        ({"minCeiling": 0.5, "maxCeiling": 0.5}, "maxCeiling"),
        ({"minCeiling": 0.5, "maxCeiling": 1.1}, "maxCeiling"),
        ({"minCeiling": 0.5, "domain": "name"}, "domain"),
        ({"minCeiling": 0.5, "shape": "cubic"}, "shape"),
    ],
    "probabilistic-admitter": [
        ({"queueDepthThreshold": 0}, "queueDepthThreshold"),
        ({"kvCacheUtilThreshold": 0}, "kvCacheUtilThreshold"),
        ({"kvCacheUtilThreshold": 1.5}, "kvCacheUtilThreshold"),
        ({"power": 0}, "power"),
        ({"k": -1}, "k"),
    ],
    "session-affinity-filter": [
        ({"encodedEndpointHeaderConfig": {"header": " "}}, "encodedEndpointHeaderConfig.header"),
        ({"strategy": "cookie"}, "strategy"),
        (_session(sources=[]), "sessionIdConfig.sources"),
        (_session(sources=[{}]), r"sessionIdConfig.sources\[0\]"),
        (_session(sources=[{"header": "a"}, {"header": "a", "attribute": "b"}]), r"sources\[1\]"),
        (_session(sources=[{"header": "a", "producer": "b"}]), r"sources\[0\].producer"),
        (_session(sources=[{"attribute": "a"}]), r"sources\[0\].producer"),
        (_session(evictionTtlSeconds=0), "evictionTtlSeconds"),
        (_session(evictionTtlSeconds=nan), "evictionTtlSeconds"),
        (_session(evictionSweepSeconds=-1), "evictionSweepSeconds"),
    ],
    "session-id-producer": [
        (parameters, "headerName and cookieName")
        for parameters in ({}, {"headerName": "a", "cookieName": "b"}, {"headerName": " "})
    ],
    "soft-reflective-ceiling-policy": [({"threshold": 1}, "threshold")],
    "static-usage-limit-policy": [({"threshold": threshold}, "threshold") for threshold in (0, -1)],
    "token-load-scorer": [({"queueThresholdTokens": 0}, "queueThresholdTokens")],
    "token-producer": [
        ({"vllm": {}}, "needs modelName"),
        ({"vllm": {}, "estimate": {}, "modelName": "m"}, "estimate excludes"),
        ({"estimate": {}, "modelName": "m"}, "estimate excludes"),
        ({"udsTokenizerConfig": {"socketFile": "/x"}, "modelName": "m"}, "use vllm.url"),
        ({"vllm": {"url": "render:8000"}, "modelName": "m"}, "vllm.url must begin"),
        ({"vllm": {"timeout": "5"}, "modelName": "m"}, "no duration"),
        ({"vllm": {"mmTimeout": "0s"}, "modelName": "m"}, "must be positive"),
        ({"estimate": {"image": {"dynamic": {"factor": 0}}}}, "image.dynamic.factor"),
    ],
    "topology-affinity-filter": [({"minAffinity": tier}, "minAffinity") for tier in ("Host", "")],
    "utilization-detector": [
        ({"queueDepthThreshold": 0}, "queueDepthThreshold"),
        ({"kvCacheUtilThreshold": 1.5}, "kvCacheUtilThreshold"),
        ({"kvCacheUtilThreshold": 0.0}, "kvCacheUtilThreshold"),
        ({"metricsStalenessThreshold": "0s"}, "metricsStalenessThreshold"),
        ({"metricsStalenessThreshold": "soon"}, "duration"),
        ({"headroom": -0.5}, "headroom"),
        ({"headroom": nan}, "headroom"),
        ({"headroom": 1e308}, "headroom"),
        ({"queueDepthThreshold": HUGE, "headroom": 0.5}, "headroom"),
        ({"assumedConcurrency": 0}, "assumedConcurrency"),
    ],
    "utilization-filter": [
        ({}, "conditions"),
        ({"conditions": []}, "conditions"),
        (_limits(waiting_queue=-1), "maxValue"),
        (_limits(waiting_queue=nan), "maxValue"),
        (_limits(waiting_queue=1, kv_cache_utilization=1.1), r"conditions\[1\].maxValue"),
        (_limits(queue=1), "metric"),
        ({"conditions": [{"metric": "waiting-queue"}]}, "maxValue"),
    ],
}


@pytest.mark.parametrize(
    ("type_name", "parameters", "named"),
    [(name, parameters, named) for name, rows in REFUSED.items() for parameters, named in rows],
)
def test_invalid_parameters_are_refused(
    type_name: str, parameters: dict[str, Any], named: str
) -> None:
    with pytest.raises((ValueError, msgspec.ValidationError), match=named):
        configured(type_name, parameters)
