"""A tenant finds room beside another that floods, as it does alone; in virtual time."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "headroom.py"
SECONDS, SEEDS = 12.0, range(3)


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("headroom", SCRIPT)
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("ends", ["lengths", "steps"])
@pytest.mark.parametrize(
    ("places", "shares"), [(12, (0.25,)), (16, (0.15, 0.33, 0.4)), (20, (0.15, 0.33, 0.4))]
)
def test_fewer_than_one_request_in_two_hundred_waits(
    bench: ModuleType, places: int, shares: tuple[float, ...], ends: str
) -> None:
    """So the 99th percentile is that of a tenant alone, from when the flood begins."""
    rows = [bench.row(bench.Case(places, share, ends, SECONDS, SEEDS)) for share in shares]
    (total,) = bench.sums(rows)
    assert total["waited"] < 0.005


def test_what_is_kept_is_not_all_that_others_have(bench: ModuleType) -> None:
    """Three tenants ask for a fifth each: the flood beside them has a tenth of the pool or so."""
    places, calm = 20, 0.2
    rate = calm * places / bench.SERVICE_SECONDS
    rates = dict.fromkeys(("calm", "second", "third"), (rate, 0.0))
    rates["flood"] = (2 * places / bench.SERVICE_SECONDS, bench.SINCE)
    parameters = bench.DeficitRoundRobinFairnessPolicyParameters()
    runs = [bench.run(places, rates, "lengths", seed, 20.0, parameters) for seed in range(6)]
    unused = sum(told.unused / told.seconds / places for told in runs) / len(runs)
    assert unused < 1 - 3 * calm - 0.09
    late = [took > bench.WAITED_SECONDS for told in runs for took in told.waits]
    assert sum(late) / len(late) < 0.05
