"""A real worker process for tests: started on a free port, watched, and gone afterwards."""

import asyncio
import json
import re
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

CHAT = "/v1/chat/completions"
PATIENCE_SECONDS = 240.0


@dataclass(frozen=True)
class Ended:
    events: list[str]
    is_whole: bool
    seconds: float

    @property
    def error(self) -> dict[str, object] | None:
        if not self.events or self.events[-1] == "[DONE]":
            return None
        return json.loads(self.events[-1]).get("error")


@dataclass
class Worker:
    process: asyncio.subprocess.Process
    http: httpx.AsyncClient

    def engine_pid(self) -> int | None:
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(children[0]) if children else None

    async def ask(self, **fields: object) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, **fields}
        return await self.http.post(CHAT, json=body)

    async def stream(self, begun: Callable[[], None], **fields: object) -> Ended:
        body = {
            "messages": [{"role": "user", "content": "hello"}],
            "max_tokens": 1500,
            "ignore_eos": True,
            "stream": True,
            **fields,
        }
        events: list[str] = []
        is_whole = False
        with suppress(httpx.RemoteProtocolError):
            async with self.http.stream("POST", CHAT, json=body) as response:
                assert response.status_code == 200, await response.aread()
                async for line in response.aiter_lines():
                    if line.startswith("data: "):
                        events.append(line.removeprefix("data: "))
                        if len(events) == 1:
                            begun()
            is_whole = True
        return Ended(events, is_whole, time.monotonic())

    async def status(self, path: str) -> int:
        return (await self.http.get(path)).status_code

    async def until(self, path: str, status: int) -> float:
        """Probe until the answer is `status`, and return when that was (monotonic)."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while await self.status(path) != status:
                pass
        return time.monotonic()

    async def until_down(self, engine: int | None) -> float:
        """Probe until the worker is unhealthy or runs another engine; return when (monotonic)."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while await self.status("/health") != 503 and not self.has_another(engine):
                pass
        return time.monotonic()

    def has_another(self, engine: int | None) -> bool:
        return self.engine_pid() not in (None, engine)

    async def counters(self) -> dict[str, float]:
        """Return all counters of its metrics page except Python's own."""
        page = (await self.http.get("/metrics")).text
        return {
            f"{s.name}{sorted(s.labels.items())}": s.value
            for family in text_string_to_metric_families(page)
            if family.type in ("counter", "histogram", "summary")
            for s in family.samples
            if not s.name.startswith(("python_", "process_"))
        }

    async def exit_status(self) -> int:
        async with asyncio.timeout(PATIENCE_SECONDS):
            return await self.process.wait()


async def under_load(
    worker: Worker, harm: Callable[[], None], count: int, **fields: object
) -> tuple[list[Ended], float]:
    """Stream `count` answers and do the harm when all have begun; return their ends and when the
    harm was done (monotonic).
    """
    begun = asyncio.Semaphore(0)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(worker.stream(begun.release, **fields)) for _ in range(count)]
        for _ in tasks:
            await begun.acquire()
        harm()
        harmed = time.monotonic()
    return [task.result() for task in tasks], harmed


def assert_each_reports_its_end(streams: list[Ended]) -> None:
    for stream in streams:
        assert stream.error is not None, stream.events[-1:]
        assert stream.error["code"] == 503
        assert not stream.is_whole
        assert "[DONE]" not in stream.events


@asynccontextmanager
async def running_worker(*flags: str) -> AsyncIterator[Worker]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "worker", "--port", "0"),
        # However long the machine keeps the engine from running, it is not taken for lost.
        *("--heartbeat-timeout", "60", *flags),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            line = (await process.stdout.readline()).decode()
        ready = re.match(r"worker ready on (\S+)", line)
        assert ready, "the worker did not start; see its log above"
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=ready[1], timeout=PATIENCE_SECONDS, limits=limits
        ) as http:
            yield Worker(process, http)
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
