"""Listening sockets: those on TCP, and those in the file system."""

import socket
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc as pb_grpc

from picker.extproc.server import build_server
from picker.rpc.binding import listen
from picker.rpc.options import ServerOptions


@pytest.fixture
def path() -> Iterator[Path]:
    """Paths of unix sockets have at most 107 bytes, so the folder is a short one."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / "picker.sock"


def mode_of(path: Path) -> int | None:
    return stat.S_IMODE(path.stat().st_mode) if path.exists() else None


def put_file(path: Path) -> None:
    path.write_text("precious")
    path.chmod(0o644)


def move_aside(path: Path) -> None:
    path.rename(path.with_suffix(".old"))


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="a system without it")
def test_an_accepted_connection_notices_a_vanished_peer() -> None:
    """An accepted connection inherits the options of the listening socket."""
    with (
        listen(ServerOptions(host="127.0.0.1", port=0)) as listening,
        socket.create_connection(listening.getsockname()),
        listening.accept()[0] as accepted,
    ):
        assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 120_000


@pytest.mark.parametrize(
    ("host", "path", "address"),
    [
        ("unix:///run/p.sock", "/run/p.sock", "unix:/run/p.sock"),
        ("unix:/run/p.sock", "/run/p.sock", "unix:/run/p.sock"),
        ("/run/p.sock", "/run/p.sock", "unix:/run/p.sock"),
        ("::1", None, "[::1]:9002"),
        ("10.0.0.1", None, "10.0.0.1:9002"),
    ],
)
def test_a_host_that_is_a_path_is_a_unix_socket(host: str, path: str | None, address: str) -> None:
    """These are the spellings that gRPC and Envoy know."""
    options = ServerOptions(host=host)
    assert options.unix_path == (Path(path) if path else None)
    assert options.address == address


async def test_a_stream_runs_over_a_unix_socket_that_is_gone_afterwards(
    path: Path, director: Callable[..., Any]
) -> None:
    options = ServerOptions(host=f"unix://{path}")
    server = build_server(director(), options=options)
    assert await server.start() == 0
    try:
        assert mode_of(path) == 0o660
        async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
            call = pb_grpc.ExternalProcessorStub(channel).Process()
            headers = pb.HttpHeaders(end_of_stream=True)
            await call.write(pb.ProcessingRequest(request_headers=headers))
            assert (await call.read()).HasField("request_headers")
            await call.done_writing()
            assert await call.code() is grpc.StatusCode.OK
    finally:
        await server.stop(0)
    assert mode_of(path) is None


async def test_a_socket_left_behind_is_replaced(path: Path, director: Callable[..., Any]) -> None:
    """A killed picker leaves its socket behind and must not keep the next one from starting."""
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    options = ServerOptions(host=str(path))
    server = build_server(director(), options=options)
    assert await server.start() == 0
    await server.stop(0)


async def test_a_socket_in_use_and_a_file_of_another_kind_are_left_alone(
    path: Path, director: Callable[..., Any]
) -> None:
    options = ServerOptions(host=str(path))
    first = build_server(director(), options=options)
    await first.start()
    with pytest.raises(OSError, match="in use"):
        await build_server(director(), options=options).start()
    await first.stop(0)
    put_file(path)
    with pytest.raises(OSError, match="no socket"):
        await build_server(director(), options=options).start()
    assert mode_of(path) == 0o644


async def test_stopping_leaves_the_socket_of_a_successor(
    path: Path, director: Callable[..., Any]
) -> None:
    server = build_server(director(), options=ServerOptions(host=str(path)))
    await server.start()
    move_aside(path)
    with listen(ServerOptions(host=str(path))):
        await server.stop(0)
        assert mode_of(path) is not None
