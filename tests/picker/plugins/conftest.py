"""What every plugin test needs: candidates and a request."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import msgspec
import pytest

from picker.framework.flow import QueuedRequest
from picker.framework.registry import PluginType
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
MakeQueued = Callable[..., QueuedRequest]


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


@pytest.fixture
def configured() -> Callable[..., Any]:
    """`configured(PLUGIN, {...}, name=…)`: an instance from its parameters as YAML has them.

    Raises what the configuration reports as an error: `ValueError` or `msgspec.ValidationError`.
    """

    def make(
        plugin: PluginType[Any], parameters: dict[str, Any] | None = None, name: str = ""
    ) -> Any:
        decoded = msgspec.convert(parameters or {}, plugin.parameters)
        return plugin.make(name or plugin.name, decoded)

    return make


@pytest.fixture
def placed() -> Callable[..., Candidate]:
    """`placed(name, labels, address=…, port=…, **fields)`: a candidate that stands somewhere."""

    def make(
        name: str = "w",
        labels: dict[str, str] | None = None,
        *,
        address: str = "10.0.0.1",
        port: int = 8000,
        **fields: Any,
    ) -> Candidate:
        fields.setdefault("metrics", EndpointMetrics())
        return Candidate(Endpoint(name, address, port, labels=labels or {}), **fields)

    return make


@pytest.fixture(scope="session")
def queued() -> MakeQueued:
    """`queued(flow, at=…, tokens=…, ttl=…, headers=…, **request)`: each with its own sequence."""
    sequences = count(1)

    def make(
        flow: str = "f",
        *,
        at: float = 0.0,
        tokens: int = 0,
        ttl: float | None = None,
        headers: dict[str, str] | None = None,
        **fields: Any,
    ) -> QueuedRequest:
        body = ParsedBody(Api.RAW, "m")
        request = InferenceRequest("r", headers or {}, body, "m", "m", fairness_id=flow, **fields)
        return QueuedRequest(request, next(sequences), at, tokens=tokens, ttl_seconds=ttl)

    return make
