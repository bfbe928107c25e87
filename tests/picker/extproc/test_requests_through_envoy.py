"""The real Envoy and this picker: bodies, tunnels and answers of other filters arrive whole."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from itertools import product
from random import Random
from typing import Any

import pytest

from picker.decisions.decision import Watchers
from picker.extproc.machine.request_phase import StreamSettings
from picker.extproc.server import build_server
from picker.metrics.picker_metrics import PickerMetrics
from picker.pool.datastore import Datastore
from picker.pool.inflight import InflightLoad
from picker.requestcontrol.director import Director
from picker.requestcontrol.pipeline import RequestContext
from picker.rpc.options import ServerOptions, TlsOptions
from picker.rpc.self_signed import self_signed
from picker.telemetry.request_metrics import RequestMetrics
from picker.types import Endpoint
from tests.support.fleet.envoy_front import NEEDS_ENVOY, Asking, Front, envoy_front
from tests.support.picker.first_candidate import first_candidate
from tests.support.picker.http_exchange import Answer, Ask, exchange
from tests.support.picker.odd_endpoint import EVENTS, OddEndpoint, odd_endpoint
from tests.support.picker.websocket import ECHOED, echoing, over_http1, over_http2
from tests.support.waiting import until

pytestmark = NEEDS_ENVOY

LISTENERS = {
    "duplex": Asking(),
    "duplex-none": Asking(response_body="NONE", allow_override=True),
    "duplex-buffered": Asking(response_body="BUFFERED"),
    "buffered-duplex": Asking("BUFFERED"),
    "buffered-skipping": Asking("BUFFERED", request_trailers="SKIP"),
    "buffered-none": Asking("BUFFERED", "NONE"),
    "buffered-asked": Asking("BUFFERED", "NONE", allow_override=True),
    "buffered-streamed": Asking("BUFFERED", "STREAMED"),
    "buffered-buffered": Asking("BUFFERED", "BUFFERED"),
    "buffered-partial": Asking("BUFFERED", "BUFFERED_PARTIAL"),
    # What Envoy Gateway writes for deploy/k8s/gateways/envoy-gateway.
    "envoy-gateway": Asking("BUFFERED", "STREAMED", "SKIP", "SKIP", allow_override=True),
    "tls": Asking(tls=True),
    "hurried": Asking(request_timeout="0.5s"),
    "buffered-hurried": Asking("BUFFERED", request_timeout="0.5s"),
    "observing": Asking("STREAMED", "STREAMED", observe=True),
}
SERVED = [name for name in LISTENERS if name != "observing" and "hurried" not in name]
# Envoy keeps 8 MiB here, and an endless stream would never end where it keeps the whole response.
STREAMING = [name for name in SERVED if not name.endswith("-buffered")]
EACH_CLIENT = pytest.mark.parametrize("http2", [False, True], ids=["http1", "http2"])
RENAMED = (("x-llm-d-model-name-rewrite", "big"),)
TUNNELS = {
    "tunnel-duplex": Asking(),
    "tunnel-duplex-none": Asking(response_body="NONE"),
    "tunnel-duplex-streamed": Asking(response_body="STREAMED"),
    "tunnel-buffered": Asking("BUFFERED", "NONE", allow_override=True),
    "tunnel-buffered-both": Asking("BUFFERED", "BUFFERED", allow_override=True),
    "tunnel-unseen": Asking("NONE", "NONE"),
}
LIMIT_SECONDS = 60.0
REQUEST_MODES = ("NONE", "STREAMED", "BUFFERED", "FULL_DUPLEX_STREAMED")
RESPONSE_MODES = ("NONE", "STREAMED", "BUFFERED", "BUFFERED_PARTIAL", "FULL_DUPLEX_STREAMED")
BEFORE = {
    f"{request}-{response}-{'override' if override else 'original'}": Asking(
        request, response, answering="before", override_host=override
    )
    for request, response, override in product(REQUEST_MODES, RESPONSE_MODES, (False, True))
}
BEHIND = {
    f"behind-{request}-{response}": Asking(request, response, answering="behind")
    for request, response in product(("BUFFERED", "FULL_DUPLEX_STREAMED"), RESPONSE_MODES)
}
LARGE = Random(1).randbytes(1_000_000)
# How each filter is asked for its answer: path, headers, status and text.
ANSWERS = {
    "fault": ("/v1/models", (("x-answer", "fault"),), 401, b"fault filter abort"),
    "rbac": ("/v1/models", (("x-answer", "rbac"),), 403, b"RBAC: access denied"),
    "limit": ("/limited", (), 429, b"local_rate_limited"),
}
EACH_ANSWER = pytest.mark.parametrize("expected", ANSWERS.values(), ids=ANSWERS)


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    with envoy_front(LISTENERS | TUNNELS | BEFORE | BEHIND) as running:
        yield running


@asynccontextmanager
async def directing(
    front: Front,
    port: int | None,
    *,
    settings: StreamSettings | None = None,
    watchers: Watchers | None = None,
) -> AsyncIterator[InflightLoad]:
    """Run a picker at both of Envoy's sockets, in front of one endpoint unless `port` is None."""
    datastore, inflight = Datastore(), InflightLoad()
    datastore.set_endpoints([] if port is None else [Endpoint("pod", "127.0.0.1", port)])
    director = Director(
        first_candidate(), RequestContext(datastore, inflight, Random(1), watchers or Watchers())
    )
    plain = ServerOptions(host=str(front.picker_socket))
    secret = ServerOptions(host=str(front.tls_picker_socket), tls=TlsOptions(self_signed()))
    servers = [build_server(director, options=one, settings=settings) for one in (plain, secret)]
    for server in servers:
        await server.start()
    try:
        yield inflight
    finally:
        for server in servers:
            await server.stop(1)


@asynccontextmanager
async def picking(
    front: Front, *, settings: StreamSettings | None = None, is_empty: bool = False
) -> AsyncIterator[tuple[OddEndpoint, InflightLoad]]:
    async with odd_endpoint() as endpoint:
        port = None if is_empty else endpoint.port
        async with directing(front, port, settings=settings) as inflight:
            yield endpoint, inflight


def noise(size: int) -> bytes:
    return Random(size).randbytes(size)


async def echoed(front: Front, name: str, ask: Ask, *, http2: bool) -> Answer:
    answer = await exchange(front.ports[name], ask, http2=http2)
    assert (answer.status, answer.complete) == (200, True), answer.body[:200]
    return answer


@EACH_CLIENT
@pytest.mark.parametrize("name", SERVED)
async def test_bodies_of_every_size_and_cut_arrive_unchanged(
    front: Front, name: str, http2: bool
) -> None:
    large = noise(4 * 1024 * 1024)
    chunks = [large[at : at + 65_521] for at in range(0, 1_000_000, 65_521)]
    async with picking(front) as (endpoint, inflight):
        for pieces, length in (
            ([], True),
            ([b"x"], True),
            ([noise(62_000)], True),
            ([noise(62_001)], True),
            ([large], True),
            ([b"x"], False),
            ([b"a", b"bc", b"d" * 70_000, b"e"], False),
            (chunks, False),
        ):
            ask = Ask("/echo", pieces, length=length)
            answer = await echoed(front, name, ask, http2=http2)
            assert answer.body == b"".join(pieces)
            assert endpoint.got[-1].body == answer.body
    assert inflight.total == 0


@EACH_CLIENT
@pytest.mark.parametrize("name", ["duplex", "duplex-none", "buffered-none", "buffered-streamed"])
async def test_a_stream_of_ten_thousand_events_arrives_unchanged(
    front: Front, name: str, http2: bool
) -> None:
    async with picking(front) as (_, inflight):
        answer = await echoed(front, name, Ask("/events", [b"{}"]), http2=http2)
        assert answer.body == b"".join(EVENTS)
    assert inflight.total == 0


@EACH_CLIENT
@pytest.mark.parametrize("name", SERVED)
async def test_trailers_pass_both_ways(front: Front, name: str, http2: bool) -> None:
    ask = Ask("/trailers", [b"body"], trailers=(("x-behind", "it"),))
    async with picking(front) as (endpoint, inflight):
        answer = await echoed(front, name, ask, http2=http2)
        assert (answer.body, answer.trailers) == (b"body", {"x-after": "all"})
        assert endpoint.got[-1].trailers == {"x-behind": "it"}
    assert inflight.total == 0


@pytest.mark.parametrize("name", SERVED)
async def test_owned_headers_pass_in_neither_direction(front: Front, name: str) -> None:
    headers = (
        ("x-gateway-destination-endpoint", "192.0.2.1:1"),
        ("x-prefiller-host-port", "192.0.2.1:1"),
        ("x-encoder-hosts-ports", "192.0.2.1:1"),
        ("x-slo-ttft-ms", "1"),
        ("x-mine", "kept"),
    )
    async with picking(front) as (endpoint, _):
        for ask in (
            Ask("/echo", [b"body"], headers=headers),
            Ask("/echo", method="GET", headers=headers),
        ):
            answer = await echoed(front, name, ask, http2=False)
            seen = endpoint.got[-1].headers
            assert not {name for name, value in headers[1:4]} & set(seen)
            assert seen["x-gateway-destination-endpoint"] == endpoint.host_port
            assert seen["x-mine"] == "kept"
            assert "x-llm-d-request-dropped-reason" not in answer.headers
            assert answer.headers["x-kept"] == "yes"
            assert "x-went-into-resp-headers" not in answer.headers


# Where the picker sees the body, or can ask for it, the client's own model name comes back.
@pytest.mark.parametrize(
    ("name", "model"),
    [(name, "big" if name in ("duplex-none", "buffered-none") else "m") for name in SERVED],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_model_name_is_put_back_wherever_the_body_can_be_seen(
    front: Front, name: str, model: str, stream: bool
) -> None:
    body = json.dumps({"model": "m", "prompt": "hi", "stream": stream}).encode()
    async with picking(front) as (endpoint, inflight):
        ask = Ask("/v1/completions", [body], headers=RENAMED)
        answer = await echoed(front, name, ask, http2=False)
        got = endpoint.got[-1]
        assert json.loads(got.body)["model"] == "big"
        assert int(got.headers.get("content-length", len(got.body))) == len(got.body)
        text = answer.body.removeprefix(b"data: ").partition(b"\n\n")[0]
        assert json.loads(text)["model"] == model
        assert answer.body.endswith(b"data: [DONE]\n\n") is stream
        assert int(answer.headers.get("content-length", len(answer.body))) == len(answer.body)
    assert inflight.total == 0


@pytest.mark.parametrize("name", ["duplex", "buffered-duplex", "buffered-skipping"])
async def test_refusals_reach_the_client(front: Front, name: str) -> None:
    port = front.ports[name]
    async with picking(front, settings=StreamSettings(max_body_bytes=300_000)) as (
        endpoint,
        inflight,
    ):
        headers = [("x-llm-d-model-name-rewrite", "n")]
        ask = Ask("/v1/completions", [b"no healthy upstream"], headers=headers)
        answer = await exchange(port, ask)
        assert (answer.status, answer.headers["content-type"]) == (400, "application/json")
        assert json.loads(answer.body)["error"]["type"] == "BadRequestError"
        assert (await exchange(port, Ask("/echo", [bytes(300_001)]))).status == 413
        if name == "buffered-duplex":  # shows trailers too late for a decision
            answer = await exchange(port, Ask("/echo", trailers=(("x-behind", "it"),)))
            assert answer.status == 400
            assert b"needs a body" in answer.body
        assert endpoint.got == []
        assert inflight.total == 0
    async with picking(front, is_empty=True):
        answer = await exchange(port, Ask("/v1/completions", [b'{"model": "m", "prompt": "p"}']))
        assert answer.status == 503
        assert answer.headers["x-llm-d-request-dropped-reason"] == "rejected-no-endpoints"


@pytest.mark.parametrize("name", ["hurried", "buffered-hurried"])
async def test_envoys_own_error_reaches_a_client_that_is_too_slow(front: Front, name: str) -> None:
    async with picking(front) as (endpoint, inflight):
        slow = Ask("/echo", [b"half of it"], length=False, has_end=False)
        assert (await exchange(front.ports[name], slow)).status == 408
        assert endpoint.got == []
        assert inflight.total == 0


async def test_a_proxy_that_only_observes_is_not_held_up(front: Front) -> None:
    """The request fails because this cluster has no other source of a destination."""
    async with picking(front) as (endpoint, _):
        answer = await exchange(front.ports["observing"], Ask("/echo", [b"body"]))
        assert answer.status == 503
        assert endpoint.got == []


@pytest.mark.parametrize("name", list(TUNNELS))
@pytest.mark.parametrize("talk", [over_http1, over_http2])
async def test_a_websocket_is_routed_at_its_headers(front: Front, name: str, talk) -> None:
    async with (
        echoing() as port,
        directing(front, port) as inflight,
        asyncio.timeout(LIMIT_SECONDS),
    ):
        assert await talk(front.ports[name]) == ECHOED
        await until(lambda: inflight.total == 0, what="the tunnel is released")


def counted(metrics: PickerMetrics, name: str) -> Mapping[str, float]:
    samples = (sample for family in metrics.registry.collect() for sample in family.samples)
    return {[*s.labels.values()][-1]: s.value for s in samples if s.name == name}


def asks(path: str, headers: tuple[tuple[str, str], ...]) -> list[Ask]:
    return [
        Ask(path, method="GET", headers=headers),
        Ask(path, headers=headers),
        Ask(path, [b'{"model": "m"}'], headers=headers),
        Ask(path, [LARGE], headers=headers),
        Ask(path, [b"a", b"bc", b"d" * 70_000, b"e"], headers=headers, length=False),
    ]


@EACH_ANSWER
async def test_an_answer_that_comes_before_the_picker_reaches_the_client(
    front: Front, caplog: pytest.LogCaptureFixture, expected: Any
) -> None:
    path, headers, status, text = expected
    caplog.set_level(logging.INFO)
    num_answers, metrics = 0, PickerMetrics()
    watchers = Watchers(RequestMetrics(metrics))
    async with directing(front, 1, watchers=watchers) as inflight:
        for name in BEFORE:
            if not headers:
                await exchange(front.ports[name], Ask(path, method="GET"))  # has the one token
        logged = len(caplog.records)
        before = counted(metrics, "pointsman_request_outcomes_total").get("skipped", 0)
        errors = counted(metrics, "llm_d_epp_request_error_total")
        for name in BEFORE:
            for ask in asks(path, headers):
                answer = await exchange(front.ports[name], ask)
                assert (answer.status, answer.complete) == (status, True), name
                assert answer.body == text, name
                num_answers += 1
    assert inflight.total == 0
    assert caplog.records[logged:] == []
    outcomes = counted(metrics, "pointsman_request_outcomes_total")
    assert outcomes["skipped"] - before == num_answers
    assert counted(metrics, "llm_d_epp_request_error_total") == errors


@EACH_ANSWER
async def test_an_answer_that_comes_behind_the_picker_reaches_the_client(
    front: Front, caplog: pytest.LogCaptureFixture, expected: Any
) -> None:
    path, headers, status, text = expected
    caplog.set_level(logging.WARNING)
    async with directing(front, 1) as inflight:
        for name in BEHIND:
            for ask in asks(path, headers):
                answer = await exchange(front.ports[name], ask)
                if not headers and answer.status == 503:
                    answer = await exchange(front.ports[name], ask)  # that had the one token
                assert (answer.status, answer.complete) == (status, True), name
                assert answer.body == text, name
    assert inflight.total == 0
    assert caplog.records == []
