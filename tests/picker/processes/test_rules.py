"""Every process goes by the same objectives and rewrites, whenever it began."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

from metrics_pages import page, pods
from processes_scene import Connection, Processes, processes
from whole_picker import objective, rewrite, rule, until

CONNECTIONS = 24


async def routed(two: Processes, each: Sequence[Connection], priority: str, target: str) -> bool:
    """Whether a request through each of the connections is counted under these."""

    async def count() -> float:
        labels = {"priority": priority, "target_model_name": target}
        return await two.requests(**labels) or 0.0

    before = await count()
    for connection in each:
        await connection.ask(headers={"x-llm-d-inference-objective": "o"})
    return await count() == before + len(each)


async def test_rules_are_known_to_all_from_the_start_and_as_they_change(tmp_path: Path) -> None:
    """A process that replaces another one begins with those of the moment."""
    one = pods(page())
    policies = [objective("o", 3), rewrite("r", rule(v1=None))]
    async with (
        processes(tmp_path, one, policies=policies) as two,
        two.connected(CONNECTIONS) as connections,
    ):
        each = await two.connected_to_each(connections)
        assert await routed(two, each, "3", "v1")
        two.list_policies([objective("o", -2), rewrite("r", rule(v2=None))])
        await until(lambda: routed(two, each, "-2", "v2"))
        victim = two.pids[0]
        os.kill(victim, signal.SIGKILL)

        async def is_replaced() -> bool:
            return len(two.pids) == 2 and victim not in two.pids

        await until(is_replaced)
        async with two.connected(CONNECTIONS) as later:
            each = await two.connected_to_each(later)
            assert await routed(two, each, "-2", "v2")
        two.list_policies([])
        async with two.connected(CONNECTIONS) as later:
            each = await two.connected_to_each(later)
            await until(lambda: routed(two, each, "0", "my-model"))
