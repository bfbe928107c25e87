"""pd-profile-handler: decode, then perhaps prefill."""

from __future__ import annotations

import pytest

from picker.errors import Code, RefusedError
from picker.framework.attributes import Attributes
from picker.framework.disaggregation import DISAGGREGATION_DECISION_KEY, DisaggregationDecision
from tests.support.picker.plugin_scenes import (
    SetDecider,
    configured,
    pool_of,
    request_for,
    schedule,
)

NAME = "prefix-based-pd-decider"


@pytest.mark.parametrize("answer", [True, False])
def test_the_decider_decides_about_prefill(answer: bool) -> None:
    """It sees the decode endpoint, and so does the prefill profile."""
    handler, made = configured("pd-profile-handler"), SetDecider(answer)
    assert handler.references == {"deciderPluginName": NAME}
    handler.connect({NAME: made})
    result, runs = schedule(handler, ("decode", "prefill"), pool_of("prefill", "decode"))
    assert runs == [("decode", None), ("prefill", "decode1")][: 2 if answer else 1]
    assert made.shown == ["decode1"]
    assert [endpoint.host_port for endpoint in result.endpoints] == ["10.0.0.1:8000"]
    prefiller = {"x-prefiller-host-port": "10.0.0.0:8000"}
    assert result.set_headers == (prefiller if answer else {})
    attributes = Attributes()
    handler.pre_request(request_for(), result, attributes)
    word = "prefill-decode" if answer else "decode-only"
    assert attributes.get(DISAGGREGATION_DECISION_KEY) is DisaggregationDecision(word)


def test_the_primary_port_stands_in_front_of_the_picked_endpoint() -> None:
    """Which a header names; a fallback would be given the wrong one, so there is none."""
    handler = configured("pd-profile-handler", {"primaryPort": 9000})
    handler.connect({NAME: SetDecider(True)})
    result, _ = schedule(handler, ("decode", "prefill"), pool_of("decode", "decode", "prefill"))
    assert [endpoint.host_port for endpoint in result.endpoints] == ["10.0.0.0:9000"]
    assert result.set_headers == {
        "x-data-parallel-host-port": "10.0.0.0:8000",
        "x-prefiller-host-port": "10.0.0.2:8000",
    }
    assert result.profiles["decode"].picked[0].candidate.endpoint.port == 8000


@pytest.mark.parametrize("roles", [("decode",), ("prefill",)])
def test_only_decode_is_needed(roles: tuple[str, ...]) -> None:
    """Without a prefill endpoint decode does it all; without a decode endpoint: 429."""
    handler = configured(
        "pd-profile-handler", {"deciderPluginName": "d", "prefixPluginType": "anything"}
    )
    handler.connect({"d": SetDecider(True)})
    if roles == ("decode",):
        result, _ = schedule(handler, ("decode", "prefill"), pool_of(*roles))
        assert result.set_headers == {}
        return
    with pytest.raises(RefusedError) as refusal:
        schedule(handler, ("decode", "prefill"), pool_of(*roles))
    assert refusal.value.code is Code.RESOURCE_EXHAUSTED


def test_without_a_prefill_profile_nobody_is_asked() -> None:
    handler, made = configured("pd-profile-handler"), SetDecider(True)
    handler.connect({NAME: made})
    _, runs = schedule(handler, ("decode",), pool_of("decode"))
    assert runs == [("decode", None)]
    assert made.shown == []


def test_its_decider_has_to_be_one() -> None:
    """Named or not: there is always one."""
    with pytest.raises(ValueError, match=NAME):
        configured("pd-profile-handler", {"deciderPluginName": ""}).connect({})
