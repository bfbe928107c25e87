"""The composed picker: real ports, real workers' metrics pages, ext_proc streams like Envoy's."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from aiohttp import web
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc as pb_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from picker.app.picker import Options, Picker, Ports, StartError, compose
from picker.cli.options import MetricsTls, TlsFlags
from picker.errors import ConfigError
from picker.rpc.options import TlsMaterial
from picker.rpc.self_signed import self_signed

PATIENCE_SECONDS = 120.0
PAGE = """\
vllm:num_requests_waiting 0
vllm:num_requests_running 0
vllm:kv_cache_usage_perc 0.1
vllm:cache_config_info{block_size="16",num_gpu_blocks="4096"} 1
process_start_time_seconds 1000
"""


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait for something that happens soon."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            if await condition():
                return
            await asyncio.sleep(0.01)


@asynccontextmanager
async def metrics_page() -> AsyncIterator[int]:
    """A worker of which only the metrics matter; yields its port."""

    async def answer(_: web.Request) -> web.Response:
        return web.Response(text=PAGE)

    application = web.Application()
    application.router.add_get("/metrics", answer)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield runner.addresses[0][1]
    await runner.cleanup()


@dataclass
class Running:
    """A picker that serves, and the ways to reach it."""

    picker: Picker
    ports: Ports
    task: asyncio.Task[None]
    channel: grpc.aio.Channel
    http: aiohttp.ClientSession

    async def get(self, path: str) -> tuple[int, str]:
        async with self.http.get(f"http://127.0.0.1:{self.ports.metrics}{path}") as response:
            return response.status, await response.text()

    async def endpoints(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads((await self.get("/endpoints"))[1])["endpoints"]
        return found

    async def all_scraped(self) -> bool:
        return all(row["metrics"] for row in await self.endpoints())

    async def route(self, prompt: str) -> tuple[Any, str]:
        """Send a chat request; returns its open stream and the destination header."""
        stream = pb_grpc.ExternalProcessorStub(self.channel).Process()
        headers = pb.HttpHeaders()
        for key, value in ((":path", b"/v1/chat/completions"), (":method", b"POST")):
            headers.headers.headers.add(key=key, raw_value=value)
        await stream.write(pb.ProcessingRequest(request_headers=headers))
        message = {"role": "user", "content": prompt}
        body = json.dumps({"model": "m", "messages": [message]}).encode()
        await stream.write(
            pb.ProcessingRequest(request_body=pb.HttpBody(body=body, end_of_stream=True))
        )
        reply = await stream.read()
        mutation = reply.request_headers.response.header_mutation.set_headers
        wanted = "x-gateway-destination-endpoint"
        values = [o.header.raw_value for o in mutation if o.header.key == wanted]
        assert len(values) == 1, reply
        return stream, values[0].decode()


def options(folder: Path, *workers: int, **changes: Any) -> Options:
    """Loopback, free ports, `workers` by their ports."""
    path = folder / "endpoints.yaml"
    rows = [{"name": f"w{i}", "address": "127.0.0.1", "port": p} for i, p in enumerate(workers)]
    path.write_text(json.dumps({"endpoints": rows}))
    chosen = {"grpc_port": 0, "grpc_health_port": 0, "metrics_port": 0} | changes
    return Options(endpoints_file=path, **{"bind_address": "127.0.0.1", **chosen})


@asynccontextmanager
async def running(chosen: Options) -> AsyncIterator[Running]:
    """Serves until the end of the block, then stops without waiting for anybody."""
    picker = compose(chosen)
    started: asyncio.Future[Ports] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(picker.run(started.set_result))
    await asyncio.wait([started, task], return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        await task
    ports = started.result()
    async with (
        grpc.aio.insecure_channel(f"127.0.0.1:{ports.grpc}") as channel,
        aiohttp.ClientSession() as http,
    ):
        yield Running(picker, ports, task, channel, http)
    picker.stop()
    picker.stop()
    await asyncio.wait_for(task, PATIENCE_SECONDS)


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Running]:
    """A picker in front of two workers whose metrics are known."""
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(metrics_page()) for _ in range(2)]
        running_ = await stack.enter_async_context(running(options(tmp_path, *workers)))
        await until(running_.all_scraped)
        yield running_


async def test_a_prompt_goes_where_its_prefix_is(fleet: Running) -> None:
    """The same long prompt returns to the same worker each time."""
    destinations: list[str] = []
    for turn in range(4):
        stream, destination = await fleet.route("tell me a story " * 100 + str(turn))
        destinations.append(destination)
        stream.cancel()

        async def idle() -> bool:
            return not any(row["inflight_requests"] for row in await fleet.endpoints())

        await until(idle)
    assert len(set(destinations)) == 1
    _, page = await fleet.get("/metrics")
    assert "llm_d_epp_prefix_indexer_size{" in page
    assert 'llm_d_epp_request_total{model_name="m"' in page


async def test_a_burst_spreads_before_any_scrape_sees_it(fleet: Running) -> None:
    """Workers report no load at all, yet own counts keep the balance."""
    routed = [await fleet.route(f"{n} question") for n in range(20)]
    counts = Counter(destination for _, destination in routed)
    assert sorted(counts.values()) == [10, 10]
    assert sorted(row["inflight_requests"] for row in await fleet.endpoints()) == [10, 10]
    for stream, _ in routed:
        stream.cancel()


async def test_readiness_health_and_metrics_are_served(fleet: Running) -> None:
    """On the HTTP port and on the gRPC health port."""
    assert await fleet.get("/healthz") == (200, "ok\n")
    assert await fleet.get("/readyz") == (200, "ready\n")
    _, page = await fleet.get("/metrics")
    assert 'llm_d_epp_ready_endpoints{name="default"} 2.0' in page
    assert 'llm_d_epp_average_kv_cache_utilization{name="default"} 0.1' in page
    assert "_created" not in page
    async with grpc.aio.insecure_channel(f"127.0.0.1:{fleet.ports.health}") as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_drain_refuses_readiness_and_waits_for_streams(tmp_path: Path) -> None:
    """A request under way ends in peace; then the picker does."""
    async with (
        metrics_page() as worker,
        running(options(tmp_path, worker)) as fleet,
    ):
        stream, _ = await fleet.route("long answer")
        fleet.picker.stop()

        async def not_ready() -> bool:
            return (await fleet.get("/readyz"))[0] == 503

        await until(not_ready)
        another, _ = await fleet.route("sent before the proxy noticed")
        another.cancel()
        assert not fleet.task.done()
        await stream.done_writing()
        await asyncio.wait_for(fleet.task, PATIENCE_SECONDS)


async def test_an_empty_pool_is_ready_and_refuses_requests(tmp_path: Path) -> None:
    """503 with the reason, as an immediate response."""
    async with running(options(tmp_path)) as fleet:
        assert (await fleet.get("/readyz"))[0] == 200
        stream = pb_grpc.ExternalProcessorStub(fleet.channel).Process()
        headers = pb.HttpHeaders(end_of_stream=True)
        headers.headers.headers.add(key=":path", raw_value=b"/v1/models")
        await stream.write(pb.ProcessingRequest(request_headers=headers))
        reply = await stream.read()
    assert reply.immediate_response.status.code == 503


@pytest.mark.parametrize("flag", ["metrics", "grpc", "grpc_health"])
async def test_a_busy_port_is_said_in_one_sentence(tmp_path: Path, flag: str) -> None:
    """Which address, which flag, and why; nothing is left open."""
    async with running(options(tmp_path)) as first:
        taken = {
            "metrics": first.ports.metrics,
            "grpc": first.ports.grpc,
            "grpc_health": first.ports.health,
        }[flag]
        named = f"127.0.0.1:{taken} (--{flag.replace('_', '-')}-port)"
        with pytest.raises(StartError) as error:
            async with running(options(tmp_path, **{f"{flag}_port": taken})):
                pass
        assert named in str(error.value)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"config_text": "kind: x"}, "--config-text:1:1: the key 'apiVersion' is missing"),
        ({"config_text": "kind: x"}, "--config-text:1:1: kind: 'x' is unknown"),
        ({"config_file": Path("/nowhere/c.yaml")}, "--config-file: cannot read /nowhere/c.yaml"),
        ({"config_text": "", "config_file": Path("c")}, "exclude each other"),
        ({"tls": TlsFlags(Path("/nowhere"))}, "--cert-path: cannot read /nowhere/tls.key"),
        ({"tls": TlsFlags(min_version="SSLv3")}, "'SSLv3' is no TLS version"),
        ({"metrics_tls": MetricsTls(Path("/nowhere"))}, "--metrics-cert-dir: cannot read /nowhere"),
    ],
)
async def test_options_that_cannot_work_are_refused(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    """Before any port opens."""
    with pytest.raises(ConfigError) as error:
        compose(options(tmp_path, **changes))
    assert reason in str(error.value)


async def test_endpoints_have_exactly_one_source(tmp_path: Path) -> None:
    """A flag or the configuration; neither or both is an error."""
    text = (
        "{apiVersion: llm-d.ai/v1alpha1, kind: EndpointPickerConfig,"
        " plugins: [{type: file-discovery, parameters: {path: %s}}],"
        " dataLayer: {discovery: {pluginRef: file-discovery}}}"
    )
    with pytest.raises(ConfigError, match="no endpoints: give --endpoints-file"):
        compose(Options())
    given = options(tmp_path, 8000)
    with pytest.raises(ConfigError, match="not both"):
        compose(Options(endpoints_file=given.endpoints_file, config_text=text % "x"))
    configured = Options(
        config_text=text % given.endpoints_file,
        bind_address="127.0.0.1",
        grpc_port=0,
        grpc_health_port=0,
        metrics_port=0,
    )
    async with running(configured) as fleet:
        assert len(await fleet.endpoints()) == 1


def with_weights(queue: int, more: str = "") -> str:
    """A configuration whose one profile weighs queues."""
    return (
        "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n"
        "plugins:\n- {type: prefix-cache-scorer}\n- {type: queue-scorer}\n"
        "schedulingProfiles:\n- name: default\n  plugins:\n"
        "  - {pluginRef: prefix-cache-scorer, weight: 3}\n"
        f"  - {{pluginRef: queue-scorer, weight: {queue}}}\n{more}"
    )


async def test_a_changed_configuration_is_used_and_a_bad_one_is_not(tmp_path: Path) -> None:
    """The prefix index survives, as its entry has not changed; metrics tell how it went."""
    path = tmp_path / "config.yaml"
    path.write_text(with_weights(1))

    async def page_has(fleet: Running, line: str) -> bool:
        return line in (await fleet.get("/metrics"))[1]

    async with metrics_page() as one, metrics_page() as two:
        chosen = options(tmp_path, one, two, config_file=path)
        async with running(chosen) as fleet:
            await until(fleet.all_scraped)
            stream, first = await fleet.route("a long prompt " * 200)
            stream.cancel()
            replacement = tmp_path / "new.yaml"
            replacement.write_text(with_weights(1) + "surprise: 1\n")
            replacement.rename(path)
            await until(lambda: page_has(fleet, 'config_reloads_total{result="failure"} 1'))
            assert await page_has(fleet, "pointsman_config_last_reload_successful 0")
            path.write_text(with_weights(1, "dataLayer: {sources: []}\n") + "# more\n")
            await until(lambda: page_has(fleet, 'config_reloads_total{result="success"} 1'))
            assert await page_has(fleet, "pointsman_config_last_reload_successful 1")
            for _ in range(5):
                stream, again = await fleet.route("a long prompt " * 200)
                stream.cancel()
                assert again == first
            path.write_text(with_weights(1, "dataLayer: {injectDefaults: false}\n"))
            await until(lambda: page_has(fleet, 'config_reloads_total{result="failure"} 2'))
            path.write_text(with_weights(2))
            await until(lambda: page_has(fleet, 'config_reloads_total{result="success"} 2'))


async def test_the_http_port_can_speak_tls(tmp_path: Path) -> None:
    """With a certificate of its own, and with the next one as soon as that is there."""
    first, second = self_signed(), self_signed()
    show_pair(tmp_path, first)
    chosen = options(tmp_path, metrics_tls=MetricsTls(tmp_path))
    async with running(chosen) as fleet:

        async def is_trusted_by(made: TlsMaterial) -> bool:
            url = f"https://127.0.0.1:{fleet.ports.metrics}/readyz"
            trusting = ssl.create_default_context(cadata=made.certificate_chain.decode())
            connector = aiohttp.TCPConnector(ssl=trusting)
            try:
                async with aiohttp.ClientSession(connector=connector) as http, http.get(url) as one:
                    return one.status == 200
            except aiohttp.ClientSSLError:
                return False

        assert await is_trusted_by(first)
        assert not await is_trusted_by(second)
        show_pair(tmp_path, second)
        await until(lambda: is_trusted_by(second))
        assert not await is_trusted_by(first)


def show_pair(folder: Path, made: TlsMaterial) -> None:
    """A certificate and its key where a picker looks for them."""
    (folder / "tls.crt").write_bytes(made.certificate_chain)
    (folder / "tls.key").write_bytes(made.private_key)


async def test_ext_proc_can_listen_on_a_unix_socket(tmp_path: Path) -> None:
    """Next to Envoy in a pod; health stays on TCP, where the kubelet can reach it."""
    socket = tmp_path / "epp.sock"
    async with running(options(tmp_path, bind_address=f"unix://{socket}")) as fleet:
        assert fleet.ports.grpc == 0
        assert fleet.ports.health != 0
        async with grpc.aio.insecure_channel(f"unix:{socket}") as channel:
            stream = pb_grpc.ExternalProcessorStub(channel).Process()
            headers = pb.HttpHeaders(end_of_stream=True)
            headers.headers.headers.add(key=":path", raw_value=b"/v1/models")
            await stream.write(pb.ProcessingRequest(request_headers=headers))
            assert (await stream.read()).immediate_response.status.code == 503


@pytest.mark.parametrize("counted", [True, False])
async def test_streams_are_counted_where_that_was_asked_for(tmp_path: Path, counted: bool) -> None:
    """By the port that serves them."""
    async with running(options(tmp_path, 1, grpc_stream_metrics=counted)) as picker:
        stream, _ = await picker.route("hello")
        _, page = await picker.get("/metrics")
        assert f"llm_d_epp_extproc_streams_inflight {float(counted)}" in page
        stream.cancel()
