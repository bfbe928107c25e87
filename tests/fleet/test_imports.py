"""Commands import no more than they need: modules are counted, not seconds of a busy machine."""

import asyncio
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from fleet.command_lines import LINES
from tests.support.picker.admin_scene import busy_scene, serving

RUN = """
import json, sys
from fleet.commands.cli import main

try:
    status = main(sys.argv[2:])
except SystemExit as end:
    status = end.code
with open(sys.argv[1], "w") as file:
    json.dump([status, sorted(sys.modules)], file)
"""
# Each takes longer to import than a command may take that only reads flags or asks a server.
HEAVY = {
    *("aiohttp", "click", "cryptography", "envoy", "google", "grpc", "h2", "httpcore", "httpx"),
    *("jinja2", "kubernetes", "numpy", "prometheus_client", "pygments", "starlette", "tokenizers"),
    *("torch", "transformers", "uvicorn", "uvloop", "xds"),
}
# All modules, the interpreter's own included (68 with Python 3.11 and an editable install),
# with a fifth to spare for other versions of Python and of packages.
OF_LIGHT_FLAGS = 150
OF_FLAGS = {"picker": 290, "restart": 240, "simulate": 210, "worker": 300, "ps": 190}


def run(path: Path, *argv: str) -> tuple[int, set[str]]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("COV")}
    environment["XDG_RUNTIME_DIR"] = str(path)  # no fleet runs there
    result = path / "result.json"
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(result), *argv],
        capture_output=True,
        stdin=subprocess.DEVNULL,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    status, modules = json.loads(result.read_text())
    return status, set(modules)


def check(modules: set[str], most: int) -> None:
    packages = Counter(name.partition(".")[0] for name in modules)
    heavy = HEAVY & packages.keys()
    assert not heavy, heavy
    assert len(modules) <= most, packages.most_common(12)


@pytest.mark.parametrize("name", LINES)
def test_a_command_that_refuses_a_flag_has_imported_its_flags_alone(
    name: str, tmp_path: Path
) -> None:
    status, modules = run(tmp_path, name, "--no-such-flag")
    assert status == 2
    check(modules, OF_FLAGS.get(name, OF_LIGHT_FLAGS))


@pytest.mark.parametrize(
    ("line", "most"),
    [
        ("bench --rounds 3", OF_LIGHT_FLAGS),
        ("simulate --think 3", OF_FLAGS["simulate"]),
        ("up --prefill 1", OF_LIGHT_FLAGS),
        ("worker --engine sim --block-size 7", OF_FLAGS["worker"]),
        ("picker --endpoints-file f --leader-election-lease-duration 5s", OF_FLAGS["picker"]),
        ("doctor --kubeconfig x", 370),
        ("up --engine sim --workers 300", 430),  # it reads flags of a picker and of workers
    ],
)
def test_flags_that_contradict_each_other_are_refused_before_anything_runs(
    line: str, most: int, tmp_path: Path
) -> None:
    status, modules = run(tmp_path, *line.split())
    assert status == 2
    check(modules, most)


def test_help_imports_nothing_that_only_a_run_needs() -> None:
    code = f"""
import contextlib, io, sys
from fleet.command_lines import LINES
from fleet.commands.cli import main

for name in LINES:
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        main([name, "--help"])
    assert text.getvalue().startswith(f"usage: pointsman {{name}}"), name
    heavy = {HEAVY} & set(sys.modules)
    assert not heavy, (name, heavy)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("line", "status", "most"),
    [("version", 0, 190), ("ps", 1, 190), ("logs", 1, 190), ("models", 0, 200), ("--help", 0, 120)],
)
def test_commands_that_ask_no_server_import_little(
    line: str, status: int, most: int, tmp_path: Path
) -> None:
    found, modules = run(tmp_path, *line.split())
    assert found == status
    check(modules, most)


@pytest.mark.parametrize(
    ("line", "status", "most"),
    [("explain --last", 0, 300), ("top --once", 0, 300), ("doctor", 2, 370)],
)
async def test_commands_that_ask_a_picker_import_little(
    line: str, status: int, most: int, tmp_path: Path
) -> None:
    async with serving(await busy_scene()) as scene:
        argv = (*line.split(), "--picker", scene.url)
        found, modules = await asyncio.to_thread(run, tmp_path, *argv)
    assert found == status
    check(modules, most)


@asynccontextmanager
async def model_server() -> AsyncIterator[str]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        body = b'{"data": [{"id": "it"}]}'
        if head.startswith(b"POST"):
            body = b'data: {"choices": [{"delta": {"content": "Hello"}}]}\n\ndata: [DONE]\n\n'
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_chat_imports_little_until_it_has_shown_an_answer(tmp_path: Path) -> None:
    async with model_server() as url:
        status, modules = await asyncio.to_thread(run, tmp_path, "chat", "--url", url, "hi")
    assert status == 0
    check(modules, 230)
