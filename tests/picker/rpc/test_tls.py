"""Ports with TLS, as gateways reach them: certificates, renewal, versions, HTTP/2 negotiated."""

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc as pb_grpc

from picker.errors import ConfigError
from picker.extproc.server import build_server
from picker.rpc.options import ServerOptions, TlsMaterial, TlsOptions
from picker.rpc.self_signed import self_signed
from picker.rpc.server import GrpcServer
from picker.rpc.tls import CertificateFolder, cipher_suites, min_version, server_context

BROKEN = TlsMaterial(b"no key", b"no certificate")


@pytest.fixture(scope="module")
def certificate() -> TlsMaterial:
    return self_signed()


@asynccontextmanager
async def serving(director: Any, tls: TlsOptions) -> AsyncIterator[tuple[GrpcServer, int]]:
    server = build_server(director, options=ServerOptions(host="127.0.0.1", port=0, tls=tls))
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


async def test_a_stream_runs_over_tls_with_http2_negotiated(
    certificate: TlsMaterial, director: Callable[..., Any]
) -> None:
    async with serving(director(), TlsOptions(certificate)) as (_, port):
        assert await answered(port, certificate)
        assert await handshake(port) == ("h2", shown_as(certificate))


async def test_a_new_certificate_is_for_new_connections(
    certificate: TlsMaterial, director: Callable[..., Any]
) -> None:
    later = self_signed()
    async with serving(director(), TlsOptions(certificate)) as (server, port):
        server.use_certificate(later)
        assert await answered(port, later)
        mixed = TlsMaterial(certificate.private_key, later.certificate_chain)
        for unusable in (BROKEN, mixed):
            with pytest.raises(OSError, match=r"SSL|PEM|KEY"):
                server.use_certificate(unusable)
            assert await answered(port, later)


async def test_an_unusable_certificate_keeps_a_server_from_starting(
    director: Callable[..., Any],
) -> None:
    options = ServerOptions(host="127.0.0.1", port=0, tls=TlsOptions(BROKEN))
    with pytest.raises(OSError, match=r"SSL|PEM"):
        await build_server(director(), options=options).start()


async def test_a_client_older_than_the_least_version_is_turned_away(
    certificate: TlsMaterial, director: Callable[..., Any]
) -> None:
    old = {"maximum_version": ssl.TLSVersion.TLSv1_2}
    async with serving(director(), TlsOptions(certificate)) as (_, port):
        assert (await handshake(port, **old))[0] == "h2"
    async with serving(director(), TlsOptions(certificate, min_version("VersionTLS13"))) as (
        _,
        port,
    ):
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
