"""disagg-headers-handler: two headers before the request leaves."""

from __future__ import annotations

import pytest
from plugin_scenes import configured, placed, request_for

from picker.framework.attributes import Attributes
from picker.framework.registry import Stability
from picker.plugins.profile_handlers.disagg_headers_handler import PLUGIN
from picker.types import (
    ProfileResult,
    SchedulingResult,
    ScoredEndpoint,
)

PREFILLER, ENCODERS = "x-prefiller-host-port", "x-encoder-hosts-ports"


@pytest.mark.parametrize(
    ("parameters", "profiles", "expected"),
    [
        ({}, {}, {}),
        ({}, {"prefill": [1, 2]}, {PREFILLER: "10.0.0.1:8001"}),
        ({}, {"encode": [1, 2]}, {ENCODERS: "10.0.0.1:8001,10.0.0.1:8002"}),
        (
            {},
            {"prefill": [3], "encode": [4]},
            {PREFILLER: "10.0.0.1:8003", ENCODERS: "10.0.0.1:8004"},
        ),
        ({}, {"prefill": [], "encode": []}, {}),
        ({"prefillProfile": "p"}, {"prefill": [1], "p": [2]}, {PREFILLER: "10.0.0.1:8002"}),
        ({"encodeProfile": "e"}, {"encode": [1]}, {}),
    ],
)
def test_the_stages_that_found_an_endpoint_are_told(
    parameters: dict[str, str], profiles: dict[str, list[int]], expected: dict[str, str]
) -> None:
    """The first prefill endpoint and all encode endpoints."""
    decode = placed("d")
    results = {"decode": ProfileResult((ScoredEndpoint(decode, 1.0),))}
    for name, ports in profiles.items():
        picked = [ScoredEndpoint(placed(f"w{port}", port=8000 + port), 1.0) for port in ports]
        results[name] = ProfileResult(tuple(picked))
    decided = SchedulingResult((decode.endpoint,), "decode", results)
    plugin = configured(PLUGIN, parameters)
    assert plugin.pre_request(request_for(), decided, Attributes()) == expected


def test_it_is_known_by_its_former_name() -> None:
    """And deprecated under both."""
    assert PLUGIN.deprecated_aliases == ("prefill-header-handler",)
    assert PLUGIN.stability is Stability.DEPRECATED
