"""The endpoints that are published to a proxy."""

from picker.types import Endpoint
from picker.xds.state.assignment import Assignment


def published(*endpoints: Endpoint) -> Assignment:
    made = Assignment("pool", lambda endpoint: endpoint.name.encode())
    for endpoint in endpoints:
        made.put(endpoint)
    return made


def zones(assignment: Assignment) -> list[tuple[str, list[bytes]]]:
    return [(locality.zone, [*pieces]) for locality, pieces in assignment.places]


def test_an_endpoint_with_a_host_name_is_skipped() -> None:
    """Envoy would reject all others with it."""
    found = published(Endpoint("a", "worker.example", 1), Endpoint("b", "10.0.0.1", 1))
    assert zones(found) == [("", [b"b"])]
    assert (found.skipped, found.size) == ({"default/a"}, 1)


def test_an_address_is_published_once() -> None:
    """A pod that took over the address of another one is one entry; ports are distinct."""
    old, new = Endpoint("a", "10.0.0.1", 1), Endpoint("b", "10.0.0.1", 1)
    found = published(new, Endpoint("c", "10.0.0.1", 2), old)
    assert zones(found) == [("", [b"a", b"c"])]
    found.remove(old.key)
    assert zones(found) == [("", [b"b", b"c"])]


def test_endpoints_are_grouped_by_locality() -> None:
    zone = "topology.kubernetes.io/zone"
    places = {"a": "z2", "b": "z1", "c": None, "d": "z1"}
    endpoints = [
        Endpoint(name, f"10.0.0.{n}", 1, labels={zone: place} if place else {})
        for n, (name, place) in enumerate(places.items())
    ]
    found = published(*endpoints)
    assert zones(found) == [("", [b"c"]), ("z1", [b"b", b"d"]), ("z2", [b"a"])]
    assert found.size == 4


def test_an_address_with_a_zone_is_skipped() -> None:
    """It is valid on one machine only, and Envoy would reject all others with it."""
    found = published(Endpoint("a", "fe80::1%eth0", 1), Endpoint("b", "fd00::1", 1))
    assert (found.skipped, found.size) == ({"default/a"}, 1)
