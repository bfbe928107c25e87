"""Endpoints as Envoy reads of them."""

from __future__ import annotations

from envoy.config.endpoint.v3 import endpoint_pb2
from google.protobuf.json_format import MessageToDict
from hypothesis import given, settings
from hypothesis import strategies as st

from picker.types import Endpoint
from picker.xds import wire
from picker.xds.assignment import assignment_of


def test_an_endpoint_is_told_with_its_address_its_name_and_where_it_stands() -> None:
    """All that is said of one; its other labels are nobody's business."""
    labels = {
        "topology.kubernetes.io/region": "r",
        "topology.kubernetes.io/zone": "z",
        "topology.kubernetes.io/rack": "k",
        "app": "x",
    }
    endpoint = Endpoint("pod-1", "fd00::1", 8000, namespace="prod", labels=labels)
    resource = wire.AssignmentEncoder().encode(assignment_of("pool", [endpoint]))
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
    """An order that says nothing is no change."""
    endpoints = [Endpoint(f"e{n}", f"10.0.0.{n}", 8000) for n in range(5)]
    one = wire.AssignmentEncoder().encode(assignment_of("pool", endpoints))
    assert wire.AssignmentEncoder().encode(assignment_of("pool", reversed(endpoints))) == one
    assert (
        wire.AssignmentEncoder().encode(assignment_of("pool", endpoints[1:])).version != one.version
    )
    assert wire.emptied("pool") == wire.AssignmentEncoder().encode(assignment_of("pool", []))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.dictionaries(st.integers(0, 5), st.integers(1, 3), max_size=6), max_size=5))
def test_what_is_kept_of_the_last_assignment_changes_nothing(pools: list[dict[int, int]]) -> None:
    """An encoder that has encoded others says the same as a new one."""
    encoder = wire.AssignmentEncoder()
    known = {
        (n, port): Endpoint(f"e{n}", f"10.0.0.{n}", port) for n in range(6) for port in range(1, 4)
    }
    for pool in pools:
        assignment = assignment_of("pool", [known[one] for one in pool.items()])
        assert encoder.encode(assignment) == wire.AssignmentEncoder().encode(assignment)
