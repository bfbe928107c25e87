"""The API server that `reflector.py` has its clients follow: a child process of its own."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from random import Random
from typing import Any
from urllib.parse import parse_qs, urlsplit

import uvloop

SEED = 11
HOST = "127.0.0.1"
POD_BYTES = 12_400
TICK_SECONDS = 0.01
FIRST_VERSION = 1_000_000
_READY, _VERSION = "READY-HERE", "VERSION-HERE"


@dataclass(frozen=True, slots=True)
class Load:
    """How many Pods, and how many events at which rate."""

    pods: int
    rate: int
    seconds: int

    @property
    def events(self) -> int:
        """In all."""
        return self.rate * self.seconds


def template(number: int) -> str:
    """A Pod's JSON, with places for its readiness and its version."""
    managed = [
        {"manager": f"controller-{n}", "operation": "Update", "fieldsV1": {"f:status": {}}, "n": n}
        for n in range(400)
    ]
    pod: dict[str, Any] = {
        "kind": "Pod",
        "apiVersion": "v1",
        "metadata": {
            "name": f"worker-{number}",
            "namespace": "default",
            "uid": f"uid-{number}",
            "resourceVersion": _VERSION,
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "labels": {"app": "vllm"},
            "managedFields": [],
        },
        "spec": {
            "nodeName": f"node{number % 50}",
            "containers": [{"name": "server", "image": "server:1", "ports": []}],
        },
        "status": {
            "phase": "Running",
            "podIP": f"10.{number // 65536}.{number // 256 % 256}.{number % 256}",
            "podIPs": [{"ip": f"10.{number // 65536}.{number // 256 % 256}.{number % 256}"}],
            "conditions": [{"type": "Ready", "status": _READY}],
            "containerStatuses": [
                {
                    "name": "server",
                    "ready": True,
                    "restartCount": 0,
                    "image": "server:1",
                    "imageID": "server@sha256:0",
                }
            ],
        },
    }
    fields = pod["metadata"]["managedFields"]
    size = len(json.dumps(pod, separators=(",", ":")))
    for one in managed:
        size += len(json.dumps(one, separators=(",", ":"))) + 1
        if size > POD_BYTES:
            break
        fields.append(one)
    return json.dumps(pod, separators=(",", ":"))


class Server:
    """Answers lists and watches; one watch gets all the events."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._pods = [template(number).split(_VERSION) for number in range(load.pods)]

    def _pod(self, number: int, ready: bool, version: int) -> str:
        return str(version).join(self._pods[number]).replace(_READY, str(ready))

    def _page(self, query: dict[str, list[str]]) -> bytes:
        begin = int(query.get("continue", ["0"])[0])
        end = begin + int(query.get("limit", [str(self._load.pods)])[0])
        metadata = {"resourceVersion": str(FIRST_VERSION)}
        if end < self._load.pods:
            metadata["continue"] = str(end)
        numbers = range(begin, min(end, self._load.pods))
        items = ",".join(self._pod(number, True, FIRST_VERSION) for number in numbers)
        head = f'{{"kind":"PodList","apiVersion":"v1","metadata":{json.dumps(metadata)},"items":'
        return f"{head}[{items}]}}".encode()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                query = parse_qs(urlsplit(head.split(b" ", 2)[1].decode()).query)
                if "watch" in query:
                    await self._watch(writer)
                    return
                body = self._page(query)
                writer.write(
                    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
                    b"Content-Length: %d\r\n\r\n" % len(body)
                )
                writer.write(body)
                await writer.drain()

    async def _watch(self, writer: asyncio.StreamWriter) -> None:
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        rng, loop = Random(SEED), asyncio.get_running_loop()
        ready = [True] * self._load.pods
        begin = loop.time() + 1.0
        each = round(self._load.rate * TICK_SECONDS)
        for tick in range(self._load.events // each):
            await asyncio.sleep(max(0.0, begin + tick * TICK_SECONDS - loop.time()))
            for index in range(each):
                number = rng.randrange(self._load.pods)
                ready[number] = not ready[number]
                version = FIRST_VERSION + 1 + tick * each + index
                pod = self._pod(number, ready[number], version)
                line = b'{"type":"MODIFIED","object":%s}\n' % pod.encode()
                writer.write(b"%x\r\n%s\r\n" % (len(line), line))
            await writer.drain()
        await asyncio.sleep(3600)


def serve(pipe: Connection, load: Load) -> None:
    """The child that plays the API server until it is killed; it tells its port first."""

    async def run() -> None:
        server = await asyncio.start_server(Server(load).answer, HOST, 0)
        pipe.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    uvloop.run(run())
