"""destination-endpoint-served-verifier: who has served."""

from __future__ import annotations

import pytest

from picker.framework.interfaces import ResponseHeadHook
from picker.types import ResponseHead
from tests.support.picker.plugin_scenes import configured, flight


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        (ResponseHead(200, {}, "10.0.0.1:3000", True), "10.0.0.1:3000"),
        (ResponseHead(503, {}, "[fd00::1]:3000", True), "[fd00::1]:3000"),
        (ResponseHead(200, {}, None, True), "fail: missing destination endpoint served metadata"),
        (ResponseHead(200, {}, "", True), "fail: missing destination endpoint served metadata"),
        (ResponseHead(200), "fail: missing envoy lb metadata"),
        (ResponseHead(None), "fail: missing envoy lb metadata"),
    ],
)
def test_every_response_says_who_has_served(head: ResponseHead, expected: str) -> None:
    """Or what the proxy left out."""
    plugin = configured("destination-endpoint-served-verifier")
    assert isinstance(plugin, ResponseHeadHook)
    answer = plugin.response_head(flight(), head)
    assert answer == {"x-conformance-test-served-endpoint": expected}
