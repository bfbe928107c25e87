"""The cluster that `following.py` has a picker follow: a child process of its own.

Pods live through what a kubelet was recorded to write (`tests/data/kubernetes`): half of the events
are of Pods that are replaced, from Pending until the one before is gone, half of Pods that lose
their readiness for as long as counts as a failure. Every Pod has an engine with a metrics page.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any, cast

import uvloop

from fleet.ports import free_ports

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))

from tests.fakes.kube_api.server import KubeApi, running_kube_api  # noqa: E402

SEED = 7
HOST = "127.0.0.1"
FIRST_PORT = 18000  # free ones are looked for from here on
POD_BYTES = 12_400
PODS_OF_A_NODE = 8
STORY_STEP_SECONDS = 2.0  # between two events of one Pod
REPLACED = 1 / 6  # of stories, so that half of the events are theirs
RECORDING = ROOT / "tests" / "data" / "kubernetes" / "deployment_rollout.jsonl"
BORN, ENDED = "vllm-5cd876f6cf-27b4j", "vllm-7bdfb47f6-jvp2g"
PAGE = (
    b'vllm:num_requests_waiting{engine="0",model_name="m"} 0.0\n'
    b'vllm:num_requests_running{engine="0",model_name="m"} 0.0\n'
    b'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.0\n'
    b"process_start_time_seconds 1.7e+09\n"
)
ANSWER = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4\r\nContent-Length: %d\r\n\r\n%s"
    % (len(PAGE), PAGE)
)


@dataclass(frozen=True, slots=True)
class Load:
    """How many Pods, how many events of them a second, for how long."""

    pods: int
    rate: int
    seconds: int


@dataclass(frozen=True, slots=True)
class Place:
    """A Pod: what it is called and where it is."""

    name: str
    uid: str
    address: str
    node: str


class Recorded:
    """The states of a Pod as they were recorded, for any Pod."""

    def __init__(self) -> None:
        events = [json.loads(line) for line in RECORDING.read_bytes().splitlines()]
        self._birth = [one["object"] for one in events if self._is_of(one, BORN, ending=False)]
        self._end = [
            one["object"]
            for one in events
            if self._is_of(one, ENDED, ending=True) and one["type"] != "DELETED"
        ]
        self._filler = [
            {"manager": f"controller-{n}", "operation": "Update", "fieldsV1": {"f:status": {}}}
            for n in range(150)
        ]

    @staticmethod
    def _is_of(event: dict[str, Any], name: str, *, ending: bool) -> bool:
        metadata = event["object"]["metadata"]
        return metadata["name"] == name and ("deletionTimestamp" in metadata) == ending

    def birth(self, place: Place) -> list[dict[str, Any]]:
        """From Pending to ready."""
        return [self._at(place, one) for one in self._birth]

    def end(self, place: Place) -> list[dict[str, Any]]:
        """From its deletion to the last state before it is gone."""
        return [self._at(place, one) for one in self._end]

    def ready(self, place: Place, ready: bool) -> dict[str, Any]:
        """As it runs."""
        pod = self._at(place, self._birth[-1])
        for condition in pod["status"]["conditions"]:
            if condition["type"] in ("Ready", "ContainersReady"):
                condition["status"] = str(ready)
        return pod

    def _at(self, place: Place, recorded: dict[str, Any]) -> dict[str, Any]:
        pod: dict[str, Any] = json.loads(json.dumps(recorded))
        pod["metadata"] |= {"name": place.name, "uid": place.uid}
        pod["metadata"]["labels"]["app"] = "vllm"
        if "nodeName" in pod["spec"]:
            pod["spec"]["nodeName"] = place.node
        if "podIP" in pod["status"]:
            pod["status"] |= {"podIP": place.address, "podIPs": [{"ip": place.address}]}
        for container in pod["status"]["containerStatuses"]:
            if "containerID" in container:
                container["containerID"] = f"containerd://{place.uid}"
        pod["metadata"]["managedFields"] = self._filler
        return pod


class Cluster:
    """Writes what becomes of Pods."""

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
            api.write(self._recorded.ready(place, True))

    def _new_place(self) -> Place:
        number, self._count = self._count, self._count + 1
        node = f"node{number // PODS_OF_A_NODE}"
        return Place(f"vllm-{number}", f"uid-{number}", self._free.popleft(), node)

    async def change(self, events: int) -> None:
        """So many events, at the rate: many Pods' stories, of which each goes on by turns."""
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
            write(recorded.ready(place, False))
            yield
            write(recorded.ready(place, True))
            self._idle.append(place)
            yield
            return
        successor = self._new_place()
        for state in recorded.birth(successor):
            write(state, even_if_same=True)
            yield
        for state in recorded.end(place):
            write(state, even_if_same=True)
            yield
        self._api.erase("pods", place.name)
        self._free.append(place.address)
        self._idle.append(successor)
        yield


class Engine(asyncio.Protocol):
    """Answers every request with the page."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A picker has come."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Requests have no body."""
        self._transport.write(ANSWER * data.count(b"\r\n\r\n"))


def serve(pipe: Connection, load: Load, folder: Path, crds: list[Path]) -> None:
    """The child: says that it is ready, then makes as many events as it is asked for."""

    async def run() -> None:
        loop = asyncio.get_running_loop()
        async with running_kube_api(None, *crds, window=10_000) as api:
            cluster = Cluster(api, load)
            (port,) = free_ports(cluster.addresses[0], 1, FIRST_PORT)
            await loop.create_server(Engine, cluster.addresses, port)
            selected = {"selector": {"matchLabels": {"app": "vllm"}}}
            pool: dict[str, Any] = {
                "apiVersion": "inference.networking.k8s.io/v1",
                "kind": "InferencePool",
                "metadata": {"name": "pool", "namespace": "default"},
                "spec": selected | {"targetPorts": [{"number": port}]},
            }
            api.write(pool)
            api.write_kubeconfig(folder / "kubeconfig")
            pipe.send("ready")
            while (events := await loop.run_in_executor(None, pipe.recv)) is not None:
                await cluster.change(events)
                pipe.send("done")

    uvloop.run(run())
