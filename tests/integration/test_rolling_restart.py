"""`pointsman restart`: a new picker, a new Envoy and new workers under load, and no request that
fails or passes the picker by.
"""

import asyncio
import contextlib
import json
import os
import re
import signal
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from h2 import events
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.settings import SettingCodes, Settings
from hyperframe.frame import GoAwayFrame

from tests.support.fleet.running_fleet import (
    LIMIT_SECONDS,
    Fleet,
    free_base_port,
    ready_fleet,
    running_fleet,
)
from tests.support.waiting import until

_WINDOW = 2**30


class BrokenError(Exception): ...


@dataclass
class Answer:
    headers: dict[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    fault: str | None = None

    @property
    def status(self) -> int:
        return int(self.headers.get(":status", 0))

    def fail(self, fault: str) -> None:
        if not self.ended.is_set():
            self.fault = fault
            self.ended.set()


class _PatientHttp2(H2Connection):
    """The library itself would end its streams at a GOAWAY."""

    last_stream_id: int | None = None

    def _receive_goaway_frame(self, frame: GoAwayFrame) -> Any:
        self.last_stream_id = frame.last_stream_id
        return [], []


class _Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._answers: dict[int, Answer] = {}
        self._http = _PatientHttp2(H2Configuration(client_side=True, header_encoding="utf-8"))
        window = {SettingCodes.INITIAL_WINDOW_SIZE: _WINDOW}
        self._http.local_settings = Settings(client=True, initial_values=window)
        self._http.initiate_connection()
        self._http.increment_flow_control_window(_WINDOW)
        self.said_goodbye = False

    def send(self, path: str, body: bytes) -> Answer:
        number = self._http.get_next_available_stream_id()
        answer = self._answers[number] = Answer()
        headers = [(":method", "POST"), (":scheme", "http"), (":path", path)]
        headers += [(":authority", "localhost"), ("content-type", "application/json")]
        self._http.send_headers(number, [*headers, ("content-length", str(len(body)))])
        self._http.send_data(number, body, end_stream=True)
        self._writer.write(self._http.data_to_send())
        return answer

    async def read(self) -> None:
        reason = "the connection was closed"
        try:
            while data := await self._reader.read(65_536):
                for event in self._http.receive_data(data):
                    if (number := getattr(event, "stream_id", None)) in self._answers:
                        self._take(event, number)
                if self._http.last_stream_id is not None:
                    self._goodbye(self._http.last_stream_id)
                self._writer.write(self._http.data_to_send())
        except OSError as error:
            reason = f"the connection broke: {error}"
        finally:
            self.said_goodbye = True
            for answer in self._answers.values():
                answer.fail(reason)
            self._writer.close()

    def _take(self, event: events.Event, number: int) -> None:
        answer = self._answers[number]
        if isinstance(event, events.ResponseReceived):
            answer.headers |= dict(event.headers)
        elif isinstance(event, events.DataReceived):
            answer.body += event.data
        elif isinstance(event, events.StreamReset):
            answer.fail(f"reset with code {event.error_code}")
        elif isinstance(event, events.StreamEnded):
            del self._answers[number]
            answer.ended.set()

    def _goodbye(self, last: int) -> None:
        self.said_goodbye = True
        for number in [number for number in self._answers if number > last]:
            self._answers.pop(number).fail("refused by a goodbye")
        if not self._answers:
            self._writer.close()

    def close(self) -> None:
        self._writer.close()


class Http2Client:
    def __init__(self, port: int, group: asyncio.TaskGroup) -> None:
        self._port, self._group = port, group
        self._connection: _Connection | None = None
        self._opening = asyncio.Lock()

    async def post(self, path: str, document: object) -> Answer:
        async with self._opening:
            connection = self._connection
            if connection is None or connection.said_goodbye:
                streams = await asyncio.open_connection("127.0.0.1", self._port)
                connection = self._connection = _Connection(*streams)
                self._group.create_task(connection.read())
        answer = connection.send(path, json.dumps(document).encode())
        await answer.ended.wait()
        if answer.fault is not None:
            raise BrokenError(answer.fault)
        return answer

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()


SHORT_TOKENS, STREAM_TOKENS = 4, 40
PICKED = "x-pointsman-endpoint"  # of `--decision-header`: this request has met a picker
PATH = "/v1/chat/completions"


def body(stream: bool, tokens: int) -> dict[str, object]:
    return {
        "model": "sim",
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": stream,
        **({"stream_options": {"include_usage": True}} if stream else {}),
        "messages": [{"role": "user", "content": "hello"}],
    }


@dataclass
class Load:
    served: Counter[str] = field(default_factory=Counter)  # by kind of client and answer
    faults: Counter[str] = field(default_factory=Counter)
    unpicked: int = 0
    stopped: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def total(self) -> int:
        return self.served.total()

    def judge(
        self, kind: str, stream: bool, status: int, headers: Mapping[str, str], text: bytes
    ) -> None:
        kind = f"{kind} {'stream' if stream else 'short'}"
        if status != 200:
            self.faults[f"{kind}: {status} {text[:200]!r}"] += 1
        elif not _is_complete(stream, text):
            self.faults[f"{kind}: incomplete: {text[-200:]!r}"] += 1
        else:
            self.served[kind] += 1
            self.unpicked += PICKED not in headers


def _is_complete(stream: bool, text: bytes) -> bool:
    if not stream:
        return json.loads(text)["usage"]["completion_tokens"] == SHORT_TOKENS
    return b'"completion_tokens":%d' % STREAM_TOKENS in text and text.endswith(b"data: [DONE]\n\n")


async def _over_http1(load: Load, port: int, stream: bool) -> None:
    url = f"http://127.0.0.1:{port}{PATH}"
    request = body(stream, STREAM_TOKENS if stream else SHORT_TOKENS)
    connector = aiohttp.TCPConnector(limit=1)
    async with aiohttp.ClientSession(connector=connector) as session:
        while not load.stopped.is_set():
            try:
                async with session.post(url, json=request) as reply:
                    text = await reply.read()
                    load.judge("HTTP/1.1", stream, reply.status, reply.headers, text)
            except aiohttp.ClientError as error:
                load.faults[f"HTTP/1.1: {error!r}"] += 1
                await asyncio.sleep(0.01)


async def _over_http2(load: Load, client: Http2Client, stream: bool) -> None:
    request = body(stream, STREAM_TOKENS if stream else SHORT_TOKENS)
    while not load.stopped.is_set():
        try:
            answer = await client.post(PATH, request)
            load.judge("HTTP/2", stream, answer.status, answer.headers, bytes(answer.body))
        except (BrokenError, OSError) as error:
            load.faults[f"HTTP/2: {error!r}"] += 1
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def steady_load(port: int) -> AsyncIterator[Load]:
    load = Load()
    async with asyncio.TaskGroup() as group:
        shared = Http2Client(port, group)
        async with asyncio.TaskGroup() as clients:
            for stream in (False, True):
                clients.create_task(_over_http1(load, port, stream))
                for _ in range(2):
                    clients.create_task(_over_http2(load, shared, stream))
            try:
                yield load
            finally:
                load.stopped.set()
        shared.close()


@dataclass
class Page:
    newest: set[str] = field(default_factory=set)
    faults: list[str] = field(default_factory=list)


@contextlib.asynccontextmanager
async def open_page(url: str) -> AsyncIterator[Page]:
    page = Page()

    async def poll() -> None:
        async with aiohttp.ClientSession(raise_for_status=True) as session:
            while True:
                try:
                    for path in ("endpoints?history=4", "queues", "config", "metrics"):
                        async with session.get(f"{url}/{path}") as reply:
                            await reply.read()
                    async with session.get(f"{url}/decisions?limit=50") as reply:
                        decisions = (await reply.json())["decisions"]
                    page.newest = {one["request_id"] for one in decisions}
                except aiohttp.ClientError as error:
                    page.faults.append(repr(error))
                await asyncio.sleep(0.02)

    async with asyncio.TaskGroup() as group:
        polling = group.create_task(poll())
        yield page
        polling.cancel()


pytestmark = [pytest.mark.envoy, pytest.mark.usefixtures("patient_envoy"), pytest.mark.full]
FLAGS = ("--decision-header", "--drain-timeout", "5")
QUEUE = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
featureGates: [flowControl]
plugins:
- {type: queue-scorer}
- {type: concurrency-detector, parameters: {maxConcurrency: 1}}
flowControl: {saturationDetector: {pluginRef: concurrency-detector}}
"""


async def ended(process: asyncio.subprocess.Process) -> tuple[int | None, str]:
    async with asyncio.timeout(2 * LIMIT_SECONDS):
        output, _ = await process.communicate()
    return process.returncode, output.decode()


def parts_of(fleet: Fleet) -> dict[str, int]:
    found = {}
    for pid, line in fleet.descendants().items():
        if "-m picker " in line:
            found["picker"] = pid
        elif "envoy" in line and "--concurrency" in line:
            found["envoy"] = pid
        elif "-m worker --" in line:
            found[f"worker {line.partition('--port ')[2].partition(' ')[0]}"] = pid
    return found


def assert_nothing_was_lost(load: Load) -> None:
    assert not load.faults
    assert load.unpicked == 0
    kinds = {f"{http} {kind}" for http in ("HTTP/1.1", "HTTP/2") for kind in ("short", "stream")}
    assert set(load.served) == kinds


async def test_a_restart_of_everything_costs_no_request() -> None:
    async with ready_fleet("--workers", "3", *FLAGS) as fleet:
        before = parts_of(fleet)
        assert len(before) == 5
        async with steady_load(fleet.port) as load, open_page(fleet.picker_url) as page:
            await until(lambda: load.total > 20, what="load")
            first = await fleet.restart("all")
            await until(lambda: "picker: starting" in fleet.output, what="the restart begins")
            status, said = await ended(await fleet.restart("workers"))
            assert status == 1
            assert "a restart of picker, envoy, workers is under way" in said
            status, said = await ended(first)
            assert status == 0, said
            # At once, when the Envoy before this one is hardly gone.
            assert (await ended(await fleet.restart("envoy")))[0] == 0
            so_far = load.total
            await until(lambda: load.total > so_far + 20, what="load afterwards")
            asked = await fleet.openai.models.with_raw_response.list()
            newest = str(asked.headers["x-request-id"])
            await until(lambda: newest in page.newest, what="the page shows the new picker")
        assert_nothing_was_lost(load)
        assert page.faults == []
        after = parts_of(fleet)
        assert after.keys() == before.keys()
        assert not set(after.values()) & set(before.values())
        assert "was ended by" not in fleet.output
        assert re.search(r"done in .* 0 with a status of 5xx, 0 without the picker, 0 cut", said)

        os.kill(after["picker"], signal.SIGKILL)
        os.kill(after["envoy"], signal.SIGKILL)
        await until(lambda: "picker is back" in fleet.output, what="the picker is back")
        await until(lambda: "envoy is back" in fleet.output, what="Envoy is back")
        assert await fleet.say_hello() == 4
        assert (await ended(await fleet.restart("envoy")))[0] == 0  # also of one that was reborn
        assert await fleet.say_hello() == 4

        memory = set(Path("/dev/shm").glob("envoy_shared_memory_*"))  # noqa: ASYNC240
        await fleet.interrupt()
        assert len(memory - set(Path("/dev/shm").glob("envoy_shared_memory_*"))) == 1  # noqa: ASYNC240


async def test_a_worker_that_dies_meanwhile_does_not_stop_a_restart() -> None:
    async with ready_fleet("--workers", "3", *FLAGS) as fleet:
        before = parts_of(fleet)
        stop = asyncio.Event()

        async def keep_asking() -> int:
            asked = 0
            while not stop.is_set():
                assert await fleet.say_hello() == 4
                asked += 1
            return asked

        async with asyncio.TaskGroup() as group:
            asking = [group.create_task(keep_asking()) for _ in range(3)]
            rolling = await fleet.restart("workers")
            first, second, _ = sorted(name for name in before if "worker" in name)
            await until(
                lambda: parts_of(fleet).get(first) != before[first], what="the first worker goes"
            )
            os.killpg(before[second], signal.SIGKILL)
            status, said = await ended(rolling)
            assert status == 0, said
            stop.set()
        assert all(task.result() for task in asking)
        after = parts_of(fleet)
        assert after.keys() == before.keys()
        assert not {after[name] for name in after if "worker" in name} & set(before.values())
        assert "worker-2 was ended by SIGKILL; starting it again" in fleet.output


async def test_the_only_worker_is_replaced_by_one_beside_it() -> None:
    async with ready_fleet("--workers", "1", *FLAGS) as fleet:
        before = parts_of(fleet)
        async with steady_load(fleet.port) as load:
            await until(lambda: load.total > 10, what="load")
            status, said = await ended(await fleet.restart("workers"))
            assert status == 0, said
        assert_nothing_was_lost(load)
        after = parts_of(fleet)
        assert after["picker"] == before["picker"]
        assert {name for name in after if "worker" in name}.isdisjoint(before)

        cut = await fleet.restart("picker")
        await until(lambda: "picker: starting" in fleet.output, what="the restart begins")
        await fleet.interrupt()
        status, said = await ended(cut)
        assert status == 1
        assert "the fleet stops" in said


async def test_clients_get_a_reason_at_the_end(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(QUEUE)
    flags = ("--decision-header", "--workers", "1", "--drain-timeout", "0.5")
    async with (
        running_fleet(free_base_port(), *flags, "--config", str(config)) as fleet,
        aiohttp.ClientSession() as http,
    ):
        early = await _first_answer(http, fleet.url)
        await fleet.ready()
        decision = f"{fleet.picker_url}/decisions/{early.headers['x-request-id']}"
        async with http.get(decision) as reply:
            assert reply.status == 200, "nobody decided the first request"
        config.write_text("nonsense: true\n")
        status, said = await ended(await fleet.restart("picker"))
        assert status == 1
        assert "picker ended with status 1 while starting" in said
        request = body(stream=True, tokens=100 * STREAM_TOKENS)
        streaming = await http.post(fleet.url + PATH, json=request)
        await streaming.content.readline()
        waiting = asyncio.ensure_future(http.post(fleet.url + PATH, json=body(False, 4)))
        await until_queued(http, fleet)
        fleet.process.send_signal(signal.SIGINT)
        assert (await waiting).status == 503
        received = b""
        with contextlib.suppress(aiohttp.ClientPayloadError):  # a worker cuts off after its error
            async for piece in streaming.content.iter_any():
                received += piece
        assert b'"error"' in received
        await fleet.ended()


async def _first_answer(http: aiohttp.ClientSession, url: str) -> aiohttp.ClientResponse:
    async with asyncio.timeout(LIMIT_SECONDS):
        while True:
            try:
                return await http.post(url + PATH, json=body(False, 4))
            except aiohttp.ClientConnectorError:
                await asyncio.sleep(0.01)


async def until_queued(http: aiohttp.ClientSession, fleet: Fleet) -> None:
    async with asyncio.timeout(LIMIT_SECONDS):
        while True:
            async with http.get(f"{fleet.picker_url}/queues") as reply:
                if (await reply.json())["queued_requests"]:
                    return
            await asyncio.sleep(0.02)
