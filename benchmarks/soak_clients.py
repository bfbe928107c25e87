"""The load of `worker_soak.py`: what clients ask for, and what they see."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ABORT = "/inference/v1/abort_requests"
KINDS = {"whole": 30, "stream": 40, "abort": 8, "leave-stream": 10, "leave-whole": 5, "bad": 7}
NUM_PREFIXES = 6
NUM_FIXED = 8
PATIENCE_SECONDS = 300.0
WORDS = tuple(
    f"{first}{second}"
    for first in ("riv", "sto", "lam", "gar")
    for second in ("er", "ne", "pe", "den", "dow", "ning", "able")
)

# What a server must refuse, whatever the model: path, body, statuses.
BAD_REQUESTS: tuple[tuple[str, Any, tuple[int, ...]], ...] = (
    (CHAT, b"{", (400,)),
    (CHAT, b"\xff\xfe", (400,)),
    (CHAT, {"messages": []}, (400,)),
    (CHAT, {"messages": [{"role": "user", "content": "x"}], "temperature": -1}, (400,)),
    (CHAT, {"messages": [{"role": "user", "content": "x"}], "model": "nobody"}, (404,)),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 0}, (400,)),
    (COMPLETIONS, {"prompt": "x", "n": 0}, (400,)),
    (COMPLETIONS, {"prompt": [1, 2, 999_999_999]}, (400,)),
    (COMPLETIONS, {"prompt": "x " * 20_000}, (400,)),
    ("/v1/nothing", {}, (404,)),
)


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. `leave_after` is how many stream events (or, for a whole answer, how many
    hundredths of a second) a client waits before it aborts or leaves. `fixed` names requests that
    must all be answered alike.
    """

    kind: str
    path: str
    body: dict[str, Any] | bytes
    statuses: tuple[int, ...] = (200,)
    num_choices: int = 1
    leave_after: int = 0
    fixed: int | None = None

    @property
    def priority(self) -> int:
        """The lower, the earlier."""
        return 0 if isinstance(self.body, bytes) else int(self.body.get("priority", 0))


@dataclass(slots=True)
class Outcome:
    """How one request ended for its client. `problem` None: as it should have."""

    ask: Ask
    status: int = 0
    first_seconds: float | None = None
    seconds: float = 0.0
    reasons: list[str] = field(default_factory=list)
    num_tokens: int = 0
    digest: str = ""
    is_cut: bool = False  # the client left before the end
    problem: str | None = None


class Deck:
    """Draws requests; the same ones for the same seed and client."""

    def __init__(
        self, seed: int, client: int, max_tokens: int, max_prompt_words: int, low_share: float = 0.0
    ) -> None:
        self._rng = random.Random(seed * 1000 + client)
        self._low_share = low_share
        self._max_tokens = max_tokens
        self._max_words = max_prompt_words
        shared = random.Random(seed)
        self._prefixes = [
            " ".join(shared.choices(WORDS, k=shared.randrange(20, max_prompt_words // 2)))
            for _ in range(NUM_PREFIXES)
        ]

    def draw(self) -> Ask:
        """The next request."""
        rng = self._rng
        kind = rng.choices(list(KINDS), weights=list(KINDS.values()))[0]
        if kind == "bad":
            path, bad, statuses = rng.choice(BAD_REQUESTS)
            return Ask(kind, path, bad, statuses)
        if kind in ("whole", "stream") and rng.random() < 0.15:
            return self._fixed(kind, rng.randrange(NUM_FIXED))
        words = rng.choices(WORDS, k=rng.choice((3, 10, self._max_words // 2)))
        text = rng.choice(self._prefixes) + " " + " ".join(words)
        num_choices = rng.choices((1, 2, 3), weights=(8, 1, 1))[0]
        body: dict[str, Any] = {
            "max_tokens": rng.randrange(1, self._max_tokens),
            "n": num_choices,
            "priority": self._priority(),
            "ignore_eos": rng.random() < 0.5,
        }
        if rng.random() < 0.5:
            body["seed"] = rng.randrange(1 << 30)
        if rng.random() < 0.3:
            body |= {"temperature": rng.choice((0.0, 0.7, 1.3)), "top_p": 0.9}
            body["n"] = num_choices = 1  # several greedy answers are refused
        leave = rng.randrange(5, 150) if kind == "leave-whole" else rng.randrange(1, 8)
        return self._finish(kind, text, body, num_choices, leave)

    def _priority(self) -> int:
        """A tenth go first; as many as asked for go last, which under full load is never."""
        share = self._rng.random()
        if share < self._low_share:
            return 1
        return -1 if share > 0.9 else 0

    def _finish(
        self, kind: str, text: str, body: dict[str, Any], num_choices: int, leave: int
    ) -> Ask:
        is_stream = kind in ("stream", "abort", "leave-stream")
        if is_stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if self._rng.random() < 0.5:
            path, body["prompt"] = COMPLETIONS, text
        else:
            path, body["messages"] = CHAT, [{"role": "user", "content": text}]
        return Ask(kind, path, body, num_choices=num_choices, leave_after=leave)

    def _fixed(self, kind: str, number: int) -> Ask:
        body: dict[str, Any] = {
            "prompt": self._prefixes[number % NUM_PREFIXES] + f" number {number}",
            "max_tokens": 4 + 2 * number,
            "seed": number,
            "temperature": 0.0 if number % 2 else 1.0,
            "ignore_eos": True,
        }
        if kind == "stream":
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return Ask(kind, COMPLETIONS, body, fixed=number)


class Client:
    """One client: asks, waits for the end, asks again. Owns its connections."""

    def __init__(self, url: str, number: int, deck: Deck) -> None:
        self._http = httpx.AsyncClient(base_url=url, timeout=PATIENCE_SECONDS)
        self._deck = deck
        self._name = f"soak{number}"
        self._count = 0

    async def run(self, until: float) -> list[Outcome]:
        """Ask until that time (monotonic); what has begun is waited for."""
        outcomes = []
        async with self._http:
            while time.monotonic() < until:
                outcomes.append(await self._ask(self._deck.draw()))
        return outcomes

    async def _ask(self, ask: Ask) -> Outcome:
        self._count += 1
        outcome = Outcome(ask)
        started = time.monotonic()
        act = {"stream": self._stream, "abort": self._stream, "leave-stream": self._stream}
        try:
            await act.get(ask.kind, self._whole)(outcome, started)
        except (httpx.HTTPError, ValueError, KeyError) as error:
            outcome.problem = f"{type(error).__name__}: {error}"
        outcome.seconds = time.monotonic() - started
        return outcome

    async def _whole(self, outcome: Outcome, started: float) -> None:
        ask = outcome.ask
        leave = ask.leave_after / 100 if ask.kind == "leave-whole" else PATIENCE_SECONDS
        content = ask.body if isinstance(ask.body, bytes) else json.dumps(ask.body).encode()
        headers = {"content-type": "application/json"}
        try:
            async with asyncio.timeout(leave):
                reply = await self._http.post(ask.path, content=content, headers=headers)
        except TimeoutError:
            outcome.is_cut = True
            if ask.kind != "leave-whole":
                outcome.problem = "no answer in time"
            return
        outcome.status = reply.status_code
        if reply.status_code not in ask.statuses:
            outcome.problem = f"status {reply.status_code}: {reply.text[:200]}"
        elif reply.status_code == 200:
            outcome.first_seconds = time.monotonic() - started
            _take_whole(outcome, reply.json())
        elif "error" not in reply.json():
            outcome.problem = "an error without a body that says why"

    async def _stream(self, outcome: Outcome, started: float) -> None:
        ask, name = outcome.ask, f"{self._name}-{self._count}"
        headers = {"x-request-id": name}
        seen = _Stream()
        opened = self._http.stream("POST", ask.path, json=ask.body, headers=headers)
        async with opened as reply:
            outcome.status = reply.status_code
            if reply.status_code != 200:
                outcome.problem = f"status {reply.status_code}: {(await reply.aread())[:200]!r}"
                return
            async for event in _events(reply):
                if outcome.first_seconds is None:
                    outcome.first_seconds = time.monotonic() - started
                seen.take(event)
                if seen.num_events != ask.leave_after:
                    continue
                if ask.kind == "leave-stream":
                    outcome.is_cut = True
                    return
                if ask.kind == "abort":
                    await self._http.post(ABORT, json={"request_ids": [name]})
        seen.judge(outcome)


class _Stream:
    """What came of one stream so far."""

    def __init__(self) -> None:
        self.num_events = 0
        self._texts: dict[int, str] = {}
        self._reasons: dict[int, list[str]] = {}
        self._usage: dict[str, Any] | None = None
        self._is_done = False
        self._error: str | None = None

    def take(self, event: str) -> None:
        """The data of one event."""
        self.num_events += 1
        if self._is_done:
            self._error = "an event after the end"
        elif event == "[DONE]":
            self._is_done = True
        else:
            self._take_body(json.loads(event))

    def _take_body(self, body: dict[str, Any]) -> None:
        if "error" in body:
            self._error = f"error event: {body['error']}"
            return
        self._usage = body.get("usage") or self._usage
        for choice in body["choices"]:
            index = choice["index"]
            text = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            self._texts[index] = self._texts.get(index, "") + text
            if choice["finish_reason"] is not None:
                self._reasons.setdefault(index, []).append(choice["finish_reason"])

    def judge(self, outcome: Outcome) -> None:
        """Whether it ended exactly once, in every choice."""
        ends = [len(self._reasons.get(i, ())) for i in range(outcome.ask.num_choices)]
        outcome.reasons = [reason for found in self._reasons.values() for reason in found]
        outcome.digest = _digest(self._texts[index] for index in sorted(self._texts))
        if self._usage is not None:
            outcome.num_tokens = self._usage["completion_tokens"]
        if self._error is not None:
            outcome.problem = self._error
        elif not self._is_done:
            outcome.problem = "the stream ended without [DONE]"
        elif set(ends) != {1}:
            outcome.problem = f"choices ended {ends} times"
        elif self._usage is None:
            outcome.problem = "no usage came"


def _take_whole(outcome: Outcome, body: dict[str, Any]) -> None:
    choices = sorted(body["choices"], key=lambda choice: int(choice["index"]))
    outcome.reasons = [choice["finish_reason"] for choice in choices]
    outcome.num_tokens = body["usage"]["completion_tokens"]
    outcome.digest = _digest(c["text"] if "text" in c else c["message"]["content"] for c in choices)
    if len(choices) != outcome.ask.num_choices or None in outcome.reasons:
        outcome.problem = f"choices ended with {outcome.reasons}"


def _digest(texts: Any) -> str:
    return hashlib.sha256("\0".join(text or "" for text in texts).encode()).hexdigest()[:16]


async def _events(reply: httpx.Response) -> AsyncIterator[str]:
    async for line in reply.aiter_lines():
        if line.startswith("data: "):
            yield line.removeprefix("data: ")
