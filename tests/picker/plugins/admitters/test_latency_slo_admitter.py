"""latency-slo-admitter: sheddable requests that nobody can serve in time are refused."""

from __future__ import annotations

from random import Random

import pytest
from msgspec.structs import replace
from plugin_scenes import candidate, request_for

from picker.errors import RefusedError
from picker.framework.attributes import Attributes, LatencyPrediction, latency_predictions_key
from picker.plugins.admitters.latency_slo_admitter import (
    LatencySloAdmitter,
    LatencySloAdmitterParameters,
)
from picker.types import Candidate, InferenceRequest

OBJECTIVE = {"x-llm-d-slo-ttft-ms": "100"}


def _found(*valid: bool) -> Attributes:
    attributes = Attributes()
    predictions = {
        f"default/{index}": LatencyPrediction(1.0, 1.0, 0.0, 0.0, good)
        for index, good in enumerate(valid)
    }
    attributes.put(latency_predictions_key(), predictions)
    return attributes


@pytest.fixture
def admitter() -> LatencySloAdmitter:
    return LatencySloAdmitter(LatencySloAdmitterParameters())


@pytest.fixture
def sheddable() -> InferenceRequest:
    return replace(request_for(priority=-1), headers=OBJECTIVE)


@pytest.fixture
def busy() -> Candidate:
    return candidate("0", running_requests=3, kv_cache_usage=0.5)


def test_a_hopeless_request_is_refused(
    admitter: LatencySloAdmitter, sheddable: InferenceRequest, busy: Candidate
) -> None:
    """With 429, and as saturation."""
    with pytest.raises(RefusedError) as refused:
        admitter.admit(sheddable, [busy], _found(False), Random(0))
    assert refused.value.status == 429
    assert refused.value.headers == (("x-llm-d-request-dropped-reason", "rejected-saturated"),)


def test_one_endpoint_that_can_is_enough(
    admitter: LatencySloAdmitter, sheddable: InferenceRequest, busy: Candidate
) -> None:
    """By prediction, by being idle, or by being cold."""
    admitter.admit(sheddable, [busy], _found(True), Random(0))
    idle = candidate("1", kv_cache_usage=0.5)
    cold = candidate("1", running_requests=3, kv_cache_usage=0.019)
    for other in (idle, cold):
        admitter.admit(sheddable, [busy, other], _found(False, False), Random(0))


def test_unknown_and_loaded_endpoints_are_neither_idle_nor_cold(
    admitter: LatencySloAdmitter, sheddable: InferenceRequest
) -> None:
    """Own requests that no scrape has seen count."""
    for other in (
        candidate("0", known=False),
        candidate("0", inflight=1, kv_cache_usage=0.5),
        candidate("0", running_requests=1, kv_cache_usage=0.02),
    ):
        with pytest.raises(RefusedError):
            admitter.admit(sheddable, [other], _found(False), Random(0))


def test_others_are_not_asked_about(
    admitter: LatencySloAdmitter, sheddable: InferenceRequest, busy: Candidate
) -> None:
    """Critical requests, those without an objective, and all while there are no predictions."""
    admitter.admit(replace(sheddable, priority=0), [busy], _found(False), Random(0))
    admitter.admit(replace(sheddable, headers={}), [busy], _found(False), Random(0))
    admitter.admit(sheddable, [busy], Attributes(), Random(0))
    admitter.admit(sheddable, [busy], _found(), Random(0))
    assert admitter.consumes == (latency_predictions_key(),)
