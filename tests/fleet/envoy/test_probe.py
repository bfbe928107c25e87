"""Small HTTP requests to our own processes."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fleet.envoy.probe import NoReplyError, ProbeReply, request, until
from fleet.envoy.settings import PipeAddress, SocketAddress


class Server:
    def __init__(self) -> None:
        self.answers = [b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"]
        self.asked: list[bytes] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.asked.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(self.answers.pop(0) if len(self.answers) > 1 else self.answers[0])
        writer.close()


@pytest.fixture
async def server() -> AsyncIterator[tuple[Server, SocketAddress]]:
    canned = Server()
    listening = await asyncio.start_server(canned.serve, "127.0.0.1", 0)
    async with listening:
        yield canned, SocketAddress("127.0.0.1", listening.sockets[0].getsockname()[1])


async def test_an_answer_is_status_and_body(server) -> None:
    canned, address = server
    assert await request(address, "/x", "POST") == ProbeReply(200, b"ok")
    assert canned.asked[0].startswith(b"POST /x HTTP/1.1\r\n")
    canned.answers = [b"HTTP/1.1 503 No\r\ntransfer-encoding: chunked\r\n\r\n2\r\nno\r\n0\r\n\r\n"]
    assert await request(address, "/x") == ProbeReply(503, b"no")


async def test_a_unix_socket_is_as_good(tmp_path: Path) -> None:
    """The admin page of a private proxy is at such a path."""
    path = str(tmp_path / "s")
    async with await asyncio.start_unix_server(Server().serve, path):
        assert (await request(PipeAddress(path), "/")).status == 200


async def test_no_answer_is_an_error_of_its_own(server) -> None:
    canned, address = server
    with pytest.raises(NoReplyError):
        await request(SocketAddress("127.0.0.1", 1), "/")
    canned.answers = [b"SSH-2.0\r\n"]
    with pytest.raises(NoReplyError):
        await request(address, "/")


async def test_requests_repeat_until_the_answer_is_acceptable(server) -> None:
    canned, address = server
    good = canned.answers[0]
    canned.answers = [b"HTTP/1.1 503 No\r\ncontent-length: 0\r\n\r\n", b"rubbish\r\n", good]
    assert await until(address, "/") == ProbeReply(200, b"ok")
    assert len(canned.asked) == 3
