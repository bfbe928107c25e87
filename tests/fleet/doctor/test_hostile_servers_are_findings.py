"""Servers that hang, never end or answer nonsense: each is one clear finding, in time."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from fleet.command_lines import parser_of
from fleet.doctor import web
from fleet.doctor.cluster_look import ClusterLook
from fleet.doctor.command import WRONG, diagnose, doctor_command
from fleet.doctor.diagnosis import Facts
from fleet.doctor.envoy_look import ask_envoy
from fleet.doctor.picker_look import ask_certificate, ask_picker, ask_worker
from fleet.doctor.web import NoPageError, PageClient
from picker.k8s.credentials import Access
from tests.support.kube.wired_client import client_of

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]
TLS = b"\x16"
given = parser_of("doctor").parse_args
DEEP = b'{"a":' * 50_000 + b"1" + b"}" * 50_000


def answers(status: int, kind: str, body: bytes, *head: str) -> Answer:
    lines = [f"HTTP/1.1 {status} It", f"Content-Type: {kind}", f"Content-Length: {len(body)}"]

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write("\r\n".join([*lines, *head, "Connection: close", "", ""]).encode() + body)
        await writer.drain()

    return answer


async def endless(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n")
    while True:
        writer.write(b"a" * 65536)
        await writer.drain()


async def trickling(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n")
    while True:
        writer.write(b"a")
        await writer.drain()
        await asyncio.sleep(0.02)


NONSENSE: dict[str, Answer] = {
    "html": answers(200, "text/html", b"<html>hello</html>"),
    "401": answers(401, "text/plain", b"who?"),
    "403": answers(403, "application/json", b'{"kind": "Status", "message": "no"}'),
    "500": answers(500, "text/html", b"<h1>oops"),
    "null": answers(200, "application/json", b"null"),
    "list": answers(200, "application/json", b"[]"),
    "mapping": answers(200, "application/json", b"{}"),
    "bytes": answers(200, "application/json", b"\xff\xfe\x00{"),
    "deep": answers(200, "application/json", DEEP),
    "no gzip": answers(200, "text/plain", b"it", "Content-Encoding: gzip"),
    "redirect": answers(302, "text/plain", b"", "Location: /it"),
    "no zone": answers(200, "text/plain", b"it", "Date: Mon, 01 Jan 2024 00:00:00 -0000"),
}


@contextlib.asynccontextmanager
async def serving(answer: Answer | None) -> AsyncIterator[str]:
    done = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            if answer is None:
                await done.wait()
            else:
                if await reader.readexactly(1) != TLS:
                    await reader.readuntil(b"\r\n\r\n")
                    await answer(writer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        done.set()
        server.close()


async def look_at(address: str) -> list[tuple[str, str]]:
    async with client_of(Access(f"http://{address}", None)) as client:
        cluster = await ClusterLook(client, "default", "it", None, lambda: 0.0).look()
    facts = Facts(
        picker=await ask_picker(address),
        envoys=(await ask_envoy(address),),
        certificates=(await ask_certificate(address),),
        cluster=cluster,
    )
    return [(one.check, one.seen) for one in diagnose(facts)]


@pytest.mark.parametrize("answer", NONSENSE.values(), ids=NONSENSE)
async def test_nonsense_is_one_finding_of_each(answer: Answer) -> None:
    async with serving(answer) as address:
        found = await look_at(address)
        await ask_worker(address)
    assert [check for check, _ in found] == [
        "picker-reachable",
        "tls-expiry",
        "envoy-reachable",
        "k8s-reachable",
    ]
    assert not any(seen.rstrip(")").endswith(("(", ": ")) for _, seen in found)


@pytest.mark.parametrize(
    ("answer", "seconds", "text"),
    [
        (None, 0.2, "no answer within 0.2 s"),
        (trickling, 0.2, "no answer within 0.2 s"),
        (endless, 60.0, "more than 1048576 bytes"),
    ],
    ids=["silent", "slow", "endless"],
)
async def test_a_page_has_to_arrive_in_time(
    answer: Answer | None, seconds: float, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web, "MAX_BYTES", 2**20)
    async with asyncio.timeout(120), serving(answer) as address:
        with pytest.raises(NoPageError, match=text):
            await PageClient(address, seconds).page("/")


async def test_an_api_server_has_a_limit_for_all_that_is_asked() -> None:
    """A server that hangs after some answers counts as one that does not answer."""

    class Hanging:
        async def has(self, _resource: object) -> bool:
            return True

        async def list(self, *_: object) -> dict[str, Any]:
            await asyncio.Event().wait()
            return {}

    api: Any = Hanging()
    async with asyncio.timeout(120):
        facts = await ClusterLook(api, "default", "it", None, lambda: 0.0, seconds=0.1).look()
    (found,) = diagnose(Facts(cluster=facts))
    assert found.check == "k8s-reachable"
    assert "did not answer all that was asked within 0.1 s" in found.seen


@pytest.mark.parametrize(
    "flags",
    [
        ("--picker", "http://["),
        ("--picker", "http://it:x"),
        ("--picker", "ftp://it"),
        ("--picker", "unix:///no/such"),
        ("--envoy-admin", "http://127.0.0.1:99999"),
        ("--envoy-admin", "unix://["),
        ("--certificate", "https://["),
        ("--certificate", "it:99999"),
        ("--picker", "https://["),
        ("--envoy-config", "/"),
        ("--envoy-config", "/dev/null"),
    ],
    ids=" ".join,
)
def test_invalid_addresses_are_findings(flags: tuple[str, str]) -> None:
    lines: list[str] = []
    assert doctor_command(given([*flags, "--json"]), {}, lines.append) == WRONG
    checks = {one["check"] for one in json.loads("\n".join(lines))["findings"]}
    assert checks <= {"picker-reachable", "envoy-reachable", "tls-expiry"}


def test_an_invalid_kubeconfig_is_a_finding(tmp_path: Path) -> None:
    for number, text in enumerate(("", "[]", "clusters: 5", "\x00", "{" * 1500)):
        path = tmp_path / str(number)
        path.write_text(text)
        lines: list[str] = []
        argv = ["--pool", "it", "--kubeconfig", str(path), "--json"]
        assert doctor_command(given(argv), {}, lines.append) == WRONG
        (found,) = json.loads("\n".join(lines))["findings"]
        assert found["check"] == "k8s-reachable"
