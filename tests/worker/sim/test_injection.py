"""Faults around an application: errors on demand, stalls, fake metrics, broken pages, crashes."""

import asyncio
import json
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from worker.config import ApiConfig, EngineConfig, ServeConfig
from worker.engine.messages import Command, CommandReply, Configure
from worker.errors import EngineDeadError
from worker.sim.config import FaultConfig, SimConfig
from worker.sim.faults import FAILURES
from worker.sim.injection import FaultInjection, StalledReply
from worker.types import EngineStats

CHAT = "/v1/chat/completions"


@dataclass
class FakeEngine:
    stats: EngineStats = field(default_factory=lambda: EngineStats(num_running=3, num_waiting=1))
    answer: CommandReply | None = field(default_factory=lambda: CommandReply(0))
    commands: list[dict[str, Any]] = field(default_factory=list)
    delay_seconds: float = 0.0
    is_alive = True
    is_progressing = True
    num_waiting_reported = 1

    async def run(self, command: Command) -> CommandReply:
        assert isinstance(command, Configure)
        self.commands.append(command.settings)
        await asyncio.sleep(self.delay_seconds)
        if self.answer is None:
            raise EngineDeadError("gone")
        return self.answer


@dataclass
class Answer:
    status: int = 0
    headers: dict[bytes, bytes] = field(default_factory=dict)
    body: bytes = b""
    times: list[float] = field(default_factory=list)

    @property
    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.body)["error"]
        return found


async def stream_of_four(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for number in range(4):
        body = b"%d\n" % number
        await send({"type": "http.response.body", "body": body, "more_body": number < 3})
        await asyncio.sleep(1)


@dataclass
class Bench:
    faults: FaultInjection
    engine: FakeEngine
    deaths: list[int]
    app: Callable[[Any, Any, Any], Awaitable[None]]

    async def ask(
        self,
        path: str = CHAT,
        body: Any = None,
        method: str = "POST",
        partial: bool = False,
        leaves: bool = False,
        **headers: str,
    ) -> Answer:
        """A `partial` request never sends all of its body; a client that `leaves` disconnects."""
        answer = Answer()
        sent = b"" if body is None else json.dumps(body).encode()
        messages = [{"type": "http.request", "body": sent, "more_body": partial}]

        async def receive() -> Any:
            if messages:
                return messages.pop()
            if leaves:
                return {"type": "http.disconnect"}
            await asyncio.Event().wait()

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                answer.status = message["status"]
                answer.headers = dict(message["headers"])
            else:
                answer.body += message.get("body", b"")
                answer.times.append(asyncio.get_running_loop().time() - started)

        named = [(k.replace("_", "-").encode(), v.encode()) for k, v in headers.items()]
        if partial or sent:
            named.append((b"content-length", b"%d" % (len(sent) + partial)))
        scope = {"type": "http", "path": path, "method": method, "headers": named}
        started = asyncio.get_running_loop().time()
        await self.app(scope, receive, send)
        return answer

    async def configure(self, /, **settings: object) -> Answer:
        body = {name.replace("_", "-"): value for name, value in settings.items()}
        return await self.ask("/admin/config", body)

    async def shown(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((await self.ask("/admin/config", method="GET")).body)
        return found


def bench(kind: str = "sim", seed: int = 0, setup: FaultConfig | None = None, **api: Any) -> Bench:
    engine, deaths = FakeEngine(), []
    config = ServeConfig(
        "127.0.0.1",
        0,
        ApiConfig(("m",), max_model_len=100, vocab_size=100, **api),
        EngineConfig(kind, None, sim=SimConfig(seed=seed)),
        faults=setup or FaultConfig(),
    )
    clock = asyncio.get_running_loop().time
    faults = FaultInjection(config, engine, clock, lambda: deaths.append(1))
    return Bench(faults, engine, deaths, faults.around(stream_of_four))


async def configured(seed: int = 0, /, **settings: object) -> Bench:
    subject = bench(seed=seed)
    await subject.configure(**settings)
    return subject


pytestmark = pytest.mark.looptime


async def test_a_reply_is_unchanged_without_faults() -> None:
    answer = await bench().ask()
    assert (answer.status, answer.body) == (200, b"0\n1\n2\n3\n")
    assert answer.times == pytest.approx([0, 1, 2, 3])
    assert answer.headers == {}


@pytest.mark.parametrize("status", [400, 401, 404, 429, 500, 503, 599])
async def test_a_request_can_ask_for_an_error(status: int) -> None:
    answer = await bench().ask(x_return_error=str(status))
    assert answer.status == status
    assert answer.error["code"] == status


@pytest.mark.parametrize("asked", ["", "x", "200", "99", "600", "4e2", "+42", "0429"])
async def test_a_header_without_an_error_status_is_a_bad_request(asked: str) -> None:
    answer = await bench().ask(x_return_error=asked)
    assert (answer.status, answer.error["param"]) == (400, "X-Return-Error")


async def test_failures_follow_their_rate_and_repeat_with_the_seed() -> None:
    async def run(seed: int) -> list[int]:
        subject = await configured(seed, failure_injection_rate=20)
        return [(await subject.ask("/v1/completions")).status for _ in range(400)]

    first, again, other = await run(1), await run(1), await run(2)
    assert first == again != other
    assert 50 < sum(status != 200 for status in first) < 110
    assert set(first) == {200} | {failure.status for failure in FAILURES.values()}


async def test_a_failure_names_the_model_and_its_parameter() -> None:
    subject = await configured(failure_injection_rate=100, failure_types=["model_not_found"])
    answer = await subject.ask()
    assert answer.status == 404
    assert answer.error == {
        "message": "The model 'm-nonexistent' does not exist",
        "type": "NotFoundError",
        "param": "model",
        "code": 404,
    }
    assert (await subject.ask("/v1/models", method="GET")).status == 200


async def test_a_reply_stalls_before_its_start_or_within_its_stream() -> None:
    subject = await configured(stall_before="5s")
    assert (await subject.ask()).times == pytest.approx([5, 6, 7, 8])
    await subject.configure(stall_stream="2.5s", stall_after_events=2)
    assert (await subject.ask()).times == pytest.approx([5, 6, 8.5, 8.5])


async def test_only_some_requests_stall() -> None:
    subject = await configured(stall_before="9s", stall_rate=30)
    stalled = [(await subject.ask()).times[0] > 0 for _ in range(100)]
    assert 15 < sum(stalled) < 45


async def test_fake_metrics_replace_their_statistics() -> None:
    subject = bench()
    assert subject.faults.stats() == subject.engine.stats
    fakes = {"running-requests": "ramp:0:10:10s", "kv-cache-usage": "NaN"}
    await subject.configure(fake_metrics=fakes)
    await asyncio.sleep(4)
    stats = subject.faults.stats()
    assert (stats.num_running, stats.num_waiting) == (4, 1)
    assert math.isnan(stats.kv_cache_usage)
    await subject.configure(fake_metrics=None)
    assert subject.faults.stats() == subject.engine.stats


async def metrics_page(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"# HELP a b\na 1\nbbb 2\nccc 3\n"})


@pytest.mark.parametrize(
    ("page", "status", "size"),
    [
        ("ok", 200, 27),
        ("garbage", 200, 65536),
        ("empty", 200, 0),
        ("error", 500, 21),
        ("redirect", 302, 0),
        ("truncated", 200, 13),
        ("huge", 200, 200_000),
    ],
)
async def test_a_broken_metrics_page_replaces_the_real_one(
    page: str, status: int, size: int
) -> None:
    """Each page breaks in a way that a scraper must survive."""
    subject = bench()
    subject.app = subject.faults.around(metrics_page)
    there = "http://127.0.0.1:1/x"
    await subject.configure(metrics_page=page, metrics_bytes=200_000, metrics_redirect=there)
    answer = await subject.ask("/metrics", method="GET")
    assert (answer.status, len(answer.body)) == (status, size)
    assert answer.headers.get(b"location") == (there.encode() if page == "redirect" else None)
    assert not answer.body.endswith(b"\n") or page in ("ok", "huge")
    assert len((await subject.ask()).body) == 27
    assert len(asyncio.all_tasks()) == 1


async def test_a_client_disconnect_ends_a_huge_metrics_page() -> None:
    subject = await configured(metrics_page="huge", metrics_bytes=1 << 40)
    assert len((await subject.ask("/metrics", method="GET", leaves=True)).body) < 1 << 20


async def test_the_metrics_page_can_be_delayed() -> None:
    subject = await configured(metrics_delay="5s")
    assert (await subject.ask("/metrics", method="GET")).times == pytest.approx([5, 6, 7, 8])


async def test_a_worker_is_not_ready_during_its_startup_duration() -> None:
    subject = bench(setup=FaultConfig(startup_seconds=10.0))
    assert (await subject.ask("/health/ready", method="GET")).status == 503
    assert (await subject.ask("/health", method="GET")).status == 200
    await asyncio.sleep(10)
    assert (await subject.ask("/health/ready", method="GET")).status == 200


async def test_replies_name_their_pod() -> None:
    subject = bench(setup=FaultConfig(reply_headers=(("x-inference-pod", "p-0"),)))
    assert (await subject.ask()).headers == {b"x-inference-pod": b"p-0"}
    assert (await subject.ask(x_return_error="429")).headers[b"x-inference-pod"] == b"p-0"
    assert (await subject.ask("/v1/models", method="GET")).headers == {}


async def test_the_simulators_settings_reach_the_engine() -> None:
    subject = bench()
    answer = await subject.configure(inter_token_latency="30ms", slow=2)
    assert answer.status == 200
    assert subject.engine.commands == [
        {"sim": {"inter_token_latency_seconds": 0.03}, "slow_factor": 2.0}
    ]
    assert json.loads(answer.body) == await subject.shown()
    assert (await subject.shown())["inter-token-latency"] == "30ms"
    await subject.configure(inter_token_latency_std_dev="3ms", hang="1s")
    assert subject.engine.commands[1] == {
        "sim": {"inter_token_latency_std_seconds": 0.003},
        "hang_seconds": 1.0,
    }


@pytest.mark.parametrize(
    "settings",
    [
        {"failure_injection_rate": 50, "volume": 11},
        {"failure_injection_rate": 50, "slow": -1},
        {"failure_injection_rate": 50, "inter_token_latency_std_dev": "3ms"},
    ],
)
async def test_a_wrong_setting_changes_nothing(settings: dict[str, object]) -> None:
    subject = bench()
    before = await subject.shown()
    answer = await subject.configure(**settings)
    assert answer.status == 400
    assert answer.error["message"]
    assert await subject.shown() == before
    assert subject.engine.commands == []


async def test_a_refusal_of_the_engine_changes_nothing() -> None:
    subject = bench()
    before = await subject.shown()
    subject.engine.answer = CommandReply(0, False, "not today")
    answer = await subject.configure(slow=2, failure_injection_rate=1)
    assert (answer.status, answer.error["message"]) == (400, "not today")
    subject.engine.answer = None
    assert (await subject.configure(slow=2)).status == 503
    assert await subject.shown() == before


async def test_concurrent_changes_all_take_effect() -> None:
    """Changes are serialized even if the engine is slow, so that none reverts another."""
    subject = bench()
    subject.engine.delay_seconds = 5.0
    await asyncio.gather(
        subject.configure(slow=3),
        subject.configure(failure_injection_rate=25),
        subject.configure(inter_token_latency="30ms"),
        subject.configure(time_scale=2),
    )
    shown = await subject.shown()
    assert (shown["slow"], shown["failure-injection-rate"]) == (3.0, 25.0)
    assert (shown["inter-token-latency"], shown["time-scale"]) == ("30ms", 2.0)


async def test_a_new_engine_starts_with_the_settings_of_the_command_line() -> None:
    subject = bench()
    at_first = await subject.shown()
    await subject.configure(slow=3, inter_token_latency="30ms", stall_before="1s")
    subject.engine.stats = msgspec.structs.replace(subject.engine.stats, num_restarts=1)
    assert await subject.shown() == at_first | {"stall-before": "1s"}
    await subject.configure(slow=3)
    assert subject.engine.commands[-1] == {"slow_factor": 3.0}
    subject.engine.stats = msgspec.structs.replace(subject.engine.stats, num_restarts=2)
    await subject.configure(slow=3)
    assert subject.engine.commands[-1] == {"slow_factor": 3.0}
    assert len(subject.engine.commands) == 3
    assert (await subject.shown())["slow"] == 3.0


async def test_a_real_engine_takes_only_faults_of_the_http_process() -> None:
    subject = bench("torch")
    assert (await subject.configure(failure_injection_rate=100)).status == 200
    assert (await subject.configure(inter_token_latency="3ms")).status == 400
    assert (await subject.configure(hang="3s")).status == 400
    assert (await subject.configure(crash={"target": "engine"})).status == 400
    assert subject.engine.commands == []


async def test_a_worker_crashes_after_its_answer_or_at_the_nth_request() -> None:
    subject = bench()
    assert (await subject.configure(crash={"target": "worker"})).status == 200
    assert subject.deaths == []
    await asyncio.sleep(0.2)
    assert subject.deaths == [1]
    subject = await configured(crash={"target": "worker", "after-requests": 2})
    await subject.ask()
    assert subject.deaths == []
    await subject.ask()
    assert subject.deaths == [1]


async def test_an_engine_gets_the_count_of_its_crash() -> None:
    """An immediate crash leaves no answer, which is no error."""
    subject = await configured(crash={"target": "engine", "after-tokens": 100})
    counts = {"crash_after_requests": None, "crash_after_tokens": 100}
    assert subject.engine.commands == [counts]
    subject.engine.answer = None
    assert (await subject.configure(crash={"target": "engine"})).status == 200


async def test_the_api_keys_protect_the_configuration() -> None:
    subject = bench(api_keys=("secret",))
    assert (await subject.ask("/admin/config", {}, authorization="Bearer x")).status == 401
    assert (await subject.ask("/admin/config", {}, authorization="Bearer secret")).status == 200


async def test_the_configuration_takes_get_and_bounded_posts_only() -> None:
    subject = bench(body_timeout_seconds=3.0, max_body_bytes=1000)
    answer = await subject.ask("/admin/config", method="DELETE")
    assert (answer.status, answer.headers[b"allow"]) == (405, b"GET, POST")
    assert (await subject.ask("/admin/config", {"slow": "x" * 1000})).status == 413
    answer = await subject.ask("/admin/config", partial=True)
    assert (answer.status, answer.headers[b"connection"]) == (408, b"close")
    assert answer.times == pytest.approx([3])


class Client:
    """Records the parts of a reply with their times; disconnects before part `leaves_at`."""

    def __init__(self, leaves_at: int | None = None) -> None:
        self.heads: list[Any] = []
        self.parts: list[tuple[bytes, float]] = []
        self._leaves_at = leaves_at
        self._started = asyncio.get_running_loop().time()

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.heads.append(message)
        elif len(self.parts) == self._leaves_at:
            raise OSError("gone")
        else:
            elapsed = asyncio.get_running_loop().time() - self._started
            self.parts.append((message["body"], elapsed))


async def stream(client: Client, after_events: int | None, seconds: float) -> None:
    headers = ((b"x-a", b"b"),)
    async with StalledReply(client.send, headers, after_events, seconds) as reply:
        await reply.send({"type": "http.response.start", "status": 200, "headers": []})
        for number in range(4):
            body = {"body": b"%d" % number, "more_body": number < 3}
            await reply.send({"type": "http.response.body", **body})
            await asyncio.sleep(1)


@pytest.mark.parametrize(
    ("after_events", "seconds", "times"),
    [
        (None, 0.0, [0, 1, 2, 3]),
        (2, 2.5, [0, 1, 3.5, 3.5]),
        (1, 60.0, [0, 60, 60, 60]),
        (1, 1.5, [0, 1.5, 2, 3]),
    ],
)
async def test_a_stalled_stream_continues_after_its_stall(
    after_events: int | None, seconds: float, times: list[float]
) -> None:
    """A timer flushes the buffered parts in order, without waiting for the next part."""
    client = Client()
    await stream(client, after_events, seconds)
    assert [body for body, _ in client.parts] == [b"0", b"1", b"2", b"3"]
    assert [time for _, time in client.parts] == pytest.approx(times)
    assert client.heads[0]["headers"] == [(b"x-a", b"b")]


async def test_a_failed_writer_drops_the_buffered_parts() -> None:
    client = Client()

    async def fail() -> None:
        async with StalledReply(client.send, (), 1, 60.0) as reply:
            for _ in range(2):
                await reply.send({"type": "http.response.body", "body": b"", "more_body": True})
            raise OSError("writer")

    with pytest.raises(OSError, match="writer"):
        await fail()
    assert len(client.parts) == 1
    assert len(asyncio.all_tasks()) == 1


@pytest.mark.parametrize("seconds", [1.5, 60.0])
async def test_a_disconnect_during_a_stall_reaches_the_writer(seconds: float) -> None:
    client = Client(leaves_at=1)
    with pytest.raises(OSError, match="gone"):
        await stream(client, 1, seconds)
    assert len(client.parts) == 1
