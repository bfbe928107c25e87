"""The endpoints that a proxy is sent."""

from __future__ import annotations

from picker.types import Endpoint
from picker.xds.state.assignment import Assignment


def told(*endpoints: Endpoint) -> Assignment:
    """An assignment of these, each of them encoded to its name."""
    made = Assignment("pool", lambda endpoint: endpoint.name.encode())
    for endpoint in endpoints:
        made.put(endpoint)
    return made


def zones(assignment: Assignment) -> list[tuple[str, list[bytes]]]:
    return [(locality.zone, [*pieces]) for locality, pieces in assignment.places]


def test_a_name_in_place_of_an_address_is_left_out() -> None:
    """Envoy would refuse all the others with it."""
    found = told(Endpoint("a", "worker.example", 1), Endpoint("b", "10.0.0.1", 1))
    assert zones(found) == [("", [b"b"])]
    assert (found.skipped, found.size) == ({"default/a"}, 1)


def test_an_address_is_told_once() -> None:
    """Of a pod that took over another one's address and port, one entry; ports are told apart."""
    old, new = Endpoint("a", "10.0.0.1", 1), Endpoint("b", "10.0.0.1", 1)
    found = told(new, Endpoint("c", "10.0.0.1", 2), old)
    assert zones(found) == [("", [b"a", b"c"])]
    found.remove(old.key)
    assert zones(found) == [("", [b"b", b"c"])]


def test_endpoints_are_told_by_where_they_stand() -> None:
    """As their labels say, in a fixed order; those of which nothing is known are together."""
    zone = "topology.kubernetes.io/zone"
    places = {"a": "z2", "b": "z1", "c": None, "d": "z1"}
    endpoints = [
        Endpoint(name, f"10.0.0.{n}", 1, labels={zone: place} if place else {})
        for n, (name, place) in enumerate(places.items())
    ]
    found = told(*endpoints)
    assert zones(found) == [("", [b"c"]), ("z1", [b"b", b"d"]), ("z2", [b"a"])]
    assert found.size == 4


def test_an_address_with_a_zone_is_left_out() -> None:
    """It is one for this machine alone, and Envoy would refuse all the others with it."""
    found = told(Endpoint("a", "fe80::1%eth0", 1), Endpoint("b", "fd00::1", 1))
    assert (found.skipped, found.size) == ({"default/a"}, 1)
