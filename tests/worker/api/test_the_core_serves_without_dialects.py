"""The shelf of dialects can be taken away: the other routes are served as before."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

from worker.api.schema.routes import ROUTES, dialects

ROOT = Path(__file__).parents[3]
# Run in a copy of the packages: the paths in the OpenAPI document, and the status of each route.
PROGRAM = """
import asyncio, json, sys
from tests.worker.conftest import Bench, ScriptedEngine, output, sim, FinishReason

async def main():
    end = output([105, sim.IM_END_ID], FinishReason.STOP, stop_token=sim.IM_END_ID)
    bench = Bench(ScriptedEngine([output("h"), end]))
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    async with bench.client() as client:
        document = (await client.get("/openapi.json")).json()
        statuses = {}
        for path in sys.argv[1:]:
            statuses[path] = (await client.post(path, json=chat)).status_code
    print(json.dumps([sorted(document["paths"]), statuses]))

asyncio.run(main())
"""


def test_without_the_folder_the_core_serves_and_dialects_are_not_found(tmp_path: Path) -> None:
    for package in ("base", "worker", "tests/worker/conftest.py"):
        source, target = ROOT / package, tmp_path / package
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "dialects", "*.so")
            shutil.copytree(source, target, ignore=ignored)
        else:
            shutil.copy(source, target)
    taken = [route.path for dialect in dialects() for route in dialect.ROUTES]
    assert len(taken) == 9
    ours = ["/v1/chat/completions", "/tokenize", "/invocations"]
    finished = subprocess.run(
        [sys.executable, "-c", PROGRAM, *ours, *taken],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    paths, statuses = json.loads(finished.stdout)
    assert statuses == {**dict.fromkeys(ours, 200), **dict.fromkeys(taken, 404)}
    assert set(paths) <= {route.path for route in ROUTES}
