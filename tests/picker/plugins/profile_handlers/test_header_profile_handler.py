"""header-profile-handler: the profile that a header names."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from plugin_scenes import configured, pool_of, request_for, schedule

from picker.errors import Code, RefusedError
from picker.framework.attributes import Attributes
from picker.plugins.profile_handlers.header_profile_handler import PLUGIN
from picker.types import ProfileResult


@pytest.mark.parametrize(
    ("parameters", "header", "profiles", "expected"),
    [
        ({}, "prefill", ("decode", "prefill"), "prefill"),
        ({}, "  prefill ", ("decode", "prefill"), "prefill"),
        ({}, None, ("decode", "prefill"), "decode"),
        ({}, " ", ("decode", "prefill"), "decode"),
        ({"defaultProfile": "prefill"}, None, ("decode", "prefill"), "prefill"),
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
    """The only profile needs no name; a name that is no profile is refused."""
    request = request_for()
    if header is not None:
        request = replace(request, headers={"epp-profile": header})
    handler, candidates = configured(PLUGIN, parameters), pool_of("both", "encode")
    if expected is None:
        with pytest.raises(RefusedError) as refusal:
            schedule(handler, profiles, candidates, request)
        assert refusal.value.code is Code.RESOURCE_EXHAUSTED
        return
    result, runs = schedule(handler, profiles, candidates, request)
    assert [name for name, _ in runs] == [expected]
    assert result.primary_profile == expected


def test_another_header_can_be_named() -> None:
    """Its case does not matter."""
    request = replace(request_for(), headers={"x-stage": "prefill", "epp-profile": "decode"})
    handler = configured(PLUGIN, {"headerName": "X-Stage"})
    result, _ = schedule(handler, ("decode", "prefill"), pool_of("both"), request)
    assert result.primary_profile == "prefill"


def test_all_picked_endpoints_are_the_fallback_list() -> None:
    """In order."""
    result, _ = schedule(configured(PLUGIN), ("decode",), pool_of("decode", "decode"))
    assert [endpoint.name for endpoint in result.endpoints] == ["decode0", "decode1"]
    assert result.set_headers == {}


@pytest.mark.parametrize("found", [None, ProfileResult(())])
def test_nothing_picked_is_refused(found: ProfileResult | None) -> None:
    """429; and no other profile is tried."""
    handler = configured(PLUGIN)
    assert not handler.pick_profiles(request_for(), ("a", "b"), {"a": found}, Attributes())
    with pytest.raises(RefusedError) as refusal:
        handler.process_results(request_for(), {"a": found})
    assert refusal.value.code is Code.RESOURCE_EXHAUSTED
