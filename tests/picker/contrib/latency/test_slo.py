"""latency-slo-admitter: sheddable requests that nobody can serve in time are refused."""

from __future__ import annotations

from random import Random

import pytest
from msgspec.structs import replace

from picker.contrib.latency.slo import (
    LatencySloAdmitter,
    LatencySloAdmitterParameters,
)
from picker.errors import RefusedError
from picker.framework.attributes import Attributes, LatencyPrediction, latency_predictions_key
from tests.support.picker.plugin_scenes import candidate, request_for

OBJECTIVE = {"x-llm-d-slo-ttft-ms": "100"}


def _found(*valid: bool) -> Attributes:
    attributes = Attributes()
    predictions = {
        f"default/{index}": LatencyPrediction(1.0, 1.0, 0.0, 0.0, good)
        for index, good in enumerate(valid)
    }
    attributes[latency_predictions_key()] = predictions
    return attributes


ADMITTER = LatencySloAdmitter(LatencySloAdmitterParameters())


SHEDDABLE = replace(request_for(priority=-1), headers=OBJECTIVE)


BUSY = candidate("0", running_requests=3, kv_cache_usage=0.5)


def test_a_hopeless_request_is_refused() -> None:
    """With 429, and as saturation."""
    with pytest.raises(RefusedError) as refused:
        ADMITTER.admit(SHEDDABLE, [BUSY], _found(False), Random(0))
    assert refused.value.status == 429
    assert refused.value.headers == (("x-llm-d-request-dropped-reason", "rejected-saturated"),)


def test_one_endpoint_that_can_is_enough() -> None:
    """By prediction, by being idle, or by being cold."""
    ADMITTER.admit(SHEDDABLE, [BUSY], _found(True), Random(0))
    idle = candidate("1", kv_cache_usage=0.5)
    cold = candidate("1", running_requests=3, kv_cache_usage=0.019)
    for other in (idle, cold):
        ADMITTER.admit(SHEDDABLE, [BUSY, other], _found(False, False), Random(0))


def test_unknown_and_loaded_endpoints_are_neither_idle_nor_cold() -> None:
    """Own requests that no scrape has seen count."""
    for other in (
        candidate("0", known=False),
        candidate("0", running_requests=None, kv_cache_usage=0.5),
        candidate("0", running_requests=3, kv_cache_usage=None),
        candidate("0", inflight=1, kv_cache_usage=0.5),
        candidate("0", running_requests=1, kv_cache_usage=0.02),
    ):
        with pytest.raises(RefusedError):
            ADMITTER.admit(SHEDDABLE, [other], _found(False), Random(0))


def test_others_are_not_asked_about() -> None:
    """Critical requests, those without an objective, and all while there are no predictions."""
    ADMITTER.admit(replace(SHEDDABLE, priority=0), [BUSY], _found(False), Random(0))
    ADMITTER.admit(replace(SHEDDABLE, headers={}), [BUSY], _found(False), Random(0))
    ADMITTER.admit(SHEDDABLE, [BUSY], Attributes(), Random(0))
    ADMITTER.admit(SHEDDABLE, [BUSY], _found(), Random(0))
    assert ADMITTER.consumes == (latency_predictions_key(),)
