"""Every benchmark script runs with its smallest arguments."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fleet.run.ports import free_ports

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(
    path.stem
    for path in (ROOT / "benchmarks").glob("*.py")
    if '__name__ == "__main__"' in path.read_text()
)
# Command lines of each script: one for each of its modes.
SMALLEST: dict[str, tuple[str, ...]] = {
    "admin_pages": ("--values 300 --endpoints 2 --seconds 0.2",),
    "ext_proc_cpu": ("--requests 800 --decision-records 100",),
    "first_answers": ("--url {url} --prompts 1 --runs 2 --max-tokens 4",),
    "following": ("--pods 12 --rate 10 --seconds 1 --rounds 1 --warm-up 1 --limit 1000",),
    "gpu": ("--check",),
    "kv_tiers": ("--model {model} --documents 2 --tokens 16 --requests 2",),
    "kv_trace": ("",),
    "kv_transfer": ("--mebibytes 1 --rounds 1", "--model {model} --lengths 32 --rounds 1"),
    "picker_ext_proc": (
        "--quick --response-bodies off",
        "--saturate --connections 4 --seconds 1 --rounds 1 --response-bodies off",
    ),
    "prefix_index": ("--endpoints 1 --rounds 1 --pairs 2000",),
    "replicas": ("--rates 100 --seconds 0.2",),
    "resume": ("--port {port} --streams 16 --max-tokens 60 --kill-every 1",),
    "response_bodies": ("--rounds 1 --requests 2 --tokens 4 --modes off,usage",),
    "sampling": ("--vocab 1000 --rows 1 --rounds 1",),
    "scheduling": ("--endpoints 10 --decisions 20",),
    "scrape": ("--endpoints 2 --seconds 0.2 --idle-after 0.1",),
    "speculation": (
        "--model {model} --quick --methods ngram --batches 1 --workloads repeating --max-tokens 4",
    ),
    "step_host": ("--sizes 1,2 --contexts 64 --steps 2",),
    "structured_outputs": (
        "libraries --model {model} --vocab 49152 --masks 10",
        "steps --model {model} --sequences 1 --tokens 4 --runs 1",
    ),
    "tenants": ("--seconds 2 --tokens 4 --workers 1 --settle 1",),
    "worker_engine": (
        "--peers --model {model} --threads 1 --batches 1 --steps 2 --repeats 1",
        "--weights --layers 1 --batches 1 --steps 1 --repeats 1",
    ),
    "worker_soak": ("--engine sim --minutes 0.1 --clients 8",),
}
# Of a script that writes no results: what it prints.
PRINTED = {"gpu": (": as torch", "decoding and drafting by graphs: as launched anew")}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    command = [sys.executable, "-m", "worker", "--engine", "sim", "--port", "0"]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment()
    ) as worker:
        assert worker.stdout is not None
        try:
            yield worker.stdout.readline().removeprefix("worker ready on ").split()[0]
        finally:
            worker.terminate()


def environment() -> dict[str, str]:
    interpret = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    return {**os.environ, **interpret, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_runs(
    script: str, request: pytest.FixtureRequest, model_path: Path, tmp_path: Path
) -> None:
    for line in SMALLEST[script]:
        places = {
            "model": model_path,
            "url": request.getfixturevalue("url") if "{url}" in line else "",
            "port": free_ports("127.0.0.1", 40, 21_000)[0],
        }
        results = tmp_path / "results.json"
        wanted = [] if script in PRINTED else ["--json", str(results)]
        command = [sys.executable, f"benchmarks/{script}.py", *line.format(**places).split()]
        done = subprocess.run(
            [*command, *wanted],
            cwd=ROOT,
            env=environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        for text in PRINTED.get(script, ()):
            assert text in done.stdout
        if wanted:
            document = json.loads(results.read_text(encoding="utf-8"))
            assert any(document[key] for key in document.keys() - {"machine", "arguments"})
            assert len(done.stdout.splitlines()) > 1
            results.unlink()


def test_every_smallest_command_line_is_of_a_script() -> None:
    assert SMALLEST.keys() == set(SCRIPTS)
