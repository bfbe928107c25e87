"""The modules and rooms that one chat request passes through, from its body to the engine."""

import sys
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import worker
from tests.worker.conftest import Bench
from worker.api.generate.runner import Runner
from worker.api.http.exchange import Exchange

ROOT = str(Path(worker.__file__).parent) + "/"
ENTRY = "api/openai/chat.py"
# Reached: 12 and 12; and from there until the engine has the request, 20 and 24.
MAX_FILES, MAX_ROOM_CHANGES = 12, 12
MAX_FILES_TO_ENGINE, MAX_ROOM_CHANGES_TO_ENGINE = 20, 24
BODY = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0.5, "max_tokens": 5}


@dataclass
class Trace:
    """The calls of the worker's functions while `on`: each one's file and its caller's file."""

    calls: list[tuple[str, str]] = field(default_factory=list)

    @property
    def entries(self) -> Counter[str]:
        return Counter(file for file, caller in self.calls if file != caller)

    @property
    def room_changes(self) -> int:
        # The simulator's tokenizer stands for a model's, in the room of tokenizers.
        files = [file.replace("sim/tokenizer", "tokenizer/sim") for file, _ in self.calls]
        rooms = [file.rpartition("/")[0] for file in files]
        return sum(one != other for one, other in pairwise(rooms))

    def on(self) -> None:
        self.calls.clear()
        sys.setprofile(self._called)

    def _called(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ROOT):
            caller = frame.f_back
            while caller is not None and not caller.f_code.co_filename.startswith(ROOT):
                caller = caller.f_back
            files = [f.f_code.co_filename.removeprefix(ROOT) for f in (frame, caller) if f]
            self.calls.append((files[0], files[-1]))


async def traced(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, body: dict[str, Any]
) -> list[Trace]:
    trace, prepared = Trace(), Trace()
    read_body, answer = Exchange.json_body, Runner.answer

    async def read(self: Exchange, limit: int) -> bytes:
        body = await read_body(self, limit)
        trace.on()
        return body

    async def answered(self: Runner, *arguments: Any) -> None:
        prepared.calls = list(trace.calls)
        await answer(self, *arguments)

    async with bench.client() as client:
        for _ in range(3):  # caches are warm afterwards
            await client.post("/v1/chat/completions", json=body)
        monkeypatch.setattr(Exchange, "json_body", read)
        monkeypatch.setattr(Runner, "answer", answered)
        opened = bench.engine.open
        monkeypatch.setattr(
            bench.engine, "open", lambda request: (sys.setprofile(None), opened(request))[1]
        )
        response = await client.post("/v1/chat/completions", json=body)
    assert response.is_success
    calls = prepared.calls
    end = max(n for n, (file, _) in enumerate(calls) if file.startswith("api/openai"))
    return [Trace(calls[: end + 1]), trace]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_chat_request_passes_few_modules_once_each(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    prepared, whole = await traced(bench, monkeypatch, {**BODY, "stream": stream})
    entries = prepared.entries
    assert {file: n for file, n in entries.items() if n > 1 and file != ENTRY} == {}
    assert len(entries) <= MAX_FILES, entries
    assert prepared.room_changes <= MAX_ROOM_CHANGES
    assert len(whole.entries) <= MAX_FILES_TO_ENGINE, whole.entries
    assert whole.room_changes <= MAX_ROOM_CHANGES_TO_ENGINE
