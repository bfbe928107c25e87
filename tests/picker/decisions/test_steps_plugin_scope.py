"""Plugins access only declared attributes."""

import contextlib
import logging

import pytest

from picker.config.findings import InvalidConfigError
from picker.decisions.steps import WATCHED_CALLS, BoundPlugin, Scope
from picker.errors import RefusedError
from picker.framework.attributes import Attributes, DataKey
from picker.metrics.picker_metrics import PickerMetrics
from picker.types import Endpoint, EndpointMetrics, FinishCause, RawRequest
from tests.support.picker.configured_requests import GOLDEN, golden, routing

CASES = [case for case in GOLDEN if not case.startswith("bad_")]
BODY = b"""{"model": "m", "messages": [{"role": "user", "content": [
    {"type": "text", "text": "Tell me a story about a pointsman and a train. Make it a long one."},
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}]}"""
HEADERS = {
    ":path": "/v1/chat/completions",
    "x-session": "s",
    "x-session-id": "s",
    "x-llm-d-slo-ttft-ms": "100",
    "test-epp-endpoint-selection": "10.0.0.1",
}
ROLES = ("encode-prefill-decode", "prefill", "decode", "encode")
MINE: DataKey[int] = DataKey("Mine", "me")
WANTED: DataKey[int] = DataKey("Wanted", "other")
FOREIGN: DataKey[int] = DataKey("Foreign", "other")


@pytest.mark.parametrize("case", CASES)
async def test_no_plugin_accesses_undeclared_attributes(case: str) -> None:
    pool = [
        Endpoint(f"w{i}", f"10.0.0.{i + 1}", 8000, labels={"llm-d.ai/role": role, "zone": "a"})
        for i, role in enumerate(ROLES)
    ]
    try:
        house = routing(golden(case), pool, strict=True)
    except InvalidConfigError:
        pytest.skip("refused, as its golden twin says")
    for endpoint in pool:
        house.datastore.update_metrics(endpoint.key, EndpointMetrics(block_size_tokens=16))
    for _ in range(2):
        exchange = house.director.begin()
        with contextlib.suppress(RefusedError):
            await exchange.route(RawRequest(HEADERS, BODY))
        exchange.finish(FinishCause.COMPLETED, 200)
    violations = house.metrics.plugin_data_scope_violations_total.numbers()
    assert [labels for labels, _ in violations] == []


class Reader:
    produces = (MINE,)
    consumes = (WANTED,)


def bound_in(metrics: PickerMetrics, *, strict: bool) -> BoundPlugin[Reader]:
    labels, plugin = ("Scorer", "reader", "me"), Reader()
    bound = BoundPlugin(plugin, *labels)
    bound.scope = Scope("me", (plugin,), metrics.plugin_data_scope_violations_total, labels)
    if strict:
        bound.scope.never_lift()
    return bound


@pytest.mark.parametrize("strict", [False, True])
def test_undeclared_access_is_counted_each_time_and_logged_once(
    strict: bool, caplog: pytest.LogCaptureFixture
) -> None:
    metrics, found = PickerMetrics(), Attributes()
    found[FOREIGN] = 1
    bound = bound_in(metrics, strict=strict)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            seen = bound.scoped(found)
            assert seen.get(FOREIGN) == (None if strict else 1)
            seen[FOREIGN] = 2 if strict else 1
    assert found.get(FOREIGN) == 1
    counted = dict(metrics.plugin_data_scope_violations_total.numbers())
    assert counted == {
        ("Scorer", "reader", "me", "read"): 2,
        ("Scorer", "reader", "me", "write"): 2,
    }
    assert [record.message.count("Foreign/other") for record in caplog.records] == [1, 1]


def test_declared_access_passes() -> None:
    metrics, found = PickerMetrics(), Attributes()
    found[WANTED] = 3
    seen = bound_in(metrics, strict=True).scoped(found)
    seen[MINE] = 1
    seen[DataKey("Private", "me")] = 2
    assert (seen.get(WANTED), seen.get(MINE), seen.of_type("Wanted")) == (3, 1, (3,))
    assert seen.get(DataKey("Private", "me")) == 2
    assert seen.of_type("Foreign") == ()
    assert len(list(metrics.plugin_data_scope_violations_total.numbers())) == 1


def test_a_plugin_is_watched_only_for_its_first_calls() -> None:
    bound, found = bound_in(PickerMetrics(), strict=False), Attributes()
    for _ in range(WATCHED_CALLS):
        assert bound.scoped(found) is not found
    assert bound.scope is None
    assert bound.scoped(found) is found
