"""The gRPC shell on grpc.aio: binds a port and hands each call to its method."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import grpc

from picker.extproc.pump import StreamFailedError
from picker.extproc.services import MethodTable
from picker.rpc.binding import UNIX_SOCKET_MODE, remove_stale
from picker.rpc.calls import ByMetadata, Metadata, Method, RpcError, Served, joined
from picker.rpc.options import ServerOptions, TlsMaterial, TlsOptions
from picker.rpc.tls import server_context

_STATUS_CODES = {code.value[0]: code for code in grpc.StatusCode}


class GrpcioServer:
    """One listening port; see `options.GrpcServer`."""

    def __init__(self, options: ServerOptions, table: MethodTable) -> None:
        self._options = options
        self._server: grpc.aio.Server | None = None
        self._stopping = False
        self._material: TlsMaterial | None = None
        self._methods = table(lambda: self._stopping)

    async def start(self) -> int:
        """Listen; returns the bound port. Raises `OSError` when the port cannot be had."""
        server = grpc.aio.server(options=_channel_options(self._options))
        server.add_generic_rpc_handlers((_Table(self._methods),))
        port = self._bind(server)
        await server.start()
        self._server = server
        return port

    def use_certificate(self, material: TlsMaterial) -> None:
        """Show `material` to new connections; see `options.GrpcServer`."""
        tls = self._options.tls
        if tls is not None:
            server_context(replace(tls, material=material))  # raises what the library would not say
            self._material = material

    def _bind(self, server: grpc.aio.Server) -> int:
        path, address, tls = self._options.unix_path, self._options.address, self._options.tls
        try:
            if path is not None:
                remove_stale(path)
            if tls is None:
                port = int(server.add_insecure_port(address))
            else:
                port = int(server.add_secure_port(address, self._credentials(tls)))
            if path is None:
                return port
            path.chmod(UNIX_SOCKET_MODE)
            return 0
        except (OSError, RuntimeError) as error:
            raise OSError(f"cannot listen on {address}: {error}") from error

    def _credentials(self, tls: TlsOptions) -> grpc.ServerCredentials:
        """What asks for the certificate anew at each handshake."""
        if tls.cipher_suites or tls.min_version != ssl.TLSVersion.TLSv1_2:
            raise OSError("this transport has no choice of TLS versions and cipher suites")
        server_context(tls)
        self._material = tls.material
        return grpc.dynamic_ssl_server_credentials(
            self._configuration(), self._configuration, require_client_authentication=False
        )

    def _configuration(self) -> grpc.ServerCertificateConfiguration | None:
        material = self._material
        if material is None:
            return None
        pair = (material.private_key, material.certificate_chain)
        return grpc.ssl_server_certificate_configuration([pair])

    async def stop(self, grace_seconds: float) -> None:
        """Accept nothing new, let streams end for `grace_seconds`, then cancel what is left."""
        if self._server is not None:
            self._stopping = True
            await self._server.stop(grace_seconds)

    async def wait_stopped(self) -> None:
        """Return once the server has stopped; at once when it was never started."""
        if self._server is not None:
            await self._server.wait_for_termination()


class _Table(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Finds the method of a path for grpc; all are streams of bytes both ways."""

    def __init__(self, table: Mapping[str, Served]) -> None:
        self._table = table
        self._rooms: dict[Method, Any] = {}

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """The method; None is UNIMPLEMENTED to the client."""
        method = self._table.get(handler_call_details.method)
        if isinstance(method, ByMetadata):
            method = method.choose(_metadata(handler_call_details))
        if method is None:
            return None
        room = self._rooms.get(method)
        if room is None:
            room = grpc.stream_stream_rpc_method_handler(_served_by(method))
            self._rooms[method] = room
        return room


def _metadata(details: grpc.HandlerCallDetails) -> Metadata:
    """Names and values as bytes; the library gives text, but for names that end with `-bin`."""
    return joined(
        [
            (name.encode(), value if isinstance(value, bytes) else value.encode())
            for name, value in details.invocation_metadata
        ]
    )


def _served_by(method: Method) -> Any:
    async def serve(_: object, context: grpc.aio.ServicerContext) -> None:
        """One call; grpc cancels it when the peer resets the stream."""

        async def read() -> bytes | None:
            try:
                message: bytes = await context.read()
            except grpc.aio.BaseError as error:
                raise StreamFailedError(f"cannot read: {error}", peer_at_fault=True) from error
            return None if message is grpc.aio.EOF else message

        async def write(message: bytes) -> None:
            try:
                await context.write(message)
            except grpc.aio.BaseError as error:
                raise StreamFailedError(f"cannot write: {error}", peer_at_fault=True) from error

        try:
            await method(read, write)
        except RpcError as failure:
            await context.abort(_STATUS_CODES[int(failure.status)], str(failure))

    return serve


def _channel_options(options: ServerOptions) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", options.max_message_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.so_reuseport", 0),  # two pickers on one port is a mistake, not load balancing
        # Proxies ping idle connections more often than gRPC's default tolerates.
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.server_handshake_timeout_ms", int(1000 * options.handshake_seconds)),
        ("grpc.max_connection_idle_ms", int(1000 * options.idle_seconds)),
    ]
