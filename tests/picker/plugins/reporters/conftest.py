"""A request under way."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from picker.framework.attributes import Attributes
from picker.framework.interfaces import Flight
from picker.types import Candidate, InferenceRequest, SchedulingResult


@pytest.fixture
def flight(
    placed: Callable[..., Candidate], request_for: Callable[..., InferenceRequest]
) -> Flight:
    """To one endpoint."""
    return Flight(request_for(), SchedulingResult((placed().endpoint,), "default"), Attributes())
