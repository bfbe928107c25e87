"""Restarts are rationed, and counters outlive the engines that counted."""

from typing import Any

import msgspec

from worker.engine.process.supervision import (
    LONGEST_DELAY_SECONDS,
    WINDOW_SECONDS,
    RestartBudget,
    Supervision,
    add_counters,
    counters_of,
)
from worker.types import EngineStats, SchedulerCounters, SpeculationStats

GAUGES = {
    *("num_running", "num_waiting", "num_deferred", "num_fetching", "num_fetched"),
    *("kv_cache_usage", "host_blocks", "host_usage", "disk_blocks", "sleep_level"),
    *("is_paused", "num_restarts", "stalled_seconds", "num_speculative_tokens"),
    *("loaded", "awaited"),
}


def test_the_first_restart_is_immediate_and_the_next_ones_wait() -> None:
    budget = RestartBudget(Supervision(max_restarts=20))
    delays = [budget.take(float(second)) for second in range(12)]
    assert delays[:5] == [0.0, 0.5, 1.0, 2.0, 4.0]
    assert delays[-1] == LONGEST_DELAY_SECONDS


def test_the_budget_is_spent_and_comes_back() -> None:
    budget = RestartBudget(Supervision(max_restarts=2))
    assert [budget.take(0.0), budget.take(100.0), budget.take(200.0)] == [0.0, 0.5, None]
    assert budget.take(WINDOW_SECONDS + 50.0) == 0.5
    assert budget.take(WINDOW_SECONDS + 60.0) is None
    assert budget.take(3 * WINDOW_SECONDS) == 0.0


def test_without_restarts_there_are_none() -> None:
    assert RestartBudget(Supervision(restart=False)).take(0.0) is None
    assert RestartBudget(Supervision(max_restarts=0)).take(0.0) is None


def leaves(stats: msgspec.Struct) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in stats.__struct_fields__:
        value = getattr(stats, name)
        found |= leaves(value) if isinstance(value, msgspec.Struct) else {name: value}
    return found


def ones(stats: msgspec.Struct) -> Any:
    values = {name: getattr(stats, name) for name in stats.__struct_fields__}
    of_parts = {n: ones(v) if isinstance(v, msgspec.Struct) else 1 for n, v in values.items()}
    return msgspec.structs.replace(stats, **of_parts)


def test_every_number_of_the_engine_is_a_counter_or_a_gauge() -> None:
    """A new counter is summed over engines; a new gauge has to be named."""
    summed = leaves(add_counters(ones(EngineStats()), ones(EngineStats())))
    assert {name for name, value in summed.items() if value == 1} == GAUGES
    assert {name for name, value in summed.items() if value == 2} == summed.keys() - GAUGES


def test_counters_by_position_are_summed_position_by_position() -> None:
    """An engine that has just started has counted at no position yet."""
    dead, new = SpeculationStats(num_accepted_by_position=(5, 3, 1)), SpeculationStats()
    assert add_counters(dead, new).num_accepted_by_position == (5, 3, 1)
    assert add_counters(new, dead).num_accepted_by_position == (5, 3, 1)
    more = SpeculationStats(num_accepted_by_position=(1, 1))
    assert add_counters(dead, more).num_accepted_by_position == (6, 4, 1)


def test_a_dead_engines_counters_stay_and_its_gauges_go() -> None:
    prompts = SchedulerCounters(prompt_tokens=100)
    counted = counters_of(EngineStats(num_running=3, kv_cache_usage=0.5, scheduler=prompts))
    assert counted == EngineStats(scheduler=prompts)
    more = EngineStats(num_running=1, scheduler=SchedulerCounters(prompt_tokens=5))
    both = SchedulerCounters(prompt_tokens=105)
    assert add_counters(counted, more) == EngineStats(num_running=1, scheduler=both)
