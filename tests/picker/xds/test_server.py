"""Endpoint discovery over calls, also of pools that are not known yet."""

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
    def __init__(self, *awaited: str) -> None:
        self.cache = Cache(awaited)
        self.series = PickerMetrics().xds
        self.methods = EndpointDiscovery(self.cache, self.series).methods()

    def publish(self, *ports: int, cluster: str = "pool") -> None:
        endpoints = [Endpoint(f"e{port}", "10.0.0.1", port) for port in ports]
        self.cache.publish([wire.resource(wire.assignment(cluster, endpoints))])

    def call(self, path: str) -> Any:
        return calling(self.methods[path], DeltaResponse if "Delta" in path else Response)

    def counted(self, name: str) -> dict[str, float]:
        return {labels[0]: number for labels, number in getattr(self.series, name).numbers()}


@pytest.fixture
def served() -> Served:
    return Served()


def asking(is_delta: bool, name: str = "pool", **fields: Any) -> Any:
    if is_delta:
        return DeltaRequest(resource_names_subscribe=[name], node={"id": "n"}, **fields)
    return Request(resource_names=[name], node={"id": "n"}, **fields)


def answer(is_delta: bool, response: Any, problem: str | None = None) -> Any:
    fields: dict[str, Any] = {"response_nonce": response.nonce, "type_url": wire.ENDPOINT_TYPE}
    if problem is not None:
        fields["error_detail"] = {"code": 13, "message": problem}
    return DeltaRequest(**fields) if is_delta else Request(resource_names=["pool"], **fields)


@VARIANTS
@pytest.mark.parametrize("is_aggregated", [False, True], ids=["eds", "ads"])
async def test_a_client_receives_the_endpoints_and_every_change(
    served: Served, is_delta: bool, is_aggregated: bool
) -> None:
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
            served.publish(*ports)
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
async def test_a_rejection_is_logged_once_with_its_reason(
    served: Served, is_delta: bool, caplog: pytest.LogCaptureFixture
) -> None:
    served.publish(1)
    async with served.call(wire.DELTA_ENDPOINTS if is_delta else wire.STREAM_ENDPOINTS) as call:
        call.send(asking(is_delta))
        for port in (2, 3, 4):
            call.send(answer(is_delta, await call.receive(), "malformed IP address"))
            await call.silence()
            served.publish(port)
        call.send(answer(is_delta, await call.receive()))
    assert served.counted("nacks_total") == {"delta" if is_delta else "sotw": 3.0}
    (line,) = [one.getMessage() for one in caplog.records if one.levelno == logging.ERROR]
    assert line == "the proxy 'n' rejects the endpoints: malformed IP address"


async def test_a_delta_client_that_reconnects_receives_nothing_it_has(served: Served) -> None:
    """Versions identify contents, so this holds even after a restart of the picker."""
    served.publish(1, 2)
    async with served.call(wire.DELTA_ENDPOINTS) as call:
        call.send(asking(is_delta=True))
        (known,) = (await call.receive()).resources
    restarted = Served()
    async with restarted.call(wire.DELTA_ENDPOINTS) as call:
        call.send(asking(is_delta=True, initial_resource_versions={"pool": known.version}))
        await call.silence()
        restarted.publish(2, 1)
        await call.silence()
        restarted.publish(1)
        assert assignments(await call.receive()) == {"pool": ["10.0.0.1:1"]}


@VARIANTS
async def test_an_unserved_cluster_is_named_in_the_log(
    served: Served, is_delta: bool, caplog: pytest.LogCaptureFixture
) -> None:
    served.publish(1)
    async with served.call(wire.DELTA_ENDPOINTS if is_delta else wire.STREAM_ENDPOINTS) as call:
        call.send(asking(is_delta, "other"))
        if is_delta:
            response = await call.receive()
            assert (list(response.resources), list(response.removed_resources)) == ([], ["other"])
        await call.silence()
        served.publish(2)
        await call.silence()
    (line,) = [one.getMessage() for one in caplog.records]
    assert line == "the proxy 'n' requests endpoints of 'other'; served: 'pool'"


@pytest.mark.parametrize(
    "path", [wire.STREAM_ENDPOINTS, wire.DELTA_ENDPOINTS, wire.FETCH_ENDPOINTS]
)
async def test_the_service_of_endpoints_refuses_other_types(served: Served, path: str) -> None:
    async with served.call(path) as call:
        call.send(asking("Delta" in path, type_url=CLUSTERS))
        failure = await call.failure()
    assert failure.status is Status.INVALID_ARGUMENT
    assert str(failure) == f"'{CLUSTERS}' is not served here, only {wire.ENDPOINT_TYPE}"
    assert dict(served.series.clients.numbers()) == {(): 0.0}


async def test_the_aggregated_service_ignores_other_types(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    served.publish(1)
    async with served.call(wire.STREAM_AGGREGATED) as call:
        for _ in range(2):
            call.send(Request(type_url=CLUSTERS, node={"id": "n"}))
        await call.silence()
        call.send(Request(type_url=wire.ENDPOINT_TYPE, resource_names=["pool"]))
        assert assignments(await call.receive()) == {"pool": ["10.0.0.1:1"]}
        call.send(Request(resource_names=["pool"]))
        assert str(await call.failure()) == "a request without a type"
    assert [one.getMessage() for one in caplog.records] == [
        f"the proxy 'n' requests {CLUSTERS}: only endpoints are served here"
    ]


@pytest.mark.parametrize("path", [wire.STREAM_ENDPOINTS, wire.DELTA_AGGREGATED])
async def test_invalid_bytes_end_the_stream(served: Served, path: str) -> None:
    async with served.call(path) as call:
        call.send(b"\xff\xff\xff")
        failure = await call.failure()
    assert failure.status is Status.INVALID_ARGUMENT
    assert "DiscoveryRequest: " in str(failure)


async def test_endpoints_can_be_fetched_once(served: Served) -> None:
    served.publish(1)
    async with served.call(wire.FETCH_ENDPOINTS) as call:
        call.send(Request(resource_names=["pool"]))
        assert assignments(await call.receive()) == {"pool": ["10.0.0.1:1"]}


async def test_a_failed_fetch_has_a_status_and_a_reason(served: Served) -> None:
    for status, request in (
        (Status.UNAVAILABLE, Request(resource_names=["pool"])),
        (Status.NOT_FOUND, Request(resource_names=["other"])),
        (Status.INVALID_ARGUMENT, None),
    ):
        async with served.call(wire.FETCH_ENDPOINTS) as call:
            if request is not None:
                call.send(request)
            assert (await call.failure()).status is status
        served.publish(1)


@VARIANTS
async def test_a_client_with_too_many_names_is_refused(served: Served, is_delta: bool) -> None:
    served.publish(1)
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
async def test_a_client_can_cause_few_lines_of_the_log(
    served: Served, is_delta: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    served.publish(1)
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
            served.publish(number)
    lines = [one.getMessage() for one in caplog.records]
    assert 3 <= len(lines) <= 3 * MAX_LINES
    assert max(map(len, lines)) < 2000
    assert not any("\n" in line for line in lines)


async def test_a_thousand_calls_leave_no_watchers(served: Served) -> None:
    served.publish(1)
    for number in range(1000):
        async with served.call(wire.STREAM_ENDPOINTS) as call:
            call.send(b"\xff" if number % 2 else asking(is_delta=False))
            if number % 2:
                assert (await call.failure()).status is Status.INVALID_ARGUMENT
    assert served.cache._watchers == []
    assert dict(served.series.clients.numbers()) == {(): 0.0}


async def test_a_fetch_of_an_awaited_name_is_unavailable(caplog: pytest.LogCaptureFixture) -> None:
    served = Served("a", "b")
    served.cache.update(wire.emptied("a"))
    for name, status in (("b", Status.UNAVAILABLE), ("z", Status.NOT_FOUND)):
        async with served.call(wire.FETCH_ENDPOINTS) as call:
            call.send(Request(resource_names=[name]))
            assert (await call.failure()).status is status
    caplog.clear()
    async with served.call(wire.STREAM_ENDPOINTS) as call:
        call.send(Request(resource_names=["a", "b"]))
        assert assignments(await call.receive()) == {"a": []}
    assert caplog.records == []
