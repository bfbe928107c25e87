"""Handlers that run one profile: the only one, by a header, or through a sidecar."""

from typing import Any

import pytest

from picker.errors import Code, RefusedError
from picker.framework.attributes import Attributes
from picker.types import ProfileResult
from tests.support.picker.plugin_scenes import (
    configured,
    decided,
    placed,
    pool_of,
    request_for,
    schedule,
)

SINGLE, HEADER = "single-profile-handler", "header-profile-handler"
DATA_PARALLEL, HEADERS = "data-parallel-profile-handler", "disagg-headers-handler"
PREFILLER, ENCODERS = "x-prefiller-host-port", "x-encoder-hosts-ports"


@pytest.mark.parametrize("found", [None, ProfileResult(())])
@pytest.mark.parametrize("plugin", [SINGLE, HEADER, DATA_PARALLEL])
def test_an_empty_result_is_refused(plugin: str, found: ProfileResult | None) -> None:
    handler = configured(plugin)
    assert not handler.pick_profiles(request_for(), ("a", "b"), {"a": found}, Attributes())
    with pytest.raises(RefusedError) as refusal:
        handler.process_results(request_for(), {"a": found})
    assert refusal.value.code is Code.RESOURCE_EXHAUSTED


@pytest.mark.parametrize(("plugin", "limit"), [(SINGLE, 1), (HEADER, None)])
def test_all_picked_endpoints_are_the_fallback_list(plugin: str, limit: int | None) -> None:
    handler = configured(plugin)
    assert handler.max_profiles is limit
    result, runs = schedule(handler, ("decode",), pool_of("decode", "decode"))
    assert runs == [("decode", None)]
    assert [endpoint.name for endpoint in result.endpoints] == ["decode0", "decode1"]
    assert result.primary_profile == "decode"
    assert result.set_headers == {}


@pytest.mark.parametrize(
    ("parameters", "header", "profiles", "expected"),
    [
        ({}, "prefill", ("decode", "prefill"), "prefill"),
        ({}, "  prefill ", ("decode", "prefill"), "prefill"),
        ({}, None, ("decode", "prefill"), "decode"),
        ({}, " ", ("decode", "prefill"), "decode"),
        ({"defaultProfile": "prefill"}, None, ("decode", "prefill"), "prefill"),
        ({"headerName": "EPP-PROFILE"}, "prefill", ("decode", "prefill"), "prefill"),
        ({"headerName": "X-Other"}, "prefill", ("decode", "prefill"), "decode"),
        ({}, "prefill", ("decode",), "decode"),
        ({}, None, ("prefill",), "prefill"),
        ({}, "Prefill", ("decode", "prefill"), None),
        ({}, "unknown", ("decode", "prefill"), None),
        ({}, None, ("encode", "prefill"), None),
    ],
)
def test_the_header_names_the_profile(
    parameters: dict[str, Any], header: str | None, profiles: tuple[str, ...], expected: str | None
) -> None:
    request = request_for(headers={} if header is None else {"epp-profile": header})
    handler, candidates = configured(HEADER, parameters), pool_of("both", "encode")
    if expected is None:
        with pytest.raises(RefusedError) as refusal:
            schedule(handler, profiles, candidates, request)
        assert refusal.value.code is Code.RESOURCE_EXHAUSTED
        return
    result, runs = schedule(handler, profiles, candidates, request)
    assert [name for name, _ in runs] == [expected]
    assert result.primary_profile == expected


@pytest.mark.parametrize(("parameters", "port"), [({}, 8000), ({"primaryPort": 9001}, 9001)])
def test_the_destination_is_the_sidecar_of_the_picked_rank(
    parameters: dict[str, int], port: int
) -> None:
    ranks = [
        placed(f"pod-{rank}", {"llm-d.ai/role": "decode"}, port=8200 + rank) for rank in (3, 1)
    ]
    handler = configured(DATA_PARALLEL, parameters)
    assert handler.max_profiles == 1
    result, runs = schedule(handler, ("decode",), ranks)
    assert runs == [("decode", None)]
    assert [endpoint.host_port for endpoint in result.endpoints] == [f"10.0.0.1:{port}"]
    assert result.endpoints[0].key == "default/pod-3"
    assert result.set_headers == {"x-data-parallel-host-port": "10.0.0.1:8203"}
    assert len(result.profiles["decode"].picked) == 2


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
def test_headers_name_the_stages_that_found_an_endpoint(
    parameters: dict[str, str], profiles: dict[str, list[int]], expected: dict[str, str]
) -> None:
    found = {
        name: [placed(f"w{port}", port=8000 + port) for port in ports]
        for name, ports in profiles.items()
    }
    result = decided(decode=[placed("d")], **found)
    plugin = configured(HEADERS, parameters)
    assert plugin.pre_request(request_for(), result, Attributes()) == expected
