"""Endpoints in Envoy's messages."""

from envoy.config.endpoint.v3 import endpoint_pb2
from google.protobuf.json_format import MessageToDict
from hypothesis import given
from hypothesis import strategies as st

from picker.types import Endpoint
from picker.xds import wire
from picker.xds.state.assignment import ZONE_LABEL
from tests.depth import examples


def test_an_endpoint_has_its_address_its_name_and_its_locality() -> None:
    labels = {
        "topology.kubernetes.io/region": "r",
        "topology.kubernetes.io/zone": "z",
        "topology.kubernetes.io/rack": "k",
        "app": "x",
    }
    endpoint = Endpoint("pod-1", "fd00::1", 8000, namespace="prod", labels=labels)
    resource = wire.resource(wire.assignment("pool", [endpoint]))
    message = endpoint_pb2.ClusterLoadAssignment.FromString(resource.body)
    names = {"name": "pod-1", "namespace": "prod"}
    assert MessageToDict(message, preserving_proto_field_name=True) == {
        "cluster_name": "pool",
        "endpoints": [
            {
                "locality": {"region": "r", "zone": "z", "sub_zone": "k"},
                "lb_endpoints": [
                    {
                        "endpoint": {
                            "address": {
                                "socket_address": {"address": "fd00::1", "port_value": 8000}
                            }
                        },
                        "health_status": "HEALTHY",
                        "metadata": {"filter_metadata": {"pointsman": names}},
                    }
                ],
            }
        ],
    }


def test_the_same_endpoints_have_the_same_version_in_any_order() -> None:
    endpoints = [Endpoint(f"e{n}", f"10.0.0.{n}", 8000) for n in range(5)]
    one = wire.resource(wire.assignment("pool", endpoints))
    assert wire.resource(wire.assignment("pool", reversed(endpoints))) == one
    assert wire.resource(wire.assignment("pool", endpoints[1:])).version != one.version
    assert wire.emptied("pool") == wire.resource(wire.assignment("pool", []))


STEPS = st.tuples(
    st.integers(0, 5),
    st.sampled_from([None, "10.0.0.1", "10.0.0.2", "worker.example", "fe80::1%eth0"]),
    st.sampled_from(["", "z1", "z2"]),
)


@examples(200)
@given(st.lists(STEPS, max_size=20))
def test_a_changed_assignment_equals_a_new_one(steps: list[tuple[int, str | None, str]]) -> None:
    changed, pool = wire.assignment("pool"), dict[int, Endpoint]()
    for number, address, zone in steps:
        if address is None:
            changed.remove(f"default/e{number}")
            pool.pop(number, None)
        else:
            pool[number] = Endpoint(f"e{number}", address, 8000, labels={ZONE_LABEL: zone})
            changed.put(pool[number])
        new = wire.assignment("pool", pool.values())
        assert wire.resource(changed) == wire.resource(new)
        assert (changed.size, changed.skipped) == (new.size, new.skipped)


@examples(50)
@given(st.lists(st.tuples(st.integers(1, 300), st.sampled_from(["", "z1", "z2"])), max_size=300))
def test_the_bytes_equal_those_of_the_whole_message(places: list[tuple[int, str]]) -> None:
    """All lengths are tried because the code writes the lengths of parts itself."""
    endpoints = [
        Endpoint(f"e{n}", f"10.0.0.{n % 250}", n, labels={ZONE_LABEL: z}) for n, z in places
    ]
    body = wire.resource(wire.assignment("pool", endpoints)).body
    message = endpoint_pb2.ClusterLoadAssignment.FromString(body)
    assert message.SerializeToString(deterministic=True) == body
    keys = [
        [one.endpoint.address.socket_address.port_value for one in group.lb_endpoints]
        for group in message.endpoints
    ]
    assert sorted(port for group in keys for port in group) == sorted({n for n, _ in places})
