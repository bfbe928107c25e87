"""Invalid parameters of the shelf's types are refused by a message that names them."""

from collections.abc import Mapping
from math import nan
from typing import Any

import msgspec
import pytest

from tests.support.picker.plugin_scenes import configured


def _screen(**change: Any) -> dict[str, Any]:
    return {"scope": {"labelSelector": "a=b"}, "revisionGating": {"mode": "disabled"}, **change}


def _header_selectors(*changes: Mapping[str, str]) -> dict[str, Any]:
    selector = {"name": "r", "headerName": "x-r", "labelKey": "r", "mode": "strict"}
    return _screen(headerSelectors=[{**selector, **change} for change in changes])


def _report(expression: str, **attribute: Any) -> dict[str, Any]:
    return {"attributes": [{"key": {"name": "cost"}, "expression": expression, **attribute}]}


# By plugin type: parameters, and what the message says.
REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "burst-prefix-cache-producer": [
        ({"windowDurationMs": 0}, "windowDurationMs"),
        ({"windowDurationMs": 10_001}, "windowDurationMs"),
        ({"maxPerReplica": 0}, "maxPerReplica"),
        ({"maxBatchSize": -2}, "maxBatchSize"),
        ({"blockSizeTokens": 0}, "blockSizeTokens"),
        ({"maxPrefixTokensToMatch": -1}, "maxPrefixTokensToMatch"),
        ({"minColocateBlocks": -1}, "minColocateBlocks"),
    ],
    "context-length-aware": [({"label": ""}, "label")],
    "disaggregatedset-rollout-screener": [
        (_screen(scope={"labelSelector": " "}), "scope.labelSelector"),
        (_screen(scope={"labelSelector": "a in"}), "scope.labelSelector"),
        (_screen(scope={}), "labelSelector"),
        (_screen(revisionGating={"mode": "max"}), "mode"),
        (_screen(revisionGating={"mode": "sum"}), "revisionGating.requireRoles.values"),
        (
            _screen(revisionGating={"mode": "max-role", "requireRoles": {"values": [""]}}),
            "revisionGating.requireRoles.values",
        ),
        (_header_selectors({}, {"headerName": ""}), r"headerSelectors\[1\].headerName"),
        (_header_selectors({"labelKey": " "}), r"headerSelectors\[0\].labelKey"),
        (_header_selectors({"mode": "loose"}), "mode"),
    ],
    "header-label-affinity-scorer": [
        ({"headerName": "x"}, "labelKey"),
        ({"labelKey": "x"}, "headerName"),
        ({"headerName": " ", "labelKey": "x"}, "headerName"),
        ({"headerName": "x", "labelKey": ""}, "labelKey"),
    ],
    "latency-scorer": [
        ({name: -0.1}, name)
        for name in (
            "ttftWeight",
            "tpotWeight",
            "compositeKVWeight",
            "compositeQueueWeight",
            "compositePrefixWeight",
        )
    ],
    "mm-embeddings-cache-producer": [({"cacheSizeInMBPerServer": 1}, "cacheSizeInMBPerServer")],
    "multicluster-metrics-extractor": [
        ({name: ""}, name) for name in ("queueSizeMetric", "kvCacheUtilizationMetric")
    ],
    "p2p-source-producer": [({"minCachedTokenDelta": 0}, "minCachedTokenDelta")],
    "predicted-latency-producer": [
        ({"sloBufferFactor": 0.0}, "sloBufferFactor"),
        ({"predictionServerURL": "localhost"}, "URL"),
    ],
    "program-aware-fairness": [
        ({"strategy": "fifo"}, "strategy"),
        ({"evictionTtlSeconds": 0}, "evictionTtlSeconds"),
        ({"evictionSweepSeconds": -1}, "evictionSweepSeconds"),
        ({"lasHalfLifeSeconds": 0}, "lasHalfLifeSeconds"),
        ({"lasHalfLifeSeconds": nan}, "lasHalfLifeSeconds"),
        ({"lasWeightService": -0.1}, "lasWeightService"),
        ({"lasWeightHeadWait": nan}, "lasWeightHeadWait"),
    ],
    "request-attribute-reporter": [
        ({}, "attributes"),
        ({"attributes": []}, "attributes"),
        ({"attributes": _report("1")["attributes"] * 2}, "attributes"),
        (_report("1", key={"name": ""}), r"attributes\[0\].key.name"),
        (_report("usage."), r"attributes\[0\].expression"),
        (_report("1", condition="1"), r"attributes\[0\].condition"),
        ({"attributes": [{"key": {"name": "x"}}]}, "expression"),
        ({"attributes": [{"expression": "1"}]}, "key"),
    ],
    "slo-headroom-tier-filter": [
        ({"epsilonExploreNeg": epsilon}, "epsilonExploreNeg") for epsilon in (-0.01, 1.01, nan)
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
