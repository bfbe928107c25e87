"""Meters count the findings of some types of plugins."""

import pytest

from picker.types import Endpoint
from tests.support.picker.configured_requests import routing

STAGES = """
plugins:
- {type: HANDLER}
- {type: always-disagg-pd-decider}
- {type: decode-filter}
- {type: prefill-filter}
schedulingProfiles:
- {name: decode, plugins: [{pluginRef: decode-filter}]}
- {name: prefill, plugins: [{pluginRef: prefill-filter}]}
"""
ROLES = [
    Endpoint(role, f"10.0.1.{i}", 8000, labels={"llm-d.ai/role": role})
    for i, role in enumerate(("prefill", "decode"), 1)
]


@pytest.mark.parametrize(
    ("handler", "series"),
    [
        (
            "disagg-profile-handler, parameters: {deciders: {prefill: always-disagg-pd-decider}}",
            "disagg_decision_total",
        ),
        (
            "pd-profile-handler, parameters: {deciderPluginName: always-disagg-pd-decider}",
            "pd_decision_total",
        ),
    ],
)
async def test_decisions_about_stages_are_counted(handler: str, series: str) -> None:
    house = routing(STAGES.replace("HANDLER", handler), ROLES)
    for _ in range(2):
        await house.route()
    name = handler.partition(",")[0]
    labels = {"model_name": "m", "decision_type": "prefill-decode"}
    own = {"plugin_name": name, "plugin_type": name, **labels}
    assert house.value(f"llm_d_epp_{series}", **own) == 2
    assert house.value(f"llm_d_inference_scheduler_{series}", **labels) == 2
    other = ({"disagg_decision_total", "pd_decision_total"} - {series}).pop()
    assert house.samples(f"llm_d_epp_{other}") == {}


async def test_a_pool_without_prefill_is_decode_only() -> None:
    handler = "disagg-profile-handler, parameters: {deciders: {prefill: always-disagg-pd-decider}}"
    house = routing(STAGES.replace("HANDLER", handler), ROLES[1:])
    await house.route()
    assert list(house.samples("llm_d_epp_disagg_decision_total")) == [
        ("decode-only", "m", "disagg-profile-handler", "disagg-profile-handler")
    ]


PRECISE = """
plugins:
- {type: precise-prefix-cache-producer}
- type: prefix-cache-scorer
  parameters: {prefixMatchInfoProducerName: precise-prefix-cache-producer}
"""


async def test_look_ups_of_what_engines_hold_are_counted() -> None:
    house = routing(PRECISE)
    await house.route()
    for prefix in ("llm_d_epp_kv_cache_index", "kvcache_index"):
        assert house.value(f"{prefix}_lookup_requests_total") == 1
        assert house.value(f"{prefix}_lookup_hits_total") == 0
        assert house.value(f"{prefix}_lookup_latency_seconds_count") == 1
    guessing = routing("plugins: [{type: prefix-cache-scorer}]\n")
    await guessing.route()
    assert guessing.value("llm_d_epp_kv_cache_index_lookup_requests_total") == 0
