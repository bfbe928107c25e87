"""A running `pointsman up`, for tests that use it like a user."""

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.model.echo_model import TALK, write_echo_model
from tests.support.waiting import until

LIMIT_SECONDS = 120


def children(pid: int) -> Iterator[int]:
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield int(child)
                yield from children(int(child))


def command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""


async def pointsman(*arguments: str) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "fleet.commands.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )


class Fleet:
    def __init__(self, process: asyncio.subprocess.Process, port: int) -> None:
        self.process = process
        self.port = port
        self.output = ""
        self.url = f"http://127.0.0.1:{port}"
        self.openai = openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key="unused", max_retries=0, timeout=LIMIT_SECONDS
        )

    async def read(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            self.output += line.decode()

    async def ready(self) -> None:
        await until(
            lambda: (
                re.search(r"dashboard .*\n", self.output) or self.process.returncode is not None
            ),
            what="ready",
        )

    @property
    def worker_urls(self) -> list[str]:
        listed = re.search(r"workers   127\.0\.0\.1:([\d, ]+?)  ", self.output)
        assert listed is not None, self.output
        return [f"http://127.0.0.1:{port}" for port in listed[1].split(", ")]

    @property
    def picker_url(self) -> str:
        listed = re.search(r"dashboard +(http://\S+)", self.output)
        assert listed is not None, self.output
        return listed[1]

    def descendants(self) -> dict[int, str]:
        return {pid: command(pid) for pid in children(self.process.pid)}

    async def ended(self, status: int = 0) -> None:
        assert await asyncio.wait_for(self.process.wait(), LIMIT_SECONDS) == status, self.output

    async def interrupt(self) -> None:
        """Send SIGINT and wait until the fleet and every process of it are gone."""
        before = {pid: line for pid, line in self.descendants().items() if line}

        def remaining() -> dict[int, str]:
            return {pid: line for pid, line in before.items() if command(pid) == line}

        self.process.send_signal(signal.SIGINT)
        await self.ended()
        await until(lambda: not remaining(), what=f"all gone: {remaining()}")

    async def restart(self, part: str = "") -> asyncio.subprocess.Process:
        words = ("restart", *part.split(), "--port", str(self.port))
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "fleet.commands.cli", *words),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )

    async def configure_workers(self, **settings: object) -> None:
        body = {name.replace("_", "-"): value for name, value in settings.items()}
        async with httpx.AsyncClient(timeout=LIMIT_SECONDS) as http:
            for url in self.worker_urls:
                answer = await http.post(f"{url}/admin/config", json=body)
                assert answer.status_code == 200, answer.text

    async def series(self, name: str, /, **labels: str) -> float:
        """Return the sum of the picker's samples of that name with these labels."""
        async with httpx.AsyncClient(timeout=LIMIT_SECONDS) as http:
            page = (await http.get(f"{self.picker_url}/metrics")).text
        return sum(
            sample.value
            for family in text_string_to_metric_families(page)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    async def say_hello(self) -> int:
        answer = await self.openai.chat.completions.create(
            model="sim",
            max_tokens=4,
            messages=[{"role": "user", "content": "hello"}],
            extra_body={"ignore_eos": True},
        )
        assert answer.usage is not None
        return answer.usage.completion_tokens


@contextlib.asynccontextmanager
async def running_fleet(port: int, *flags: str) -> AsyncIterator[Fleet]:
    """`pointsman up` on `port`, with simulated workers unless `flags` say otherwise."""
    argv = ["up", "--engine", "sim", "--port", str(port), *flags]
    process = await asyncio.create_subprocess_exec(
        # As the installed script imports.
        *(sys.executable, "-P", "-m", "fleet.commands.cli", *argv),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    fleet = Fleet(process, port)
    async with asyncio.TaskGroup() as group:
        group.create_task(fleet.read())
        try:
            yield fleet
        finally:
            await fleet.openai.close()
            if process.returncode is None:
                process.kill()
            await process.wait()


@contextlib.asynccontextmanager
async def ready_fleet(*flags: str) -> AsyncIterator[Fleet]:
    async with running_fleet(free_base_port(), *flags) as fleet:
        await fleet.ready()
        yield fleet


@contextlib.asynccontextmanager
async def talking_fleet(folder: Path, *flags: str) -> AsyncIterator[Fleet]:
    """Two workers that say what the last message says, and cache the conversation."""
    _, model, *echoes = write_echo_model(folder, TALK)
    worker_args = " ".join((*echoes, *flags, "--sim-time-scale", "0"))
    ways = ("--workers", "2", "--model", model, "--worker-args", worker_args)
    async with ready_fleet(*ways) as fleet:
        yield fleet


def free_base_port() -> int:
    """A port between those of `local_ports` and those of outgoing connections."""
    for candidate in range(30_000 + os.getpid() % 100 * 20, 32_500, 20):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", candidate))
            return candidate
    pytest.fail("no free port")
