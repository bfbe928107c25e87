"""The live part of `sim_closed_form.py`: the sequential load over HTTP to real worker processes.

Each of eight `python -m worker --engine sim` gets its requests one after the other. Beside the
closed form, the answers must be word for word those of the virtual run.
"""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import httpx
from sim_closed_form import (
    NUM_WORKERS,
    Ask,
    Row,
    Scenario,
    Totals,
    closed_form,
    prompt_of,
    relative_errors,
    sequential,
    serve,
)

from worker.faults.sim_settings import SETTINGS
from worker.tokenizer.detokenize import decode
from worker.tokenizer.sim import SimTokenizer

START_SECONDS = 60.0


def flags_of(scenario: Scenario) -> list[str]:
    """The scenario's configuration on a worker's command line."""
    flags = ["--sim-seed", str(scenario.sim.seed), "--max-num-seqs", str(scenario.slots)]
    flags += ["--max-num-batched-tokens", "8192", "--no-enable-partial-hits"]
    for setting in SETTINGS:
        suffix = "-ms" if f"--sim-{setting.name}-ms" in MILLISECOND_FLAGS else ""
        flags += [f"--sim-{setting.name}{suffix}", str(setting.show(scenario.sim))]
    return flags


MILLISECOND_FLAGS = {"--sim-step-overhead-ms", "--sim-decode-base-ms", "--sim-decode-per-seq-ms"}


@asynccontextmanager
async def worker(flags: Sequence[str]) -> AsyncIterator[str]:
    """A worker process; its URL."""
    command = (sys.executable, "-m", "worker", "--engine", "sim", "--port", "0", *flags)
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        async with asyncio.timeout(START_SECONDS):
            line = (await process.stdout.readline()).decode()
        ready = re.match(r"worker ready on (\S+)", line)
        assert ready, f"the worker did not start: {line}"
        yield ready[1]
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


async def drive(scenario: Scenario, asks: Sequence[Ask]) -> tuple[list[float], list[str]]:
    """One worker's requests, one after the other: their latencies and answers."""
    latencies, answers = [], []
    async with worker(flags_of(scenario)) as url, httpx.AsyncClient(base_url=url) as client:
        # The first exchange pays for imports and connections.
        await client.post("/v1/completions", json={"prompt": [300], "max_tokens": 1})
        for ask in asks:
            body = {
                "prompt": prompt_of(ask),
                "max_tokens": ask.num_output,
                "seed": ask.seed,
                "ignore_eos": True,
            }
            started = time.perf_counter()
            response = await client.post("/v1/completions", json=body, timeout=60)
            latencies.append(time.perf_counter() - started)
            answers.append(response.raise_for_status().json()["choices"][0]["text"])
    return latencies, answers


async def live_row(count: int, seed: int) -> Row:
    """Serve the load live; the makespan is that of a client without pauses."""
    scenario = replace(sequential(count, seed), name="live", gap_seconds=0.0)
    # Four times slower than the virtual load, so that HTTP is a small part of it.
    slow = {
        field: getattr(scenario.sim, field) * 4
        for field in (
            "inter_token_latency_seconds",
            "inter_token_latency_std_seconds",
            "prefill_overhead_seconds",
            "prefill_per_token_seconds",
            "prefill_std_seconds",
        )
    }
    scenario = replace(scenario, sim=replace(scenario.sim, **slow))
    started = time.perf_counter()
    parts = await asyncio.gather(*(drive(scenario, asks) for asks in scenario.asks))
    wall = time.perf_counter() - started
    latencies = [seconds for part, _ in parts for seconds in part]
    tokens = sum(ask.num_output for asks in scenario.asks for ask in asks)
    makespan = max(sum(part) for part, _ in parts)
    measured = Totals(tokens, makespan, sum(latencies) / len(latencies))
    expected = replace(
        closed_form(replace(scenario, name="sequential")),
        makespan_seconds=max(sum(expected_latencies(scenario, asks)) for asks in scenario.asks),
    )
    same = all(
        answers == virtual_answers(scenario, asks)
        for (_, answers), asks in zip(parts, scenario.asks, strict=True)
    )
    assert len(scenario.asks) == NUM_WORKERS
    errors = relative_errors(expected, measured)
    return Row("live", count, expected, measured, errors, same, wall)


def expected_latencies(scenario: Scenario, asks: Sequence[Ask]) -> list[float]:
    """The model's mean latency of each request."""
    alone = [replace(scenario, name="sequential", asks=((ask,),)) for ask in asks]
    return [closed_form(one).mean_latency_seconds for one in alone]


def virtual_answers(scenario: Scenario, asks: Sequence[Ask]) -> list[str]:
    """What the same requests are answered in virtual time, in their order."""
    served = sorted(serve(scenario, asks), key=lambda one: int(one.request_id))
    return [text_of(one.token_ids) for one in served]


def text_of(token_ids: list[int]) -> str:
    """What the simulator's tokenizer makes of an answer."""
    return decode(SimTokenizer().token_bytes, token_ids)
