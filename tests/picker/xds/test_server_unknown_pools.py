"""Endpoint discovery of several pools while one of them is not known yet."""

import logging
from typing import Any

import pytest
from envoy.service.discovery.v3 import discovery_pb2

from picker.metrics.picker_metrics import PickerMetrics
from picker.rpc.calls import Status
from picker.xds import wire
from picker.xds.server import EndpointDiscovery
from picker.xds.state import delta, sotw
from picker.xds.state.cache import Cache, ResourceSet, XdsResource, resource_of
from picker.xds.state.delta import DeltaSession
from picker.xds.state.sotw import SotwSession
from tests.support.picker.xds_call import assignments, calling


def resource(name: str, text: str) -> XdsResource:
    return resource_of(name, text.encode())


def known(*awaited: str, **contents: str) -> ResourceSet:
    cache = Cache((*awaited, *contents))
    for name, text in contents.items():
        cache.update(resource(name, text))
    assert cache.current is not None
    return cache.current


def said(response: delta.DeltaResponse | None) -> tuple[dict[str, str], set[str]] | None:
    if response is None:
        return None
    return {r.name: r.body.decode() for r in response.resources}, set(response.removed)


def test_a_published_name_is_no_longer_awaited() -> None:
    cache = Cache(("a", "b", "c"))
    assert cache.current is None
    cache.update(resource("a", "1"))
    assert cache.current.awaited == {"b", "c"}
    cache.publish([resource("b", "1")])
    assert cache.current.awaited == {"c"}
    assert known("b", a="1").awaited == {"b"}


@pytest.mark.parametrize("had", [{}, {"b": "old"}], ids=["new", "again"])
def test_nothing_is_sent_about_an_awaited_name(had: dict[str, str]) -> None:
    session = DeltaSession()
    session.receive(delta.DeltaRequest(("a", "b", "z"), initial_versions=had))
    response = session.poll(known("b", a="1"))
    assert said(response) == ({"a": "1"}, {"z"})
    session.receive(delta.DeltaRequest(nonce=response.nonce))
    assert session.poll(known("b", a="1")) is None
    assert said(session.poll(known(a="1", b="1"))) == ({"b": "1"}, set())


def test_a_wildcard_client_keeps_its_awaited_resources() -> None:
    session = DeltaSession()
    session.receive(delta.DeltaRequest(initial_versions={"b": "old", "z": "old"}))
    assert said(session.poll(known("b", a="1"))) == ({"a": "1"}, {"z"})


def test_a_repeated_subscription_is_answered_once_the_pool_is_known() -> None:
    """This holds even with the same version: the client may have dropped the content."""
    session = DeltaSession()
    has = resource("b", "1").version
    session.receive(delta.DeltaRequest(("a", "b"), initial_versions={"b": has}))
    response = session.poll(known("b", a="1"))
    assert said(response) == ({"a": "1"}, set())
    session.receive(delta.DeltaRequest(("b",), nonce=response.nonce))
    response = session.poll(known("b", a="2"))
    assert said(response) == ({"a": "2"}, set())
    session.receive(delta.DeltaRequest(nonce=response.nonce))
    assert said(session.poll(known(a="2", b="1"))) == ({"b": "1"}, set())


def test_the_removal_of_a_published_name_is_sent() -> None:
    session = DeltaSession()
    session.receive(delta.DeltaRequest(("a", "b")))
    cache = Cache(("a", "b"))
    cache.publish([resource("a", "1"), resource("b", "1")])
    response = session.poll(cache.current)
    session.receive(delta.DeltaRequest(nonce=response.nonce))
    cache.publish([resource("a", "1")])
    assert said(session.poll(cache.current)) == ({}, {"b"})


def test_the_state_of_the_world_variant_is_silent_too() -> None:
    """A resource that is absent from a response stays."""
    session = SotwSession(lambda name: resource(name, "emptied"))
    session.receive(sotw.SotwRequest(("a", "b")))
    response = session.poll(known("b", a="1"))
    assert [one.name for one in response.resources] == ["a"]


async def test_a_fetch_of_an_awaited_name_is_unavailable(caplog: pytest.LogCaptureFixture) -> None:
    cache = Cache(("a", "b"))
    methods = EndpointDiscovery(cache, PickerMetrics().xds).methods()
    cache.update(wire.emptied("a"))
    request: Any = discovery_pb2.DiscoveryRequest
    for names, status in ((["b"], Status.UNAVAILABLE), (["z"], Status.NOT_FOUND)):
        async with calling(methods[wire.FETCH_ENDPOINTS], discovery_pb2.DiscoveryResponse) as call:
            call.send(request(resource_names=names))
            assert (await call.failure()).status is status
    with caplog.at_level(logging.WARNING, "picker.xds.server"):
        async with calling(methods[wire.STREAM_ENDPOINTS], discovery_pb2.DiscoveryResponse) as call:
            call.send(request(resource_names=["a", "b"]))
            assert assignments(await call.receive()) == {"a": []}
    assert caplog.records == []
