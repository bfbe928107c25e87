"""A relay that speaks TLS to a picker and verifies no certificate, as gateways do in this protocol.

gRPC for Python has no way to accept any certificate; a plain connection to this relay is one to
the picker.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

_BUFFER_BYTES = 65_536


def any_certificate() -> ssl.SSLContext:
    """TLS 1.2 or newer that offers HTTP/2 and verifies nothing."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    return context


async def negotiated(address: str) -> tuple[str | None, str | None]:
    """Connect to `host:port` with TLS; the application protocol and the version agreed upon.

    Raises OSError (ssl.SSLError is one) where no TLS connection comes about.
    """
    host, _, port = address.rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port), ssl=any_certificate())
    try:
        agreed: ssl.SSLObject = writer.get_extra_info("ssl_object")
        return agreed.selected_alpn_protocol(), agreed.version()
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


@asynccontextmanager
async def tls_relay(address: str) -> AsyncIterator[str]:
    """Relay to the TLS port at `host:port`; gives the plain address, at which it listens."""
    host, _, port = address.rpartition(":")
    open_relays: set[asyncio.Task[None]] = set()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            open_relays.add(task)
        try:
            far = await asyncio.open_connection(host, int(port), ssl=any_certificate())
            await _both_ways((reader, writer), far)
        except (OSError, asyncio.CancelledError):
            pass  # refused or cut: the near side sees the same
        finally:
            writer.close()
            if task is not None:
                open_relays.discard(task)

    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        ending = list(open_relays)
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)


_End = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def _both_ways(near: _End, far: _End) -> None:
    """Until either side is over; then both are."""
    pumps = {
        asyncio.create_task(_pump(near[0], far[1]), name="conformance relay up"),
        asyncio.create_task(_pump(far[0], near[1]), name="conformance relay down"),
    }
    try:
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
        far[1].close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_BUFFER_BYTES):
        writer.write(data)
        await writer.drain()
