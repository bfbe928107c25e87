"""Pages arrive over one persistent connection; a misbehaving server costs one error."""

import asyncio
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
import uvloop

from picker.scrape.http_client import HttpPages, ScrapeError, _Connection, tls_context
from picker.scrape.sources import MAX_PAGE_BYTES, PageLocation, TlsFiles

PAGE = b"vllm:num_requests_waiting 3\n"
OK = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(PAGE), PAGE)

Serve = Callable[["Session"], Awaitable[None]]


class Session:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def request(self) -> bytes:
        return await self.reader.readuntil(b"\r\n\r\n")

    async def answer(self, *pieces: bytes) -> None:
        for piece in pieces:
            self.writer.write(piece)
            await self.writer.drain()
            await asyncio.sleep(0)


class Server:
    def __init__(self, serve: Serve) -> None:
        self.sessions = 0
        self.left = asyncio.Event()
        self.address = ""
        self._serve = serve

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.sessions += 1
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            await self._serve(Session(reader, writer))
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
        self.left.set()


@asynccontextmanager
async def serving(
    serve: Serve, context: ssl.SSLContext | None = None, host: str = "127.0.0.1"
) -> AsyncIterator[Server]:
    server = Server(serve)
    listener = await asyncio.start_server(server, host, 0, ssl=context)
    port = listener.sockets[0].getsockname()[1]
    server.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        yield server
    finally:
        listener.close()


def once(*pieces: bytes) -> Serve:
    async def serve(session: Session) -> None:
        await session.request()
        await session.answer(*pieces)
        await session.reader.read()

    return serve


def http(timeout_seconds: float = 10.0, max_page_bytes: int = MAX_PAGE_BYTES) -> HttpPages:
    location = PageLocation(max_page_bytes=max_page_bytes)
    return HttpPages(location, timeout_seconds=timeout_seconds)


async def test_many_pages_arrive_over_one_connection() -> None:
    asked: list[bytes] = []

    async def serve(session: Session) -> None:
        while True:
            asked.append(await session.request())
            await session.answer(OK)

    async with serving(serve) as server, http() as pages:
        assert [await pages.fetch(server.address) for _ in range(3)] == [PAGE] * 3
        assert server.sessions == 1
    assert asked[0] == asked[2]
    assert asked[0].startswith(b"GET /metrics HTTP/1.1\r\nHost: " + server.address.encode())
    assert b"Accept-Encoding: identity" in asked[0]


async def test_an_address_may_be_ipv6(ipv6: str) -> None:
    async with serving(once(OK), host=ipv6) as server, http() as pages:
        assert await pages.fetch(server.address) == PAGE


def test_the_client_works_on_the_event_loop_of_the_picker() -> None:
    """The transports of uvloop have a class of their own."""

    async def serve(session: Session) -> None:
        with suppress(asyncio.IncompleteReadError):
            while True:
                await session.request()
                await session.answer(OK)

    async def fetch() -> None:
        async with serving(serve) as server:
            async with http() as pages:
                assert [await pages.fetch(server.address) for _ in range(3)] == [PAGE] * 3
                assert server.sessions == 1
            await asyncio.wait_for(server.left.wait(), 60)

    uvloop.run(fetch())


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nhi",
        b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nhi",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhiHTTP/1.1 200 OK\r\n",
    ],
)
async def test_a_connection_unfit_for_reuse_is_closed(answer: bytes) -> None:
    async with serving(once(answer)) as server, http() as pages:
        assert [await pages.fetch(server.address) for _ in range(2)] == [b"hi"] * 2
        assert server.sessions == 2


async def test_a_body_may_end_with_the_connection() -> None:

    async def serve(session: Session) -> None:
        await session.request()
        await session.answer(b"HTTP/1.1 200 OK\r\n\r\n", b"hel", b"lo")

    async with serving(serve) as server, http() as pages:
        assert await pages.fetch(server.address) == b"hello"


async def test_an_idle_connection_that_the_server_closed_is_replaced_at_once() -> None:
    """Servers close idle connections; that is not a failure."""
    close = asyncio.Event()

    async def serve(session: Session) -> None:
        await session.request()
        await session.answer(OK)
        await close.wait()  # until the next request is on its way, which it will not read

    async with serving(serve) as server, http() as pages:
        assert await pages.fetch(server.address) == PAGE
        second = asyncio.create_task(pages.fetch(server.address))
        await asyncio.sleep(0)
        close.set()
        assert await second == PAGE
        assert server.sessions == 2


async def test_unsolicited_bytes_close_the_connection() -> None:
    sent = asyncio.Event()

    async def serve(session: Session) -> None:
        await session.request()
        await session.answer(OK)
        if not sent.is_set():
            await session.answer(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nfake")
            await session.reader.read()
            sent.set()

    async with serving(serve) as server, http() as pages:
        assert await pages.fetch(server.address) == PAGE
        await asyncio.wait_for(sent.wait(), 60)
        assert await pages.fetch(server.address) == PAGE
        assert server.sessions == 2


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"HTTP/1.1 302 Found\r\nlocation: /metrics\r\ncontent-length: 0\r\n\r\n", "status 302"),
        (b"HTTP/1.1 500 Oops\r\ncontent-length: 4\r\n\r\noops", "status 500"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 4097\r\n\r\n", "larger than 4096 bytes"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 4097, "larger than 4096 bytes"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nshort", "ended before"),
        (b"hello, who is there?\r\n\r\n", "no HTTP response"),
        (b"", "closed without an answer"),
    ],
)
async def test_an_unusable_response_is_an_error_with_a_reason(answer: bytes, reason: str) -> None:
    async def serve(session: Session) -> None:
        await session.request()
        await session.answer(answer)

    async with serving(serve) as server, http(max_page_bytes=4096) as pages:
        with pytest.raises(ScrapeError, match=reason):
            await pages.fetch(server.address)


async def test_a_page_of_a_hundred_engines_is_read() -> None:
    page = PAGE * (4_000_000 // len(PAGE))
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    async with (
        serving(once(head, b"%x\r\n" % len(page), page, b"\r\n0\r\n\r\n")) as server,
        http(60.0) as pages,
    ):
        assert await pages.fetch(server.address) == page


def redirecting(places: dict[bytes, bytes], asked: list[bytes]) -> Serve:
    async def serve(session: Session) -> None:
        while True:
            path = (await session.request()).split(b" ", 2)[1]
            asked.append(path)
            place = places.get(path)
            if place is None:
                await session.answer(OK)
            else:
                head = b"HTTP/1.1 307 Elsewhere\r\nLocation: %s\r\ncontent-length: 0\r\n\r\n"
                await session.answer(head % place)

    return serve


@pytest.mark.parametrize(
    ("place", "path"),
    [
        (b"/metrics/", b"/metrics/"),
        (b"internal/metrics?format=text", b"/internal/metrics?format=text"),
        (b"http://%s/metrics/#top", b"/metrics/"),
        (b"https://%s/m", b"/m"),
        (b"//%s", b"/"),
    ],
)
async def test_a_redirection_on_the_same_server_is_followed_and_remembered(
    place: bytes, path: bytes
) -> None:
    places: dict[bytes, bytes] = {}
    asked: list[bytes] = []
    async with serving(redirecting(places, asked)) as server, http() as pages:
        places[b"/metrics"] = place.replace(b"%s", server.address.encode())
        for _ in range(2):
            assert await pages.fetch(server.address) == PAGE
        assert asked == [b"/metrics", path, path]
        assert server.sessions == 1


@pytest.mark.parametrize(
    "place",
    [
        b"http://127.0.0.2:%d/metrics",
        b"http://127.0.0.1/metrics",
        b"http://127.0.0.1:1/metrics",
        b"http://metrics.example:%d/metrics",
        b"//metrics.example:%d/metrics",
        b"ftp://127.0.0.1/metrics",
        b"http://127.0.0.1:port/metrics",
        b"/a metrics page",
        b"/m\xe9trics",
    ],
)
async def test_a_redirection_to_another_server_is_not_followed(place: bytes) -> None:
    places: dict[bytes, bytes] = {}
    asked: list[bytes] = []
    async with serving(redirecting(places, asked)) as server, http() as pages:
        port = int(server.address.rpartition(":")[2])
        places[b"/metrics"] = place.replace(b"%d", b"%d" % port)
        with pytest.raises(ScrapeError, match=r"status 307 to .* not followed: set"):
            await pages.fetch(server.address)
        assert asked == [b"/metrics"]


async def test_a_redirection_is_forgotten_when_its_target_fails() -> None:
    places = {b"/metrics": b"/a", b"/a": b"/b"}
    asked: list[bytes] = []
    async with serving(redirecting(places, asked)) as server, http() as pages:
        with pytest.raises(ScrapeError, match="status 307"):
            await pages.fetch(server.address)
        del places[b"/a"]
        assert await pages.fetch(server.address) == PAGE
        places |= {b"/a": b"/c", b"/c": b"/d"}
        with pytest.raises(ScrapeError, match="status 307"):
            await pages.fetch(server.address)
        places.clear()
        assert await pages.fetch(server.address) == PAGE
        assert asked == [b"/metrics", b"/a", b"/metrics", b"/a", b"/a", b"/c", b"/metrics"]


async def test_an_error_status_keeps_the_connection() -> None:

    async def serve(session: Session) -> None:
        while True:
            await session.request()
            await session.answer(b"HTTP/1.1 503 Wait\r\ncontent-length: 2\r\n\r\nno")

    async with serving(serve) as server, http() as pages:
        for _ in range(3):
            with pytest.raises(ScrapeError, match="status 503"):
                await pages.fetch(server.address)
        assert server.sessions == 1


@pytest.mark.parametrize("endless", [b"", b"H", b"HTTP/1.1 200 OK\r\nx: y\r\n"])
async def test_an_endless_response_times_out(endless: bytes) -> None:
    async with serving(once(endless)) as server, http(timeout_seconds=0.05) as pages:
        with pytest.raises(ScrapeError, match=r"no answer within 0\.05 s"):
            await pages.fetch(server.address)
        await asyncio.wait_for(server.left.wait(), 60)


class Wire(asyncio.Transport):
    def write(self, data: bytes | bytearray | memoryview) -> None:
        pass

    def is_closing(self) -> bool:
        return False


@pytest.mark.looptime
async def test_each_request_of_a_connection_has_its_own_deadline() -> None:
    connection = _Connection(MAX_PAGE_BYTES)
    connection.connection_made(Wire())
    loop = asyncio.get_running_loop()
    for deadline, answered in ((1.0, 0.5), (9.0, 3.0)):
        loop.call_at(loop.time() + answered, connection.data_received, OK)
        response = await connection.ask(b"", loop.time() + deadline)
        assert response.body == PAGE


async def test_a_cancelled_fetch_closes_its_connection() -> None:
    """Otherwise its response would be that of the next request."""
    asked = asyncio.Event()

    async def serve(session: Session) -> None:
        await session.request()
        asked.set()
        await session.reader.read()

    async with serving(serve) as server, http() as pages:
        task = asyncio.create_task(pages.fetch(server.address))
        await asked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(server.left.wait(), 60)


async def test_the_connection_to_a_forgotten_address_is_closed() -> None:
    async with serving(once(OK)) as server, http() as pages:
        await pages.fetch(server.address)
        pages.forget(server.address)
        pages.forget("10.0.0.1:80")
        await asyncio.wait_for(server.left.wait(), 60)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.0.0.1:99999", "no such host:80"])
async def test_an_unreachable_address_is_an_error(address: str) -> None:
    async with http() as pages:
        with pytest.raises(ScrapeError):
            await pages.fetch(address)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "tls.crt", folder / "tls.key"
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs the openssl command to make a certificate")
    command = [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-keyout", str(key), "-out", str(cert), "-days", "2", "-subj", "/CN=w"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(command, check=True, capture_output=True)
    return cert, key


def test_plain_http_needs_no_certificates() -> None:
    assert tls_context(PageLocation()) is None
    with pytest.raises(OSError, match="No such file"):
        tls_context(PageLocation("https", tls=TlsFiles(True, ca_cert_path="/none.pem")))


async def test_pages_over_https_follow_their_tls_settings(certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)

    async def fetch(tls: TlsFiles) -> bytes:
        location = PageLocation("https", tls=tls)
        async with HttpPages(location, tls_context(location), 10.0) as pages:
            return await pages.fetch(server.address)

    async with serving(once(OK), context) as server:
        assert await fetch(TlsFiles()) == PAGE
        assert await fetch(TlsFiles(verify=True, ca_cert_path=str(cert))) == PAGE
        with pytest.raises(ScrapeError, match="CERTIFICATE_VERIFY_FAILED"):
            await fetch(TlsFiles(verify=True))
