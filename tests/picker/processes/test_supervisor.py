"""Several real processes serve one port as one picker."""

from __future__ import annotations

import asyncio
import os
import signal
import ssl
from itertools import count
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from metrics_pages import page, pods, serving
from processes_scene import Processes, processes
from whole_picker import until

from picker.app.listeners import StartError
from picker.cli.options import Options, TlsFlags
from picker.errors import ConfigError
from picker.processes.supervisor import Supervisor
from picker.rpc.options import Transport

CONNECTIONS = 24  # that none of them comes to one of two processes happens once in ten million


async def test_decisions_are_spread_over_the_processes_and_counted_together(two: Processes) -> None:
    """Each process takes some of the connections; the metrics are those of one picker."""
    async with two.connected(CONNECTIONS) as connections:
        for one in connections:
            await one.ask()
    counted = await two.counted()
    assert all(counted)
    assert await two.requests() == sum(counted) == CONNECTIONS
    assert await two.series("llm_d_epp_ready_endpoints") == 2
    assert await two.series("llm_d_epp_info") == 1
    assert await two.series("llm_d_epp_scheduler_e2e_duration_seconds_count") == CONNECTIONS
    await until(two.is_idle)


async def test_each_process_knows_what_the_others_have_under_way(two: Processes) -> None:
    """A request goes where fewer are, whichever process they came through."""
    async with two.connected(CONNECTIONS) as connections:
        first, second = await two.connected_to_each(connections)
        await until(two.is_idle)
        busy = await first.route("one thing")

        numbers = count()

        async def another() -> str:
            return await second.ask(f"{next(numbers)} other things")

        async def is_known() -> bool:  # and not drawn by chance
            return busy not in [await another() for _ in range(20)]

        await until(is_known)
        held = [pod.name for pod in two.pods if pod.host_port == busy]

        async def is_all() -> bool:
            rows = await two.endpoints()
            return [name for name, row in rows.items() if row["inflight_requests"]] == held

        await until(is_all)
        assert await two.series("llm_d_epp_inflight_requests") == 1
        await first.end()
        await until(two.is_idle)


async def test_a_killed_process_takes_its_own_connections_only(two: Processes) -> None:
    """The others serve on, it is replaced, what it counted stays, what it held is let go."""
    async with two.connected(CONNECTIONS) as connections:
        victim, survivor = await two.connected_to_each(connections)
        await victim.route()
        await survivor.route()
        routed = await two.requests()
        assert routed is not None
        pids = two.pids
        os.kill(pids[0], signal.SIGKILL)
        assert await victim.end() is grpc.StatusCode.UNAVAILABLE
        await survivor.ask()

        async def is_replaced() -> bool:
            return len(two.pids) == 2 and pids[0] not in two.pids

        await until(is_replaced)
        assert await survivor.end() is grpc.StatusCode.OK
        assert pids[1] in two.pids
        assert await two.requests() == routed + 1
        assert await two.series("pointsman_process_restarts_total") == 1
        await until(two.is_idle)
        async with two.connected(CONNECTIONS) as later:
            await two.connected_to_each(later)


async def test_endpoints_that_come_and_restart_are_known_to_all(two: Processes) -> None:
    """An added endpoint is used by each process."""
    (extra,) = pods(page())
    async with two.connected(CONNECTIONS) as connections, serving(extra):
        each = await two.connected_to_each(connections)
        two.list_endpoints([extra])

        async def is_alone() -> bool:
            return list(await two.endpoints()) == [extra.name]

        await until(is_alone)
        for connection in each:

            async def goes_there(connection=connection) -> bool:  # type: ignore[no-untyped-def]
                return await connection.ask() == extra.host_port

            await until(goes_there)


async def test_a_drain_waits_for_the_streams_of_all_processes(tmp_path: Path) -> None:
    """It is not ready, and every stream ends in peace."""
    async with (
        processes(tmp_path, pods(page(), page())) as two,
        two.connected(CONNECTIONS) as connections,
    ):
        each = await two.connected_to_each(connections)
        for connection in each:
            await connection.route()
        two.supervisor.stop()

        async def is_not_ready() -> bool:
            return (await two.get("/readyz"))[0] == 503

        await until(is_not_ready)
        assert len(two.pids) == 2
        for connection in each:
            assert await connection.end() is grpc.StatusCode.OK


async def test_readiness_is_told_by_the_process_that_watches(two: Processes) -> None:
    """On the health port and over HTTP."""
    assert await two.get("/readyz") == (200, "ready\n")
    assert await two.get("/healthz") == (200, "ok\n")
    async with grpc.aio.insecure_channel(f"127.0.0.1:{two.ports.health}") as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_changed_configuration_is_used_by_all_or_none(tmp_path: Path) -> None:
    """A bad one by nobody; a process that begins later begins with the good one."""
    path = tmp_path / "config.yaml"
    text = (
        "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n"
        "plugins: [{type: %s}, {type: max-score-picker}]\n"
        "schedulingProfiles: [{name: %s, plugins: [{pluginRef: %s}]}]\n"
    )
    path.write_text(text % ("queue-scorer", "p", "queue-scorer"))
    async with processes(tmp_path, pods(page(), page()), config_file=path) as two:

        async def reloads(result: str) -> float | None:
            return await two.series("pointsman_config_reloads_total", result=result)

        async def plugins() -> list[set[str]]:
            name = "llm_d_epp_plugin_duration_seconds"
            async with two.connected(CONNECTIONS) as connections:
                await two.connected_to_each(connections)
            told = [await one.tell() for one in two.supervisor._fleet.members]
            return [{row[0][1] for row in one.counted[name] if row[1][1]} for one in told if one]  # type: ignore[index]

        assert all("queue-scorer" in one for one in await plugins())
        path.write_text("kind: nonsense")
        await until(lambda: _is(reloads("failure"), 1))
        path.write_text(text % ("random-picker", "p", "random-picker"))
        await until(lambda: _is(reloads("success"), 1))
        assert [one.revision for one in two.supervisor._fleet.members] == [1, 1]
        assert all("random-picker" in one for one in await plugins())
        victim = two.pids[1]
        os.kill(victim, signal.SIGKILL)

        async def is_replaced() -> bool:
            return len(two.pids) == 2 and victim not in two.pids

        await until(is_replaced)
        assert [one.revision for one in two.supervisor._fleet.members] == [1, 1]
        assert all("random-picker" in one for one in await plugins())


async def _is(asked, value: float) -> bool:  # type: ignore[no-untyped-def]
    return bool(await asked == value)


async def test_a_unix_socket_is_shared_and_goes_with_the_picker(tmp_path: Path) -> None:
    """Also after one of the processes was replaced."""
    path = tmp_path / "picker.sock"
    async with processes(tmp_path, pods(page()), bind_address=f"unix://{path}") as two:
        async with two.connected(4) as connections:
            for one in connections:
                await one.ask()
        pids = two.pids
        os.kill(pids[0], signal.SIGTERM)

        async def is_replaced() -> bool:
            return len(two.pids) == 2 and pids[0] not in two.pids

        await until(is_replaced)
        assert path.exists()
        async with two.connected(4) as connections:
            for one in connections:
                await one.ask()
        assert await two.requests() == 8
    assert not path.exists()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"grpc_transport": Transport.GRPCIO}, "grpcio cannot share its port"),
        ({"config_text": "kind: x"}, "the key 'apiVersion' is missing"),
        (
            {
                "config_text": "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n"
                "plugins: [{type: precise-prefix-cache-producer, parameters: "
                "{kvEventsConfig: {zmqEndpoint: 'tcp://*:5557', discoverPods: false}}}]\n",
                "allow_experimental_plugins": True,
            },
            "engines cannot connect to the picker",
        ),
    ],
)
async def test_what_several_processes_cannot_do_is_refused(
    tmp_path: Path, changes: dict[str, object], reason: str
) -> None:
    """Before anything is started."""
    path = tmp_path / "e.yaml"
    path.write_text("endpoints: []")
    with pytest.raises(ConfigError) as error:
        Supervisor(Options(endpoints_file=path, processes=2, **changes))  # type: ignore[arg-type]
    assert reason in str(error.value)


async def test_a_port_that_another_picker_shares_is_busy(tmp_path: Path, two: Processes) -> None:
    """Two pickers at one port are a mistake, however many processes they have."""
    with pytest.raises(StartError, match="the port is already in use"):
        async with processes(tmp_path, (), grpc_port=two.ports.grpc):
            pass


async def test_processes_that_cannot_serve_say_why(tmp_path: Path) -> None:
    """And none is left."""
    path = tmp_path / "e.yaml"
    path.write_text("endpoints: []")
    with pytest.raises(StartError, match="--cert-path: cannot read"):
        async with processes(tmp_path, (), tls=TlsFlags(Path("/nowhere"))):
            pass


async def test_all_processes_show_one_certificate(tmp_path: Path) -> None:
    """Also when it was made on the spot."""
    async with processes(tmp_path, (), tls=TlsFlags()) as two:
        shown = {
            await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", two.ports.grpc))
            for _ in range(CONNECTIONS)
        }
    assert len(shown) == 1
