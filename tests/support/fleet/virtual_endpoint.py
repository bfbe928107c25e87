"""An endpoint in virtual time, without sockets: it answers each request on a schedule of its own,
and so knows to the microsecond what a client has to see.
"""

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import msgspec

from fleet.bench.client import Client
from fleet.bench.command import Settings
from fleet.bench.driver import Driver, RequestForm
from fleet.bench.flags import build_parser
from fleet.bench.load import loads_of
from fleet.bench.shard import LoadShard, endpoint_of
from fleet.bench.summary import Observed, Stage, stage_of
from fleet.sim.virtual_time import VirtualTimeLoop

LENGTH = re.compile(rb"content-length: (\d+)\r\n\r\n")
NOWHERE = endpoint_of("http://x", True, ())
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


@dataclass(frozen=True)
class Times:
    """Seconds until the first token of an answer and between tokens; both are positive."""

    ttft: float
    itl: float = 0.01


def sse(document: object) -> bytes:
    data = b"data: " + (document if isinstance(document, bytes) else msgspec.json.encode(document))
    return b"%x\r\n%b\r\n" % (len(data) + 2, data + b"\n\n")


def delta(text: str) -> dict[str, object]:
    return {"choices": [{"index": 0, "delta": {"content": text}}]}


@dataclass
class VirtualEndpoint:
    """`times(number, now)` is asked for each request as it comes. `write_seconds` is what a send
    costs the client; `answer` replaces all answers, and comes in pieces of `cut` bytes. A
    connection on which `answers_per_connection` were given is closed at the next request.
    """

    times: Callable[[int, float], Times]
    write_seconds: float = 0.0
    answer: bytes | None = None
    cut: int = 1 << 20
    answers_per_connection: int = 1 << 20
    bodies: list[dict[str, object]] = field(default_factory=list)
    came_at: list[float] = field(default_factory=list)
    connections: int = 0
    closed: int = 0  # of them, whichever end closed them

    async def connect(self, protocol: Callable[[], asyncio.Protocol]) -> object:
        self.connections += 1
        made = protocol()
        made.connection_made(_Transport(self, made))
        return made

    def driver(self, form: RequestForm | None = None, timeout_seconds: float = 60.0) -> Driver:
        clock = asyncio.get_running_loop().time
        client = Client(self.connect, HEAD, clock, timeout_seconds)
        return Driver(client, form or RequestForm("m"), clock)


async def bench_stage(
    endpoint: VirtualEndpoint, *flags: str, processes: int = 1
) -> tuple[list[Driver[bytes]], Stage]:
    """Run `pointsman bench` with this number of processes, all within this one."""
    settings = Settings(**vars(build_parser().parse_args(flags)))
    (load,), clock = loads_of(settings), asyncio.get_running_loop().time
    drivers, stages = [], []
    for number in range(processes):
        shard = LoadShard(
            number, processes, settings, load, 0, NOWHERE, RequestForm("m"), 60.0, 1.0, 0
        )
        driver = shard.driver(Client(endpoint.connect, HEAD, clock, 60.0), clock)
        drivers.append(driver)
        stages.append(shard.prepared(driver)())
    await asyncio.gather(*stages)
    seen = [Observed(one.outcomes, one.pulses, one.started, 0, 0.0) for one in drivers]
    return drivers, stage_of("s", drivers[0].begun, clock(), settings.warmup, seen)


class _Transport(asyncio.Transport):
    def __init__(self, endpoint: VirtualEndpoint, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self._endpoint = endpoint
        self._protocol = protocol
        self._closing = False
        self._written = 0
        self._loop = cast("VirtualTimeLoop", asyncio.get_running_loop())

    def is_closing(self) -> bool:
        return self._closing

    def abort(self) -> None:
        self.close()

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._endpoint.closed += 1
            self._loop.call_soon(self._protocol.connection_lost, None)

    def write(self, data: bytes) -> None:
        endpoint, now = self._endpoint, self._loop.time()
        found = LENGTH.search(data)
        assert found is not None
        assert len(data) - found.end() == int(found[1])
        endpoint.came_at.append(now)
        body = msgspec.json.decode(data[found.end() :])
        endpoint.bodies.append(body)
        self._loop.work(endpoint.write_seconds)
        self._written += 1
        if self._written > endpoint.answers_per_connection:
            self.close()
            return
        if endpoint.answer is not None:
            self._later(0.1, endpoint.answer)
            return
        times = endpoint.times(len(endpoint.bodies) - 1, now)
        count = body["max_tokens"]
        self._later(times.ttft / 2, ANSWER + sse({"choices": [{"delta": {"role": "assistant"}}]}))
        usage = {"prompt_tokens": 7, "completion_tokens": count}
        usage |= {"prompt_tokens_details": {"cached_tokens": 3}}
        end = sse({"choices": [], "usage": usage}) + sse(b"[DONE]") + b"0\r\n\r\n"
        for number in range(count):
            piece = sse(delta(f" w{number}")) + (end if number == count - 1 else b"")
            self._later(times.ttft + number * times.itl, piece)

    def _later(self, seconds: float, data: bytes) -> None:
        self._loop.call_later(seconds, self._deliver, data)

    def _deliver(self, data: bytes) -> None:
        for at in range(0, len(data), self._endpoint.cut):
            if not self._closing:
                self._protocol.data_received(data[at : at + self._endpoint.cut])
