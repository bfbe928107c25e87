"""A request under way."""

from __future__ import annotations

import pytest

from picker.framework.attributes import Attributes
from picker.framework.interfaces import Flight
from picker.types import SchedulingResult
from tests.support.picker.plugin_scenes import placed, request_for


@pytest.fixture
def flight() -> Flight:
    return Flight(request_for(), SchedulingResult((placed().endpoint,), "default"), Attributes())
