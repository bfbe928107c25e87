"""The simulator's totals are those of its models on paper, and the same on every run."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "sim_closed_form.py"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    """The benchmark as a module."""
    spec = importlib.util.spec_from_file_location("sim_closed_form", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_ten_thousand_requests_through_eight_workers_come_to_the_closed_form(
    bench: ModuleType,
) -> None:
    """Makespan, tokens and mean latency of a saturated fleet within 1 %."""
    scenario = bench.saturated(10_000, 1)
    assert len(scenario.asks) == 8
    assert sum(map(len, scenario.asks)) == 10_000
    short = tuple(
        tuple(replace(ask, num_output=1 + ask.num_output // 3) for ask in asks)
        for asks in scenario.asks
    )
    scenario = replace(scenario, asks=short)
    measured, _ = bench.run(scenario)
    errors = bench.relative_errors(bench.closed_form(scenario), measured)
    assert errors["tokens"] == 0
    assert max(errors.values()) < bench.TOLERANCE


@pytest.mark.parametrize(("name", "tolerance"), [("sequential", 0.01), ("waves", 1e-9)])
def test_the_published_models_come_to_their_closed_forms(
    bench: ModuleType, name: str, tolerance: float
) -> None:
    """llm-d's with noise on average, Dynamo's polynomials to the last digit."""
    scenario = getattr(bench, name)(1024, 1)
    measured, _ = bench.run(scenario)
    errors = bench.relative_errors(bench.closed_form(scenario), measured)
    assert max(errors.values()) <= tolerance


def test_a_run_is_a_function_of_its_seed(bench: ModuleType) -> None:
    """Every token and time twice the same; another seed is another run."""
    digests = [bench.run(bench.sequential(400, seed))[1] for seed in (1, 1, 2)]
    assert digests[0] == digests[1] != digests[2]
