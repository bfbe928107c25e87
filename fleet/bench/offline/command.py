"""`pointsman bench offline`, from its flags to its report."""

import argparse
import json
import random
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from fleet.bench.offline.engines import ENGINES, Work
from fleet.errors import FleetError
from worker.errors import WorkerError
from worker.tokenizer.checkpoint import read_checkpoint


def offline_command(given: argparse.Namespace, out: Callable[[str], None]) -> int:
    """Run the engines one after the other, and print tokens a second. Raises `FleetError`."""
    peer: str | None = given.peer
    if peer is not None and find_spec(ENGINES[peer][0]) is None:
        raise FleetError(f"--peer {peer}: it is not installed in this environment ({sys.prefix})")
    with TemporaryDirectory(prefix="pointsman-bench-") as name:
        folder = Path(name)
        model = given.model or _random_model(folder)
        work = _work(given, model)
        tokens = [sum(map(len, work.prompts)), sum(work.output_tokens)]
        out(f"{given.requests} requests, seed {given.seed}: {tokens[0]:,} prompt tokens,")
        out(f"{tokens[1]:,} generated tokens; model: {given.model or 'random weights'}\n")
        out(f"{'engine':<14}{'seconds':>10}{'generated/s':>14}{'all tokens/s':>14}")
        seconds = {}
        for engine in ("pointsman", *([] if peer is None else [peer])):
            work.engine = engine
            seconds[engine] = one = _seconds(work, folder)
            rates = tokens[1] / one, sum(tokens) / one
            out(f"{engine:<14}{one:>10.1f}{rates[0]:>14,.1f}{rates[1]:>14,.1f}")
    if peer is not None:
        out(f"\npointsman / {peer}: {seconds[peer] / seconds['pointsman']:.2f}")
    if given.json is not None:
        settings = {"requests": given.requests, "seed": given.seed, "llm": work.llm}
        numbers = {"prompt_tokens": tokens[0], "output_tokens": tokens[1], "seconds": seconds}
        given.json.write_text(
            json.dumps({"model": given.model, **settings, **numbers}, default=str)
        )
    return 0


def _random_model(folder: Path) -> Path:
    weights = import_module("fleet.bench.offline.random_weights")
    dtype = import_module("torch").bfloat16
    path: Path = weights.write_checkpoint(folder / "model", weights.QWEN3_600M, dtype)
    return path


def _work(given: argparse.Namespace, model: Path) -> Work:
    try:
        size = read_checkpoint(model).vocab_size
    except WorkerError as error:
        raise FleetError(f"--model {error}") from error
    draw = random.Random(given.seed)
    inputs, outputs = given.input_tokens, given.output_tokens
    lengths = [draw.randint(inputs.low, inputs.high) for _ in range(given.requests)]
    prompts = [[draw.randrange(size) for _ in range(length)] for length in lengths]
    new = [draw.randint(outputs.low, outputs.high) for _ in range(given.requests)]
    return Work("", str(model), prompts, new, given.seed, given.llm)


def _seconds(work: Work, folder: Path) -> float:
    paths = folder / "work.json", folder / "seconds"
    paths[0].write_bytes(msgspec.json.encode(work))
    # What engines print is no part of the report.
    command = (sys.executable, "-m", "fleet.bench.offline.engines", *map(str, paths))
    done = subprocess.run(command, stdout=sys.stderr.fileno(), check=False)
    if done.returncode:
        raise FleetError(f"{work.engine} ended with status {done.returncode}; its error is above")
    return float(paths[1].read_text())
