"""The types for conformance: endpoints listed by a header, and the endpoint that served."""

import pytest
from msgspec.structs import replace

from picker.framework.interfaces import ResponseHeadHook
from picker.types import ResponseHead
from tests.support.picker.plugin_scenes import configured, flight, passed, placed, request_for


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (None, ["a0", "a1", "b0", "v6", "b1"]),
        ("", []),
        ("  ", []),
        (",", []),
        ("10.0.0.1:3000", ["a0"]),
        ("10.0.0.1", ["a0", "a1"]),
        ("10.0.0.2", ["b0", "b1"]),
        (" 10.0.0.2:3001 ,10.0.0.1 ", ["b1", "a0", "a1"]),
        ("10.0.0.2,10.0.0.1:3001", ["b0", "b1", "a1"]),
        ("10.0.0.1:3001,10.0.0.1", ["a1", "a0"]),
        ("10.0.0.1:3000,10.0.0.1:3000", ["a0"]),
        ("10.0.0.9", []),
        ("10.0.0.1:9999,10.0.0.2:3000", ["b0"]),
        ("[fd00::1]:3000", ["v6"]),
        ("[fd00::1]", ["v6"]),
        ("fd00::1", ["v6"]),
        ("fd00:0:0::1", ["v6"]),
        ("[fd00::1]:3001", []),
        ("fd00::1:3000", []),
        ("localhost:3000", []),
        ("10.0.0.1:", []),
        ("10.0.0.1:port", []),
        ("10.0.0.1:30000000000000000000", []),
        ("10.0.0.1:٣٠٠٠", []),
        ("[10.0.0.1", ["a0", "a1"]),
        (":3000", []),
    ],
)
def test_the_listed_endpoints_pass(header: str | None, expected: list[str]) -> None:
    candidates = [
        placed("a0", address="10.0.0.1", port=3000),
        placed("a1", address="10.0.0.1", port=3001),
        placed("b0", address="10.0.0.2", port=3000),
        placed("v6", address="fd00::1", port=3000),
        placed("b1", address="10.0.0.2", port=3001),
    ]
    headers = {} if header is None else {"test-epp-endpoint-selection": header}
    request = replace(request_for(), headers=headers)
    assert (
        passed(configured("header-based-testing-filter"), candidates, request=request) == expected
    )


def test_a_host_name_is_never_listed() -> None:
    request = replace(request_for(), headers={"test-epp-endpoint-selection": "nonsense,host"})
    assert (
        passed(
            configured("header-based-testing-filter"),
            [placed("n", address="host")],
            request=request,
        )
        == []
    )


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
def test_every_response_names_the_endpoint_that_served(head: ResponseHead, expected: str) -> None:
    plugin = configured("destination-endpoint-served-verifier")
    assert isinstance(plugin, ResponseHeadHook)
    answer = plugin.response_head(flight(), head)
    assert answer == {"x-conformance-test-served-endpoint": expected}
