"""Streams through `pointsman front` while workers are killed: complete, correct, or ended early.

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

import argparse
import asyncio
import os
import random
import re
import signal
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
from measuring import command_line, write_results
from streams import CHAT, COMPLETIONS, Answer, running

START_SECONDS = 240.0
MIN_EQUAL = 0.99
# The workers' ports, and the last line of a fleet that serves.
READY = r"workers +127\.0\.0\.1:([\d, ]+?)  (?:.|\n)*curl -N"
RUNNING = re.compile(r"^vllm:num_requests_running\{[^}]*\} (\S+)$", re.MULTILINE)


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
            asked.append((COMPLETIONS, {**body, "prompt": f"{number}: {words}"}))
    return asked


async def ask(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Answer:
    """Read a stream to its end, whatever that is."""
    answer = Answer()
    try:
        async with session.post(url, json=body) as response:
            if response.status != 200:
                answer.error = f"{response.status} {(await response.text())[:200]}"
                return answer
            async for line in response.content:
                answer.take_line(line)
    except (aiohttp.ClientError, OSError) as error:
        answer.error = answer.error or f"cut: {error}"
    return answer


async def ask_all(url: str, asked: list[tuple[str, Any]], concurrency: int) -> list[Answer]:
    """The answers, in order; `concurrency` requests at a time."""
    answers: list[Answer] = [Answer()] * len(asked)
    turns = iter(range(len(asked)))
    timeout = aiohttp.ClientTimeout(total=None, sock_read=300)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:

        async def client() -> None:
            for number in turns:
                path, body = asked[number]
                answers[number] = await ask(session, url + path, body)

        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(client())
    return answers


def worker_at(port: str) -> int | None:
    """The process id of the fleet's worker at a port."""
    words = b"\0--port\0%s\0" % port.encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            command = (folder / "cmdline").read_bytes()
            if words in command and b"worker" in command:
                return int(folder.name)
    return None


async def kill_workers(ports: list[str], every: float, seed: int, killed: list[int]) -> None:
    """Kill one that has work, again and again; collect the numbers of requests that ran there."""
    rng = random.Random(seed)
    async with aiohttp.ClientSession() as session:
        while True:
            await asyncio.sleep(every)
            for port in rng.sample(ports, len(ports)):
                try:
                    async with session.get(f"http://127.0.0.1:{port}/metrics") as page:
                        busy = RUNNING.search(await page.text())
                except (aiohttp.ClientError, OSError):
                    continue  # it is starting again
                pid = worker_at(port)
                if pid is not None and busy is not None and float(busy[1]):
                    os.kill(pid, signal.SIGKILL)
                    killed.append(int(float(busy[1])))
                    break


def verdict(body: dict[str, Any], answer: Answer, expected: Answer) -> str:
    """One of the three of the module's docstring."""
    if answer.error is not None or not answer.is_done:
        return "error"
    if len(answer.ids) != 1:
        return "silently wrong"
    if "seed" not in body and body["temperature"]:
        same = "stop" in body or answer.usage == expected.usage
    else:
        same = answer.content() == expected.content()
    return "equal" if same else "silently wrong"


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Ask everything twice, the second time while workers are killed."""
    asked = requests(options.streams, options.max_tokens, options.seed)
    killed: list[int] = []
    command = [
        sys.executable,
        "-P",
        "-m",
        "fleet.commands.cli",
        "up",
        "--front",
        "--engine",
        options.engine,
    ]
    command += ["--port", str(options.port), "--workers", str(options.workers)]
    if options.engine == "sim":
        command += [f"--worker-args=--sim-decode-base-ms {options.token_ms}ms"]
    url = f"http://127.0.0.1:{options.port}"
    async with running(command, READY, START_SECONDS) as (_, ready):
        ports = ready[1].split(", ")
        expected = await ask_all(url, asked, options.concurrency)
        assert all(one.error is None and one.is_done for one in expected)
        async with asyncio.TaskGroup() as group:
            killing = group.create_task(
                kill_workers(ports, options.kill_every, options.seed, killed)
            )
            answers = await ask_all(url, asked, options.concurrency)
            killing.cancel()
    rows = list(zip(asked, answers, expected, strict=True))
    verdicts = [verdict(body, answer, other) for (_, body), answer, other in rows]
    wrong = [
        {"asked": body, "answered": answer.content(), "expected": other.content()}
        for (body, answer, other), kind in zip(rows, verdicts, strict=True)
        if kind == "silently wrong"
    ]
    return {
        "streams": len(asked),
        "workers killed": len(killed),
        "streams that ran there": sum(killed),
        "tokens": sum(one.num_tokens for one in answers),
        **{kind: verdicts.count(kind) for kind in ("equal", "error", "silently wrong")},
        "errors": Counter(one.error for one in answers if one.error).most_common(5),
        "wrong": wrong[:3],
    }


def main() -> int:
    """Measure, print the figures, write the JSON."""
    parser = command_line(__doc__)
    parser.add_argument("--engine", choices=("sim", "torch"), default="sim")
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=100)
    parser.add_argument("--token-ms", type=float, default=30, help="of a simulated worker's step")
    parser.add_argument("--kill-every", type=float, default=5.0, metavar="SECONDS")
    parser.add_argument("--port", type=int, default=18080)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    figures = asyncio.run(measure(options))
    for name, value in figures.items():
        print(f"{name:<24}{value}")
    write_results(options, figures=figures)
    is_good = figures["equal"] >= MIN_EQUAL * figures["streams"]
    return 0 if is_good and not figures["silently wrong"] else 1


if __name__ == "__main__":
    sys.exit(main())
