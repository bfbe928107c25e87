"""Meters count the findings of the types of the shelf."""

import json

import pytest

from picker.contrib.latency._model import MIN_SAMPLES
from picker.errors import RefusedError
from picker.framework.services import Services
from picker.types import Endpoint, FinishCause
from tests.support.picker.configured_requests import PROMPT, routing
from tests.support.picker.fake_latency_predictor import FakeLatencyPredictor


def picture(*urls: str) -> dict[str, object]:
    blocks = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"model": "m", "messages": [{"role": "user", "content": blocks}]}


async def test_items_of_encoder_caches_are_counted() -> None:
    house = routing(
        "plugins: [{type: mm-embeddings-cache-scorer}]\n", [Endpoint("a", "10.0.0.1", 8000)]
    )
    await house.route(picture("http://x/1", "http://x/1"), "/v1/chat/completions")
    await house.route(picture("http://x/1", "http://x/2"), "/v1/chat/completions")
    await house.route()
    plugin = "mm-embeddings-cache-producer"
    assert house.samples("llm_d_epp_encoder_cache_queries_total") == {("image", plugin, plugin): 3}
    assert house.samples("llm_d_epp_encoder_cache_hits_total") == {
        ("image", plugin, plugin, "a"): 1
    }
    assert house.samples("llm_d_epp_encoder_cache_hit_ratio_count") == {(plugin, plugin): 2}
    assert house.samples("llm_d_epp_encoder_cache_hit_ratio_sum") == {(plugin, plugin): 0.5}


async def test_modalities_that_no_engine_has_share_a_label() -> None:
    house = routing("plugins: [{type: mm-embeddings-cache-scorer}]\n")
    for kind in ("video", "smell", "kind-7", "audio"):
        hashes, places = {kind: ["h"]}, {kind: [{"offset": 0, "length": 1}]}
        body = {
            "model": "m",
            "token_ids": [1, 2],
            "features": {"mm_hashes": hashes, "mm_placeholders": places},
        }
        await house.route(body, "/inference/v1/generate")
    kinds = {labels[0] for labels in house.samples("llm_d_epp_encoder_cache_queries_total")}
    assert kinds == {"video", "audio", "other"}


LATENCY = "plugins: [{type: latency-scorer}]\n"


PREDICTOR = {"PREDICTION_SERVER_URL": "http://p", "TRAINING_SERVER_URL": "http://t"}


USAGE = {"prompt_tokens": 4, "completion_tokens": 11, "total_tokens": 15}


LAST = f"data: {json.dumps({'choices': [], 'usage': USAGE})}\n\ndata: [DONE]\n\n".encode()


async def test_predictions_are_held_against_what_requests_saw() -> None:
    services = Services(FakeLatencyPredictor(), PREDICTOR)
    house = routing(LATENCY, services=services)
    headers = {"x_llm_d_slo_ttft_ms": "500", "x_llm_d_slo_tpot_ms": "200"}
    exchange, decision = await house.route({**PROMPT, "stream": True}, **headers)
    house.answer(exchange, decision, b'data: {"choices":[{"text":"a"}]}\n\n', LAST)

    plugin = {"plugin_name": "predicted-latency-producer"}
    plugin["plugin_type"] = plugin["plugin_name"]
    labels = {**plugin, "model_name": "m", "target_model_name": "m"}

    def last(kind: str) -> float | None:
        return house.value("llm_d_epp_inference_request_metric", type=kind, **labels)

    assert last("ttft") == pytest.approx(1.0)
    assert last("tpot") == pytest.approx(0.1)
    assert (last("ttft_slo_violation"), last("tpot_slo_violation")) == (1, 0)
    assert last("predicted_ttft") is not None
    name = "llm_d_epp_request_slo_violation_total"
    assert house.value(name, type="ttft", **labels) == 1
    assert house.value(name, type="tpot", **labels) is None
    for series in (
        "request_predicted_ttft_seconds",
        "request_predicted_tpot_seconds",
        "request_ttft_prediction_duration_seconds",
        "request_tpot_prediction_duration_seconds",
    ):
        assert house.value(f"llm_d_epp_{series}_count", **labels) == 1
        twin = f"inference_objective_{series}_count"
        assert house.value(twin, model_name="m", target_model_name="m") == 1


async def test_errors_of_predictions_are_counted() -> None:
    house = routing(LATENCY)
    for _ in range(MIN_SAMPLES + 2):
        exchange, decision = await house.route(PROMPT)
        house.answer(exchange, decision, b'{"choices":[{"text":"a"}]}')
    labels = {"plugin_name": "predicted-latency-producer", "model_name": "m", "type": "ttft"}
    labels |= {"plugin_type": labels["plugin_name"], "target_model_name": "m"}
    error = "llm_d_epp_request_latency_prediction_error_ratio"
    assert house.value(f"{error}_count", **labels) == 2
    assert house.value(f"{error}_sum", **labels) == pytest.approx(0.0, abs=0.02)
    held = "llm_d_epp_request_latency_p90_total"
    counts = [house.value(held, held=held_, **labels) or 0 for held_ in ("true", "false")]
    assert sum(counts) == 2


async def test_requests_that_failed_saw_nothing() -> None:
    house = routing(LATENCY)
    exchange, _ = await house.route(x_llm_d_slo_ttft_ms="500")
    exchange.finish(FinishCause.RESET)
    assert house.samples("llm_d_epp_inference_request_metric") == {}
    assert house.samples("llm_d_epp_request_slo_violation_total") == {}


ROLLOUT = """
plugins:
- type: disaggregatedset-rollout-screener
  name: gate
  parameters:
    scope: {labelSelector: set=s}
    headerSelectors:
    - {name: by-revision, headerName: x-revision, labelKey: rev, mode: strict}
    revisionGating:
      mode: sum
      revisionLabelKey: rev
      roleLabelKey: role
      requireRoles: {values: [decode]}
"""


async def test_shares_of_revisions_and_headers_without_a_match_are_reported() -> None:
    endpoints = [
        Endpoint(f"w{i}", f"10.0.0.{i + 1}", 80, labels={"set": "s", "rev": rev, "role": "decode"})
        for i, rev in enumerate(("old", "old", "old", "new"))
    ]
    house = routing(ROLLOUT, endpoints)
    plugin = {"plugin_name": "gate", "plugin_type": "disaggregatedset-rollout-screener"}
    share = "llm_d_epp_disaggregatedset_revision_gating_share"
    assert house.samples(share) == {}
    await house.route()
    assert house.value(share, mode="sum", revision="old", **plugin) == 0.75
    assert house.value(share, mode="sum", revision="new", **plugin) == 0.25
    unmatched = "llm_d_epp_disaggregatedset_strict_header_no_match_total"
    assert house.samples(unmatched) == {}
    with pytest.raises(RefusedError):
        await house.route(x_revision="none")
    assert house.value(unmatched, selector="by-revision", **plugin) == 1
