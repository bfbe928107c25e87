"""10,000 requests through eight simulated workers, beside what the model says in closed form.

    python benchmarks/sim_closed_form.py [--requests 10000] [--seed 1]

The production scheduler and block manager run on a virtual clock; only the model is replaced by its
latency formula. Three loads whose totals can be written down:

saturated   All requests at once, prompts and answers of random lengths, a linear model. Of every
            sum only the number of steps depends on the schedule, and a full batch makes it
            (answer tokens) / slots. Latency follows from Little's law: on a worker, slots are in
            service all the time, so a request is served for slots * makespan / requests, and
            begins at a time spread evenly over the rest.
sequential  Each worker serves one request after the other, llm-d's per-token model with noise:
            overhead + prompt * per token, then a latency for each further token.
waves       Equal requests, as many at once as there are slots, Dynamo's polynomials: every wave
            takes one prompt step and then decode steps at a known cache usage.

Every load runs twice; the digest of all answers and times must be the same. Results go to
benchmarks/results/sim_closed_form.json; the exit status is 1 when anything is 1 % off or differs.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from result_files import RESULTS, write_results
from virtual_worker import Served, VirtualWorker

from worker.config import CacheConfig, SchedulerConfig, SimConfig
from worker.engine.messages import AddRequest
from worker.types import SamplingParams

RESULTS_FILE = RESULTS / "sim_closed_form.json"
TOLERANCE = 0.01
NUM_WORKERS = 8
SLOTS = 16
BLOCK_SIZE = 16
VOCABULARY = (256, 1280)


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: sizes in tokens, and the seed of its draws and noise."""

    num_prompt: int
    num_output: int
    seed: int


@dataclass(frozen=True, slots=True)
class Totals:
    """What a load comes to. Times in virtual seconds; `makespan` of the slowest worker."""

    tokens: float
    makespan_seconds: float
    mean_latency_seconds: float


@dataclass(frozen=True, slots=True)
class Scenario:
    """A load, the configuration it runs under, and how far apart its requests arrive on a worker
    (0: all at once).
    """

    name: str
    asks: tuple[tuple[Ask, ...], ...]  # one tuple for each worker
    sim: SimConfig
    slots: int = SLOTS
    num_blocks: int = 4096
    gap_seconds: float = 0.0


def prompt_of(ask: Ask) -> list[int]:
    """Token ids that share no prefix with other requests."""
    return random.Random(ask.seed).choices(range(*VOCABULARY), k=ask.num_prompt)


def spread(asks: Sequence[Ask]) -> tuple[tuple[Ask, ...], ...]:
    """Requests dealt out to the workers in turn."""
    return tuple(tuple(asks[i::NUM_WORKERS]) for i in range(NUM_WORKERS))


def saturated(count: int, seed: int) -> Scenario:
    """Random lengths, all at once."""
    rng = random.Random(seed)
    asks = [Ask(rng.randrange(16, 256), rng.randrange(8, 40), seed + i) for i in range(count)]
    sim = SimConfig(
        prefill_tokens_per_second=20_000.0,
        decode_base_seconds=0.010,
        decode_per_sequence_seconds=0.0002,
        prefill_context_seconds=1e-8,
        kv_read_seconds=1e-7,
        seed=seed,
    )
    return Scenario("saturated", spread(asks), sim)


def sequential(count: int, seed: int) -> Scenario:
    """One after the other, with noise."""
    rng = random.Random(seed + 1)
    asks = [Ask(rng.randrange(16, 512), rng.randrange(1, 32), seed + i) for i in range(count)]
    sim = SimConfig(
        latency_model="llm-d",
        inter_token_latency_seconds=0.012,
        inter_token_latency_std_seconds=0.002,
        prefill_overhead_seconds=0.030,
        prefill_per_token_seconds=0.00025,
        prefill_std_seconds=0.005,
        time_factor_under_load=2.0,
        seed=seed,
    )
    return Scenario("sequential", spread(asks), sim, gap_seconds=10.0)


def waves(count: int, seed: int) -> Scenario:
    """Equal requests in full batches."""
    per_worker = count // NUM_WORKERS // SLOTS * SLOTS or SLOTS
    asks = [Ask(64, 24, seed + i) for i in range(per_worker * NUM_WORKERS)]
    sim = SimConfig(latency_model="dynamo", seed=seed)
    return Scenario("waves", spread(asks), sim, num_blocks=256)


def closed_form(scenario: Scenario) -> Totals:
    """The totals as the model gives them on paper."""
    form = {"saturated": _saturated_form, "sequential": _sequential_form, "waves": _waves_form}
    per_worker = [form[scenario.name](scenario, asks) for asks in scenario.asks]
    count = sum(len(asks) for asks in scenario.asks)
    latency = sum(
        totals.mean_latency_seconds * len(asks)
        for totals, asks in zip(per_worker, scenario.asks, strict=True)
    )
    return Totals(
        sum(totals.tokens for totals in per_worker),
        max(totals.makespan_seconds for totals in per_worker),
        latency / count,
    )


def _saturated_form(scenario: Scenario, asks: Sequence[Ask]) -> Totals:
    sim = scenario.sim
    prompts = sum(ask.num_prompt for ask in asks)
    pairs = sum(ask.num_prompt * (ask.num_prompt + 1) / 2 for ask in asks)
    outputs = sum(ask.num_output for ask in asks)
    decoded = outputs - len(asks)
    # Token n of an answer (from 2) is drawn after reading the prompt and n - 1 tokens.
    read = sum(
        (ask.num_output - 1) * ask.num_prompt + ask.num_output * (ask.num_output - 1) / 2
        for ask in asks
    )
    makespan = (
        prompts / sim.prefill_tokens_per_second
        + pairs * sim.prefill_context_seconds
        + decoded * sim.decode_per_sequence_seconds
        + read * sim.kv_read_seconds
        + outputs / scenario.slots * sim.decode_base_seconds
    )
    served = scenario.slots * makespan / len(asks)
    return Totals(outputs, makespan, served + (makespan - served) / 2)


def _sequential_form(scenario: Scenario, asks: Sequence[Ask]) -> Totals:
    sim = scenario.sim
    latency = [
        sim.prefill_overhead_seconds
        + ask.num_prompt * sim.prefill_per_token_seconds
        + (ask.num_output - 1) * sim.inter_token_latency_seconds
        for ask in asks
    ]
    makespan = (len(asks) - 1) * scenario.gap_seconds + latency[-1]
    outputs = sum(ask.num_output for ask in asks)
    return Totals(outputs, makespan, sum(latency) / len(latency))


def _waves_form(scenario: Scenario, asks: Sequence[Ask]) -> Totals:
    slots, ask = scenario.slots, asks[0]
    capacity = scenario.num_blocks * BLOCK_SIZE
    total = slots * ask.num_prompt
    milliseconds = 4.209989e-7 * total**2 + 1.518344e-2 * total + 16.50142
    for n in range(1, ask.num_output):
        usage = slots * (ask.num_prompt + n) / capacity
        milliseconds += max(1.0, -25.74 * usage**2 + 54.01 * usage + 5.74)
    num_waves = len(asks) / slots
    wave = milliseconds / 1e3
    return Totals(len(asks) * ask.num_output, num_waves * wave, wave * (num_waves + 1) / 2)


def run(scenario: Scenario) -> tuple[Totals, str]:
    """Serve the load in virtual time: the totals, and a digest of every answer and time."""
    digest = hashlib.sha256()
    makespan = latency = 0.0
    tokens = count = 0
    for index, asks in enumerate(scenario.asks):
        served = serve(scenario, asks)
        for one in served:
            assert one.finished_seconds is not None
            latency += one.finished_seconds - one.arrival_seconds
            makespan = max(makespan, one.finished_seconds)
            tokens += len(one.token_ids)
            line = (index, one.request_id, one.token_ids, one.first_token_seconds)
            digest.update(repr((*line, one.finished_seconds)).encode())
        count += len(served)
    return Totals(tokens, makespan, latency / count), digest.hexdigest()


def serve(scenario: Scenario, asks: Sequence[Ask]) -> list[Served]:
    """One worker's requests in virtual time."""
    worker = VirtualWorker(
        scenario.sim,
        SchedulerConfig(max_num_seqs=scenario.slots, max_num_batched_tokens=8192),
        # Random prompts may begin with the same token; nothing is to be saved by that here.
        CacheConfig(scenario.num_blocks, BLOCK_SIZE, enable_partial_hits=False),
    )
    for number, ask in enumerate(asks):
        params = SamplingParams(ask.num_output, seed=ask.seed, ignore_eos=True)
        arrival = number * scenario.gap_seconds
        worker.submit(AddRequest(str(number), prompt_of(ask), params, arrival))
    served = worker.run()
    assert len(served) == len(asks)
    assert worker.stats.kv_cache_usage == 0
    return served


@dataclass(frozen=True, slots=True)
class Row:
    """A scenario's totals on paper and as they came out; errors are relative."""

    scenario: str
    requests: int
    expected: Totals
    measured: Totals
    errors: dict[str, float]
    is_repeatable: bool
    wall_seconds: float

    @property
    def is_good(self) -> bool:
        """Within the tolerance and the same twice."""
        return self.is_repeatable and max(self.errors.values()) <= TOLERANCE


def compare(scenario: Scenario) -> Row:
    """Run a scenario twice and hold it to its closed form."""
    started = time.perf_counter()
    measured, digest = run(scenario)
    wall = time.perf_counter() - started
    again = run(scenario)[1]
    expected = closed_form(scenario)
    count = sum(len(asks) for asks in scenario.asks)
    errors = relative_errors(expected, measured)
    return Row(scenario.name, count, expected, measured, errors, digest == again, wall)


def relative_errors(expected: Totals, measured: Totals) -> dict[str, float]:
    """How far each total is off."""
    wanted, found = asdict(expected), asdict(measured)
    return {name: abs(found[name] / wanted[name] - 1) for name in wanted}


def print_table(rows: Sequence[Row]) -> None:
    """Closed form beside measured, one line a total."""
    print(
        f"{'scenario':12}{'requests':>9}  {'total':22}{'closed form':>14}{'measured':>14}{'off':>8}"
    )
    for row in rows:
        wanted, found = asdict(row.expected), asdict(row.measured)
        for name, value in wanted.items():
            head = f"{row.scenario:12}{row.requests:>9}  {name:22}"
            print(f"{head}{value:>14.4f}{found[name]:>14.4f}{row.errors[name]:>8.2%}")
        same = "same digest twice" if row.is_repeatable else "DIFFERENT DIGESTS"
        print(f"{'':23}{same}, {row.wall_seconds:.1f} s of wall-clock time")


def main() -> int:
    """Run everything, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    builders = (saturated, sequential, waves)
    rows = [compare(build(options.requests, options.seed)) for build in builders]
    print_table(rows)
    document = {"tolerance": TOLERANCE, "seed": options.seed, "rows": [asdict(r) for r in rows]}
    write_results(RESULTS_FILE, document)
    return 0 if all(row.is_good for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
