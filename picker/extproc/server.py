"""The gRPC shell around `pump`: binds a port and hands each stream over.

Kept thin on purpose: everything a stream does is in `stream`, `wire` and `pump`, which a second
transport shares.
"""

from __future__ import annotations

from dataclasses import dataclass

import grpc

from picker.extproc.health import HealthService
from picker.extproc.pump import ExchangeSource, StreamFailedError, serve_stream
from picker.extproc.stream import DEFAULT_MAX_BODY_BYTES
from picker.extproc.wire import SERVICE

# A buffered body is one message. One that the transport refused would break the stream, where the
# limit on bodies gives a 413; so the latter has to be the smaller.
DEFAULT_MAX_MESSAGE_BYTES = DEFAULT_MAX_BODY_BYTES + 1024 * 1024


@dataclass(frozen=True, slots=True)
class TlsMaterial:
    """What a TLS server shows: a PEM private key and the PEM certificate chain for it."""

    private_key: bytes
    certificate_chain: bytes


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Where to listen and what to accept.

    `port` 0 takes a free one. Without `tls` the port is plain text. `max_body_bytes` bounds one
    request body as a whole (413 beyond it), `max_message_bytes` one gRPC message.
    """

    host: str = "0.0.0.0"
    port: int = 9002
    tls: TlsMaterial | None = None
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES


class GrpcServer:
    """One listening port. Start it once, inside the event loop it is to live in."""

    def __init__(
        self,
        options: ServerOptions,
        health: HealthService | None,
        exchanges: ExchangeSource | None,
    ) -> None:
        self._options = options
        self._health = health
        self._exchanges = exchanges
        self._server: grpc.aio.Server | None = None
        self._stopping = False

    async def start(self) -> int:
        """Listen; returns the bound port. Raises `OSError` when the port cannot be had."""
        server = grpc.aio.server(options=_channel_options(self._options))
        if self._exchanges is not None:
            handler = grpc.stream_stream_rpc_method_handler(self._process)
            rooms = grpc.method_handlers_generic_handler(SERVICE, {"Process": handler})
            server.add_generic_rpc_handlers((rooms,))
        if self._health is not None:
            self._health.add_to(server)
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
        """Return once the server has stopped."""
        if self._server is not None:
            await self._server.wait_for_termination()

    async def _process(self, _: object, context: grpc.aio.ServicerContext) -> None:
        """One ext_proc stream; grpc cancels it when the proxy resets the stream."""
        if self._exchanges is None:
            return

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
            await serve_stream(
                read,
                write,
                self._exchanges,
                max_body_bytes=self._options.max_body_bytes,
                is_stopping=lambda: self._stopping,
            )
        except StreamFailedError as failure:
            peer, ours = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.INTERNAL
            await context.abort(peer if failure.peer_at_fault else ours, str(failure))


def build_server(
    exchanges: ExchangeSource,
    *,
    options: ServerOptions,
    health: HealthService | None = None,
) -> GrpcServer:
    """The ext_proc server; `exchanges` is the director. With `health`, the same port answers it."""
    return GrpcServer(options, health, exchanges)


def build_health_server(health: HealthService, *, options: ServerOptions) -> GrpcServer:
    """A server for the health port alone."""
    return GrpcServer(options, health, None)


def _bind(server: grpc.aio.Server, options: ServerOptions) -> int:
    host = f"[{options.host}]" if ":" in options.host else options.host
    address = f"{host}:{options.port}"
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
