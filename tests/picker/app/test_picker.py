"""The composed picker with real ports, metrics pages of workers and ext_proc streams."""

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from picker.app.picker import Options, StartError, compose
from picker.cli.options import MetricsTls, PoolFlags, TlsFlags
from picker.errors import ConfigError
from picker.rpc.options import TlsMaterial
from picker.rpc.self_signed import self_signed
from tests.support.picker.ext_proc_stream import GatewayStream, completion, destination_of
from tests.support.picker.metrics_pages import Pod, page, pods
from tests.support.picker.whole_picker import (
    LOOPBACK,
    WholePicker,
    started_picker,
    whole_picker,
    write_endpoints,
)
from tests.support.waiting import until


def options(folder: Path, **changes: Any) -> Options:
    path = folder / "endpoints.yaml"
    write_endpoints(path, [Pod("a", "127.0.0.1", None, port=1)])
    return Options(endpoints_file=path, **{**LOOPBACK, **changes})


@asynccontextmanager
async def opened(picker: WholePicker, prompt: str) -> AsyncIterator[str]:
    stream = GatewayStream(picker.channel)
    yield destination_of(await stream.ask(completion(prompt=prompt)))
    stream.call.cancel()


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[WholePicker]:
    async with whole_picker(tmp_path, pods(page(kv=0.1), page(kv=0.1)), None) as picker:
        yield picker


async def test_readiness_health_and_metrics_are_served(fleet: WholePicker) -> None:
    assert await fleet.get("/healthz") == (200, "ok\n")
    assert await fleet.get("/readyz") == (200, "ready\n")
    _, text = await fleet.get("/metrics")
    assert 'llm_d_epp_ready_endpoints{name="default"} 2.0' in text
    assert 'llm_d_epp_average_kv_cache_utilization{name="default"} 0.1' in text
    assert "_created" not in text
    async with grpc.aio.insecure_channel(f"127.0.0.1:{fleet.ports.health}") as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_the_health_of_a_silent_endpoint_is_unknown(tmp_path: Path) -> None:
    async with whole_picker(tmp_path, pods(page(), page()), None) as picker:
        names = [pod.name for pod in picker.pods]
        assert (await picker.endpoints())[names[1]]["health"]["state"] == "healthy"
        dead = Pod("dead", "127.0.0.1", None, port=1)
        picker.list_endpoints([picker.pods[0], dead])

        async def is_seen() -> bool:
            return "dead" in await picker.endpoints()

        await until(is_seen)
        found = await picker.endpoints()
        assert found["dead"]["health"]["state"] == "unknown"
        assert found[names[0]]["health"]["state"] == "healthy"
        text = "ready\n1 of 2 endpoints do not answer: default/dead\n"
        assert await picker.get("/readyz") == (200, text)


async def test_a_drain_ends_readiness_and_waits_for_streams(tmp_path: Path) -> None:
    async with (
        started_picker(options(tmp_path)) as (picker, ports),
        grpc.aio.insecure_channel(f"127.0.0.1:{ports.grpc}") as channel,
        aiohttp.ClientSession() as http,
    ):
        fleet = WholePicker(picker, ports, (), tmp_path, channel, http)
        stream = GatewayStream(channel)
        await stream.ask(completion(prompt="long answer"))
        picker.stop()
        await until(lambda: fleet.get("/readyz"), lambda found: found[0] == 503)
        async with opened(fleet, "sent before the proxy noticed"):
            pass
        assert (await fleet.get("/healthz"))[0] == 200
        await stream.rest()

        async def is_over() -> bool:
            try:
                await fleet.get("/healthz")
            except aiohttp.ClientConnectionError:
                return True
            return False

        await until(is_over)


@pytest.mark.parametrize("flag", ["metrics", "grpc", "grpc_health"])
async def test_a_busy_port_is_an_error_with_address_and_flag(tmp_path: Path, flag: str) -> None:
    async with started_picker(options(tmp_path)) as (_, ports):
        taken = {"metrics": ports.metrics, "grpc": ports.grpc, "grpc_health": ports.health}[flag]
        named = f"127.0.0.1:{taken} (--{flag.replace('_', '-')}-port)"
        with pytest.raises(StartError) as error:
            async with started_picker(options(tmp_path, **{f"{flag}_port": taken})):
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
async def test_unusable_options_are_refused(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError) as error:
        compose(options(tmp_path, **changes))
    assert reason in str(error.value)


async def test_endpoints_have_exactly_one_source(tmp_path: Path) -> None:
    text = (
        "{apiVersion: llm-d.ai/v1alpha1, kind: EndpointPickerConfig,"
        " plugins: [{type: file-discovery, parameters: {path: %s}}],"
        " dataLayer: {discovery: {pluginRef: file-discovery}}}"
    )
    with pytest.raises(ConfigError, match="no endpoints: give --endpoints-file"):
        compose(Options())
    given = options(tmp_path)
    with pytest.raises(ConfigError, match="not both"):
        compose(Options(endpoints_file=given.endpoints_file, config_text=text % "x"))
    picker = compose(Options(config_text=text % given.endpoints_file))
    picker.pools[""].load()
    assert len(picker.pools[""].datastore.snapshot().candidates) == 1


def with_weights(queue: int, more: str = "") -> str:
    return (
        "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n"
        "plugins:\n- {type: prefix-cache-scorer}\n- {type: queue-scorer}\n"
        "schedulingProfiles:\n- name: default\n  plugins:\n"
        "  - {pluginRef: prefix-cache-scorer, weight: 3}\n"
        f"  - {{pluginRef: queue-scorer, weight: {queue}}}\n{more}"
    )


async def test_a_valid_change_of_the_configuration_is_used_and_an_invalid_one_is_not(
    tmp_path: Path,
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(with_weights(1))
    async with whole_picker(tmp_path, pods(page(), page()), None, config_file=path) as fleet:

        async def reloads(result: str, count: int) -> None:
            async def are_counted() -> bool:
                name = "pointsman_config_reloads_total"
                return await fleet.series(name, result=result) == count

            await until(are_counted)

        async with opened(fleet, "a long prompt " * 200) as first:
            pass
        replacement = tmp_path / "new.yaml"
        replacement.write_text(with_weights(1) + "surprise: 1\n")
        replacement.rename(path)
        await reloads("failure", 1)
        assert await fleet.series("pointsman_config_last_reload_successful") == 0
        path.write_text(with_weights(1, "dataLayer: {sources: []}\n") + "# more\n")
        await reloads("success", 1)
        assert await fleet.series("pointsman_config_last_reload_successful") == 1
        for _ in range(5):
            async with opened(fleet, "a long prompt " * 200) as again:
                assert again == first
        path.write_text(with_weights(1, "dataLayer: {injectDefaults: false}\n"))
        await reloads("failure", 2)
        path.write_text(with_weights(2))
        await reloads("success", 2)


async def test_the_http_port_can_use_tls(tmp_path: Path) -> None:
    first, second = self_signed(), self_signed()
    show_pair(tmp_path, first)
    async with started_picker(options(tmp_path, metrics_tls=MetricsTls(tmp_path))) as (_, ports):

        async def is_trusted_by(made: TlsMaterial) -> bool:
            url = f"https://127.0.0.1:{ports.metrics}/readyz"
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
    (folder / "tls.crt").write_bytes(made.certificate_chain)
    (folder / "tls.key").write_bytes(made.private_key)


@pytest.mark.parametrize("counted", [True, False])
async def test_streams_are_counted_on_demand(tmp_path: Path, counted: bool) -> None:
    backends = pods(page())
    async with (
        whole_picker(tmp_path, backends, None, grpc_stream_metrics=counted) as fleet,
        opened(fleet, "hello"),
    ):
        name = "llm_d_epp_extproc_streams_inflight"
        assert await fleet.series(name) == float(counted)


def test_autoscaling_of_several_pools_needs_the_pool_of_each_group(tmp_path: Path) -> None:
    file, endpoints = tmp_path / "a.yaml", options(tmp_path).endpoints_file
    pools = tuple(PoolFlags(name, endpoints_file=endpoints) for name in "ab")
    given = options(tmp_path, pools=pools, autoscale=file)
    file.write_text("mode: thresholds\ngroups: [{pool: b}]")
    compose(given)
    file.write_text("mode: thresholds\ngroups: [{}]")
    with pytest.raises(ConfigError, match="'both' needs the key pool, one of a, b"):
        compose(given)
