"""The picker's knowledge of responses behind a generated bootstrap on a real Envoy, by mode."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from base.response_bodies import ResponseBodies
from fleet.envoy.bootstrap import build, to_yaml
from fleet.envoy.response_reports import MAX_DOCUMENT_BYTES
from fleet.envoy.settings import BootstrapConfig, SocketAddress
from tests.support.fleet.envoy_process import EnvoyProcess, PickerProcess
from tests.support.local_ports import free_port
from tests.support.picker.metrics_pages import Pod, page
from tests.support.picker.whole_picker import HEAD, WholePicker, whole_picker, write_endpoints
from tests.support.waiting import until

pytestmark = pytest.mark.envoy
LOCAL = "127.0.0.1"
OFF, USAGE, ALL = ResponseBodies
# The default producer of loads asks for the first piece; the queue alone needs only the end.
WATCHING = f"{HEAD}plugins: [{{type: active-request-scorer}}]\n"
QUIET = f"{HEAD}plugins: [{{type: queue-scorer}}]\n"
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
COUNTS = {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}
TOKENS = [f'data: {{"choices":[{{"delta":{{"content":"{n}"}}}}]}}\n\n'.encode() for n in range(4)]
DONE = b"data: [DONE]\n\n"
Step = bytes | asyncio.Event
KINDS = {
    "chat": ("/v1/chat/completions", CHAT, {"usage": COUNTS}),
    "completions": ("/v1/completions", {"model": "m", "prompt": "hi"}, {"usage": COUNTS}),
    "messages": (
        "/v1/messages",
        {**CHAT, "max_tokens": 9},
        {"type": "message_delta", "usage": {"input_tokens": 7, "output_tokens": 5}},
    ),
    "responses": (
        "/v1/responses",
        {"model": "m", "input": "hi"},
        {
            "type": "response.completed",
            "response": {"usage": {"input_tokens": 7, "output_tokens": 5, "total_tokens": 12}},
        },
    ),
}


@dataclass
class ScriptedPod(Pod):
    """It answers each POST with `head` and then the steps: bytes, or an event to wait for."""

    head: bytes = b""
    steps: Sequence[Step] = ()
    sent: int = 0
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    def streams(self, *steps: Step) -> None:
        self.head = (
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        self.steps = [*map(chunked, steps), b"0\r\n\r\n"]

    def says(self, body: bytes, status: str = "200 OK", kind: str = "application/json") -> None:
        self.head = (
            f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
        ).encode()
        self.steps = [body]

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                if head.startswith(b"GET"):
                    text = (self.page or "").encode()
                    size = f"HTTP/1.1 200 OK\r\ncontent-length: {len(text)}\r\n\r\n"
                    writer.write(size.encode() + text)
                    continue
                lowered = head.lower()
                if b"content-length:" in lowered:
                    length = int(lowered.partition(b"content-length:")[2].partition(b"\r\n")[0])
                    await reader.readexactly(length)
                writer.write(self.head)
                for step in self.steps:
                    if isinstance(step, asyncio.Event):
                        await step.wait()
                    else:
                        writer.write(step)
                        await writer.drain()
                        self.sent += 1
        writer.close()


def chunked(step: Step) -> Step:
    return step if isinstance(step, asyncio.Event) else b"%x\r\n%b\r\n" % (len(step), step)


@dataclass
class Scene:
    picker: WholePicker
    pod: ScriptedPod
    port: int
    envoy: EnvoyProcess

    async def post(
        self, path: str = "/v1/chat/completions", body: Any = CHAT, version: str = "1.1"
    ) -> bytes:
        reader, writer = await self.open(path, body, version)
        answer = await reader.read()
        writer.close()
        return answer

    async def open(
        self, path: str = "/v1/chat/completions", body: Any = CHAT, version: str = "1.1"
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await opened(self.port, path, body, version)

    async def outcome(self) -> dict[str, Any]:
        """Return the newest request in the ring, once it is over."""

        async def newest() -> dict[str, Any]:
            rows = json.loads((await self.picker.get("/decisions"))[1])["decisions"]
            return rows[0] if rows else {}

        over = lambda row: row and row["outcome"] not in ("waiting", "under-way")  # noqa: E731
        return await until(newest, over, what="the request is over")

    async def tokens(self) -> tuple[float | None, float | None]:
        await self.outcome()
        return (
            await self.picker.series("llm_d_epp_request_input_tokens_sum"),
            await self.picker.series("llm_d_epp_request_output_tokens_sum"),
        )

    async def reports(self, result: str) -> float:
        name = "pointsman_extproc_response_reports_total"
        return await self.picker.series(name, result=result) or 0.0


async def opened(
    port: int, path: str, body: Any, version: str = "1.1"
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection(LOCAL, port)
    writer.write(
        f"POST {path} HTTP/{version}\r\nhost: x\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n".encode()
        + data
    )
    return reader, writer


def bootstrap(
    mode: ResponseBodies, grpc: int, health: int, pod: Pod, **changes: Any
) -> BootstrapConfig:
    given = {"buffer_request_body": True, "message_timeout_seconds": 60.0}
    return BootstrapConfig(
        listen=SocketAddress(LOCAL, free_port()),
        admin=SocketAddress(LOCAL, free_port()),
        picker=SocketAddress(LOCAL, grpc),
        picker_health=SocketAddress(LOCAL, health),
        endpoints=(SocketAddress(pod.address, pod.port),),
        response_bodies=mode,
        **given | changes,
    )


@contextlib.asynccontextmanager
async def proxied(
    folder: Path, config: BootstrapConfig, document: str = ""
) -> AsyncIterator[EnvoyProcess]:
    envoy = EnvoyProcess(folder, config.admin.port)  # type: ignore[union-attr]
    try:
        await envoy.start(document or to_yaml(build(config)))
        await envoy.until_ready()
        await envoy.until_healthy("picker", 1)
        await envoy.until_healthy("pool", 1)
        yield envoy
    finally:
        await envoy.stop()


@contextlib.asynccontextmanager
async def scene(
    folder: Path, mode: ResponseBodies = USAGE, config: str = QUIET, **changes: Any
) -> AsyncIterator[Scene]:
    pod = ScriptedPod("pod", LOCAL, page(0, 0.1))
    async with whole_picker(folder, [pod], config, response_bodies=mode) as picker:
        made = bootstrap(mode, picker.ports.grpc, picker.ports.health, pod, **changes)
        async with proxied(folder, made) as envoy:
            yield Scene(picker, pod, made.listen.port, envoy)


@pytest.mark.parametrize("buffered", [True, False], ids=["buffered", "duplex"])
@pytest.mark.parametrize("mode", [USAGE, ALL], ids=lambda mode: mode.value)
async def test_usage_and_first_token_of_streams_are_known(
    tmp_path: Path, mode: ResponseBodies, buffered: bool
) -> None:
    async with scene(tmp_path, mode, buffer_request_body=buffered) as s:
        for number, (path, body, last) in enumerate(KINDS.values(), 1):
            end = b"data: " + json.dumps(last).encode() + b"\n\n"
            s.pod.streams(*TOKENS, end, DONE)
            answer = await s.post(path, {**body, "stream": True})
            assert end in answer
            assert answer.endswith(b"0\r\n\r\n")
            assert await s.tokens() == (7 * number, 5 * number)
            row = await s.outcome()
            assert row["outcome"] == "completed"
            assert row["ttft_seconds"] is not None
        count = "llm_d_epp_request_ttft_seconds_count"
        assert await s.picker.series(count, streaming="true") == len(KINDS)
        each = await s.picker.series("llm_d_epp_request_streaming_tpot_seconds_count")
        assert each == len(KINDS)
        assert await s.reports("taken") == (len(KINDS) if mode is USAGE else 0)
        assert await s.reports("unknown") == 0


@pytest.mark.parametrize("mode", [USAGE, ALL], ids=lambda mode: mode.value)
async def test_usage_of_whole_answers_is_known(tmp_path: Path, mode: ResponseBodies) -> None:
    """A long document, whose beginning Envoy does not send, has its usage at the end."""
    texts = ["hi", "höhö", "x" * (3 * MAX_DOCUMENT_BYTES)]
    async with scene(tmp_path, mode) as s:
        for number, text in enumerate(texts, 1):
            message = {"message": {"content": text}, "usage": None}
            document = {"choices": [message], "usage": COUNTS, "prompt_logprobs": None}
            s.pod.says(json.dumps(document, ensure_ascii=False).encode())
            url = f"http://{LOCAL}:{s.port}/v1/chat/completions"
            async with s.picker.http.post(url, json=CHAT) as answer:
                assert await answer.json() == document
            assert await s.tokens() == (7 * number, 5 * number)
        name = "llm_d_epp_response_size_bytes_sum"
        assert await s.picker.series(name) > 3 * MAX_DOCUMENT_BYTES  # type: ignore[operator]


async def test_without_bodies_neither_is_known(tmp_path: Path) -> None:
    async with scene(tmp_path, OFF) as s:
        s.pod.streams(*TOKENS, b"data: " + json.dumps({"usage": COUNTS}).encode() + b"\n\n", DONE)
        await s.post(body={**CHAT, "stream": True})
        assert await s.tokens() == (None, None)
        assert (await s.outcome())["ttft_seconds"] is None


async def test_the_tokens_of_the_beginning_and_of_the_end_add_up(tmp_path: Path) -> None:
    """Anthropic's first event has the tokens of the prompt, and its last those of the answer."""
    start = {"type": "message_start", "message": {"usage": {"input_tokens": 7}}}
    end = {"type": "message_delta", "usage": {"output_tokens": 5}}
    events = [b"data: " + json.dumps(one).encode() + b"\n\n" for one in (start, end)]
    async with scene(tmp_path) as s:
        gates = [asyncio.Event() for _ in TOKENS]
        steps = [step for pair in zip(TOKENS, gates, strict=True) for step in pair]
        s.pod.streams(events[0], *steps, events[1], b'data: {"type": "message_stop"}\n\n')
        reader, writer = await s.open("/v1/messages", {**CHAT, "max_tokens": 9, "stream": True})
        for token, gate in zip(TOKENS, gates, strict=True):
            await reader.readuntil(token)
            gate.set()
        await reader.read()
        writer.close()
        assert await s.tokens() == (7, 5)


async def test_the_first_piece_is_reported_when_it_comes(tmp_path: Path) -> None:
    """It returns the load of the prompt while the answer still streams."""
    gates = asyncio.Event(), asyncio.Event()
    async with scene(tmp_path, config=WATCHING) as s:
        s.pod.streams(gates[0], TOKENS[0], gates[1], DONE)
        reader, writer = await s.open(body={**CHAT, "stream": True})
        await reader.readuntil(b"\r\n\r\n")
        assert await s.reports("taken") == 0
        gates[0].set()
        await until(lambda: s.reports("taken"), lambda taken: taken == 1, what="the first piece")
        gates[1].set()
        await reader.read()
        writer.close()
        await s.outcome()
        await until(lambda: s.reports("taken"), lambda taken: taken == 2, what="the end")


async def test_headers_that_come_with_the_first_piece_make_its_report_needless(
    tmp_path: Path,
) -> None:
    async with scene(tmp_path, config=WATCHING) as s:
        for taken in (2, 3, 4):  # the first answer is not known to be of that kind
            s.pod.streams(*TOKENS, DONE)
            s.pod.head += s.pod.steps.pop(0)  # in one write
            await s.post(body={**CHAT, "stream": True})
            await until(lambda: s.reports("taken"), lambda n, of=taken: n >= of, what="the reports")
            await s.outcome()
            assert await s.reports("taken") == taken


async def test_an_answer_in_one_piece_needs_no_report_of_a_first_one(tmp_path: Path) -> None:
    async with scene(tmp_path, config=WATCHING) as s:
        s.pod.says(json.dumps({"usage": COUNTS}).encode())
        await s.post()
        await s.outcome()
        assert await s.reports("taken") == 1


@pytest.mark.parametrize("status", ["404 Not Found", "503 Service Unavailable"])
async def test_errors_of_a_worker_are_reported_as_answers(tmp_path: Path, status: str) -> None:
    async with scene(tmp_path, num_retries=0) as s:
        s.pod.says(b'{"error": {"message": "no"}}', status)
        assert b'"no"' in await s.post()
        row = await s.outcome()
        assert (row["outcome"], row["status"]) == ("completed", int(status[:3]))
        assert await s.tokens() == (None, None)


async def test_a_response_without_a_body_has_no_first_token(tmp_path: Path) -> None:
    async with scene(tmp_path) as s:
        s.pod.says(b"")
        await s.post()
        row = await s.outcome()
        assert (row["outcome"], row["ttft_seconds"]) == ("completed", None)


async def test_http_1_0_and_other_kinds_of_bodies_pass_whole(tmp_path: Path) -> None:
    audio = bytes(range(256)) * 1000
    async with scene(tmp_path) as s:
        s.pod.says(audio, kind="audio/wav")
        assert (await s.post("/v1/audio/speech", version="1.0")).endswith(audio)
        assert (await s.outcome())["outcome"] == "completed"


async def test_a_client_that_leaves_within_an_answer_is_seen(tmp_path: Path) -> None:
    never = asyncio.Event()
    async with scene(tmp_path) as s:
        s.pod.streams(TOKENS[0], never)
        reader, writer = await s.open(body={**CHAT, "stream": True})
        await reader.readuntil(TOKENS[0])
        writer.close()
        assert (await s.outcome())["outcome"] == "client-gone"
        never.set()


async def test_an_envoy_without_the_filter_reports_nothing(tmp_path: Path) -> None:
    pod = ScriptedPod("pod", LOCAL, page(0, 0.1))
    async with whole_picker(tmp_path, [pod], QUIET, response_bodies=USAGE) as picker:
        made = bootstrap(OFF, picker.ports.grpc, picker.ports.health, pod)
        async with proxied(tmp_path, made) as envoy:
            s = Scene(picker, pod, made.listen.port, envoy)
            pod.says(b'{"usage": {"prompt_tokens": 7}}')
            await s.post()
            assert (await s.outcome())["outcome"] == "completed"
            assert await s.tokens() == (None, None)


async def test_a_picker_that_dies_within_an_answer_costs_no_byte(tmp_path: Path) -> None:
    gate = asyncio.Event()
    pod = ScriptedPod("pod", LOCAL, page(0, 0.1))
    server = await asyncio.start_server(pod.answer, LOCAL, 0)
    pod.port = server.sockets[0].getsockname()[1]
    write_endpoints(tmp_path / "endpoints.yaml", [pod], [])
    flags = "--endpoints-file=endpoints.yaml", "--response-bodies=usage"
    picker = PickerProcess(tmp_path, (), *flags)
    made = bootstrap(USAGE, picker.grpc, picker.health, pod)
    try:
        await picker.start()
        async with proxied(tmp_path, made) as envoy:
            pod.streams(TOKENS[0], gate, *TOKENS[1:], DONE)
            body = {**CHAT, "stream": True}
            reader, writer = await opened(made.listen.port, "/v1/chat/completions", body)
            begun = await reader.readuntil(TOKENS[0])
            await picker.kill()
            gate.set()
            rest = await reader.read()
            writer.close()
            assert begun.endswith(TOKENS[0])
            assert all(token in rest for token in (*TOKENS[1:], DONE))
            assert rest.endswith(b"0\r\n\r\n")
            # Without a picker, requests pass, and the access log has nothing to send.
            await envoy.until_healthy("picker", 0)
            reader, writer = await opened(made.listen.port, "/v1/chat/completions", body)
            assert (await reader.read()).endswith(b"0\r\n\r\n")
            writer.close()
            await picker.start()
            await envoy.until_healthy("picker", 1)
            reader, writer = await opened(made.listen.port, "/v1/chat/completions", body)
            assert (await reader.read()).endswith(b"0\r\n\r\n")
            writer.close()
    finally:
        await picker.kill()
        server.close()


async def test_a_drain_waits_for_no_access_log(tmp_path: Path) -> None:
    """Its stream would last as long as Envoy; the picker ends it with the last request."""
    gate = asyncio.Event()
    async with scene(tmp_path) as s:
        s.pod.streams(TOKENS[0], gate, DONE)
        reader, writer = await s.open(body={**CHAT, "stream": True})
        await reader.readuntil(TOKENS[0])
        s.picker.picker.stop()
        gate.set()
        await reader.read()
        writer.close()
        stats: Callable[[], Any] = lambda: s.envoy.stats("cluster.picker.upstream_cx_active$")  # noqa: E731
        name = "cluster.picker.upstream_cx_active"
        await until(stats, lambda found: found.get(name) == 0, what="no connection is left")
