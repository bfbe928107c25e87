"""The gRPC shell on grpc.aio: binds a port and hands each call to its method."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import grpc

from picker.extproc.health import HealthService
from picker.extproc.options import ServerOptions
from picker.extproc.pump import ExchangeSource, StreamFailedError
from picker.extproc.rpc import Method, RpcError
from picker.extproc.services import methods

_STATUS_CODES = {code.value[0]: code for code in grpc.StatusCode}


class GrpcioServer:
    """One listening port; see `options.GrpcServer`."""

    def __init__(
        self,
        options: ServerOptions,
        health: HealthService | None,
        exchanges: ExchangeSource | None,
    ) -> None:
        self._options = options
        self._server: grpc.aio.Server | None = None
        self._stopping = False
        self._methods = methods(
            exchanges,
            health,
            max_body_bytes=options.max_body_bytes,
            is_stopping=lambda: self._stopping,
        )

    async def start(self) -> int:
        """Listen; returns the bound port. Raises `OSError` when the port cannot be had."""
        server = grpc.aio.server(options=_channel_options(self._options))
        server.add_generic_rpc_handlers((_Table(self._methods),))
        port = _bind(server, self._options)
        await server.start()
        self._server = server
        return port

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

    def __init__(self, table: Mapping[str, Method]) -> None:
        self._rooms = {
            path: grpc.stream_stream_rpc_method_handler(_served_by(method))
            for path, method in table.items()
        }

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """The method; None is UNIMPLEMENTED to the client."""
        return self._rooms.get(handler_call_details.method)


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


def _bind(server: grpc.aio.Server, options: ServerOptions) -> int:
    address = options.address
    try:
        if options.tls is None:
            return int(server.add_insecure_port(address))
        pair = (options.tls.private_key, options.tls.certificate_chain)
        credentials = grpc.ssl_server_credentials([pair])
        return int(server.add_secure_port(address, credentials))
    except RuntimeError as error:
        raise OSError(f"cannot listen on {address}: {error}") from error


def _channel_options(options: ServerOptions) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", options.max_message_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.so_reuseport", 0),  # two pickers on one port is a mistake, not load balancing
        # Proxies ping idle connections more often than gRPC's default tolerates.
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_ping_strikes", 0),
    ]
