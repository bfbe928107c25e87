"""CPU of one change of a Pod in a whole picker that follows a cluster, by the size of the pool.

    python benchmarks/following.py [--pods 600,2000] [--rate 48] [--seconds 15] [--rounds 4]

A child process plays the cluster: the API server of the tests over real sockets, Pods of 12 KB, and
an engine with a metrics page at the address of each. Pods go through what a kubelet was recorded to
write (`tests/data/kubernetes`): half of the events belong to Pods that are replaced, from Pending
until the predecessor is gone, half to Pods that lose their readiness for a while. The picker is the
program itself with its own configuration and endpoint discovery for Envoy, which a client follows.
So a change goes the whole way: reflector, Pods, endpoints, the datastore and its observers
(scraping, health, prefix index, endpoint discovery).

CPU seconds of the picker's processes are counted in turns, while nothing happens and while events
come at the rate; the difference belongs to the events. Engines are asked every ten seconds only, so
that the cost of an idle pool does not hide it. Fixed seed. Prints a table, writes
benchmarks/results/following.json, and ends with status 1 where an event costs more than `--limit`
milliseconds.
"""

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from random import Random
from threading import Thread
from typing import Any, cast

import grpc
import uvloop
from envoy.service.discovery.v3 import discovery_pb2
from measuring import Table, child, command_line, cpu_seconds, numbers, write_results

from fleet.run.ports import free_ports
from picker.xds.wire import ENDPOINT_TYPE, STREAM_ENDPOINTS
from tests.fakes.kube_api.server import KubeApi, running_kube_api

ROOT = Path(__file__).parents[1]
SEED = 7
HOST = "127.0.0.1"
FIRST_PORT = 18000  # the search for free ones begins here
WARM_UP_SECONDS, PATIENCE_SECONDS = 10, 120
PODS_OF_A_NODE = 8
STORY_STEP_SECONDS = 2.0  # between two events of one Pod
REPLACED = 1 / 6  # of stories, which makes half of the events
RECORDING = ROOT / "tests" / "data" / "kubernetes" / "deployment_rollout.jsonl"
BORN, ENDED = "vllm-5cd876f6cf-27b4j", "vllm-7bdfb47f6-jvp2g"
MANAGED_FIELDS = [
    {"manager": f"controller-{n}", "operation": "Update", "fieldsV1": {"f:status": {}}}
    for n in range(150)
]
POOL: dict[str, Any] = {
    "apiVersion": "inference.networking.k8s.io/v1",
    "kind": "InferencePool",
    "metadata": {"name": "pool", "namespace": "default"},
}
PAGE = (
    b'vllm:num_requests_waiting{engine="0",model_name="m"} 0.0\n'
    b'vllm:num_requests_running{engine="0",model_name="m"} 0.0\n'
    b'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.0\n'
    b"process_start_time_seconds 1.7e+09\n"
)
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: %d\r\n\r\n" % len(PAGE)


@dataclass(frozen=True, slots=True)
class Load:
    """The number of Pods, their events a second, and the seconds of a round."""

    pods: int
    rate: int
    seconds: int


# ---- the cluster, a process of its own ----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Place:
    """The name, address and node of one Pod."""

    name: str
    address: str
    node: str


class Recorded:
    """The recorded states of one Pod, for any Pod."""

    def __init__(self) -> None:
        events = [json.loads(line) for line in RECORDING.read_bytes().splitlines()]
        pods = [one["object"] for one in events if one["type"] != "DELETED"]
        self._birth = [pod for pod in pods if self._is_of(pod, BORN, ending=False)]
        self._end = [pod for pod in pods if self._is_of(pod, ENDED, ending=True)]

    @staticmethod
    def _is_of(pod: dict[str, Any], name: str, *, ending: bool) -> bool:
        metadata = pod["metadata"]
        return metadata["name"] == name and ("deletionTimestamp" in metadata) == ending

    def birth(self, place: Place) -> list[dict[str, Any]]:
        """From Pending to ready."""
        return [self._at(place, one) for one in self._birth]

    def end(self, place: Place) -> list[dict[str, Any]]:
        """From the deletion to the last state of the Pod."""
        return [self._at(place, one) for one in self._end]

    def running(self, place: Place, is_ready: bool = True) -> dict[str, Any]:
        """The Pod while it runs."""
        pod = self._at(place, self._birth[-1])
        for condition in pod["status"]["conditions"]:
            if condition["type"] in ("Ready", "ContainersReady"):
                condition["status"] = str(is_ready)
        return pod

    def _at(self, place: Place, recorded: dict[str, Any]) -> dict[str, Any]:
        pod: dict[str, Any] = json.loads(json.dumps(recorded))
        pod["metadata"] |= {"name": place.name, "uid": f"uid-{place.name}"}
        pod["metadata"]["labels"]["app"] = "vllm"
        pod["metadata"]["managedFields"] = MANAGED_FIELDS
        if "nodeName" in pod["spec"]:
            pod["spec"]["nodeName"] = place.node
        if "podIP" in pod["status"]:
            pod["status"] |= {"podIP": place.address, "podIPs": [{"ip": place.address}]}
        for container in pod["status"]["containerStatuses"]:
            if "containerID" in container:
                container["containerID"] = f"containerd://{place.name}"
        return pod


class Cluster:
    """Writes the changes of Pods."""

    def __init__(self, api: KubeApi, load: Load) -> None:
        self._api, self._load = api, load
        self._rng, self._recorded = Random(SEED), Recorded()
        self._num_stories = min(int(load.rate * STORY_STEP_SECONDS), load.pods // 6)
        spare = self._num_stories  # Pods that come before others are gone
        self.addresses = [f"127.1.{n // 250}.{n % 250 + 1}" for n in range(load.pods + spare)]
        self._free = deque(self.addresses)
        self._stories: deque[Iterator[None]] = deque()
        self._count = 0
        self._idle = [self._new_place() for _ in range(load.pods)]
        for place in self._idle:
            api.write(self._recorded.running(place))

    def _new_place(self) -> Place:
        number, self._count = self._count, self._count + 1
        return Place(f"vllm-{number}", self._free.popleft(), f"node{number // PODS_OF_A_NODE}")

    async def change(self, events: int) -> None:
        """Make events at the rate: the stories of several Pods, each advanced in turn."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        for number in range(events):
            await asyncio.sleep(max(0.0, began + number / self._load.rate - loop.time()))
            has_enough = len(self._stories) >= self._num_stories
            story = self._stories.popleft() if has_enough else self._story()
            if next(story, self) is self:
                story = self._story()
                next(story)
            self._stories.append(story)

    def _story(self) -> Iterator[None]:
        place = self._idle.pop(self._rng.randrange(len(self._idle)))
        write, recorded = self._api.write, self._recorded
        if self._rng.random() >= REPLACED:
            write(recorded.running(place, is_ready=False))
            yield
            write(recorded.running(place))
            self._idle.append(place)
            yield
            return
        successor = self._new_place()
        for state in (*recorded.birth(successor), *recorded.end(place)):
            write(state, even_if_same=True)
            yield
        self._api.erase("pods", place.name)
        self._free.append(place.address)
        self._idle.append(successor)
        yield


class Engine(asyncio.Protocol):
    """Answers every request with the page."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Requests have no body."""
        self._transport.write((ANSWER + PAGE) * data.count(b"\r\n\r\n"))


def serve(pipe: Connection, load: Load, folder: Path) -> None:
    """Report that the cluster is ready, then make events as the pipe asks for them."""

    async def run() -> None:
        loop = asyncio.get_running_loop()
        crds = sorted((ROOT / "crds").glob("*.yaml"))
        async with running_kube_api(None, *crds, window=10_000) as api:
            cluster = Cluster(api, load)
            (port,) = free_ports(cluster.addresses[0], 1, FIRST_PORT)
            await loop.create_server(Engine, cluster.addresses, port)
            selector = {"matchLabels": {"app": "vllm"}}
            api.write(POOL | {"spec": {"selector": selector, "targetPorts": [{"number": port}]}})
            api.write_kubeconfig(folder / "kubeconfig")
            pipe.send("ready")
            while (events := await loop.run_in_executor(None, pipe.recv)) is not None:
                await cluster.change(events)
                pipe.send("done")

    uvloop.run(run())


# ---- the picker ---------------------------------------------------------------------------------


def wait_for(pods: int, metrics_port: int) -> None:
    """Return once the picker knows that many endpoints and has read their pages."""
    until = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < until:
        time.sleep(0.5)
        with suppress(OSError):
            with urllib.request.urlopen(f"http://{HOST}:{metrics_port}/endpoints") as page:
                known = json.load(page)["endpoints"]
            if len(known) == pods and all(one["metrics"] for one in known):
                return
    sys.exit("the picker does not get to know its endpoints")


@contextmanager
def followed_endpoints(xds_port: int) -> Iterator[None]:
    """Follow the picker's endpoint discovery, as an Envoy does."""
    requests: SimpleQueue[discovery_pb2.DiscoveryRequest | None] = SimpleQueue()
    options = [("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel(f"{HOST}:{xds_port}", options=options) as channel:
        call = channel.stream_stream(
            STREAM_ENDPOINTS,
            request_serializer=discovery_pb2.DiscoveryRequest.SerializeToString,
            response_deserializer=discovery_pb2.DiscoveryResponse.FromString,
        )(iter(requests.get, None))

        def ask(**seen: str) -> None:
            names = {"type_url": ENDPOINT_TYPE, "resource_names": ["pool"]}
            requests.put(discovery_pb2.DiscoveryRequest(**names, **seen))

        def acknowledge() -> None:
            with suppress(grpc.RpcError):
                for response in call:
                    ask(version_info=response.version_info, response_nonce=response.nonce)

        ask()
        Thread(target=acknowledge, daemon=True).start()
        yield


@contextmanager
def running_picker(kubeconfig: Path, pods: int) -> Iterator[int]:
    """The process id of a picker that follows the cluster of this file."""
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
            wait_for(pods, metrics)
            with followed_endpoints(xds):
                yield process.pid
        finally:
            process.terminate()
            process.wait(PATIENCE_SECONDS)


def measured(load: Load, rounds: int, warm_up: int) -> dict[str, Any]:
    """CPU milliseconds of an event, by round, and of a second without events."""
    events: list[float] = []
    quiets: list[float] = []
    with tempfile.TemporaryDirectory() as folder, child(serve, load, Path(folder)) as cluster:
        assert cluster.recv() == "ready"

        def change(seconds: int) -> None:
            cluster.send(load.rate * seconds)
            cluster.recv()
            time.sleep(0.5)  # the last changes are applied together

        with running_picker(Path(folder) / "kubeconfig", load.pods) as pid:
            change(warm_up)
            for _ in range(rounds):
                began, cpu = time.monotonic(), cpu_seconds(pid)
                time.sleep(load.seconds)
                quiet = (cpu_seconds(pid) - cpu) / (time.monotonic() - began)
                began, cpu = time.monotonic(), cpu_seconds(pid)
                change(load.seconds)
                busy = cpu_seconds(pid) - cpu - quiet * (time.monotonic() - began)
                events.append(busy / (load.rate * load.seconds) * 1e3)
                quiets.append(quiet * 1e3)
    return {
        "pods": load.pods,
        "event_cpu_ms": statistics.median(events),
        "quiet_cpu_ms_per_second": statistics.median(quiets),
        "by_round": [round(event, 2) for event in events],
    }


def main() -> None:
    """Measure each size of the pool."""
    parser = command_line(__doc__)
    parser.add_argument("--pods", type=numbers(int), default=[600, 2000])
    parser.add_argument("--rate", type=int, default=48)
    parser.add_argument("--seconds", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--warm-up", type=int, default=WARM_UP_SECONDS, metavar="SECONDS")
    parser.add_argument("--limit", type=float, default=0.5, metavar="MS", help="CPU of an event")
    options = parser.parse_args()
    table = Table("pods", "event_cpu_ms .2f", "quiet_cpu_ms_per_second .0f", "by_round <30")
    for pods in options.pods:
        load = Load(pods, options.rate, options.seconds)
        table.add(**measured(load, options.rounds, options.warm_up))
    write_results(options, pools=table.rows)
    if any(row["event_cpu_ms"] > options.limit for row in table.rows):
        sys.exit(f"an event costs more than {options.limit} ms")


if __name__ == "__main__":
    main()
