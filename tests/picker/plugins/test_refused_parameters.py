"""Parameters that cannot work: refused when a plugin is made, by a message that names them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from picker.config.catalog import builtin_plugins

LOWER = {"type": "linear_lower_is_better"}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("prefix-cache-scorer", {"matchLengthWeight": 1.5}, "matchLengthWeight"),
    ("prefix-cache-scorer", {"matchLengthWeight": -0.1}, "matchLengthWeight"),
    ("prefix-cache-scorer", {"matchLengthScaleTokens": 0}, "matchLengthScaleTokens"),
    ("token-load-scorer", {"queueThresholdTokens": 0}, "queueThresholdTokens"),
    ("active-request-scorer", {"idleThreshold": -1}, "idleThreshold"),
    ("active-request-scorer", {"maxBusyScore": 1.5}, "maxBusyScore"),
    ("active-request-scorer", {"maxBusyScore": -0.1}, "maxBusyScore"),
    ("header-label-affinity-scorer", {"headerName": "x"}, "labelKey"),
    ("header-label-affinity-scorer", {"labelKey": "x"}, "headerName"),
    ("header-label-affinity-scorer", {"headerName": " ", "labelKey": "x"}, "headerName"),
    ("header-label-affinity-scorer", {"headerName": "x", "labelKey": ""}, "labelKey"),
    (
        "endpoint-attribute-scorer",
        {"attributeKey": "a", "algorithm": {"type": "quadratic"}},
        "quadratic",
    ),
    (
        "endpoint-attribute-scorer",
        {"attributeKey": "", "algorithm": LOWER},
        "name of",
    ),
    ("endpoint-attribute-scorer", {"attributeKey": "a/b", "algorithm": LOWER}, "producer"),
    ("endpoint-attribute-scorer", {"algorithm": LOWER}, "attributeKey"),
    *(
        (
            "endpoint-attribute-scorer",
            {"attributeKey": "a", "algorithm": {**LOWER, "normalization": normalization}},
            named,
        )
        for normalization, named in (
            ({"fixedRange": {"min": 1, "max": 1}}, "fixedRange"),
            ({"fixedRange": {"min": 0, "max": 1}, "adaptiveRange": {}}, "not both"),
            ({"fixedRange": {"min": 0}}, "max"),
        )
    ),
    ("no-hit-lru-scorer", {"lruSize": 0}, "lruSize"),
    ("context-length-aware", {"label": ""}, "label"),
    *(
        ("latency-scorer", {name: -0.1}, name)
        for name in (
            "ttftWeight",
            "tpotWeight",
            "compositeKVWeight",
            "compositeQueueWeight",
            "compositePrefixWeight",
        )
    ),
    ("precise-prefix-cache-scorer", {"speculativeTTL": "soon"}, "duration"),
]


@pytest.mark.parametrize(("type_name", "parameters", "named"), REFUSED)
def test_parameters_out_of_range_are_refused(
    type_name: str, parameters: dict[str, Any], named: str
) -> None:
    """When the picker starts, not when it decides."""
    plugin = builtin_plugins().get(type_name)
    with pytest.raises((ValueError, msgspec.ValidationError), match=named):
        plugin.make("mine", msgspec.convert(parameters, plugin.parameters))
