"""Two whole pickers of one pool that know each other, and free ports for them."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from picker.cli.options import PeerFlags
from picker.peers.discovery import PeerName
from tests.support.local_ports import free_ports
from tests.support.picker.metrics_pages import Pod, serving
from tests.support.picker.whole_picker import WholePicker, whole_picker, write_endpoints
from tests.support.waiting import until

LOOPBACK = "127.0.0.1"
CONFIG = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- {type: prefix-cache-scorer}
- {type: active-request-scorer}
- {type: session-affinity-scorer, parameters: {strategy: session_id}}
schedulingProfiles:
- name: default
  plugins:
  - {pluginRef: prefix-cache-scorer}
  - {pluginRef: active-request-scorer}
  - {pluginRef: session-affinity-scorer, weight: 10}
"""


def peer_flags(own: int, ports: Sequence[int], **changes: Any) -> PeerFlags:
    return PeerFlags(tuple(PeerName(LOOPBACK, port) for port in ports), own, **changes)


@asynccontextmanager
async def replica(
    folder: Path, pods: Sequence[Pod], flags: PeerFlags | None, **changes: Any
) -> AsyncIterator[WholePicker]:
    folder.mkdir(parents=True, exist_ok=True)  # noqa: ASYNC240 (it takes no time)
    path = folder / "pool.yaml"
    write_endpoints(path, pods)
    given = {"peers": flags, "endpoints_file": path, **changes}
    async with whole_picker(folder, (), CONFIG, **given) as running:
        running.pods = pods
        await until(running.has_read_pages)
        yield running


@asynccontextmanager
async def two_replicas(
    folder: Path, pods: Sequence[Pod], **changes: Any
) -> AsyncIterator[tuple[WholePicker, WholePicker]]:
    ports = free_ports(2)
    async with AsyncExitStack() as stack:
        for pod in pods:
            await stack.enter_async_context(serving(pod))
        first, second = [
            await stack.enter_async_context(
                replica(folder / f"replica-{port}", pods, peer_flags(port, ports, **changes))
            )
            for port in ports
        ]
        for one in (first, second):
            await until_connected(one)
        yield first, second


async def until_connected(picker: WholePicker, peers: int = 1) -> None:
    async def is_so() -> bool:
        outgoing = await picker.series("pointsman_peers_connected")
        incoming = await picker.series("pointsman_peers_heard")
        return outgoing == incoming == peers

    await until(is_so)
