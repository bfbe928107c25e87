"""Endpoint discovery over calls: what is answered, refused, counted and logged."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from envoy.service.discovery.v3 import discovery_pb2

from picker.metrics.picker_metrics import PickerMetrics
from picker.rpc.calls import Status
from picker.types import Endpoint
from picker.xds import wire
from picker.xds.server import MAX_LINES, MAX_NAMES, EndpointDiscovery
from picker.xds.state.cache import Cache
from tests.support.picker.xds_call import assignments, calling

Request, Response = discovery_pb2.DiscoveryRequest, discovery_pb2.DiscoveryResponse
DeltaRequest = discovery_pb2.DeltaDiscoveryRequest
DeltaResponse = discovery_pb2.DeltaDiscoveryResponse
CLUSTERS = "type.googleapis.com/envoy.config.cluster.v3.Cluster"
VARIANTS = pytest.mark.parametrize("is_delta", [False, True], ids=["sotw", "delta"])


class Served:
    """The methods, what they tell of, and what they count."""

    def __init__(self) -> None:
        self.cache = Cache()
        self.series = PickerMetrics().xds
        self.methods = EndpointDiscovery(self.cache, self.series).methods()

    def tell(self, *ports: int, cluster: str = "pool") -> None:
        """Let the pool be endpoints at these ports."""
        endpoints = [Endpoint(f"e{port}", "10.0.0.1", port) for port in ports]
        self.cache.publish([wire.resource(wire.assignment(cluster, endpoints))])

    def call(self, path: str) -> Any:
        """A call of a method."""
        return calling(self.methods[path], DeltaResponse if "Delta" in path else Response)

    def counted(self, name: str) -> dict[str, float]:
        """A counter by the variant."""
        return {labels[0]: number for labels, number in getattr(self.series, name).numbers()}


@pytest.fixture
def served() -> Served:
    """One that knows nothing yet."""
    return Served()


def asking(is_delta: bool, name: str = "pool", **fields: Any) -> Any:
    """The first request of a client."""
    if is_delta:
        return DeltaRequest(resource_names_subscribe=[name], node={"id": "n"}, **fields)
    return Request(resource_names=[name], node={"id": "n"}, **fields)


def answer(is_delta: bool, response: Any, problem: str | None = None) -> Any:
    """What the client says to a response."""
    fields: dict[str, Any] = {"response_nonce": response.nonce, "type_url": wire.ENDPOINT_TYPE}
    if problem is not None:
        fields["error_detail"] = {"code": 13, "message": problem}
    return DeltaRequest(**fields) if is_delta else Request(resource_names=["pool"], **fields)


@VARIANTS
@pytest.mark.parametrize("is_aggregated", [False, True], ids=["eds", "ads"])
async def test_a_client_is_told_of_the_endpoints_and_of_every_change(
    served: Served, is_delta: bool, is_aggregated: bool
) -> None:
    """Over the service of endpoints and over the one of all types; all is counted."""
    paths = {
        (False, False): wire.STREAM_ENDPOINTS,
        (False, True): wire.STREAM_AGGREGATED,
        (True, False): wire.DELTA_ENDPOINTS,
        (True, True): wire.DELTA_AGGREGATED,
    }
    async with served.call(paths[is_delta, is_aggregated]) as call:
        call.send(asking(is_delta, type_url=wire.ENDPOINT_TYPE))
        await call.silence()  # nothing is known yet
        for ports in ((1,), (1, 2), ()):
            served.tell(*ports)
            response = await call.receive()
            assert response.type_url == wire.ENDPOINT_TYPE
            assert assignments(response) == {"pool": [f"10.0.0.1:{port}" for port in ports]}
            call.send(answer(is_delta, response))
        await call.silence()
        assert dict(served.series.clients.numbers()) == {(): 1.0}
    variant = "delta" if is_delta else "sotw"
    assert dict(served.series.clients.numbers()) == {(): 0.0}
    assert served.counted("responses_total") == served.counted("acks_total") == {variant: 3.0}
    assert served.counted("nacks_total") == {}


@VARIANTS
async def test_a_refusal_is_logged_once_with_the_reason(
    served: Served, is_delta: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """However often it is repeated, and every one is counted."""
    served.tell(1)
    async with served.call(wire.DELTA_ENDPOINTS if is_delta else wire.STREAM_ENDPOINTS) as call:
        call.send(asking(is_delta))
        for port in (2, 3, 4):
            call.send(answer(is_delta, await call.receive(), "malformed IP address"))
            await call.silence()
            served.tell(port)
        call.send(answer(is_delta, await call.receive()))
    assert served.counted("nacks_total") == {"delta" if is_delta else "sotw": 3.0}
    (line,) = [one.getMessage() for one in caplog.records if one.levelno == logging.ERROR]
    assert line == "the proxy 'n' refuses the endpoints it was sent: malformed IP address"


async def test_a_delta_client_that_comes_back_is_told_nothing_it_knows(served: Served) -> None:
    """Also by a picker that was started meanwhile: versions are those of contents."""
    served.tell(1, 2)
    async with served.call(wire.DELTA_ENDPOINTS) as call:
        call.send(asking(is_delta=True))
        (known,) = (await call.receive()).resources
    restarted = Served()
    async with restarted.call(wire.DELTA_ENDPOINTS) as call:
        call.send(asking(is_delta=True, initial_resource_versions={"pool": known.version}))
        await call.silence()
        restarted.tell(2, 1)
        await call.silence()
        restarted.tell(1)
        assert assignments(await call.receive()) == {"pool": ["10.0.0.1:1"]}


@VARIANTS
async def test_a_cluster_that_nobody_has_is_named_in_the_log(
    served: Served, is_delta: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The client hears what the protocol has for that: a removal, or nothing."""
    served.tell(1)
    async with served.call(wire.DELTA_ENDPOINTS if is_delta else wire.STREAM_ENDPOINTS) as call:
        call.send(asking(is_delta, "other"))
        if is_delta:
            response = await call.receive()
            assert (list(response.resources), list(response.removed_resources)) == ([], ["other"])
        await call.silence()
        served.tell(2)
        await call.silence()
    (line,) = [one.getMessage() for one in caplog.records]
    assert line == "the proxy 'n' asks for endpoints of 'other': here are 'pool'"


@pytest.mark.parametrize(
    "path", [wire.STREAM_ENDPOINTS, wire.DELTA_ENDPOINTS, wire.FETCH_ENDPOINTS]
)
async def test_other_types_are_refused_where_only_endpoints_can_be_asked_for(
    served: Served, path: str
) -> None:
    """With a status and a sentence that says what is served."""
    async with served.call(path) as call:
        call.send(asking("Delta" in path, type_url=CLUSTERS))
        failure = await call.failure()
    assert failure.status is Status.INVALID_ARGUMENT
    assert str(failure) == f"'{CLUSTERS}' is not served here, only {wire.ENDPOINT_TYPE}"
    assert dict(served.series.clients.numbers()) == {(): 0.0}


async def test_other_types_are_passed_over_where_all_can_be_asked_for(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    """Endpoints are served beside them; a request without a type ends the stream."""
    caplog.set_level(logging.INFO)
    served.tell(1)
    async with served.call(wire.STREAM_AGGREGATED) as call:
        for _ in range(2):
            call.send(Request(type_url=CLUSTERS, node={"id": "n"}))
        await call.silence()
        call.send(Request(type_url=wire.ENDPOINT_TYPE, resource_names=["pool"]))
        assert assignments(await call.receive()) == {"pool": ["10.0.0.1:1"]}
        call.send(Request(resource_names=["pool"]))
        assert str(await call.failure()) == "a request of no type"
    assert [one.getMessage() for one in caplog.records] == [
        f"the proxy 'n' asks for {CLUSTERS}: only endpoints are served here"
    ]


@pytest.mark.parametrize("path", [wire.STREAM_ENDPOINTS, wire.DELTA_AGGREGATED])
async def test_bytes_that_are_no_request_end_the_stream(served: Served, path: str) -> None:
    """The status blames the client."""
    async with served.call(path) as call:
        call.send(b"\xff\xff\xff")
        failure = await call.failure()
    assert failure.status is Status.INVALID_ARGUMENT
    assert "DiscoveryRequest: " in str(failure)


async def test_endpoints_can_be_fetched_once(served: Served) -> None:
    """One request, one response."""
    served.tell(1)
    async with served.call(wire.FETCH_ENDPOINTS) as call:
        call.send(Request(resource_names=["pool"]))
        assert assignments(await call.receive()) == {"pool": ["10.0.0.1:1"]}


async def test_what_cannot_be_fetched_is_an_error_that_says_why(served: Served) -> None:
    """Nothing is known yet; nobody has it; nothing was asked."""
    for status, request in (
        (Status.UNAVAILABLE, Request(resource_names=["pool"])),
        (Status.NOT_FOUND, Request(resource_names=["other"])),
        (Status.INVALID_ARGUMENT, None),
    ):
        async with served.call(wire.FETCH_ENDPOINTS) as call:
            if request is not None:
                call.send(request)
            assert (await call.failure()).status is status
        served.tell(1)


@VARIANTS
async def test_a_client_that_asks_for_too_many_names_is_sent_away(
    served: Served, is_delta: bool
) -> None:
    """All at once or, where one can, some with every request."""
    served.tell(1)
    names = [f"n{number}" for number in range(MAX_NAMES + 1)]
    async with served.call(wire.DELTA_ENDPOINTS if is_delta else wire.STREAM_ENDPOINTS) as call:
        call.send(asking(is_delta))
        if is_delta:
            call.send(DeltaRequest(resource_names_subscribe=names[:MAX_NAMES]))
        else:
            call.send(Request(resource_names=names, response_nonce=(await call.receive()).nonce))
        failure = await call.failure()
    assert failure.status is Status.RESOURCE_EXHAUSTED
    assert dict(served.series.clients.numbers()) == {(): 0.0}


@VARIANTS
async def test_what_a_client_says_takes_little_of_the_log(
    served: Served, is_delta: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """However many names it asks for, however long they are and however often it is refused."""
    caplog.set_level(logging.INFO)
    served.tell(1)
    names = [f"{number}\n" + "x" * 500 for number in range(500)]
    async with served.call(wire.DELTA_AGGREGATED if is_delta else wire.STREAM_AGGREGATED) as call:
        for number in range(100):
            asked = asking(is_delta, type_url=f"{CLUSTERS}{number}")
            asked.node.id = "n\n" * 500
            call.send(asked)
        if is_delta:
            first = DeltaRequest(resource_names_subscribe=[*names, "pool"])
        else:
            first = Request(resource_names=[*names, "pool"])
        first.type_url = wire.ENDPOINT_TYPE
        call.send(first)
        for number in range(2, 102):
            call.send(answer(is_delta, await call.receive(), f"{number}\n" + "y" * 5000))
            await call.silence()
            served.tell(number)
    lines = [one.getMessage() for one in caplog.records]
    assert 3 <= len(lines) <= 3 * MAX_LINES
    assert max(map(len, lines)) < 2000
    assert not any("\n" in line for line in lines)


async def test_a_thousand_calls_leave_nothing_behind(served: Served) -> None:
    """Neither those that end in order nor those that break off are notified of changes any more."""
    served.tell(1)
    for number in range(1000):
        async with served.call(wire.STREAM_ENDPOINTS) as call:
            call.send(b"\xff" if number % 2 else asking(is_delta=False))
            if number % 2:
                assert (await call.failure()).status is Status.INVALID_ARGUMENT
    assert served.cache._watchers == []
    assert dict(served.series.clients.numbers()) == {(): 0.0}
