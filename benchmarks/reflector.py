"""What following Pods costs: CPU of an event and of the first list, with the production code.

    python benchmarks/reflector.py [--pods 2000] [--rate 1000] [--seconds 10]

A child process plays the API server: a list of Pods of 12 KB each (with managed fields), in pages
for who asks for pages, then a watch on which random Pods flap between ready and unready at the
rate. Each client is a process of its own: the picker's reflector with its reader of Pods; the whole
of the picker's discovery, down to the endpoints that decisions look at; aiohttp, `json.loads` and a
dict; the `kubernetes` package's `Watch` with its models. CPU seconds of that process are counted,
not time, so other programs change little. `pause` is the longest pause of its event loop during the
list, `lag` what a timer of 1 ms is late while the events come (99th percentile, longest): requests
would wait as long. Fixed seed. Prints a table and writes benchmarks/results/reflector.json.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import multiprocessing
import platform
import resource
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from random import Random

import aiohttp
import kubernetes
import uvloop
from reflector_server import HOST, Load, serve
from result_files import RESULTS, write_results

from picker.k8s.api import PODS, POOLS, Selection
from picker.k8s.client import KubernetesClient
from picker.k8s.credentials import Access, Credentials
from picker.k8s.discovery import KubernetesDiscovery, Target, selected_pods
from picker.k8s.objects import PoolName
from picker.k8s.pods import read_pod
from picker.k8s.reflector import Reflector, Subject
from picker.metrics.families import KubernetesSeries
from picker.metrics.picker_metrics import PickerMetrics
from picker.pool.datastore import Datastore
from picker.pool.policies import RequestRules

RESULTS_FILE = RESULTS / "reflector.json"


@dataclass(frozen=True, slots=True)
class Result:
    """What one client took; `longest_pause` is of its event loop during the list, `event_lag` the
    99th percentile and the longest while the events came.
    """

    client: str
    sync_seconds: float
    sync_cpu_seconds: float
    longest_pause_ms: float | None
    event_cpu_ms: float
    event_lag_ms: tuple[float, float] | None
    changes: int | None
    memory_mib: float


class Meter:
    """CPU and time since a client began, and the pauses of its event loop until it was synced."""

    def __init__(self) -> None:
        self._began, self._cpu_at = time.monotonic(), time.process_time()
        self._synced: tuple[float, float] | None = None
        self._pauses: list[float] = []
        self._longest_at_first: float | None = None

    async def watch_pauses(self) -> None:
        """Until cancelled."""
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.001)
            self._pauses.append(time.monotonic() - before - 0.001)

    def synced(self) -> None:
        """The list is known; what follows is of events."""
        self._synced = time.monotonic() - self._began, time.process_time() - self._cpu_at
        self._longest_at_first = max(self._pauses, default=None)
        self._pauses.clear()
        self._cpu_at = time.process_time()

    def result(self, client: str, load: Load, changes: int | None) -> Result:
        """All events have come."""
        assert self._synced is not None
        event = (time.process_time() - self._cpu_at) / load.events
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        first, lags = self._longest_at_first, sorted(self._pauses)
        pause = None if first is None else first * 1e3
        lag = (lags[int(len(lags) * 0.99)] * 1e3, lags[-1] * 1e3) if lags else None
        return Result(client, *self._synced, pause, event * 1e3, lag, changes, memory)


class Fixed:
    """Credentials that never change."""

    def __init__(self, url: str) -> None:
        self._access = Access(url)

    def load(self, *, anew: bool) -> Access:
        """See `AccessSource`."""
        return self._access


async def follow_reflector(url: str, load: Load) -> Result:
    """The picker's own, with what it keeps of Pods."""
    meter, series, synced = Meter(), KubernetesSeries([]), asyncio.Event()
    credentials = Credentials(Fixed(url), time.monotonic)
    async with KubernetesClient(credentials, rng=Random(1)) as client:
        reflector = Reflector(
            client,
            Subject(PODS, Selection("default"), read_pod),
            rng=Random(1),
            clock=time.monotonic,
            series=series,
        )
        reflector.subscribe(lambda *_: synced.set())
        running = asyncio.create_task(reflector.run())
        pauses = asyncio.create_task(meter.watch_pauses())
        await synced.wait()
        assert len(reflector.view) == load.pods
        meter.synced()
        await all_events(series, load)
        changes = int(series.changes_total.labels("pods", "default")._number()) - 1
        result = meter.result("reflector", load, changes)
        pauses.cancel()
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
    return result


async def all_events(series: KubernetesSeries, load: Load) -> None:
    """Return once they were heard."""
    counter = series.events_total.labels("pods", "default", "MODIFIED")
    for _ in range(load.seconds * 80):
        await asyncio.sleep(0.05)
        if counter._number() >= load.events:
            return
    raise RuntimeError(f"only {counter._number():.0f} events came")


async def follow_discovery(url: str, load: Load) -> Result:
    """All that the picker does to know its endpoints."""
    meter, metrics, datastore = Meter(), PickerMetrics(), Datastore()
    credentials = Credentials(Fixed(url), time.monotonic)
    selected = selected_pods("app=vllm", (8000,))
    discovery = KubernetesDiscovery(
        Target(PoolName("pool", "default", POOLS.group), selected),
        lambda: KubernetesClient(credentials, rng=Random(1)),
        datastore,
        RequestRules(),
        metrics,
    )
    running = asyncio.create_task(discovery.run())
    pauses = asyncio.create_task(meter.watch_pauses())
    synced = asyncio.Event()
    datastore.watch(lambda: synced.set() if datastore.synced else None)
    await synced.wait()
    assert len(datastore.snapshot().candidates) == load.pods
    meter.synced()
    await all_events(metrics.kubernetes, load)
    result = meter.result("discovery", load, None)
    pauses.cancel()
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    return result


async def follow_json(url: str, load: Load) -> Result:
    """Thirty lines with aiohttp."""
    meter, pods = Meter(), {}
    path = f"{url}/api/v1/namespaces/default/pods"
    async with aiohttp.ClientSession(read_bufsize=2**20) as session:
        pauses = asyncio.create_task(meter.watch_pauses())
        async with session.get(path) as reply:
            listing = json.loads(await reply.read())
        pods = {one["metadata"]["name"]: one for one in listing["items"]}
        assert len(pods) == load.pods
        del listing
        await asyncio.sleep(0.01)
        meter.synced()
        seen = 0
        async with session.get(path, params={"watch": "1"}) as reply:
            async for line in reply.content:
                event = json.loads(line)
                pods[event["object"]["metadata"]["name"]] = event["object"]
                seen += 1
                if seen == load.events:
                    pauses.cancel()
                    return meter.result("aiohttp + json + dict", load, None)
    raise RuntimeError("the watch ended")


def follow_models(url: str, load: Load) -> Result:
    """The official package as its documentation shows it."""
    meter = Meter()
    configuration = kubernetes.client.Configuration()
    configuration.host = url
    api = kubernetes.client.CoreV1Api(kubernetes.client.ApiClient(configuration))
    listing = api.list_namespaced_pod("default")
    pods = {one.metadata.name: one for one in listing.items}
    assert len(pods) == load.pods
    meter.synced()
    version = listing.metadata.resource_version
    watch = kubernetes.watch.Watch()
    events = watch.stream(api.list_namespaced_pod, "default", resource_version=version)
    for seen, event in enumerate(events, 1):
        pods[event["object"].metadata.name] = event["object"]
        if seen == load.events:
            watch.stop()
            break
    return meter.result("kubernetes Watch, models", load, None)


AsyncClient = Callable[[str, Load], Awaitable[Result]]
CLIENTS: tuple[AsyncClient | Callable[[str, Load], Result], ...] = (
    follow_reflector,
    follow_discovery,
    follow_json,
    follow_models,
)


def client(pipe: Connection, index: int, url: str, load: Load) -> None:
    """The child that is measured."""
    gc.collect()
    follow = CLIENTS[index]
    if follow is follow_models:
        pipe.send(follow_models(url, load))
    else:
        pipe.send(uvloop.run(follow(url, load)))  # type: ignore[arg-type]


def measured(index: int, load: Load) -> Result:
    """One client against a server of its own."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    server = context.Process(target=serve, args=(there, load), daemon=True)
    server.start()
    url = f"http://{HOST}:{here.recv()}"
    mine, theirs = context.Pipe()
    child = context.Process(target=client, args=(theirs, index, url, load), daemon=True)
    child.start()
    try:
        if not mine.poll(load.seconds * 10 + 120):
            sys.exit(f"{CLIENTS[index].__name__} did not end")
        result: Result = mine.recv()
        return result
    finally:
        child.join(5)
        child.kill()
        server.kill()


def show(results: list[Result]) -> None:
    """The table."""
    print(
        f"{'client':26}{'sync s':>8}{'CPU s':>8}{'pause ms':>10}{'event ms':>10}{'lag ms':>12}"
        f"{'MiB':>7}"
    )
    for one in results:
        pause = "" if one.longest_pause_ms is None else f"{one.longest_pause_ms:.0f}"
        lag = "" if one.event_lag_ms is None else "{:.1f}, {:.0f}".format(*one.event_lag_ms)
        print(
            f"{one.client:26}{one.sync_seconds:8.2f}{one.sync_cpu_seconds:8.2f}{pause:>10}"
            f"{one.event_cpu_ms:10.3f}{lag:>12}{one.memory_mib:7.0f}"
        )
    own = results[0]
    for one in results[2:]:
        ratio = one.event_cpu_ms / own.event_cpu_ms
        print(f"an event, of the reflector's: {ratio:.1f} times in {one.client}")
    print(f"calls of listeners for the events: {own.changes}")


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--pods", type=int, default=2000)
    parser.add_argument("--rate", type=int, default=1000)
    parser.add_argument("--seconds", type=int, default=10)
    given = parser.parse_args()
    load = Load(given.pods, given.rate, given.seconds)
    results = [measured(index, load) for index in range(len(CLIENTS))]
    show(results)
    written = {
        "machine": platform.platform(),
        "load": asdict(load),
        "clients": [asdict(one) for one in results],
    }
    write_results(RESULTS_FILE, written)


if __name__ == "__main__":
    main()
