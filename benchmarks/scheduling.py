"""The time of one scheduling decision, with the production code and the built-in configuration.

    python benchmarks/scheduling.py [--decisions 2000]

One decision leads from a parsed request to its destination: candidates with in-flight counts, data
producers (tokens, prefix match), scorers, picker, and the hooks that learn from it; the clock's
readings included, parsing and the end of the request not. Prompts share one of eight system
prompts. Fixed seed. Prints a table and writes benchmarks/results/scheduling.json.
"""

import asyncio
import gc
import time
from collections import deque
from collections.abc import Iterator
from random import Random

from measuring import Table, command_line, numbers, write_results

from picker.config.build import Assembly, build, default_config
from picker.config.catalog import builtin_plugins
from picker.decisions.decision import Watchers
from picker.decisions.steps import PluginSteps
from picker.framework.attributes import Attributes
from picker.framework.interfaces import Flight
from picker.metrics.picker_metrics import PickerMetrics
from picker.pool.datastore import Datastore
from picker.pool.inflight import InflightLoad
from picker.requestcontrol.candidates import LoadedCandidates, candidates_for
from picker.requestcontrol.director import ask_hooks
from picker.requestcontrol.plugin_log import PluginLog
from picker.types import Api, Endpoint, EndpointMetrics, FinishCause, InferenceRequest, ParsedBody

SEED = 20260822
ENDPOINTS = (10, 100, 1000, 5000)
PROMPT_BYTES = (1_000, 40_000, 400_000)
SYSTEM_PROMPTS = 8


def pool(count: int, datastore: Datastore, rng: Random) -> None:
    """`count` endpoints with plausible metrics."""
    endpoints = [
        Endpoint(f"w{index}", f"10.0.{index // 250}.{index % 250 + 1}", 8000)
        for index in range(count)
    ]
    datastore.set_endpoints(endpoints)
    for endpoint in endpoints:
        metrics = EndpointMetrics(
            waiting_requests=rng.randrange(5),
            running_requests=rng.randrange(32),
            kv_cache_usage=rng.random(),
            block_size_tokens=16,
            num_kv_blocks=65536,
        )
        datastore.update_metrics(endpoint.key, metrics)


def requests(size: int, count: int, rng: Random) -> Iterator[InferenceRequest]:
    """Chat requests of `size` bytes: four fifths a shared system prompt, the rest their own."""
    shared = ["".join(rng.choices("abcdefgh ", k=size * 4 // 5)) for _ in range(SYSTEM_PROMPTS)]
    text = "".join(rng.choices("abcdefgh ", k=size))
    for index in range(count):
        start = rng.randrange(size * 4 // 5)
        own = f"{index} {text[start : start + size // 5]}"
        messages = [
            {"role": "system", "content": rng.choice(shared)},
            {"role": "user", "content": own},
        ]
        payload = {"model": "m", "messages": messages}
        body = ParsedBody(Api.CHAT_COMPLETIONS, model="m", payload=payload)
        now = time.monotonic()
        yield InferenceRequest(str(index), {}, body, "m", "m", size, received_at_seconds=now)


async def decide(
    assembly: Assembly,
    datastore: Datastore,
    loads: tuple[InflightLoad, LoadedCandidates],
    request: InferenceRequest,
    rng: Random,
) -> Flight:
    """One decision, as the director makes it."""
    attributes, log = Attributes(), PluginLog(Watchers(), time.monotonic)
    steps = PluginSteps(time.monotonic)
    candidates = candidates_for(datastore.snapshot().candidates, None, loads[0].counts, loads[1])
    for producer in assembly.pipeline.producers:
        seen = producer.scoped(attributes)
        request = producer.plugin.produce(request, candidates, seen)  # type: ignore[union-attr]
    result = assembly.pipeline.scheduler.plugin.schedule(
        request, candidates, attributes, rng, steps
    )
    flight = Flight(request, result, attributes)
    ask_hooks(assembly.pipeline.hooks, flight, steps, log)
    return flight


def end(assembly: Assembly, inflight: InflightLoad, flight: Flight) -> None:
    """The request of `flight` is over."""
    inflight.release(flight.result.endpoints[0].key)
    for hook in assembly.pipeline.request_ends:
        hook.plugin.request_ended(flight, FinishCause.COMPLETED, None, time.monotonic())


async def measure(endpoints: int, size: int, decisions: int) -> dict[str, float]:
    """Microseconds per decision; every decision follows one metrics update, as under load."""
    rng = Random(SEED)
    assembly = build(default_config(), builtin_plugins(), PickerMetrics(), time.monotonic)
    datastore, inflight = Datastore(assembly.observers), InflightLoad()
    pool(endpoints, datastore, rng)
    keys = [candidate.key for candidate in datastore.snapshot().candidates]
    under_way: deque[Flight] = deque()
    loads = (inflight, LoadedCandidates())
    took: list[float] = []
    for index, request in enumerate(requests(size, decisions + decisions // 10, rng)):
        key = rng.choice(keys)
        known = datastore.get(key)
        assert known is not None
        assert known.metrics is not None
        datastore.update_metrics(key, known.metrics)
        started = time.perf_counter()
        flight = await decide(assembly, datastore, loads, request, rng)
        elapsed = time.perf_counter() - started
        inflight.acquire(flight.result.endpoints[0].key)
        under_way.append(flight)
        if len(under_way) > 4 * min(endpoints, 64):
            end(assembly, inflight, under_way.popleft())
        if index >= decisions // 10:
            took.append(elapsed * 1e6)
    took.sort()
    return {
        "endpoints": endpoints,
        "prompt_bytes": size,
        "p50_us": round(took[len(took) // 2], 1),
        "p99_us": round(took[len(took) * 99 // 100], 1),
        "mean_us": round(sum(took) / len(took), 1),
    }


def main() -> None:
    """Measure every combination of sizes."""
    parser = command_line(__doc__)
    parser.add_argument("--decisions", type=int, default=2000)
    parser.add_argument("--endpoints", type=numbers(int), default=ENDPOINTS)
    options = parser.parse_args()
    table = Table("endpoints", "prompt_bytes", "p50_us", "p99_us", "mean_us")
    for endpoints in options.endpoints:
        for size in PROMPT_BYTES:
            gc.collect()
            table.add(**asyncio.run(measure(endpoints, size, options.decisions)))
    write_results(options, rows=table.rows)


if __name__ == "__main__":
    main()
