"""Whole pickers that exchange reports over real sockets."""

import asyncio
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import grpc

from picker.peers.wire import REPORT_METHOD, Hello, PeerReport, Seed, encoded_report
from tests.support.certificates import certificates
from tests.support.local_ports import free_ports
from tests.support.picker.ext_proc_stream import completion, destination_of
from tests.support.picker.metrics_pages import page, pods, serving
from tests.support.picker.replicas_scene import (
    LOOPBACK,
    peer_flags,
    replica,
    two_replicas,
    until_connected,
)
from tests.support.picker.whole_picker import WholePicker
from tests.support.waiting import until

PROMPT = "the same beginning " * 100
PAGES = [page() for _ in range(4)]


async def ask(picker: WholePicker, prompt: str = PROMPT, **headers: str) -> str:
    async with picker.stream() as stream:
        messages = await stream.ask(completion(prompt=prompt), headers or None)
        return destination_of(messages)


async def until_counted(picker: WholePicker, result: str, count: float) -> None:
    await until(
        lambda: picker.series("pointsman_peer_entries_total", result=result),
        lambda found: (found or 0) >= count,
    )


async def test_a_prompt_goes_where_the_other_replica_has_sent_it(tmp_path: Path) -> None:
    """Each replica has drawn its own hash seed."""
    async with two_replicas(tmp_path, pods(*PAGES)) as (first, second):
        sent = {}
        for number in range(8):
            sent[number] = await ask(first, f"{number} " + PROMPT)
        await until_counted(second, "placement", 8)
        assert {n: await ask(second, f"{n} " + PROMPT) for n in range(8)} == sent


async def test_a_request_of_one_replica_is_load_for_the_other_until_it_ends(tmp_path: Path) -> None:
    async with two_replicas(tmp_path, pods(*PAGES)) as (first, second):
        async with first.stream() as stream:
            messages = await stream.ask(completion(prompt=PROMPT))
            busy = destination_of(messages)

            async def sees_it() -> bool:
                rows = await second.endpoints()
                return [row["inflight_requests"] for row in rows.values()].count(1) == 1

            await until(sees_it)
            assert await ask(second, "something else " * 100) != busy
        await until(second.is_idle)


async def test_a_replica_that_joins_learns_earlier_placements(tmp_path: Path) -> None:
    endpoints, ports = pods(*PAGES), free_ports(2)
    flags = [peer_flags(port, ports) for port in ports]
    async with AsyncExitStack() as stack:
        for pod in endpoints:
            await stack.enter_async_context(serving(pod))
        first = await stack.enter_async_context(replica(tmp_path / "a", endpoints, flags[0]))
        sent = [await ask(first, f"{number} " + PROMPT) for number in range(8)]
        for life in range(2):
            async with replica(tmp_path / f"b{life}", endpoints, flags[1]) as second:
                await until_counted(second, "placement", 8)
                assert [await ask(second, f"{n} " + PROMPT) for n in range(8)] == sent
                async with second.stream() as stream:
                    await stream.ask(completion())
                    await until(first.endpoints, is_loaded)
            await until(first.endpoints, lambda rows: not is_loaded(rows))  # it said goodbye
            await until_connected(first, 0)


def is_loaded(rows: dict[str, Any]) -> bool:
    return any(row["inflight_requests"] for row in rows.values())


async def test_invalid_calls_are_refused_without_effect_on_others(tmp_path: Path) -> None:
    async with two_replicas(tmp_path, pods(*PAGES)) as (first, second):
        assert first.ports.peers is not None
        reader, writer = await asyncio.open_connection(LOOPBACK, first.ports.peers)
        writer.write(b"GET / HTTP/1.1\r\n\r\n" + bytes(range(256)) * 64)
        await reader.read()
        writer.close()
        seed = Seed(1)
        strange = encoded_report(PeerReport(hello=Hello(bytes(16), "default", seed, version=9)))
        of_others = encoded_report(PeerReport(hello=Hello(bytes(16), "another pool", seed)))
        known = encoded_report(PeerReport(hello=Hello(bytes(16), "default", seed)))
        for messages, status in (
            ([b"\xff" * 50], grpc.StatusCode.INVALID_ARGUMENT),
            ([b""], grpc.StatusCode.INVALID_ARGUMENT),
            ([strange], grpc.StatusCode.FAILED_PRECONDITION),
            ([of_others], grpc.StatusCode.FAILED_PRECONDITION),
            ([known, b"\xff" * 50], grpc.StatusCode.INVALID_ARGUMENT),
        ):
            assert await status_after(first.ports.peers, messages) is status
        assert await first.series("pointsman_peer_messages_refused_total") == 5
        await ask(first)
        await until_counted(second, "placement", 1)


async def status_after(port: int, messages: list[bytes]) -> grpc.StatusCode:
    async with grpc.aio.insecure_channel(f"{LOOPBACK}:{port}") as channel:
        call = channel.stream_stream(REPORT_METHOD)()
        with suppress(grpc.aio.AioRpcError):
            for message in messages:
                await call.write(message)
            while await call.read() is not grpc.aio.EOF:
                pass
        return await call.code()


async def test_replicas_with_certificates_of_one_authority_connect(tmp_path: Path) -> None:
    folder = certificates(tmp_path / "own")
    async with two_replicas(
        tmp_path, pods(*PAGES), cert_path=folder, server_name="replicas.test"
    ) as (first, second):
        sent = await ask(first)
        await until_counted(second, "placement", 1)
        assert await ask(second) == sent
        assert first.ports.peers is not None
        assert await status_after(first.ports.peers, [b""]) is grpc.StatusCode.UNAVAILABLE
        stranger = certificates(tmp_path / "other", shown=folder / "ca.crt")
        ports = [free_ports(1)[0], first.ports.peers]
        flags = peer_flags(ports[0], ports, cert_path=stranger, server_name="replicas.test")
        async with replica(tmp_path / "stranger", first.pods, flags) as third:

            async def was_rejected() -> bool:
                ended = await third.series("pointsman_peer_calls_total", result="unreachable")
                return bool(ended)

            await until(was_rejected)
            assert await third.series("pointsman_peers_connected") == 0
            assert await first.series("pointsman_peers_heard") == 1
