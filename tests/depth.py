"""The depth of the suite: a tenth by default, all of it under `DEPTH=full`.

A property test asks for the number of examples that it deserves, a walk or a comparison for the
number of seeds, requests or fleets. `make test` runs a tenth of them, the same ones every time, so
that its result depends on the code alone; `make test-all` runs all of them with fresh seeds.
"""

import os
from collections.abc import Iterable
from typing import Any, TypeVar

from hypothesis import HealthCheck, settings

T = TypeVar("T")

FULL = os.environ.get("DEPTH") == "full"
FEWEST_EXAMPLES = 5

# A property test without a decorator has hypothesis' default of 100 examples at full depth. No
# example has a deadline, because machines are shared.
settings.register_profile(
    "depth",
    max_examples=100 if FULL else 10,
    derandomize=not FULL,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("depth")


def examples(at_full_depth: int, **other: Any) -> settings:
    """Return hypothesis' settings for a test of `at_full_depth` examples; `other` are its settings.

    Decorates a function, or is assigned to the `settings` of a state machine's test case.
    """
    count = at_full_depth if FULL else min(at_full_depth, max(at_full_depth // 10, FEWEST_EXAMPLES))
    return settings(max_examples=count, **other)


def worlds(at_full_depth: int) -> int:
    return at_full_depth if FULL else max(at_full_depth // 10, 1)


def some(cases: Iterable[T]) -> list[T]:
    return list(cases) if FULL else list(cases)[::10]


def by_depth(small: T, full: T) -> T:
    return full if FULL else small
