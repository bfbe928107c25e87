"""Converts between Envoy's discovery messages and values; no other file here knows the messages."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from envoy.config.core.v3 import address_pb2, base_pb2, health_check_pb2
from envoy.config.endpoint.v3 import endpoint_components_pb2, endpoint_pb2
from envoy.service.discovery.v3 import discovery_pb2
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError

from picker.rpc.calls import RpcError, Status
from picker.types import Endpoint
from picker.xds.state import delta, sotw
from picker.xds.state.assignment import Assignment, Locality
from picker.xds.state.cache import XdsResource, resource_of

ENDPOINT_TYPE = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment"
_EDS = "/envoy.service.endpoint.v3.EndpointDiscoveryService"
_ADS = "/envoy.service.discovery.v3.AggregatedDiscoveryService"
STREAM_ENDPOINTS = f"{_EDS}/StreamEndpoints"
DELTA_ENDPOINTS = f"{_EDS}/DeltaEndpoints"
FETCH_ENDPOINTS = f"{_EDS}/FetchEndpoints"
STREAM_AGGREGATED = f"{_ADS}/StreamAggregatedResources"
DELTA_AGGREGATED = f"{_ADS}/DeltaAggregatedResources"
METADATA_NAMESPACE = "pointsman"

_Assignment = endpoint_pb2.ClusterLoadAssignment
_Group = endpoint_components_pb2.LocalityLbEndpoints
_LENGTH_DELIMITED = 2  # a wire type
_GROUPS = _Assignment.DESCRIPTOR.fields_by_name["endpoints"].number

Q = TypeVar("Q")


@dataclass(frozen=True, slots=True)
class DecodedRequest(Generic[Q]):
    """A request, its type and sender; `node_id` may be "" after the first request of a stream."""

    type_url: str
    node_id: str
    request: Q


def sotw_request(data: bytes) -> DecodedRequest[sotw.SotwRequest]:
    message = _decoded(discovery_pb2.DiscoveryRequest, data)
    request = sotw.SotwRequest(
        names=tuple(message.resource_names), nonce=message.response_nonce, problem=_problem(message)
    )
    return DecodedRequest(message.type_url, message.node.id, request)


def delta_request(data: bytes) -> DecodedRequest[delta.DeltaRequest]:
    message = _decoded(discovery_pb2.DeltaDiscoveryRequest, data)
    request = delta.DeltaRequest(
        subscribe=tuple(message.resource_names_subscribe),
        unsubscribe=tuple(message.resource_names_unsubscribe),
        initial_versions=dict(message.initial_resource_versions),
        nonce=message.response_nonce,
        problem=_problem(message),
    )
    return DecodedRequest(message.type_url, message.node.id, request)


def sotw_response(response: sotw.SotwResponse) -> bytes:
    message = discovery_pb2.DiscoveryResponse(
        version_info=response.version,
        resources=[_packed(one) for one in response.resources],
        type_url=ENDPOINT_TYPE,
        nonce=response.nonce,
    )
    return cast("bytes", message.SerializeToString())


def delta_response(response: delta.DeltaResponse) -> bytes:
    message = discovery_pb2.DeltaDiscoveryResponse(
        resources=[
            discovery_pb2.Resource(name=one.name, version=one.version, resource=_packed(one))
            for one in response.resources
        ],
        removed_resources=response.removed,
        type_url=ENDPOINT_TYPE,
        nonce=response.nonce,
    )
    return cast("bytes", message.SerializeToString())


def assignment(cluster: str, endpoints: Iterable[Endpoint] = ()) -> Assignment:
    made = Assignment(cluster, _piece)
    for endpoint in endpoints:
        made.put(endpoint)
    return made


def resource(assignment: Assignment) -> XdsResource:
    """Encode an assignment; the same endpoints always give the same bytes.

    The encoded endpoints are concatenated, like the fields of a message: building messages of
    thousands of endpoints many times a second would take the time that decisions need.
    """
    parts = [_Assignment(cluster_name=assignment.cluster).SerializeToString()]
    for locality, pieces in assignment.places:
        head = _Group(locality=_locality(locality)).SerializeToString()
        parts += _delimited(_GROUPS, b"".join((head, *pieces)))
    return resource_of(assignment.cluster, b"".join(parts))


def emptied(cluster: str) -> XdsResource:
    return resource(assignment(cluster))


def _piece(endpoint: Endpoint) -> bytes:
    group = _Group(lb_endpoints=[_member(endpoint)])
    return cast("bytes", group.SerializeToString(deterministic=True))


def _delimited(number: int, value: bytes) -> tuple[bytes, bytes]:
    """Return the bytes of a message field `number`: tag, length and `value`."""
    head, rest = bytearray((number << 3 | _LENGTH_DELIMITED,)), len(value)
    while rest > 0x7F:
        head.append(rest & 0x7F | 0x80)
        rest >>= 7
    head.append(rest)
    return bytes(head), value


def _locality(locality: Locality) -> base_pb2.Locality | None:
    if locality == Locality():
        return None
    return base_pb2.Locality(region=locality.region, zone=locality.zone, sub_zone=locality.sub_zone)


def _member(endpoint: Endpoint) -> endpoint_components_pb2.LbEndpoint:
    """Return a healthy endpoint, with its name for access logs.

    The picker does not pick an ejected endpoint, and without a picker the proxy's own checks
    decide.
    """
    member = endpoint_components_pb2.LbEndpoint(
        health_status=health_check_pb2.HEALTHY,
        endpoint=endpoint_components_pb2.Endpoint(
            address=address_pb2.Address(
                socket_address=address_pb2.SocketAddress(
                    address=endpoint.address, port_value=endpoint.port
                )
            )
        ),
    )
    named = {"name": endpoint.name, "namespace": endpoint.namespace}
    member.metadata.filter_metadata[METADATA_NAMESPACE].update(named)
    return member


def _packed(resource: XdsResource) -> any_pb2.Any:
    return any_pb2.Any(type_url=ENDPOINT_TYPE, value=resource.body)


def _problem(message: Any) -> str | None:
    return str(message.error_detail.message) if message.HasField("error_detail") else None


def _decoded(kind: Any, data: bytes) -> Any:
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise RpcError(Status.INVALID_ARGUMENT, f"not a {kind.DESCRIPTOR.name}: {error}") from error
