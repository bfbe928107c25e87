"""What several processes sent where is told as one."""

from __future__ import annotations

import json
from typing import Any

from processes_scene import Processes
from whole_picker import until

CONNECTIONS = 12


async def test_what_was_sent_where_is_that_of_all_processes(two: Processes) -> None:
    """Rates come from the processes that decide, curves from the one that watches the pool."""
    async with two.connected(CONNECTIONS) as connections:
        for one in connections:
            await one.ask()

        async def pool() -> tuple[list[dict[str, Any]], dict[str, Any]]:
            body = json.loads((await two.get("/endpoints?history=5"))[1])
            return body["endpoints"], body["history"]

        async def is_known() -> bool:
            rows, _ = await pool()
            return sum(row["requests_per_second"] or 0 for row in rows) > 0

        await until(is_known)
        rows, history = await pool()
        assert history["last"] > 0
        assert history["endpoints"].keys() == {row["key"] for row in rows}
