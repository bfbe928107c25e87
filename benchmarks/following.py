"""What a change of a Pod costs a whole picker that follows a cluster, by the size of the pool.

    python benchmarks/following.py [--pods 600 2000] [--rate 48] [--seconds 15] [--rounds 4]

A child process plays the cluster (`following_cluster.py`): the API server of the tests over real
sockets, with Pods of 12 KB that flap and are replaced as a kubelet was recorded to write it, and an
engine with a metrics page at the address of each. The picker is the program itself with its own
configuration and endpoint discovery for Envoy, which a client follows. So a change goes the whole
way: reflector, Pods, endpoints, the datastore and all that listens to it (scraping, health, prefix
index, endpoint discovery).

CPU seconds of the picker's processes are counted, by turns while nothing happens and while events
come at the rate; the difference is the events'. Engines are asked every ten seconds only, so that
what an idle pool costs does not hide it. Fixed seed. Prints a table, writes
benchmarks/results/following.json, and fails where an event costs more than the limit.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

import grpc
from envoy.service.discovery.v3 import discovery_pb2
from following_cluster import FIRST_PORT, HOST, Load, serve
from result_files import RESULTS, write_results

from fleet.ports import free_ports
from picker.xds.wire import ENDPOINT_TYPE, STREAM_ENDPOINTS

ROOT = Path(__file__).parents[1]
LIMIT_MS = 0.5
WARM_UP_SECONDS = 10
PATIENCE_SECONDS = 120


@dataclass(frozen=True, slots=True)
class Result:
    """CPU milliseconds of an event, by round, and of a second in which nothing happens."""

    pods: int
    event_cpu_ms: list[float]
    quiet_cpu_ms: list[float]

    @property
    def median(self) -> float:
        """Of the rounds, whose differences are the machine's."""
        return statistics.median(self.event_cpu_ms)


class Picker:
    """The program, and how to look at it."""

    def __init__(self, process: subprocess.Popen[bytes], metrics: int, xds: int) -> None:
        self._process = process
        self._metrics = metrics
        self._channel = grpc.insecure_channel(
            f"{HOST}:{xds}", options=[("grpc.max_receive_message_length", -1)]
        )

    def wait_for(self, pods: int) -> None:
        """Until it knows these and has read their pages."""
        until = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < until:
            time.sleep(0.5)
            with suppress(OSError):
                url = f"http://{HOST}:{self._metrics}/endpoints"
                with urllib.request.urlopen(url) as page:
                    known = json.load(page)["endpoints"]
                if len(known) == pods and all(one["metrics"] for one in known):
                    return
        sys.exit("the picker does not get to know its endpoints")

    def follow_endpoints(self) -> None:
        """As an Envoy does."""
        requests: SimpleQueue[discovery_pb2.DiscoveryRequest | None] = SimpleQueue()

        def ask(**seen: str) -> None:
            requests.put(
                discovery_pb2.DiscoveryRequest(
                    type_url=ENDPOINT_TYPE, resource_names=["pool"], **seen
                )
            )

        call = self._channel.stream_stream(
            STREAM_ENDPOINTS,
            request_serializer=discovery_pb2.DiscoveryRequest.SerializeToString,
            response_deserializer=discovery_pb2.DiscoveryResponse.FromString,
        )(iter(requests.get, None))

        def acknowledge() -> None:
            with suppress(grpc.RpcError):
                for told in call:
                    ask(version_info=told.version_info, response_nonce=told.nonce)

        ask()
        Thread(target=acknowledge, daemon=True).start()

    def close(self) -> None:
        """The end of what was followed."""
        self._channel.close()

    def cpu_seconds(self) -> float:
        """Of all its processes so far."""
        pid = self._process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        threads = [
            thread
            for one in (str(pid), *children)
            for thread in Path(f"/proc/{one}/task").iterdir()
        ]
        return sum(int((one / "schedstat").read_text().split()[0]) for one in threads) / 1e9


@contextmanager
def running_picker(kubeconfig: Path) -> Iterator[Picker]:
    """A picker that follows the cluster of this file."""
    metrics, xds = free_ports(HOST, 2, FIRST_PORT)
    command = [
        *(sys.executable, "-m", "picker", f"--kubeconfig={kubeconfig}", f"--bind-address={HOST}"),
        *("--pool-name=pool", "--pool-namespace=default"),
        *("--grpc-port=0", "--grpc-health-port=0", f"--metrics-port={metrics}"),
        *(f"--xds-port={xds}", "--refresh-metrics-interval=10s", "--drain-timeout=0s"),
    ]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, cwd=ROOT, stderr=log)
        try:
            with closing(Picker(process, metrics, xds)) as picker:
                yield picker
        finally:
            process.terminate()
            process.wait(PATIENCE_SECONDS)


@contextmanager
def running_cluster(load: Load, folder: Path) -> Iterator[Connection]:
    """The child: gives the pipe that asks it for events."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    crds = sorted((ROOT / "crds").glob("*.yaml"))
    child = context.Process(target=serve, args=(there, load, folder, crds), daemon=True)
    child.start()
    try:
        if not here.poll(PATIENCE_SECONDS):
            sys.exit("the cluster does not start")
        here.recv()
        yield here
    finally:
        child.kill()


def measured(load: Load, rounds: int) -> Result:
    """A pool of its own."""
    result = Result(load.pods, [], [])
    with (
        tempfile.TemporaryDirectory() as folder,
        running_cluster(load, Path(folder)) as cluster,
        running_picker(Path(folder) / "kubeconfig") as picker,
    ):

        def change(seconds: int) -> None:
            cluster.send(load.rate * seconds)
            cluster.recv()
            time.sleep(0.5)

        picker.wait_for(load.pods)
        picker.follow_endpoints()
        change(WARM_UP_SECONDS)
        for _ in range(rounds):
            began, cpu = time.monotonic(), picker.cpu_seconds()
            time.sleep(load.seconds)
            quiet = (picker.cpu_seconds() - cpu) / (time.monotonic() - began)
            began, cpu = time.monotonic(), picker.cpu_seconds()
            change(load.seconds)
            busy = picker.cpu_seconds() - cpu - quiet * (time.monotonic() - began)
            result.event_cpu_ms.append(busy / (load.rate * load.seconds) * 1e3)
            result.quiet_cpu_ms.append(quiet * 1e3)
    return result


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--pods", type=int, nargs="+", default=[600, 2000])
    parser.add_argument("--rate", type=int, default=48)
    parser.add_argument("--seconds", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=4)
    given = parser.parse_args()
    print(f"{'Pods':>6}{'event ms':>10}   by round{'':24}{'quiet ms/s':>12}{'limit ms':>10}")
    results = []
    for pods in given.pods:
        one = measured(Load(pods, given.rate, given.seconds), given.rounds)
        by_round = ", ".join(f"{event:.2f}" for event in one.event_cpu_ms)
        quiet = statistics.median(one.quiet_cpu_ms)
        print(f"{pods:6}{one.median:10.2f}   {by_round:32}{quiet:12.0f}{LIMIT_MS:10.1f}")
        results.append(one)
    written = {
        "machine": platform.platform(),
        "rate": given.rate,
        "processes": given.processes,
        "pools": [asdict(one) for one in results],
    }
    write_results(RESULTS / "following.json", written)
    if any(one.median > LIMIT_MS for one in results):
        sys.exit(f"an event costs more than {LIMIT_MS} ms")


if __name__ == "__main__":
    main()
