"""Under any limits, policies, commands and timing, every answer is what it would be alone."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given

from tests.depth import examples
from tests.support.worker import engine_walk as walks
from worker.config import CacheConfig, SchedulerConfig
from worker.engine import policies
from worker.engine.core import EngineCore
from worker.engine.messages import Command
from worker.engine.scheduling.scheduler import Scheduler


@pytest.mark.parametrize("pipe", sorted(walks.PIPELINES))
@examples(150, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(
    cache=walks.caches,
    limits=walks.limits_of_a_step,
    load=walks.loads,
    orders=walks.commands,
)
def test_any_batch_answers_as_each_request_alone(
    paged_executor: Callable[[int], Any],
    pipe: str,
    cache: CacheConfig,
    limits: SchedulerConfig,
    load: list[walks.Arrival],
    orders: list[tuple[int, Command]],
) -> None:
    scheduler = Scheduler(cache, limits, (walks.END,))
    executor = paged_executor(cache.block_size)
    core = EngineCore(scheduler, executor, lambda: 0.0, pipeline=walks.PIPELINES[pipe](executor))
    walk = walks.Walk(core, scheduler, load)
    walk.run(limits, orders)
    walk.check(orders)
    if limits.policy == "fcfs":
        for received in walk.received.values():
            assert received.endings[0].num_preemptions <= policies.MAX_PREEMPTIONS + len(orders)


def test_the_definition_knows_the_paged_executors_bans(follow: Callable[..., int]) -> None:
    context: Sequence[int] = [1, 2, 3]
    assert follow(context, 0, (follow(context, 0),)) != follow(context, 0)
