"""Streams through `pointsman front` while workers are killed: how many come whole, and are right?

    python benchmarks/resume.py                                  # 1,000 streams, simulated workers
    python benchmarks/resume.py --engine torch --streams 60      # the default model

A fleet of `pointsman up --front` answers every request once without a disturbance. Then it answers
them again, while a worker that has work is killed with SIGKILL every few seconds. Chats and text
completions, greedy, seeded and with a seed of the worker's own (these are compared in length
alone), some with stop strings, penalties and log probabilities. Each stream is

- equal: the same text, reason and usage, with one id and one role;
- an error: it ends in the error event, or is cut;
- silently wrong: anything else, such as a regular end too early.

Prints a table and writes benchmarks/results/resume.json. Exit status 1 if a stream is silently
wrong, or fewer than 99 % are equal.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from result_files import RESULTS, write_results

RESULTS_FILE = RESULTS / "resume.json"
START_SECONDS = 240.0
LEAST_EQUAL = 0.99
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
RUNNING = re.compile(r"^vllm:num_requests_running\{[^}]*\} (\S+)$", re.MULTILINE)


@dataclass(slots=True)
class Answer:
    """What a client gathered of a stream. `error`: it was told, or the stream was cut."""

    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    reason: str | None = None
    usage: tuple[int, int] | None = None
    ids: set[str] = field(default_factory=set)
    num_roles: int = 0
    is_done: bool = False
    error: str | None = None

    def said(self) -> tuple[object, ...]:
        """What must be the same without a disturbance."""
        return self.text, self.logprobs, self.reason, self.usage, self.num_roles


def requests(count: int, max_tokens: int, seed: int) -> list[tuple[str, dict[str, Any]]]:
    """Path and body of each."""
    rng = random.Random(seed)
    asked = []
    for number in range(count):
        words = " ".join(rng.choice(("river", "stone", "lamp", "garden")) for _ in range(20))
        body: dict[str, Any] = {
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": rng.randrange(max_tokens // 2, max_tokens + 1),
            "ignore_eos": True,
            "temperature": rng.choice((0.0, 0.8)),
        }
        if number % 10:
            body["seed"] = rng.randrange(1 << 31)
        if rng.random() < 0.2:
            body |= {"presence_penalty": 0.4, "frequency_penalty": 0.2}
        if rng.random() < 0.2:
            body["stop"] = ["lamp lamp", "\n\n\n"]
        if rng.random() < 0.5:
            body["messages"] = [{"role": "user", "content": f"{number}: {words}"}]
            body |= {"logprobs": True} if rng.random() < 0.2 else {}
            asked.append((CHAT, body))
        else:
            asked.append((TEXT, {**body, "prompt": f"{number}: {words}"}))
    return asked


class Fleet:
    """A running `pointsman up --front`."""

    def __init__(self, process: asyncio.subprocess.Process, port: int) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{port}"
        self.output = ""

    @property
    def worker_ports(self) -> list[int]:
        found = re.search(r"workers  127\.0\.0\.1:([\d, ]+?)  ", self.output)
        assert found is not None, self.output
        return [int(port) for port in found[1].split(", ")]

    async def read(self, ready: asyncio.Event) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            self.output += line.decode()
            if b"curl -N" in line:
                ready.set()
        ready.set()


@asynccontextmanager
async def running(arguments: argparse.Namespace) -> AsyncIterator[Fleet]:
    """Start the fleet; stop it afterwards."""
    command = ["up", "--front", "--engine", arguments.engine, "--port", str(arguments.port)]
    command += ["--workers", str(arguments.workers)]
    if arguments.engine == "sim":
        command += [f"--worker-args=--sim-decode-base-ms {arguments.token_ms}ms"]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "fleet.cli", *command),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    fleet, ready = Fleet(process, arguments.port), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(fleet.read(ready))
        try:
            await asyncio.wait_for(ready.wait(), START_SECONDS)
            assert "curl -N" in fleet.output, fleet.output
            yield fleet
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGINT)
            await process.wait()


async def ask(session: aiohttp.ClientSession, url: str, path: str, body: Any) -> Answer:
    """Read a stream to whatever is its end."""
    answer = Answer()
    try:
        async with session.post(url + path, json=body) as response:
            if response.status != 200:
                answer.error = f"{response.status} {(await response.text())[:200]}"
                return answer
            async for line in response.content:
                _take(answer, line.decode().strip())
    except (aiohttp.ClientError, OSError) as error:
        answer.error = answer.error or f"cut: {error}"
    return answer


def _take(answer: Answer, line: str) -> None:
    if line == "data: [DONE]":
        answer.is_done = True
    if not line.startswith("data: {"):
        return
    event = json.loads(line.removeprefix("data: "))
    if "error" in event:
        answer.error = event["error"]["message"]
        return
    answer.ids.add(event["id"])
    if event.get("usage"):
        usage = event["usage"]
        answer.usage = usage["prompt_tokens"], usage["completion_tokens"]
    for choice in event["choices"]:
        delta = choice.get("delta", choice)
        answer.num_roles += "role" in delta
        answer.text += delta.get("content") or delta.get("text") or ""
        answer.reason = choice["finish_reason"] or answer.reason
        content = (choice.get("logprobs") or {}).get("content") or []
        answer.logprobs += [entry["logprob"] for entry in content]


async def ask_all(url: str, asked: list[tuple[str, Any]], concurrency: int) -> list[Answer]:
    """So many at a time."""
    answers: list[Answer] = [Answer()] * len(asked)
    turns = iter(range(len(asked)))
    timeout = aiohttp.ClientTimeout(total=None, sock_read=300)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:

        async def client() -> None:
            for number in turns:
                answers[number] = await ask(session, url, *asked[number])

        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(client())
    return answers


def worker_at(port: int) -> int | None:
    """The process id of the fleet's worker at a port."""
    words = b"\0--port\0%d\0" % port
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            command = (folder / "cmdline").read_bytes()
            if words in command and b"worker" in command:
                return int(folder.name)
    return None


async def kill_workers(fleet: Fleet, every: float, seed: int, killed: Counter[int]) -> None:
    """One that has work, again and again; counts the requests that ran there."""
    rng = random.Random(seed)
    async with aiohttp.ClientSession() as session:
        while True:
            await asyncio.sleep(every)
            ports = fleet.worker_ports
            rng.shuffle(ports)
            for port in ports:
                try:
                    async with session.get(f"http://127.0.0.1:{port}/metrics") as page:
                        busy = RUNNING.search(await page.text())
                except (aiohttp.ClientError, OSError):
                    continue  # it is starting again
                pid = worker_at(port)
                if pid is not None and busy is not None and float(busy[1]):
                    os.kill(pid, signal.SIGKILL)
                    killed[port] += 1
                    killed[0] += int(float(busy[1]))
                    break


def verdict(body: dict[str, Any], answer: Answer, expected: Answer) -> str:
    """See the top."""
    if answer.error is not None or not answer.is_done:
        return "error"
    if len(answer.ids) != 1:
        return "silently wrong"
    if "seed" not in body and body["temperature"]:
        same = "stop" in body or answer.usage == expected.usage
    else:
        same = answer.said() == expected.said()
    return "equal" if same else "silently wrong"


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    asked = requests(arguments.streams, arguments.max_tokens, arguments.seed)
    killed: Counter[int] = Counter()
    async with running(arguments) as fleet:
        expected = await ask_all(fleet.url, asked, arguments.concurrency)
        assert all(one.error is None and one.is_done for one in expected)
        async with asyncio.TaskGroup() as group:
            killing = group.create_task(
                kill_workers(fleet, arguments.kill_every, arguments.seed, killed)
            )
            answers = await ask_all(fleet.url, asked, arguments.concurrency)
            killing.cancel()
    rows = zip(asked, answers, expected, strict=True)
    verdicts = [verdict(body, answer, other) for (_, body), answer, other in rows]
    num_cut = killed.pop(0, 0)
    return {
        "streams": len(asked),
        "workers killed": sum(killed.values()),
        "streams that ran there": num_cut,
        "tokens": sum(one.usage[1] for one in answers if one.usage),
        **{kind: verdicts.count(kind) for kind in ("equal", "error", "silently wrong")},
        "errors": Counter(one.error for one in answers if one.error).most_common(5),
        "wrong": [
            {"asked": one[0], "had": one[1].said(), "expected": one[2].said()}
            for one, kind in zip(zip(asked, answers, expected, strict=True), verdicts, strict=True)
            if kind == "silently wrong"
        ][:3],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=("sim", "torch"), default="sim")
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=100)
    parser.add_argument("--token-ms", type=float, default=30, help="of a simulated worker's step")
    parser.add_argument("--kill-every", type=float, default=5.0, metavar="SECONDS")
    parser.add_argument("--port", type=int, default=18080)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=RESULTS_FILE)
    arguments = parser.parse_args()
    figures = asyncio.run(measure(arguments))
    for name, value in figures.items():
        print(f"{name:<24}{value}")
    write_results(arguments.results, {"arguments": vars(arguments), "figures": figures})
    is_good = figures["equal"] >= LEAST_EQUAL * figures["streams"]
    return 0 if is_good and not figures["silently wrong"] else 1


if __name__ == "__main__":
    sys.exit(main())
