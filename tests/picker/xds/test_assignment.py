"""Which endpoints a proxy is told of."""

from __future__ import annotations

from picker.types import Endpoint
from picker.xds.assignment import Locality, assignment_of


def test_a_name_in_place_of_an_address_is_left_out() -> None:
    """Envoy would refuse all the others with it."""
    named, good = Endpoint("a", "worker.example", 1), Endpoint("b", "10.0.0.1", 1)
    found = assignment_of("pool", [named, good])
    assert found.localities == ((Locality(), (good,)),)
    assert (found.skipped, found.size) == (("default/a",), 1)


def test_an_address_is_told_once() -> None:
    """Of a pod that took over another one's address and port, one entry; ports are told apart."""
    old, new = Endpoint("a", "10.0.0.1", 1), Endpoint("b", "10.0.0.1", 1)
    other = Endpoint("c", "10.0.0.1", 2)
    assert assignment_of("pool", [new, other, old]).localities == ((Locality(), (old, other)),)


def test_endpoints_are_told_by_where_they_stand() -> None:
    """As their labels say, in a fixed order; those of which nothing is known are together."""
    zone = "topology.kubernetes.io/zone"
    places = {"a": "z2", "b": "z1", "c": None, "d": "z1"}
    endpoints = {
        name: Endpoint(name, f"10.0.0.{n}", 1, labels={zone: place} if place else {})
        for n, (name, place) in enumerate(places.items())
    }
    found = assignment_of("pool", endpoints.values())
    assert [(place.zone, [one.name for one in some]) for place, some in found.localities] == [
        ("", ["c"]),
        ("z1", ["b", "d"]),
        ("z2", ["a"]),
    ]
    assert found.size == 4


def test_an_address_with_a_zone_is_left_out() -> None:
    """It is one for this machine alone, and Envoy would refuse all the others with it."""
    zoned, good = Endpoint("a", "fe80::1%eth0", 1), Endpoint("b", "fd00::1", 1)
    found = assignment_of("pool", [zoned, good])
    assert (found.skipped, found.size) == (("default/a",), 1)
