"""A shared time budget: the fuzz tests of a file run for a number of seconds, one by default.

`POINTSMAN_FUZZ_SECONDS` sets the budget of each file, which its tests share alike;
`POINTSMAN_FUZZ_SEED` sets where the sequence of random examples begins: the same seed begins the
same sequence.
"""

import os
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

T = TypeVar("T")
EXAMPLES_A_ROUND = 10
SEEDS_A_START = 1_000_000


class ForSeconds(Protocol):
    def __call__(
        self, strategy: SearchStrategy[T], check: Callable[[T], Any], seconds: float | None = None
    ) -> None: ...


@pytest.fixture
def fuzz_seconds(request: pytest.FixtureRequest) -> float:
    sharing = sum(
        item.path == request.node.path and "fuzz_seconds" in getattr(item, "fixturenames", ())
        for item in request.session.items
    )
    return float(os.environ.get("POINTSMAN_FUZZ_SECONDS", "1")) / max(1, sharing)


@pytest.fixture
def for_seconds(fuzz_seconds: float) -> ForSeconds:
    def run(
        strategy: SearchStrategy[T], check: Callable[[T], Any], seconds: float | None = None
    ) -> None:
        deadline = time.monotonic() + (fuzz_seconds if seconds is None else seconds)
        number = int(os.environ.get("POINTSMAN_FUZZ_SEED", "0")) * SEEDS_A_START
        one_round(strategy, check, number)
        while time.monotonic() < deadline:
            number += 1
            one_round(strategy, check, number)

    return run


def one_round(strategy: SearchStrategy[T], check: Callable[[T], Any], number: int) -> None:
    @seed(number)
    @settings(
        max_examples=EXAMPLES_A_ROUND,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def examine(example: T) -> None:
        check(example)

    examine()
