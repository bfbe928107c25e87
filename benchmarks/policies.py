"""Ours against the policies of other routers, on one fleet in virtual time.

    python benchmarks/policies.py [--only S1,S3] [--policies default,random] [--seed 7]

The picker's whole director and the workers' schedulers and caches, without wires: every policy gets
the same requests at the same times, or, in closed loops, the same sessions in the same order. Pods
are those of llm-d's published measurements (Qwen3-32B on two H100): 20,480 prompt tokens a second,
8 ms and 0.12 ms for each sequence a decode step, 307,328 tokens of KV cache, 256 sequences. One
simulated token stands for eight: lengths, cache and prompt speed are divided by eight and a step
takes eight times as long. That leaves times as they are but for the grain of a step, some 70 ms.
The first third of the time warms up and is not counted. Prints tables and writes
benchmarks/results/policies.json.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from living_worker import WorkerSettings
from result_files import RESULTS, write_results
from virtual_replicas import ReplicasSettings, Served, VirtualReplicas
from virtual_time import run_in_virtual_time

from picker.errors import RefusedError
from worker.config import CacheConfig, SchedulerConfig, SimConfig

SEED = 7
RESULTS_FILE = RESULTS / "policies.json"
TOKENS = 8  # that a simulated token stands for
BLOCK = 16
VOCABULARY = range(256, 1280)
WARM_UP = 1 / 3
SURGES = 8  # of a spiky scenario
LONGEST, LONGEST_ANSWER = 120_000, 8192
TTFT_SLO_SECONDS, ITL_SLO_SECONDS = 2.0, 0.05
LOW = "low"  # the objective of priority -1

POD = WorkerSettings(
    SimConfig(
        prefill_tokens_per_second=20_480 / TOKENS,
        decode_base_seconds=0.008 * TOKENS,
        decode_per_sequence_seconds=0.00012 * TOKENS,
    ),
    SchedulerConfig(
        max_num_batched_tokens=8192 // TOKENS, max_num_seqs=256, max_model_len=131_072 // TOKENS
    ),
    CacheConfig(307_328 // TOKENS // BLOCK, BLOCK, record_events=True),
)

HEAD = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nplugins:\n"
LOAD = "- {type: metrics-data-source}\n- {type: core-metrics-extractor}\n"
PRECISE = """\
- {type: token-producer}
- type: precise-prefix-cache-producer
  parameters: {speculativeIndexing: true, tokenProcessorConfig: {blockSizeTokens: 16}}
"""
PRODUCER = "prefixMatchInfoProducerName: precise-prefix-cache-producer"


def config(*plugins: str, before: str = "", **weights: float) -> str:
    """One profile of these plugins, each written as in YAML; weights by type, `_` for `-`."""
    types = [plugin.partition(",")[0].removeprefix("type: ") for plugin in plugins]
    listed = "".join(f"- {{{plugin}}}\n" for plugin in plugins)
    of_profile = ", ".join(
        f"{{pluginRef: {name}, weight: {weights[name.replace('-', '_')]}}}"
        if name.replace("-", "_") in weights
        else f"{{pluginRef: {name}}}"
        for name in types
    )
    profile = f"schedulingProfiles: [{{name: default, plugins: [{of_profile}]}}]\n"
    return f"{HEAD}{LOAD}{before}{listed}{profile}"


DEFAULT_WEIGHTS = {
    "queue_scorer": 2.0,
    "kv_cache_utilization_scorer": 2.0,
    "prefix_cache_scorer": 3.0,
}
POLICIES: Mapping[str, str | None] = {
    "default": None,
    "precise": config(
        "type: queue-scorer",
        "type: kv-cache-utilization-scorer",
        f"type: prefix-cache-scorer, parameters: {{{PRODUCER}}}",
        before=PRECISE,
        **DEFAULT_WEIGHTS,
    ),
    "random": config("type: random-picker"),
    "round robin": config("type: round-robin-picker"),
    "power of two": config("type: power-of-two-picker"),
    "consistent hashing": config("type: consistent-hashing-scorer"),
    "cache_aware": config("type: cache-aware-scorer"),
    "Dynamo's cost": config(
        f"type: dynamo-cost-scorer, parameters: {{{PRODUCER}}}",
        "type: softmax-picker",
        before=f"{PRECISE}- {{type: inflight-load-producer, parameters: {{{PRODUCER}}}}}\n",
    ),
    "prefix only": config("type: prefix-cache-scorer"),
    "predicted": config(  # the published shape without its random parts
        "type: slo-headroom-tier-filter",
        "type: prefix-cache-affinity-filter, parameters: {ttftSource: latencyPredictor}",
        "type: latency-scorer",
    ),
}


@dataclass(frozen=True)
class Scenario:
    """Sessions of `turns` requests, each with what was said before, `question` more tokens and an
    answer of `output`; ranges are uniform, tokens real ones. With `spreads` the lengths of question
    and answer are lognormal with these standard deviations about their means; `spiky` sessions come
    at one and at five thirds of the rate in turn.

    A session begins with the `system` tokens of one of `groups`, or with some of its own where that
    is 0, and the first question is one of `users` in its group, or new where that is 0. Sessions
    come `rate` times a second, or one after the other to each of `clients`. The share `low` of them
    has priority -1.
    """

    workers: int
    system: tuple[int, int]
    question: int
    output: tuple[int, int]
    rate: float = 0.0
    clients: int = 0
    seconds: float = 45.0
    groups: int = 0
    users: int = 0
    turns: tuple[int, int] = (1, 1)
    low: float = 0.0
    spreads: tuple[int, int] | None = None
    spiky: bool = False


SAAS = Scenario(8, (6000, 6000), 1200, (1000, 1000), groups=150, users=5)
CODE = Scenario(10, (3000, 107_000), 1500, (800, 800), turns=(2, 10), seconds=90.0)
REASONING = Scenario(4, (250, 250), 1000, (4000, 12_000), groups=1, seconds=120.0)
CHAT = Scenario(5, (1000, 1000), 30, (700, 1300), groups=6)
MIXED = Scenario(
    4, (1000, 1000), 3000, (300, 300), groups=6, spreads=(13_550, 600), seconds=120.0, spiky=True
)
SCENARIOS: Mapping[str, Scenario] = {
    "S1 b2b-saas at 10/s": replace(SAAS, rate=10.0),
    "S1 b2b-saas at 30/s": replace(SAAS, rate=30.0),
    "S2 code-gen, 40 clients": replace(CODE, clients=40),
    "S3 reasoning, 60 clients": replace(REASONING, clients=60),
    "S4 A short questions at 20/s": replace(CHAT, rate=20.0),
    "S4 B long questions at 15/s": replace(CHAT, question=3000, rate=15.0),
    "S5 mixed lengths at 12/s": replace(MIXED, rate=12.0),
    "S12 two tenants at 22/s": replace(SAAS, workers=4, groups=75, rate=22.0, low=10 / 11),
}


@dataclass(frozen=True)
class Outcome:
    """A request that came at `arrived_seconds`; `served` None: it was refused."""

    arrived_seconds: float
    served: Served | None

    @property
    def itl_seconds(self) -> float:
        """The mean time between two real tokens."""
        assert self.served is not None
        after_first = max(1, len(self.served.token_ids) - 1)
        return (self.served.seconds - self.served.ttft_seconds) / after_first / TOKENS

    @property
    def is_good(self) -> bool:
        """Whether it was answered within both objectives."""
        one = self.served
        return one is not None and (
            one.ttft_seconds <= TTFT_SLO_SECONDS and self.itl_seconds <= ITL_SLO_SECONDS
        )


class Clients:
    """Owns what the requests of one run are, and what became of them."""

    def __init__(self, scenario: Scenario, fleet: VirtualReplicas, seed: int) -> None:
        self._scenario = scenario
        self._fleet = fleet
        self._seed = seed
        self._number = 0
        self.outcomes: list[Outcome] = []

    async def run(self) -> None:
        """All sessions, from the first to the end of the last that came in time."""
        scenario, loop = self._scenario, asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            for _ in range(scenario.clients):
                group.create_task(self._client())
            rng = Random(f"{self._seed} arrivals")
            while scenario.rate:
                await asyncio.sleep(rng.expovariate(scenario.rate * self._surge(loop.time())))
                if loop.time() > scenario.seconds:
                    return
                group.create_task(self._session())

    def _surge(self, now: float) -> float:
        """The part of the mean rate at which sessions come now: one and five thirds in turn."""
        scenario = self._scenario
        is_high = int(now / scenario.seconds * SURGES) % 2
        return (5 if is_high else 1) / 3 if scenario.spiky else 1.0

    async def _client(self) -> None:
        while asyncio.get_running_loop().time() < self._scenario.seconds:
            await self._session()

    async def _session(self) -> None:
        scenario, loop = self._scenario, asyncio.get_running_loop()
        self._number += 1
        rng = Random(f"{self._seed} session {self._number}")
        objective = LOW if rng.random() < scenario.low else ""
        group = f"{self._seed} group {rng.randrange(scenario.groups)}" if scenario.groups else ""
        prompt = _tokens(Random(group) if group else rng, rng.randint(*scenario.system))
        asker = Random(f"{group} {rng.randrange(scenario.users)}") if scenario.users else rng
        for _ in range(rng.randint(*scenario.turns)):
            question = scenario.question
            if scenario.spreads is not None:
                question = min(LONGEST, _lognormal(rng, question, scenario.spreads[0]))
            prompt += _tokens(asker, question)
            arrived, served = loop.time(), None
            if arrived > scenario.seconds:
                return
            try:
                answer = rng.randint(*scenario.output)
                if scenario.spreads is not None:
                    answer = min(LONGEST_ANSWER, _lognormal(rng, answer, scenario.spreads[1]))
                num_output = answer // TOKENS
                served = await self._fleet.ask(0, prompt, num_output, objective)
                prompt += served.token_ids
            except RefusedError:
                await asyncio.sleep(1.0)  # a closed loop would turn without end
            self.outcomes.append(Outcome(arrived, served))


def _lognormal(rng: Random, mean: float, deviation: float) -> int:
    variance = math.log(1 + (deviation / mean) ** 2)
    return max(TOKENS, int(rng.lognormvariate(math.log(mean) - variance / 2, math.sqrt(variance))))


def _tokens(rng: Random, count: int) -> list[int]:
    return rng.choices(VOCABULARY, k=count // TOKENS)


async def outcomes(scenario: Scenario, policy: str | None, seed: int) -> Sequence[Outcome]:
    """What becomes of the requests that come after the warm-up."""
    settings = ReplicasSettings(
        replicas=1,
        shares=False,
        workers=scenario.workers,
        worker=POD,
        config=policy,
        objectives={LOW: -1},
        seed=seed,
    )
    async with VirtualReplicas(settings) as fleet:
        clients = Clients(scenario, fleet, seed)
        await clients.run()
    since = WARM_UP * scenario.seconds
    return [one for one in clients.outcomes if one.arrived_seconds >= since]


def measured(scenario: Scenario, policy: str | None, seed: int) -> dict[str, Any]:
    """The numbers of one row: shares in percent, times in milliseconds, rates a second."""
    seen = run_in_virtual_time(outcomes(scenario, policy, seed))
    seconds = scenario.seconds * (1 - WARM_UP)
    served = [one.served for one in seen if one.served is not None]
    ttft = sorted(one.ttft_seconds for one in served)
    itl = sorted(one.itl_seconds for one in seen if one.served is not None)
    return {
        "hits": 100 * sum(one.num_cached for one in served) / sum(one.num_prompt for one in served),
        "ttft_p50": 1000 * _quantile(ttft, 0.5),
        "ttft_p95": 1000 * _quantile(ttft, 0.95),
        "itl_p50": 1000 * _quantile(itl, 0.5),
        "itl_p95": 1000 * _quantile(itl, 0.95),
        "good_per_second": sum(one.is_good for one in seen) / seconds,
        "requests_per_second": len(seen) / seconds,
        "refused": 100 * (1 - len(served) / len(seen)),
    }


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


COLUMNS = ("hits %", "TTFT p50 ms", "p95", "ITL p50 ms", "p95", "good/s", "requests/s", "refused %")


def _row(name: str, row: Mapping[str, float]) -> str:
    hits, first, first_95, each, each_95, good, requests, refused = row.values()
    return (
        f"| {name} | {hits:.1f} | {first:,.0f} | {first_95:,.0f} | {each:.1f} | {each_95:.1f}"
        f" | {good:.2f} | {requests:.2f} | {refused:.1f} |"
    )


def main() -> None:
    """Every scenario with every policy."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--only", default="", help="scenarios' numbers, with commas")
    parser.add_argument("--policies", default=",".join(POLICIES), help="names, with commas")
    parser.add_argument("--seed", type=int, default=SEED)
    options = parser.parse_args()
    begun, document = time.monotonic(), dict[str, Any]()
    for name, scenario in SCENARIOS.items():
        if options.only and name.split()[0] not in options.only.split(","):
            continue
        print(f"\n{name}\n\n| policy | {' | '.join(COLUMNS)} |\n{'|---' * 9}|")
        document[name] = {}
        for policy in options.policies.split(","):
            row = measured(scenario, POLICIES[policy], options.seed)
            document[name][policy] = row
            print(_row(policy, row), flush=True)
    print(f"\n{time.monotonic() - begun:.0f} s")
    write_results(RESULTS_FILE, {"seed": options.seed, "scenarios": document})


if __name__ == "__main__":
    main()
