"""A picker of several pools reports each pool to replicas and proxies by itself."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
from envoy.service.discovery.v3 import discovery_pb2

from picker.cli.options import PoolFlags, XdsFlags
from picker.xds import wire
from tests.support.local_ports import free_ports
from tests.support.picker.ext_proc_stream import completion
from tests.support.picker.metrics_pages import Pod, page, pods, serving
from tests.support.picker.pools_scene import SeveralPools, file_of, pool_flags, pools_picker
from tests.support.picker.replicas_scene import CONFIG, LOOPBACK, peer_flags, until_connected
from tests.support.picker.whole_picker import WholePicker, write_endpoints
from tests.support.picker.xds_call import assignments
from tests.support.waiting import until

PROMPT = "the same beginning " * 100
DeltaRequest = discovery_pb2.DeltaDiscoveryRequest


@asynccontextmanager
async def several(
    folder: Path, pools: dict[str, list[Pod]], **changes: Any
) -> AsyncIterator[SeveralPools]:
    folder.mkdir()  # noqa: ASYNC240 (it takes no time)
    flags: list[PoolFlags] = []
    for key, some in pools.items():
        write_endpoints(file_of(folder, key), some)
        flags.append(pool_flags(key, endpoints_file=file_of(folder, key)))
    given = {"pools": tuple(flags), "config_text": CONFIG, **changes}
    async with pools_picker(folder, given, pools) as scene:
        for one in scene.pools.values():
            await until(one.has_read_pages)
        yield scene


async def learned(picker: WholePicker) -> float:
    """Return the number of prompts reported by other replicas."""
    name = "pointsman_peer_entries_total"
    return await picker.series(name, result="placement") or 0.0


async def test_replicas_share_the_pools_that_both_have(tmp_path: Path) -> None:
    some, ports = pods(*[page()] * 4), free_ports(2)
    async with AsyncExitStack() as stack:
        for pod in some:
            await stack.enter_async_context(serving(pod))
        first, second = [
            await stack.enter_async_context(
                several(tmp_path / keys, dict.fromkeys(keys, some), peers=peer_flags(port, ports))
            )
            for keys, port in zip(("ab", "bc"), ports, strict=True)
        ]
        for scene in (first, second):
            await until_connected(scene["b"])
        sent = {}
        for number in range(6):
            for key in "ab":
                await first[key].ask(completion(prompt=f"{key} {number} {PROMPT}"))
            body = completion(prompt=f"b {number} {PROMPT}")
            sent[number] = await first["b"].destination(body)
        await until(lambda: learned(second["b"]), lambda found: found >= 12)
        for number, place in sent.items():
            body = completion(prompt=f"b {number} {PROMPT}")
            assert await second["b"].destination(body) == place
        assert await learned(second["c"]) == 0
        assert await learned(first["a"]) == 0

        async def is_refused() -> bool:
            name = "pointsman_peer_calls_total"
            return bool(await first["a"].series(name, result="refused"))

        await until(is_refused)
        for lonely in (first["a"], second["c"]):
            assert not await lonely.series("pointsman_peers_connected")
            assert not await lonely.series("pointsman_peers_heard")


@asynccontextmanager
async def subscribed(scene: SeveralPools, *names: str, **had: str) -> AsyncIterator[Any]:
    """Open a client of the incremental variant that already has `had`."""
    async with grpc.aio.insecure_channel(f"{LOOPBACK}:{scene.ports.xds}") as channel:
        call = channel.stream_stream(
            wire.DELTA_ENDPOINTS,
            request_serializer=DeltaRequest.SerializeToString,
            response_deserializer=discovery_pb2.DeltaDiscoveryResponse.FromString,
        )()
        await call.write(
            DeltaRequest(resource_names_subscribe=names, initial_resource_versions=had)
        )
        yield call
        call.cancel()


async def assigned(call: Any) -> dict[str, list[str]]:
    """Return the clusters of the next response with their addresses, and acknowledge it."""
    response = await call.read()
    await call.write(DeltaRequest(response_nonce=response.nonce))
    assert list(response.removed_resources) == []
    return {name: sorted(found) for name, found in assignments(response).items()}


async def test_proxies_receive_each_pool_as_a_cluster(tmp_path: Path) -> None:
    one, two, three = pods(page(), page(), page())
    keys = {"llama": [one], "x/qwen": [two], "y/qwen": []}
    async with AsyncExitStack() as stack:
        for pod in (one, two, three):
            await stack.enter_async_context(serving(pod))
        scene = await stack.enter_async_context(
            several(tmp_path / "p", keys, xds=XdsFlags(0, cluster_name="for one pool"))
        )
        call = await stack.enter_async_context(subscribed(scene, *keys))
        found: dict[str, list[str]] = {}
        while len(found) < len(keys):
            found |= await assigned(call)
        assert found == {"llama": [one.host_port], "x/qwen": [two.host_port], "y/qwen": []}
        scene["y/qwen"].list_endpoints([three])
        assert await assigned(call) == {"y/qwen": [three.host_port]}
        scene["llama"].list_endpoints([])
        assert await assigned(call) == {"llama": []}
        name = "pointsman_xds_endpoints"
        counts = [await scene.common.series(name, inference_pool=key) for key in keys]
        assert counts == [0, 1, 1]
        assert await scene.common.series("pointsman_xds_clients") == 1
