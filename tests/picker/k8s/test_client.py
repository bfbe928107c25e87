"""The client over real sockets and bad paths, and its decoding of the bytes of an API server."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import msgspec
import pytest
import pytest_asyncio
from aiohttp.base_protocol import BaseProtocol
from hypothesis import given
from hypothesis import strategies as st

from picker.k8s.api import (
    LEASES,
    PODS,
    POOLS,
    ApiError,
    ApiResource,
    Selection,
    SilentError,
    UnreachableError,
)
from picker.k8s.client import (
    ClientLimits,
    KubernetesClient,
    WatchLines,
    api_error,
    decode_event,
    decode_listing,
    decode_object,
    read_bounded,
)
from picker.k8s.credentials import Access
from picker.k8s.reflector import Reflector, Subject
from tests.depth import examples
from tests.fakes.kube_api import statuses
from tests.fakes.kube_api.access import Rule
from tests.fakes.kube_api.faults import Fault
from tests.fakes.kube_api.kubelet import pod
from tests.fakes.kube_api.server import KubeApi, running_kube_api
from tests.fakes.kube_api.target import Target
from tests.support.certificates import certificates
from tests.support.kube.reflector_scene import CONFIGS, SELECTION, config, decode
from tests.support.kube.wired_client import answering, client_of
from tests.support.local_ports import free_port

POOL_CRD = Path(__file__).parents[3] / "crds"
ALL = Selection("default")
QUICK = ClientLimits(silent_seconds=0.4, connect_seconds=2, request_seconds=0.4, list_seconds=0.4)
DRIP_SECONDS = 0.1  # between two pieces: shorter than any limit
PATIENCE_SECONDS = 60
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest_asyncio.fixture
async def api() -> AsyncIterator[KubeApi]:
    async with asyncio.timeout(PATIENCE_SECONDS), running_kube_api() as running:
        yield running


@pytest_asyncio.fixture
async def client(api: KubeApi) -> AsyncIterator[KubernetesClient]:
    async with client_of(Access(api.url)) as opened:
        yield opened


class OfLaterPages(Fault):
    """An expired continue token affects only requests for a later page of a list."""

    def concerns(self, target: Target) -> bool:
        return "continue" in target.query and super().concerns(target)


def named(raws: Any) -> list[str]:
    return [msgspec.json.decode(raw)["metadata"]["name"] for raw in raws]


async def test_a_long_list_is_read_in_pages(api: KubeApi, client: KubernetesClient) -> None:
    for number in range(1201):
        api.write(config(f"n{number:04}"))
    version = str(api.store.version)
    listing = await client.list(CONFIGS, ALL)
    assert named(listing.items) == [f"n{number:04}" for number in range(1201)]
    assert listing.resource_version == version
    assert [one.query["limit"] for one in api.asked] == ["500"] * 3


async def test_a_list_whose_token_expires_starts_again(api: KubeApi) -> None:
    for number in range(5):
        api.write(config(f"n{number}"))
    async with client_of(Access(api.url), limits=ClientLimits(page_objects=2)) as client:
        api.faults.add(OfLaterPages(("list",), times=1, error=statuses.expired_continue()))
        listing = await client.list(CONFIGS, ALL)
        assert named(listing.items) == [f"n{number}" for number in range(5)]
        pages = ["later" if "continue" in one.query else "first" for one in api.asked]
        assert pages == ["first", "later", "first", "later", "later"]


async def test_a_list_whose_token_always_expires_is_given_up(api: KubeApi) -> None:
    api.faults.answer(statuses.expired_continue(), "list")
    async with client_of(Access(api.url)) as client:
        with pytest.raises(ApiError, match="410"):
            await client.list(CONFIGS, ALL)
    assert len(api.asked) == 3


async def test_selectors_reach_the_server(api: KubeApi, client: KubernetesClient) -> None:
    api.write(config("a"))
    api.write(config("b", app="y"))
    assert named((await client.list(CONFIGS, SELECTION)).items) == ["a"]
    by_name = Selection("default", field_selector="metadata.name=b")
    assert named((await client.list(CONFIGS, by_name)).items) == ["b"]
    async with client.watch(CONFIGS, by_name, str(api.store.version)) as events:
        api.write(config("a", "2"))
        api.write(config("b", "2", app="y"))
        event = await anext(events)
        assert named([event.object]) == ["b"]
    query = api.asked[-1].query
    assert query["allowWatchBookmarks"] == "true"
    assert 18 <= int(query["timeoutSeconds"]) <= 24


async def test_objects_of_three_megabytes_arrive_whole(
    api: KubeApi, client: KubernetesClient
) -> None:
    large = config("large", "x" * 3 * 2**20)
    api.write(large)
    (raw,) = (await client.list(CONFIGS, ALL)).items
    assert len(decode(raw) or "") == 3 * 2**20
    async with client.watch(CONFIGS, ALL, "1000") as events:
        api.write(config("small"))
        found = [await anext(events), await anext(events)]
    assert [len(decode(one.object) or "") for one in found] == [3 * 2**20, 1]


async def test_a_watch_ends_when_the_server_ends_it(api: KubeApi, client: KubernetesClient) -> None:
    async with client.watch(CONFIGS, ALL, str(api.store.version)) as events:
        api.watches.end()
        assert [event async for event in events] == []
    assert await client.has(PODS)


async def test_a_watch_that_is_cut_off_is_unreachable(
    api: KubeApi, client: KubernetesClient
) -> None:
    async with client.watch(CONFIGS, ALL, str(api.store.version)) as events:
        api.write(config("a"))
        assert named([(await anext(events)).object]) == ["a"]
        api.watches.end(abruptly=True)
        with pytest.raises(UnreachableError):
            await anext(events)


async def test_leaving_a_watch_closes_its_connection(
    api: KubeApi, client: KubernetesClient
) -> None:
    async with client.watch(CONFIGS, ALL, str(api.store.version)) as events:
        api.write(config("a"))
        await anext(events)
    await api.watches.wait_for(0)


@pytest.mark.looptime
async def test_a_silent_watch_is_given_up(api: KubeApi) -> None:
    async with (
        client_of(Access(api.url), limits=QUICK) as client,
        client.watch(CONFIGS, ALL, str(api.store.version)) as events,
    ):
        api.watches.silence()
        with pytest.raises(SilentError):
            await anext(events)


async def test_a_request_that_is_not_answered_is_given_up(api: KubeApi) -> None:
    api.faults.add(Fault(hangs=True))
    async with client_of(Access(api.url), limits=QUICK) as client:
        with pytest.raises(UnreachableError):
            await client.list(CONFIGS, ALL)
        with pytest.raises(UnreachableError):
            await client.get(PODS, "default", "a")
        with pytest.raises(UnreachableError):
            async with client.watch(CONFIGS, ALL, "1"):
                pytest.fail("the watch is not open")
    api.faults.lift()


async def test_a_server_that_is_gone_is_unreachable(api: KubeApi, client: KubernetesClient) -> None:
    assert await client.has(PODS)
    await api.go_away()
    for _ in range(2):
        with pytest.raises(UnreachableError, match=r"127\.0\.0\.1"):
            await client.list(CONFIGS, ALL)
    await api.come_back()
    assert await client.has(PODS)
    api.faults.add(Fault(drops=True))
    with pytest.raises(UnreachableError):
        await client.list(CONFIGS, ALL)


async def test_a_name_that_does_not_exist_is_unreachable() -> None:
    for url in ("http://no-such-host.invalid:1", "http://127.0.0.1:99999", "http://"):
        async with client_of(Access(url), limits=QUICK) as client:
            with pytest.raises(UnreachableError):
                await client.list(CONFIGS, ALL)


async def test_a_kind_that_is_not_served_is_a_404_in_text(
    api: KubeApi, client: KubernetesClient
) -> None:
    with pytest.raises(ApiError, match="page not found") as raised:
        await client.list(POOLS, ALL)
    assert raised.value.status == 404
    assert not await client.has(POOLS)
    api.install(*POOL_CRD.glob("inference.networking.k8s.io_*.yaml"))
    assert await client.has(POOLS)
    assert not await client.has(ApiResource(POOLS.group, POOLS.version, "others"))
    assert (await client.list(POOLS, ALL)).items == []


async def test_objects_are_written_and_read(api: KubeApi, client: KubernetesClient) -> None:
    lease: dict[str, Any] = {
        "apiVersion": LEASES.api_version,
        "kind": "Lease",
        "metadata": {"name": "leader"},
        "spec": {"holderIdentity": "a", "leaseDurationSeconds": 15},
    }
    made = await client.send("POST", LEASES.path("default"), lease)
    assert made == await client.get(LEASES, "default", "leader")
    with pytest.raises(ApiError) as taken:
        await client.send("POST", LEASES.path("default"), lease)
    assert (taken.value.status, taken.value.reason) == (409, "AlreadyExists")
    made["spec"]["holderIdentity"] = "b"
    stored = await client.send("PUT", LEASES.path("default", "leader"), made)
    assert stored["spec"]["holderIdentity"] == "b"
    with pytest.raises(ApiError) as stale:
        await client.send("PUT", LEASES.path("default", "leader"), made)
    assert (stale.value.status, stale.value.reason) == (409, "Conflict")
    with pytest.raises(ApiError) as missing:
        await client.get(LEASES, "default", "other")
    assert missing.value.reason == "NotFound"
    with pytest.raises(ApiError):
        await client.send("POST", "/apis/authentication.k8s.io/v1/tokenreviews", {})


async def test_a_refused_token_is_renewed_once(api: KubeApi) -> None:
    api.access.grant("new", "picker", [Rule(("",), ("configmaps",), ("list",))])
    old, new = Access(api.url, "Bearer old"), Access(api.url, "Bearer new")
    async with client_of(old, new) as client:
        assert (await client.list(CONFIGS, ALL)).items == []
    async with client_of(old) as client:
        with pytest.raises(ApiError) as raised:
            await client.list(CONFIGS, ALL)
    assert raised.value.status == 401
    assert len(api.asked) == 3


@pytest.mark.parametrize(
    "pieces",
    [
        (b"garbage\r\n\r\n",),
        (HEAD + b"Content-Length: 6\r\n\r\n<html>",),
        (HEAD + b"Content-Length: 100\r\n\r\n{",),
        (HEAD + b"Content-Length: 2\r\n\r\n[]",),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",),
        (HEAD + b"Content-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc",),
        (b"",),
    ],
)
async def test_bytes_that_are_no_http_mean_unreachable(pieces: tuple[bytes, ...]) -> None:
    async with answering(*pieces) as url, client_of(Access(url), limits=QUICK) as client:
        with pytest.raises(UnreachableError):
            await client.list(CONFIGS, ALL)
        with pytest.raises(UnreachableError):
            await client.get(PODS, "default", "a")
        with pytest.raises(UnreachableError):
            async with client.watch(CONFIGS, ALL, "1") as events:
                await anext(events)


async def test_a_redirect_is_not_followed() -> None:
    head = b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n"
    async with answering(head) as url, client_of(Access(url, "Bearer x")) as client:
        with pytest.raises(ApiError) as raised:
            await client.list(CONFIGS, ALL)
    assert raised.value.status == 302


async def test_half_a_line_at_the_end_of_a_watch_is_no_event() -> None:
    lines = b'{"type":"ADDED","object":{"metadata":{"name":"a"}}}\n{"type":"ADD'
    sent = HEAD + b"Content-Length: %d\r\n\r\n" % len(lines) + lines
    async with (
        answering(sent) as url,
        client_of(Access(url)) as client,
        client.watch(CONFIGS, ALL, "1") as events,
    ):
        assert named([(await anext(events)).object]) == ["a"]
        with pytest.raises(UnreachableError, match="middle of a line"):
            await anext(events)


async def test_a_list_that_never_ends_is_given_up() -> None:
    page = b'{"metadata":{"continue":"x","resourceVersion":"5"},"items":[]}'
    sent = HEAD + b"Content-Length: %d\r\nConnection: close\r\n\r\n" % len(page) + page
    limits = ClientLimits(max_pages=20)
    async with answering(sent) as url, client_of(Access(url), limits=limits) as client:
        with pytest.raises(UnreachableError, match="not end after 20 pages"):
            await client.list(CONFIGS, ALL)


async def test_a_client_that_is_closed_says_so(api: KubeApi) -> None:
    async with client_of(Access(api.url)) as client:
        pass
    with pytest.raises(UnreachableError, match="closed"):
        await client.list(CONFIGS, ALL)


async def test_pods_are_followed_through_a_restart_of_the_server(
    api: KubeApi, client: KubernetesClient
) -> None:
    for number in range(700):
        api.write(pod(f"p{number}", "10.0.0.1", {"app": "x"}))
    views: asyncio.Queue[set[str]] = asyncio.Queue()
    reflector = Reflector(
        client,
        Subject(PODS, SELECTION, lambda raw: named([raw])[0]),
        rng=Random(1),
        clock=asyncio.get_running_loop().time,
    )
    reflector.subscribe(lambda view, _: views.put_nowait(set(view.values())))
    async with asyncio.TaskGroup() as group:
        running = group.create_task(reflector.run())
        assert len(await views.get()) == 700
        await api.watches.wait_for(1)
        api.erase("pods", "p0")
        assert len(await views.get()) == 699
        await api.go_away()
        api.erase("pods", "p1")
        api.write(pod("late", "10.0.0.2", {"app": "x"}))
        await api.come_back(forget_changes=True)
        seen = await views.get()
        assert seen == {f"p{number}" for number in range(2, 700)} | {"late"}
        assert reflector.problem() is None
        running.cancel()


async def test_the_error_of_a_proxy_that_refuses_omits_its_password() -> None:
    refusal = b"HTTP/1.1 407 Who are you\r\nContent-Length: 0\r\n\r\n"
    async with asyncio.timeout(PATIENCE_SECONDS), answering(refusal) as url:
        proxy = url.replace("://", "://me:top-secret@")
        async with client_of(Access("https://10.0.0.1", proxy=proxy)) as client:
            with pytest.raises(UnreachableError, match="407 Who are you") as raised:
                await client.list(PODS, ALL)
    assert "top-secret" not in str(raised.value)


# On bad paths


@asynccontextmanager
async def dripping(head: bytes, drops: Iterable[bytes]) -> AsyncIterator[str]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(head)
            for drop in drops:
                writer.write(drop)
                await writer.drain()
                await asyncio.sleep(DRIP_SECONDS)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def watched(client: KubernetesClient) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS), client.watch(PODS, ALL, "1") as events:
        await anext(events)


async def test_a_proxy_that_does_not_answer_is_given_up() -> None:
    async with (
        answering(holds=True) as url,
        client_of(Access("https://10.0.0.1", proxy=url), limits=QUICK) as client,
    ):
        with pytest.raises(UnreachableError, match="no answer in time"):
            await watched(client)
        with pytest.raises(UnreachableError, match="no answer in time"):
            await client.list(PODS, ALL)


async def refused(access: Access) -> str:
    async with client_of(access) as client:
        with pytest.raises(UnreachableError) as raised:
            await client.list(PODS, ALL)
    return str(raised.value)


@pytest.mark.parametrize("tls", [None, ssl.create_default_context()])
async def test_a_closed_port_is_named_in_the_error(tls: ssl.SSLContext | None) -> None:
    url = f"{'http' if tls is None else 'https'}://127.0.0.1:{free_port()}"
    place = url.partition("//")[2]
    said = await refused(Access(url, tls=tls))
    assert said == f"no connection to {place}: Connection refused"


async def test_an_unknown_host_is_named_in_the_error() -> None:
    said = await refused(Access("https://nowhere.invalid", tls=ssl.create_default_context()))
    assert said.startswith("no connection to nowhere.invalid:443: ")
    assert "<" not in said


@pytest.mark.parametrize(
    ("pieces", "why"),
    [
        ((), "the connection was closed without an answer"),
        ((b"HTTP/1.1 200 OK\r\n",), "the connection was closed without an answer"),
        ((HEAD + b"Content-Length: 100\r\n\r\n{",), "the answer broke off"),
        ((CHUNKED + b"5\r\nab",), "the answer broke off"),
    ],
)
async def test_an_answer_that_breaks_off_is_named_in_the_error(
    pieces: tuple[bytes, ...], why: str
) -> None:
    async with answering(*pieces) as url:
        assert await refused(Access(url)) == why


@pytest.mark.parametrize(
    ("has_tls", "why"), [(True, "the certificate is not accepted: "), (False, "TLS failed: ")]
)
async def test_an_untrusted_server_is_named_in_the_error(
    tmp_path: Path, has_tls: bool, why: str
) -> None:
    folder = certificates(tmp_path, "localhost")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "tls.crt", folder / "tls.key")

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context if has_tls else None)
    port = server.sockets[0].getsockname()[1]
    try:
        said = await refused(Access(f"https://localhost:{port}", tls=ssl.create_default_context()))
    finally:
        server.close()
    assert said.startswith(f"no connection to localhost:{port}: {why}")
    assert not set(said) & set("<>(_")


async def test_an_answer_whose_head_does_not_end_is_given_up() -> None:
    headers = (b"X-%d: y\r\n" % number for number in range(300))
    async with (
        dripping(b"HTTP/1.1 200 OK\r\n", headers) as url,
        client_of(Access(url), limits=QUICK) as client,
    ):
        with pytest.raises(UnreachableError, match="no answer in time"):
            await watched(client)


@pytest.mark.looptime
async def test_blanks_do_not_keep_a_watch_alive() -> None:
    """A proxy's heartbeat proves nothing about the server behind it."""
    async with (
        dripping(CHUNKED, (b"2\r\n \n\r\n" for _ in range(300))) as url,
        client_of(Access(url), limits=QUICK) as client,
    ):
        with pytest.raises(SilentError):
            await watched(client)


@pytest.mark.looptime
async def test_events_keep_a_watch_alive() -> None:
    line = b'{"type":"ADDED","object":{"metadata":{"name":"a"}}}\n'
    halves = [line[:20], line[20:]]
    chunks = [b"%x\r\n%s\r\n" % (len(half), half) for half in halves]
    async with (
        asyncio.timeout(PATIENCE_SECONDS),
        dripping(CHUNKED, [*chunks * 5, b"0\r\n\r\n"]) as url,
        client_of(Access(url), limits=QUICK) as client,
        client.watch(PODS, ALL, "1") as events,
    ):
        assert len([event async for event in events]) == 5


async def test_a_refusal_in_several_chunks_is_read_whole() -> None:
    body = json.dumps(statuses.too_many_requests("busy", 7).body()).encode()
    head = b"HTTP/1.1 429 Busy\r\nContent-Length: %d\r\n\r\n" % len(body)
    async with dripping(head, (body[:20], body[20:])) as url, client_of(Access(url)) as client:
        with pytest.raises(ApiError, match="TooManyRequests: busy") as raised:
            await client.list(PODS, ALL)
    assert raised.value.retry_after_seconds == 7


async def test_a_refusal_that_breaks_off_is_one() -> None:
    """The status is enough: an expired version must not be tried again."""
    head = b'HTTP/1.1 410 Gone\r\nContent-Length: 100\r\n\r\n{"kind":'
    async with answering(head) as url, client_of(Access(url)) as client:
        with pytest.raises(ApiError) as raised:
            await watched(client)
    assert raised.value.status == 410


async def test_an_html_page_is_no_watch() -> None:
    """A login page answers 200 to every request; it must not pass for a healthy server."""
    page = b"<html>Sign in</html>"
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=utf-8\r\n"
    sent = head + b"Content-Length: %d\r\n\r\n" % len(page) + page
    async with answering(sent) as url, client_of(Access(url)) as client:
        with pytest.raises(UnreachableError, match="text/html"):
            async with client.watch(PODS, ALL, "1"):
                pytest.fail("it opened")
        with pytest.raises(UnreachableError, match="text/html"):
            await client.list(PODS, ALL)


@examples(100)
@given(st.lists(st.binary(max_size=20)), st.lists(st.integers(1, 30)))
def test_lines_do_not_depend_on_the_cuts_between_chunks(
    lines: list[bytes], sizes: list[int]
) -> None:
    wanted = [line for one in lines for line in one.split(b"\n") if line.strip()]
    sent = b"".join(line + b"\n" for line in lines)
    cutter, found, at = WatchLines(), [], 0
    for size in [*sizes, len(sent)]:
        found += list(cutter.added(sent[at : at + size]))
        at += size
    cutter.check_whole()
    assert found == wanted


def test_a_line_that_does_not_end_is_refused() -> None:
    cutter = WatchLines(max_bytes=10)
    assert list(cutter.added(b"0123456789")) == []
    assert list(cutter.added(b"\n")) == [b"0123456789"]
    with pytest.raises(UnreachableError, match="more than 10 bytes"):
        list(cutter.added(b"01234567890"))


def test_an_end_within_a_line_is_an_error() -> None:
    cutter = WatchLines()
    list(cutter.added(b'{"a":1}\n \r\n'))
    cutter.check_whole()
    list(cutter.added(b'{"type"'))
    with pytest.raises(UnreachableError, match="middle of a line"):
        cutter.check_whole()


def test_an_event_keeps_its_object_as_it_came() -> None:
    event = decode_event(b'{"object": {"a" :  1.50}, "type": "ADDED"}')
    assert event.kind == "ADDED"
    assert bytes(event.object) == b'{"a" :  1.50}'


def test_an_error_event_is_raised_with_all_its_fields() -> None:
    status = {"code": 429, "reason": "TooMany", "details": {"retryAfterSeconds": 3}}
    line = json.dumps({"type": "ERROR", "object": status | {"message": "later"}}).encode()
    with pytest.raises(ApiError, match="429 TooMany: later") as raised:
        decode_event(line)
    assert raised.value.retry_after_seconds == 3


@pytest.mark.parametrize("line", [b"", b"x", b"[]", b'{"type":1}', b'{"type":"ADDED"}', b"\xff"])
def test_a_line_that_is_no_event_is_refused(line: bytes) -> None:
    with pytest.raises(UnreachableError, match="a line is no event"):
        decode_event(line)


@pytest.mark.parametrize(
    ("status", "headers", "body", "wanted"),
    [
        (404, {}, b"404 page not found\n", (404, "", "404 page not found", None)),
        (503, {"Retry-After": "7"}, b"<html>", (503, "", "<html>", 7)),
        (503, {"Retry-After": "Wed, 21 Oct"}, b"", (503, "", "", None)),
        (429, {"Retry-After": "1"}, b'{"details":{"retryAfterSeconds":9}}', (429, "", None, 9)),
        (500, {}, b'{"code":"x"}', (500, "", '{"code":"x"}', None)),
        (
            None,
            {},
            b'{"code":410,"reason":"Expired","message":"old"}',
            (410, "Expired", "old", None),
        ),
        (None, {}, b'"what"', (500, "", '"what"', None)),
        (502, {}, b"\xff\x00" * 400, (502, "", None, None)),
        (200, {}, b'{"message":null,"details":null}', (200, "", None, None)),
    ],
)
def test_a_refusal_is_reported_with_any_body(
    status: int | None, headers: dict[str, str], body: bytes, wanted: tuple[Any, ...]
) -> None:
    error = api_error(status, headers, body)
    reported = (error.status, error.reason, error.message, error.retry_after_seconds)
    assert [two for one, two in zip(reported, wanted, strict=True) if two is not None] == [
        one for one, two in zip(reported, wanted, strict=True) if two is not None
    ]
    assert len(error.message) <= 200


def test_a_page_has_its_objects_and_its_continue_token() -> None:
    page = decode_listing(b'{"metadata":{"continue":"x","resourceVersion":"5"},"items":[{"a":1}]}')
    assert (page.metadata.continue_, page.metadata.resource_version) == ("x", "5")
    assert [bytes(one) for one in page.objects] == [b'{"a":1}']
    assert decode_listing(b'{"metadata":{"resourceVersion":"5"},"items":null}').objects == []


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>",
        b"[]",
        b'{"items":[]}',
        b'{"metadata":{"items"',
        b'{"kind":"Status","metadata":{},"status":"Success"}',
        b'{"metadata":{},"items":[]}',
    ],
)
def test_a_body_that_is_no_list_is_refused(body: bytes) -> None:
    with pytest.raises(UnreachableError, match="no list"):
        decode_listing(body)
    with pytest.raises(UnreachableError, match="no object"):
        decode_object(b"[1]")


def test_an_unreadable_object_is_not_quoted() -> None:
    """The object may be a review that contains a token."""
    with pytest.raises(UnreachableError) as raised:
        decode_object(b'{"kind":"TokenReview","spec":{"token":"top-secret"')
    assert "top-secret" not in str(raised.value)


def test_a_refusal_without_end_is_cut() -> None:
    """The text is logged and shown to operators."""
    body = json.dumps({"kind": "Status", "reason": "r" * 10**6, "message": "m" * 10**6}).encode()
    error = api_error(403, {}, body)
    assert len(str(error)) < 2000
    assert error.status == 403


async def test_an_answer_is_read_up_to_its_limit() -> None:
    loop = asyncio.get_running_loop()

    def of_bytes(size: int) -> aiohttp.StreamReader:
        stream = aiohttp.StreamReader(BaseProtocol(loop), 2**16, loop=loop)
        stream.feed_data(bytes(size))
        stream.feed_eof()
        return stream

    assert await read_bounded(of_bytes(10), 10) == bytes(10)
    with pytest.raises(UnreachableError, match="more than 10 bytes"):
        await read_bounded(of_bytes(11), 10)
