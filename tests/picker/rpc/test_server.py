"""The parts of a server: listening sockets, TLS and the gRPC health service."""

import asyncio
import logging
import socket
import ssl
import stat
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc as pb_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from picker.errors import ConfigError
from picker.extproc.server import build_server
from picker.rpc.health import READINESS, HealthService
from picker.rpc.options import ServerOptions, TlsMaterial, TlsOptions
from picker.rpc.self_signed import self_signed
from picker.rpc.server import GrpcServer, listen
from picker.rpc.tls import CertificateFolder, cipher_suites, min_version, server_context
from tests.support.picker.recording_director import RecordingDirector


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


async def test_a_stream_runs_over_a_unix_socket_that_is_gone_afterwards(path: Path) -> None:
    options = ServerOptions(host=f"unix://{path}")
    server = build_server(RecordingDirector(), options=options)
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


async def test_a_socket_left_behind_is_replaced(path: Path) -> None:
    """A killed picker leaves its socket behind and must not keep the next one from starting."""
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    options = ServerOptions(host=str(path))
    server = build_server(RecordingDirector(), options=options)
    assert await server.start() == 0
    await server.stop(0)


async def test_a_socket_in_use_and_a_file_of_another_kind_are_left_alone(path: Path) -> None:
    options = ServerOptions(host=str(path))
    first = build_server(RecordingDirector(), options=options)
    await first.start()
    with pytest.raises(OSError, match="in use"):
        await build_server(RecordingDirector(), options=options).start()
    await first.stop(0)
    put_file(path)
    with pytest.raises(OSError, match="no socket"):
        await build_server(RecordingDirector(), options=options).start()
    assert mode_of(path) == 0o644


async def test_stopping_leaves_the_socket_of_a_successor(path: Path) -> None:
    server = build_server(RecordingDirector(), options=ServerOptions(host=str(path)))
    await server.start()
    move_aside(path)
    with listen(ServerOptions(host=str(path))):
        await server.stop(0)
        assert mode_of(path) is not None


BROKEN = TlsMaterial(b"no key", b"no certificate")


@pytest.fixture(scope="module")
def certificate() -> TlsMaterial:
    return self_signed()


@asynccontextmanager
async def serving(tls: TlsOptions) -> AsyncIterator[tuple[GrpcServer, int]]:
    options = ServerOptions(host="127.0.0.1", port=0, tls=tls)
    server = build_server(RecordingDirector(), options=options)
    port = await server.start()
    try:
        yield server, port
    finally:
        await server.stop(0)


async def answered(port: int, trusted: TlsMaterial) -> bool:
    credentials = grpc.ssl_channel_credentials(trusted.certificate_chain)
    options = [("grpc.enable_retries", 0), ("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.secure_channel(f"localhost:{port}", credentials, options) as channel:
        call = pb_grpc.ExternalProcessorStub(channel).Process()
        headers = pb.HttpHeaders(end_of_stream=True)
        try:
            await call.write(pb.ProcessingRequest(request_headers=headers))
            replied = (await call.read()).HasField("request_headers")
            await call.done_writing()
            return replied and await call.code() is grpc.StatusCode.OK
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return False


async def handshake(port: int, **limits: ssl.TLSVersion) -> tuple[str | None, bytes]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    for name, version in limits.items():
        setattr(context, name, version)
    context.set_alpn_protocols(["h2", "http/1.1"])
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    connection = writer.get_extra_info("ssl_object")
    protocol, shown = connection.selected_alpn_protocol(), connection.getpeercert(True)
    writer.close()
    return protocol, shown


def shown_as(material: TlsMaterial) -> bytes:
    return ssl.PEM_cert_to_DER_cert(material.certificate_chain.decode())


async def test_a_stream_runs_over_tls_with_http2_negotiated(certificate: TlsMaterial) -> None:
    async with serving(TlsOptions(certificate)) as (_, port):
        assert await answered(port, certificate)
        assert await handshake(port) == ("h2", shown_as(certificate))


async def test_a_new_certificate_is_for_new_connections(certificate: TlsMaterial) -> None:
    later = self_signed()
    async with serving(TlsOptions(certificate)) as (server, port):
        server.use_certificate(later)
        assert await answered(port, later)
        mixed = TlsMaterial(certificate.private_key, later.certificate_chain)
        for unusable in (BROKEN, mixed):
            with pytest.raises(OSError, match=r"SSL|PEM|KEY"):
                server.use_certificate(unusable)
            assert await answered(port, later)


async def test_an_unusable_certificate_keeps_a_server_from_starting() -> None:
    options = ServerOptions(host="127.0.0.1", port=0, tls=TlsOptions(BROKEN))
    with pytest.raises(OSError, match=r"SSL|PEM"):
        await build_server(RecordingDirector(), options=options).start()


async def test_a_client_older_than_the_least_version_is_turned_away(
    certificate: TlsMaterial,
) -> None:
    old = {"maximum_version": ssl.TLSVersion.TLSv1_2}
    async with serving(TlsOptions(certificate)) as (_, port):
        assert (await handshake(port, **old))[0] == "h2"
    async with serving(TlsOptions(certificate, min_version("VersionTLS13"))) as (_, port):
        with pytest.raises((ConnectionResetError, ssl.SSLError)):
            await handshake(port, **old)
        assert (await handshake(port))[0] == "h2"


def test_versions_and_suites_are_named_as_in_the_reference() -> None:
    assert min_version("VersionTLS12") is ssl.TLSVersion.TLSv1_2
    with pytest.raises(ConfigError, match="VersionTLS12, VersionTLS13"):
        min_version("VersionTLS10")
    assert cipher_suites(["TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256"]) == (
        "ECDHE-ECDSA-AES128-GCM-SHA256",
    )
    with pytest.raises(ConfigError, match="TLS_RSA_WITH_AES_128_CBC_SHA"):
        cipher_suites(["TLS_RSA_WITH_AES_128_CBC_SHA"])


def test_the_suites_asked_for_are_the_only_ones_of_their_version(certificate: TlsMaterial) -> None:
    suite = "ECDHE-ECDSA-AES128-GCM-SHA256"
    context = server_context(TlsOptions(certificate, cipher_suites=(suite,)))
    offered = [c["name"] for c in context.get_ciphers() if c["protocol"] == "TLSv1.2"]
    assert offered == [suite]


def test_no_two_pickers_share_a_made_up_certificate() -> None:
    assert self_signed().private_key != self_signed().private_key


# A folder that is watched


def write(folder: Path, material: TlsMaterial) -> None:
    """Replace the pair as Kubernetes does: write a new folder and turn a link to it at once."""
    fresh = folder / f"..{len(list(folder.iterdir()))}"
    fresh.mkdir()
    (fresh / "tls.key").write_bytes(material.private_key)
    (fresh / "tls.crt").write_bytes(material.certificate_chain)
    turning = folder / "..turning"
    turning.symlink_to(fresh)
    turning.rename(folder / "..data")
    for name in ("tls.key", "tls.crt"):
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(Path("..data") / name)


@asynccontextmanager
async def watched(folder: Path) -> AsyncIterator[asyncio.Queue[TlsMaterial]]:
    certificates, applied = CertificateFolder(folder), asyncio.Queue[TlsMaterial]()
    certificates.load()
    task = asyncio.create_task(certificates.watch(applied.put_nowait))
    try:
        yield applied
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_pair_that_is_replaced_is_applied(certificate: TlsMaterial, tmp_path: Path) -> None:
    write(tmp_path, certificate)
    later = self_signed()
    async with watched(tmp_path) as applied, asyncio.timeout(120):
        write(tmp_path, later)
        assert await applied.get() == later
    assert applied.empty()


async def test_a_broken_pair_is_logged_and_the_old_one_stays_in_use(
    certificate: TlsMaterial, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, certificate)
    later = self_signed()
    async with watched(tmp_path) as applied, asyncio.timeout(120):
        write(tmp_path, BROKEN)
        while "keeping the certificate of before" not in caplog.text:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert applied.empty()
        write(tmp_path, later)
        assert await applied.get() == later
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1


@pytest.mark.parametrize("missing", ["tls.key", "tls.crt"])
def test_a_folder_without_a_pair_is_an_error_that_names_the_file(
    certificate: TlsMaterial, tmp_path: Path, missing: str
) -> None:
    write(tmp_path, certificate)
    (tmp_path / missing).unlink()
    with pytest.raises(ConfigError, match=missing):
        CertificateFolder(tmp_path).load()


Status = health_pb2.HealthCheckResponse


@pytest.fixture
def readiness() -> SimpleNamespace:
    return SimpleNamespace(ready=False)


@pytest.fixture
async def stub(readiness: SimpleNamespace) -> AsyncIterator[health_pb2_grpc.HealthStub]:
    health = HealthService(lambda: readiness.ready, watch_seconds=0.01)
    options = ServerOptions(host="127.0.0.1", port=0)
    server = GrpcServer(options, health.methods())
    port = await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield health_pb2_grpc.HealthStub(channel)
    await server.stop(0)


async def check(stub: health_pb2_grpc.HealthStub, service: str) -> int:
    reply = await stub.Check(health_pb2.HealthCheckRequest(service=service))
    return int(reply.status)


async def test_readiness_follows_the_application_both_ways(
    stub: health_pb2_grpc.HealthStub, readiness: SimpleNamespace
) -> None:
    for ready, status in [(False, Status.NOT_SERVING), (True, Status.SERVING)] * 2:
        readiness.ready = ready
        assert [await check(stub, name) for name in READINESS] == [status] * len(READINESS)


async def test_liveness_does_not_wait_for_the_pool(stub: health_pb2_grpc.HealthStub) -> None:
    """A restart would not help a picker without a pool."""
    assert await check(stub, "liveness") == Status.SERVING


async def test_an_unknown_name_is_not_found(stub: health_pb2_grpc.HealthStub) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await check(stub, "typo")
    assert error.value.code() is grpc.StatusCode.NOT_FOUND


async def test_the_list_holds_every_name(stub: health_pb2_grpc.HealthStub) -> None:
    reply = await stub.List(health_pb2.HealthListRequest())
    assert set(reply.statuses) == {"liveness", *READINESS}


async def test_a_request_that_is_no_health_request_is_refused() -> None:
    options = ServerOptions(host="127.0.0.1", port=0)
    server = GrpcServer(options, HealthService(lambda: True).methods())
    port = await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await channel.unary_unary("/grpc.health.v1.Health/Check")(b"\xff\xff")
    await server.stop(0)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_watcher_hears_of_each_change(
    stub: health_pb2_grpc.HealthStub, readiness: SimpleNamespace
) -> None:
    call = stub.Watch(health_pb2.HealthCheckRequest(service="readiness"))
    assert (await call.read()).status == Status.NOT_SERVING
    readiness.ready = True
    assert (await call.read()).status == Status.SERVING
    call.cancel()
    unknown = stub.Watch(health_pb2.HealthCheckRequest(service="typo"))
    assert (await unknown.read()).status == Status.SERVICE_UNKNOWN
    unknown.cancel()
