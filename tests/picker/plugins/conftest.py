"""What every plugin test needs: candidates and a request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from picker.types import (
    Api,
    Candidate,
    Endpoint,
    EndpointMetrics,
    InferenceRequest,
    ParsedBody,
)

MakeCandidate = Callable[..., Candidate]
MakeRequest = Callable[..., InferenceRequest]


@pytest.fixture
def candidate() -> MakeCandidate:
    """`candidate(name, inflight=0, **metrics)`; `known=False` for unknown load."""

    def make(
        name: str = "w", *, inflight: int = 0, known: bool = True, **metrics: Any
    ) -> Candidate:
        endpoint = Endpoint(name, "10.0.0.1", 8000)
        return Candidate(endpoint, EndpointMetrics(**metrics) if known else None, inflight)

    return make


@pytest.fixture
def request_for() -> MakeRequest:
    """`request_for(api, payload)`: a parsed request for the model `m`."""

    def make(
        api: Api = Api.RAW, payload: dict[str, Any] | None = None, **fields: Any
    ) -> InferenceRequest:
        body = ParsedBody(api, "m", payload=payload, cache_salt=fields.pop("salt", ""))
        return InferenceRequest("r", {}, body, "m", fields.pop("model", "m"), **fields)

    return make
