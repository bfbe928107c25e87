"""Restarts are rationed, and counters outlive the engines that counted."""

from __future__ import annotations

import msgspec

from worker.engine.process.supervision import (
    LONGEST_DELAY_SECONDS,
    WINDOW_SECONDS,
    RestartBudget,
    Supervision,
    add_counters,
    counters_of,
)
from worker.types import EngineStats

GAUGES = {
    *(
        "num_running",
        "num_waiting",
        "num_deferred",
        "num_kv_fetching",
        "num_kv_fetched",
        "kv_cache_usage",
        "host_tier_blocks",
        "host_tier_usage",
        "disk_tier_blocks",
        "sleep_level",
    ),
    *("is_paused", "num_restarts", "stalled_seconds", "num_speculative_tokens"),
    *("loaded_adapters", "awaited_adapters"),
}


def test_the_first_restart_is_immediate_and_the_next_ones_wait() -> None:
    """A crash is repaired at once; a crash loop slows down, up to a limit."""
    budget = RestartBudget(Supervision(max_restarts=20))
    delays = [budget.take(float(second)) for second in range(12)]
    assert delays[:5] == [0.0, 0.5, 1.0, 2.0, 4.0]
    assert delays[-1] == LONGEST_DELAY_SECONDS


def test_the_budget_is_spent_and_comes_back() -> None:
    """So many restarts in ten minutes; what is longer ago is forgotten."""
    budget = RestartBudget(Supervision(max_restarts=2))
    assert [budget.take(0.0), budget.take(100.0), budget.take(200.0)] == [0.0, 0.5, None]
    assert budget.take(WINDOW_SECONDS + 50.0) == 0.5
    assert budget.take(WINDOW_SECONDS + 60.0) is None
    assert budget.take(3 * WINDOW_SECONDS) == 0.0


def test_without_restarts_there_are_none() -> None:
    """The other policy gives up at the first loss."""
    assert RestartBudget(Supervision(restart=False)).take(0.0) is None
    assert RestartBudget(Supervision(max_restarts=0)).take(0.0) is None


def test_every_number_of_the_engine_is_a_counter_or_a_gauge() -> None:
    """A new counter is summed over engines by itself; a new gauge has to be named."""
    names = [field.name for field in msgspec.structs.fields(EngineStats)]
    ones = msgspec.structs.replace(
        EngineStats(*([1] * len(names))), num_accepted_by_position=(1, 1)
    )
    summed = add_counters(ones, ones)
    assert {name for name in names if getattr(summed, name) == 1} == GAUGES
    assert summed.num_accepted_by_position == (2, 2)
    others = set(names) - GAUGES - {"num_accepted_by_position"}
    assert {name for name in names if getattr(summed, name) == 2} == others


def test_counters_of_places_are_summed_place_by_place() -> None:
    """An engine that has just started knows of no place yet."""
    dead, new = EngineStats(num_accepted_by_position=(5, 3, 1)), EngineStats()
    assert add_counters(dead, new).num_accepted_by_position == (5, 3, 1)
    assert add_counters(new, dead).num_accepted_by_position == (5, 3, 1)
    more = EngineStats(num_accepted_by_position=(1, 1))
    assert add_counters(counters_of(dead), more).num_accepted_by_position == (6, 4, 1)


def test_what_a_dead_engine_counted_is_kept_and_what_it_showed_is_not() -> None:
    """Counters go on from where they were; nobody runs in an engine that is gone."""
    kept = counters_of(EngineStats(num_running=3, kv_cache_usage=0.5, prompt_tokens=100))
    assert kept == EngineStats(prompt_tokens=100)
    assert add_counters(kept, EngineStats(num_running=1, prompt_tokens=5)) == EngineStats(
        num_running=1, prompt_tokens=105
    )
