"""Answers of the OpenAI API as a client sees them, and the programs that give them."""

import asyncio
import json
import re
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@dataclass(slots=True)
class Answer:
    """The parts of an answer, streamed or whole, by choice. `error`: the one that ended it."""

    texts: dict[int, str] = field(default_factory=dict)
    reasons: dict[int, list[str]] = field(default_factory=dict)
    logprobs: list[float] = field(default_factory=list)
    usage: tuple[int, int] | None = None  # tokens of the prompt and of the answer
    ids: set[str] = field(default_factory=set)
    num_roles: int = 0
    num_events: int = 0
    is_done: bool = False
    error: str | None = None

    def take_line(self, line: bytes) -> None:
        """Take in a line of a stream of server-sent events."""
        if not line.startswith(b"data: "):
            return
        self.num_events += 1
        data = line.removeprefix(b"data: ").strip()
        if self.is_done:
            self.error = "an event after the end"
        elif data == b"[DONE]":
            self.is_done = True
        else:
            self.take(json.loads(data))

    def take(self, body: dict[str, Any]) -> None:
        """Take in a whole answer, or the data of one event."""
        if "error" in body:
            self.error = f"error event: {body['error']['message']}"
            return
        self.ids.add(body["id"])
        if body.get("usage"):
            self.usage = body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]
        for choice in body["choices"]:
            index, part = choice["index"], choice.get("delta") or choice.get("message") or choice
            self.num_roles += "role" in part
            text = part.get("content") or part.get("text") or ""
            self.texts[index] = self.texts.get(index, "") + text
            if choice["finish_reason"] is not None:
                self.reasons.setdefault(index, []).append(choice["finish_reason"])
            entries = (choice.get("logprobs") or {}).get("content") or []
            self.logprobs += [entry["logprob"] for entry in entries]

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer, by its usage."""
        return 0 if self.usage is None else self.usage[1]

    def content(self) -> tuple[object, ...]:
        """Everything but the id, to compare two answers of one request."""
        texts = sorted(self.texts.items())
        return texts, self.logprobs, self.reasons, self.usage, self.num_roles


class Program:
    """A running program and its output."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.output = ""

    async def read(self, ready: re.Pattern[str], is_ready: asyncio.Event) -> None:
        """Read the output to its end; set the event at a match, or at the end."""
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            self.output += line.decode()
            if not is_ready.is_set() and ready.search(self.output):
                is_ready.set()
        is_ready.set()


@asynccontextmanager
async def running(
    command: Sequence[str], ready: str, start_seconds: float
) -> AsyncIterator[tuple[Program, re.Match[str]]]:
    """Run a program until the block ends; `ready` matches its output once it serves."""
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    program, is_ready, pattern = Program(process), asyncio.Event(), re.compile(ready, re.MULTILINE)
    async with asyncio.TaskGroup() as group:
        group.create_task(program.read(pattern, is_ready), name="output")
        try:
            async with asyncio.timeout(start_seconds):
                await is_ready.wait()
            match = pattern.search(program.output)
            if match is None:
                raise RuntimeError(f"{command} did not start: {program.output}")
            yield program, match
        finally:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            await process.wait()
