"""The path of one request through a warmed-up picker: its calls, files and changes of room."""

import asyncio
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import base
import picker
from picker.app.picker import compose
from picker.cli.options import Options
from picker.extproc.server import build_server
from picker.rpc.options import ServerOptions
from picker.types import EndpointMetrics
from tests.support.picker.ext_proc_recording import Sink, record

PICKER, BASE = (f"{Path(one.__file__).parent}/" for one in (picker, base))
WARM_UP = 1300  # the first thousand calls of a plugin are checked for undeclared attributes
TRACED = 5
# Reached: 280, 50, 86. On a slow machine a timer of the picker adds a call or two.
MAX_CALLS, MAX_FILES, MAX_ROOM_CHANGES = 290, 52, 92


@dataclass
class Trace:
    calls: list[tuple[str, str]]

    @property
    def files(self) -> Counter[str]:
        return Counter(file for file, _ in self.calls)

    @property
    def room_changes(self) -> int:
        rooms = [file.partition("/")[0] for file, _ in self.calls]
        return sum(one != other for one, other in pairwise(rooms))

    def listed(self) -> str:
        return "\n".join(f"{file}: {name}" for file, name in self.calls)


@pytest.fixture
def endpoints(tmp_path: Path) -> Path:
    rows = [f"{{name: w{n}, address: 10.0.0.{n + 1}, port: '8000'}}" for n in range(10)]
    path = tmp_path / "endpoints.yaml"
    path.write_text(f"endpoints: [{', '.join(rows)}]")
    return path


async def serve(connection: Any, pieces: Sequence[bytes]) -> None:
    for piece in pieces:
        connection.data_received(piece)
        for _ in range(3):
            await asyncio.sleep(0)


async def traced(path: Path) -> Trace:
    pool = next(iter(compose(Options(endpoints_file=path)).pools.values()))
    pool.load()
    for candidate in pool.datastore.snapshot().candidates:
        pool.datastore.update_metrics(candidate.key, EndpointMetrics(1, 2, 0.3, 16, 20_000))
    server = build_server(pool.director, options=ServerOptions())
    connection = server.accept()
    connection.connection_made(Sink())
    opening, requests = record(
        f"you are an expert on request {index} " * 20 for index in range(WARM_UP)
    )
    connection.data_received(opening)
    for pieces in requests[:-TRACED]:
        await serve(connection, pieces)
    found: list[Trace] = []

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            name = frame.f_code.co_filename
            if name.startswith((PICKER, BASE)):
                file = name.removeprefix(PICKER).replace(BASE, "base/")
                found[-1].calls.append((file, frame.f_code.co_name))

    for pieces in requests[-TRACED:]:
        found.append(Trace([]))
        sys.setprofile(profile)
        try:
            await serve(connection, pieces)
        finally:
            sys.setprofile(None)
    assert pool.num_decisions == WARM_UP
    return min(found, key=lambda one: len(one.calls))


async def test_a_request_takes_few_calls_through_few_files(endpoints: Path) -> None:
    found = await traced(endpoints)
    files, rooms = found.files, {file.partition("/")[0] for file in found.files}
    assert "flowcontrol" not in rooms
    assert "telemetry/spans.py" not in files
    assert len(found.calls) <= MAX_CALLS, found.listed()
    assert len(files) <= MAX_FILES, files
    assert found.room_changes <= MAX_ROOM_CHANGES
