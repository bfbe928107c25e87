"""Prefill and decode on different simulated workers; the exact and the fast ones agree."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from fleet.run.layout import DISAGGREGATED_CONFIG
from fleet.sim.command import simulate_command
from fleet.sim.fast_worker import FastWorker
from fleet.sim.living_worker import Answered, LivingWorker, WorkerSettings
from fleet.sim.virtual_fleet import ServedPrompt, Simulation, VirtualFleet
from fleet.sim.virtual_kv import VirtualKv
from fleet.sim.virtual_time import run_in_virtual_time
from worker.config import CacheConfig, SchedulerConfig
from worker.sim.config import SimConfig

PREFILL, BASE, TRANSFER = 1 / 1000, 0.01, 0.0001  # seconds: of a token, a step, a token of KV
WORKER = WorkerSettings(
    SimConfig(
        prefill_tokens_per_second=1 / PREFILL,
        decode_base_seconds=BASE,
        decode_per_sequence_seconds=0.0,
        kv_transfer_per_token_seconds=TRANSFER,
    ),
    SchedulerConfig(max_num_batched_tokens=4096, max_num_seqs=8),
    CacheConfig(256, 16),
)
both = pytest.mark.parametrize("is_fast", [False, True], ids=["exact", "fast"])


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    return Random(seed).choices(range(256, 1280), k=num_tokens)


def asked(
    prompts: Sequence[list[int]], is_fast: bool, worker: WorkerSettings
) -> list[ServedPrompt]:
    """The answers of two workers behind the picker of `up --prefill`."""
    settings = Simulation(2, worker, DISAGGREGATED_CONFIG, is_fast, prefill=1)

    async def main() -> list[ServedPrompt]:
        async with VirtualFleet(settings) as fleet:
            return [await fleet.ask(one, 5) for one in prompts]

    return run_in_virtual_time(main())


@both
def test_a_request_takes_prefill_transfer_and_decode(is_fast: bool) -> None:
    """In closed form: only the last token of the prompt is computed twice. Tokens in the decode
    worker's cache are not transferred, and short prompts stay there.
    """
    worker = replace(WORKER, overhead_seconds=0.5)
    long = prompt(1000)
    first, again, short = asked([long, long, prompt(100, 1)], is_fast, worker)
    times = [0.5 + 0.5, 1000 * PREFILL, 1000 * TRANSFER, PREFILL]
    assert first.ttft_seconds == pytest.approx(sum(times))
    assert first.seconds - first.ttft_seconds == pytest.approx(4 * BASE)
    assert first.num_cached == 999
    assert again.ttft_seconds == pytest.approx(0.5 + (1000 - again.num_cached) * PREFILL)
    assert again.num_cached >= 992
    assert short.ttft_seconds == pytest.approx(0.5 + 100 * PREFILL)
    assert {one.endpoint for one in (first, again, short)} == {"10.0.0.2:8000"}


class Pair:
    def __init__(self, is_fast: bool) -> None:
        peers: dict[str, VirtualKv] = {}
        self.workers: list[LivingWorker | FastWorker] = []
        for name in ("prefill", "decode"):
            connect = partial(VirtualKv, name, peers)
            if is_fast:
                loop = asyncio.get_running_loop()
                self.workers.append(FastWorker(WORKER, lambda _: None, loop.time, connect))
            else:
                self.workers.append(LivingWorker(WORKER, connect=connect))
        self.living = [asyncio.create_task(one.run()) for one in self.workers]

    async def ask(self, name: str, tokens: list[int], num_output: int) -> Answered:
        prefill, decode = self.workers
        source = (await prefill.serve(name, tokens, 1, lambda: None, keeps_kv=True)).exported
        return await decode.serve(name, tokens, num_output, lambda: None, source)

    def end(self) -> None:
        for worker, living in zip(self.workers, self.living, strict=True):
            worker.check_integrity()
            assert worker.num_requests == 0
            assert worker.stats.kv_cache_usage == pytest.approx(0.0, abs=1e-9)
            living.cancel()


@both
def test_blocks_are_conserved_under_load(is_fast: bool) -> None:
    async def one(pair: Pair, number: int, rng: Random) -> Answered:
        await asyncio.sleep(rng.expovariate(1 / 20))
        tokens = prompt(16 * rng.randrange(40), rng.randrange(4)) + prompt(rng.randint(1, 700), 9)
        return await pair.ask(f"{number}", tokens, 1 + number % 90)

    async def main() -> None:
        pair = Pair(is_fast)
        rngs = [Random(number) for number in range(120)]
        answers = await asyncio.gather(*(one(pair, *each) for each in enumerate(rngs)))
        assert [len(each.token_ids) for each in answers] == [1 + n % 90 for n in range(120)]
        pair.end()

    run_in_virtual_time(main())


@both
def test_kv_that_is_on_its_way_from_a_dead_worker_is_computed(is_fast: bool) -> None:
    """It is computed from the moment of the worker's death on; the stored KV is lost, too."""
    tokens, other = prompt(2000), prompt(2000, 1)

    async def main() -> None:
        pair = Pair(is_fast)
        prefill, decode = pair.workers
        now = asyncio.get_running_loop().time
        source = [
            (await prefill.serve(name, one, 1, lambda: None, keeps_kv=True)).exported
            for name, one in (("a", tokens), ("b", other))
        ]
        begun = now()
        asyncio.get_running_loop().call_later(0.1, prefill.die)
        answered = await decode.serve("a", tokens, 1, lambda: None, source[0])
        assert answered.num_cached == 0
        assert now() - begun == pytest.approx(0.1 + 2000 * PREFILL)
        begun = now()
        answered = await decode.serve("b", other, 1, lambda: None, source[1])
        assert (answered.num_cached, now() - begun) == (0, pytest.approx(2000 * PREFILL))
        for living in pair.living:
            living.cancel()

    run_in_virtual_time(main())


def stages(path: Path, *flags: str) -> dict[str, Any]:
    fleet = ["--prefill", "1", "--decode", "2", "--sim-kv-cache-transfer-time-per-token", "5us"]
    load = ["--rate", "8", "--duration", "6", "--input-tokens", "800", "--output-tokens", "30"]
    assert simulate_command([*fleet, *load, *flags, "--json", str(path)], print, print) == 0
    [stage] = json.loads(path.read_text())["stages"]
    return dict(stage)


def test_a_fleet_of_two_roles_is_deterministic(tmp_path: Path) -> None:
    exact, again = stages(tmp_path / "a"), stages(tmp_path / "b")
    assert exact == again
    fast = stages(tmp_path / "c", "--fast")
    assert fast == stages(tmp_path / "d", "--fast")
    for metric in ("ttft", "itl", "e2e"):
        for quantile in ("p50", "p95"):
            assert fast[metric][quantile] == pytest.approx(exact[metric][quantile], rel=0.03)
    assert fast["cached_tokens"] == exact["cached_tokens"] == 799 * exact["requests"]


def test_without_a_prefill_worker_decode_workers_compute_prompts(tmp_path: Path) -> None:
    hit = stages(tmp_path / "a", "--fast", "--event", "3:kill:1")
    assert hit["errors"] == {}
    assert 0.3 < hit["cached_tokens"] / hit["prompt_tokens"] < 0.7
