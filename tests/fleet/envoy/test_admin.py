"""Envoy's admin pages, read and decoded."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fleet.envoy import admin, probe
from fleet.envoy.settings import PipeAddress, SocketAddress

CLUSTERS = {
    "cluster_statuses": [
        {
            "name": "pool",
            "host_statuses": [
                {
                    "address": {"socket_address": {"address": "127.0.0.1", "port_value": port}},
                    "stats": [
                        {"type": "COUNTER", "value": "9", "name": "rq_total"},
                        {"type": "GAUGE", "value": str(port), "name": "rq_active"},
                        {"type": "GAUGE", "name": "cx_active"},
                    ],
                    "health_status": {"eds_health_status": "HEALTHY", **ailment},
                }
                for port, ailment in (
                    (1, {}),
                    (2, {"failed_active_health_check": True}),
                    (3, {"failed_outlier_check": True}),
                )
            ],
        },
        {
            "name": "picker",
            "host_statuses": [
                {"address": {"pipe": {"path": "/run/p.sock"}}, "health_status": {}, "stats": []}
            ],
        },
    ]
}


@contextlib.asynccontextmanager
async def answering(path: Path, status: int, document: object) -> AsyncIterator[PipeAddress]:
    """An admin port with one answer; the path of the request is in `path` + '.asked'."""
    body = json.dumps(document).encode()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = await reader.readuntil(b"\r\n\r\n")
        with path.with_suffix(".asked").open("ab") as file:
            file.write(asked.partition(b"\r\n")[0] + b"\n")
        head = f"HTTP/1.1 {status} X\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        writer.close()

    server = await asyncio.start_unix_server(answer, str(path))
    async with server:
        yield PipeAddress(str(path))


async def test_hosts_have_their_health_and_their_requests(tmp_path: Path) -> None:
    async with answering(tmp_path / "a", 200, CLUSTERS) as address:
        found = await admin.hosts(address, "pool")
        assert found == {
            SocketAddress("127.0.0.1", 1): admin.Host(True, 1),
            SocketAddress("127.0.0.1", 2): admin.Host(False, 2),
            SocketAddress("127.0.0.1", 3): admin.Host(False, 3),
        }
        known = await admin.hosts(address, "picker")
        assert known == {PipeAddress("/run/p.sock"): admin.Host(True, 0)}
        assert await admin.hosts(address, "no such cluster") == {}


async def test_statistics_are_asked_for_by_name(tmp_path: Path) -> None:
    page = {"stats": [{"name": "a.b", "value": 3}, {"histograms": {}}]}
    async with answering(tmp_path / "a", 200, page) as address:
        assert await admin.stats(address, ["a.b", "c"]) == {"a.b": 3}
    assert (tmp_path / "a.asked").read_text().startswith("GET /stats?format=json&filter=^(a.b|c)$")


@pytest.mark.parametrize(("status", "document"), [(503, {}), (200, {"other": 1}), (200, [])])
async def test_another_page_counts_as_no_reply(
    tmp_path: Path, status: int, document: object
) -> None:
    """An Envoy that starts or ends answers like this."""
    async with answering(tmp_path / "a", status, document) as address:
        with pytest.raises(probe.NoReplyError):
            await admin.hosts(address, "pool")
        with pytest.raises(probe.NoReplyError):
            await admin.stats(address, ["a"])


async def test_a_drain_fails_health_checks_and_closes_listeners(tmp_path: Path) -> None:
    async with answering(tmp_path / "a", 200, {}) as address:
        await admin.drain(address)
    asked = (tmp_path / "a.asked").read_text().splitlines()
    assert [line.split()[:2] for line in asked] == [
        ["POST", "/healthcheck/fail"],
        ["POST", "/drain_listeners"],
    ]
