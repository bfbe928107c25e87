"""Endpoints that Envoy is told of while it runs: by a picker, or by a file."""

from __future__ import annotations

from envoy.config.cluster.v3 import cluster_pb2
from envoy.config.core.v3 import (
    backoff_pb2,
    base_pb2,
    config_source_pb2,
    grpc_service_pb2,
    protocol_pb2,
)
from envoy.config.endpoint.v3 import endpoint_components_pb2, endpoint_pb2
from envoy.extensions.upstreams.http.v3 import http_protocol_options_pb2

from fleet.envoy.proto import address, packed, seconds
from fleet.envoy.settings import EndpointDiscovery

DISCOVERY = "xds"
_HTTP_OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
_Source = config_source_pb2.ApiConfigSource


def follow_a_file(cluster: cluster_pb2.Cluster, path: str) -> None:
    """Take the endpoints of `cluster` from a file, whenever it is replaced."""
    source = config_source_pb2.PathConfigSource(path=path)
    _discovered(cluster).path_config_source.CopyFrom(source)


def ask_the_picker(cluster: cluster_pb2.Cluster, discovery: EndpointDiscovery) -> None:
    """Take the endpoints of `cluster` from a picker. While it is away, the last ones stay.

    A picker that comes back is found again within two seconds: Envoy's default is half a minute.
    """
    back_off = backoff_pb2.BackoffStrategy(base_interval=seconds(0.25), max_interval=seconds(2.0))
    service = grpc_service_pb2.GrpcService(
        envoy_grpc=grpc_service_pb2.GrpcService.EnvoyGrpc(
            cluster_name=DISCOVERY, retry_policy=base_pb2.RetryPolicy(retry_back_off=back_off)
        )
    )
    source = _Source(
        api_type=_Source.DELTA_GRPC if discovery.is_delta else _Source.GRPC,
        transport_api_version=config_source_pb2.V3,
        set_node_on_first_message_only=True,
        grpc_services=[service],
    )
    _discovered(cluster).api_config_source.CopyFrom(source)
    cluster.eds_cluster_config.service_name = discovery.pool_name


def _discovered(cluster: cluster_pb2.Cluster) -> config_source_pb2.ConfigSource:
    """Where the endpoints of `cluster` come from, to be filled in.

    What leaves the pool is forgotten at once. By default Envoy would keep it for as long as it
    passes health checks, as a pod that is ending does, and send it what the picker does not decide.
    """
    cluster.type = cluster_pb2.Cluster.EDS
    cluster.ignore_health_on_host_removal = True
    source = cluster.eds_cluster_config.eds_config
    source.resource_api_version = config_source_pb2.V3
    return source


def discovery_cluster(discovery: EndpointDiscovery) -> cluster_pb2.Cluster:
    """The picker as the one who knows the endpoints.

    It has no health checks, since nobody else could be asked; pings find out that it hangs.
    """
    keepalive = protocol_pb2.KeepaliveSettings(interval=seconds(5.0), timeout=seconds(2.0))
    member = endpoint_components_pb2.LbEndpoint(
        endpoint=endpoint_components_pb2.Endpoint(address=address(discovery.picker))
    )
    return cluster_pb2.Cluster(
        name=DISCOVERY,
        type=cluster_pb2.Cluster.STATIC,
        connect_timeout=seconds(1.0),
        load_assignment=endpoint_pb2.ClusterLoadAssignment(
            cluster_name=DISCOVERY,
            endpoints=[endpoint_components_pb2.LocalityLbEndpoints(lb_endpoints=[member])],
        ),
        typed_extension_protocol_options={
            _HTTP_OPTIONS: packed(
                http_protocol_options_pb2.HttpProtocolOptions(
                    explicit_http_config=http_protocol_options_pb2.HttpProtocolOptions.ExplicitHttpConfig(
                        http2_protocol_options=protocol_pb2.Http2ProtocolOptions(
                            connection_keepalive=keepalive
                        )
                    )
                )
            )
        },
    )
