"""The server with TLS, as gateways reach it: self-signed, HTTP/2 negotiated."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc as pb_grpc

from picker.extproc.server import ServerOptions, TlsMaterial, TlsOptions, Transport, build_server


@pytest.fixture
def certificate(tmp_path: Path) -> TlsMaterial:
    """A self-signed certificate for this machine."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs the openssl command to make a certificate")
    key, chain = tmp_path / "key.pem", tmp_path / "chain.pem"
    command = [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-days", "1", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run(
        [*command, "-keyout", str(key), "-out", str(chain)], check=True, capture_output=True
    )
    return TlsMaterial(key.read_bytes(), chain.read_bytes())


async def test_a_stream_runs_over_tls_with_http2_negotiated(
    certificate: TlsMaterial, director: Callable[..., Any], transport: Transport
) -> None:
    """A client that trusts the certificate is served, and ALPN offers `h2`."""
    options = ServerOptions(
        host="127.0.0.1", port=0, tls=TlsOptions(certificate), transport=transport
    )
    server = build_server(director(), options=options)
    port = await server.start()
    credentials = grpc.ssl_channel_credentials(certificate.certificate_chain)
    try:
        async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials) as channel:
            call = pb_grpc.ExternalProcessorStub(channel).Process()
            headers = pb.HttpHeaders(end_of_stream=True)
            await call.write(pb.ProcessingRequest(request_headers=headers))
            assert (await call.read()).HasField("request_headers")
            await call.done_writing()
            assert await call.code() is grpc.StatusCode.OK
        assert await negotiated_protocol(port) == "h2"
    finally:
        await server.stop(0)


async def negotiated_protocol(port: int) -> str | None:
    """What ALPN agrees on with a client that does not verify the certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2", "http/1.1"])
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    protocol: str | None = writer.get_extra_info("ssl_object").selected_alpn_protocol()
    writer.close()
    return protocol
