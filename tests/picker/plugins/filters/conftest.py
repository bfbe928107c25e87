"""How a filter is asked."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from picker.framework.attributes import Attributes
from picker.types import Candidates, InferenceRequest


@pytest.fixture
def kept(request_for: Callable[..., InferenceRequest]) -> Callable[..., list[str]]:
    """`kept(filter, candidates, …)`: the names of what it keeps, in its order."""

    def ask(
        plugin: Any,
        candidates: Candidates,
        attributes: Attributes | None = None,
        *,
        request: InferenceRequest | None = None,
        rng: Random | None = None,
    ) -> list[str]:
        answer = plugin.filter(
            request or request_for(), candidates, attributes or Attributes(), rng or Random(1)
        )
        return [candidate.endpoint.name for candidate in answer]

    return ask
