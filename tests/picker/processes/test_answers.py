"""People ask one process and are answered by all of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from metrics_pages import page, pods
from processes_scene import Processes, processes
from whole_picker import until

CONNECTIONS = 16


async def decisions(two: Processes, limit: int = 100) -> list[dict[str, Any]]:
    """What is listed."""
    listed: list[dict[str, Any]] = json.loads((await two.get(f"/decisions?limit={limit}"))[1])[
        "decisions"
    ]
    return listed


async def test_requests_of_all_processes_are_listed_and_found(two: Processes) -> None:
    """The newest first, whoever served them; each by its id."""
    async with two.connected(CONNECTIONS) as connections:
        first, second = await two.connected_to_each(connections)
        await first.ask(headers={"x-request-id": "older"})
        await second.ask(headers={"x-request-id": "newer"})
        await first.ask(headers={"x-request-id": "newest"})

        async def are_over() -> bool:
            return all(one["outcome"] == "client-gone" for one in await decisions(two, 3))

        await until(are_over)
        assert [one["request_id"] for one in await decisions(two, 3)] == [
            "newest",
            "newer",
            "older",
        ]
        for wanted in ("older", "newer"):
            status, text = await two.get(f"/decisions/{wanted}")
            assert (status, json.loads(text)["summary"]["request_id"]) == (200, wanted)
        assert json.loads((await two.get("/decisions/last"))[1])["summary"]["request_id"] == (
            "newest"
        )
        assert (await two.get("/decisions/nobody"))[0] == 404


async def test_the_rest_is_answered_too(tmp_path: Path) -> None:
    """Flow control is off in several processes; the configuration is that of all."""
    async with processes(tmp_path, pods(page())) as two:
        assert json.loads((await two.get("/queues"))[1])["is_on"] is False
        assert json.loads((await two.get("/config"))[1])["source"] == "built-in configuration"
        rows = await two.endpoints()
        assert len(rows) == 1
