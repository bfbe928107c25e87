"""The destinations of requests: the pool of workers and the picker, with their health checks, and
the sources from which Envoy learns of them.
"""

from collections.abc import Sequence
from dataclasses import replace

from envoy.config.cluster.v3 import circuit_breaker_pb2, cluster_pb2, outlier_detection_pb2
from envoy.config.core.v3 import (
    backoff_pb2,
    base_pb2,
    config_source_pb2,
    grpc_service_pb2,
    health_check_pb2,
    protocol_pb2,
)
from envoy.config.endpoint.v3 import endpoint_components_pb2, endpoint_pb2
from envoy.extensions.load_balancing_policies.least_request.v3 import least_request_pb2
from envoy.extensions.load_balancing_policies.override_host.v3 import override_host_pb2
from envoy.extensions.upstreams.http.v3 import http_protocol_options_pb2
from envoy.type.metadata.v3 import metadata_pb2
from envoy.type.v3 import percent_pb2
from google.protobuf import any_pb2
from google.protobuf.message import Message

from fleet.envoy.proto import address, boolean, extension, packed, seconds, uint32
from fleet.envoy.settings import (
    DESTINATION_KEY,
    DESTINATION_NAMESPACE,
    BootstrapConfig,
    EndpointDiscovery,
    Limits,
    Mechanism,
    SocketAddress,
)

POOL = "pool"
PICKER = "picker"
DISCOVERY = "xds"
EXT_PROC_SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
_HTTP_OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
_Source = config_source_pb2.ApiConfigSource

# Workers close idle keep-alive connections after 5 s (uvicorn's default); closing first avoids
# sending a request into a connection that is being closed.
_UPSTREAM_IDLE_SECONDS = 4.0


def assignment(
    cluster: str,
    endpoints: Sequence[SocketAddress],
    health: Sequence[SocketAddress | None] | None = None,
) -> endpoint_pb2.ClusterLoadAssignment:
    """List the endpoints of `cluster`; `health` is the address for health checks if it differs."""
    members = [
        endpoint_components_pb2.LbEndpoint(
            endpoint=endpoint_components_pb2.Endpoint(
                address=address(endpoint),
                health_check_config=None
                if asked is None
                else endpoint_components_pb2.Endpoint.HealthCheckConfig(address=address(asked)),
            )
        )
        for endpoint, asked in zip(endpoints, health or [None] * len(endpoints), strict=True)
    ]
    locality = endpoint_components_pb2.LocalityLbEndpoints(lb_endpoints=members)
    return endpoint_pb2.ClusterLoadAssignment(cluster_name=cluster, endpoints=[locality])


def pool_clusters(config: BootstrapConfig) -> list[cluster_pb2.Cluster]:
    if not config.pools:
        return [_pool_cluster(config, POOL)]
    return [_pool_cluster(_of_pool(config, name), name) for name in config.pools]


def _of_pool(config: BootstrapConfig, name: str) -> BootstrapConfig:
    if config.discovery is None:
        return config
    return replace(config, discovery=replace(config.discovery, pool_name=name))


def _pool_cluster(config: BootstrapConfig, name: str) -> cluster_pb2.Cluster:
    cluster = cluster_pb2.Cluster(
        name=name,
        connect_timeout=seconds(1.0),
        per_connection_buffer_limit_bytes=uint32(1024 * 1024),
        circuit_breakers=_circuit_breakers(config.limits),
        typed_extension_protocol_options=_speaking(
            _UPSTREAM_IDLE_SECONDS, http_protocol_options=protocol_pb2.Http1ProtocolOptions()
        ),
    )
    if config.mechanism is Mechanism.ORIGINAL_DST:
        _go_where_the_header_says(cluster)
    else:
        _go_where_the_metadata_says(cluster, config)
    return cluster


def _go_where_the_header_says(cluster: cluster_pb2.Cluster) -> None:
    cluster.type = cluster_pb2.Cluster.ORIGINAL_DST
    cluster.lb_policy = cluster_pb2.Cluster.CLUSTER_PROVIDED
    cluster.original_dst_lb_config.CopyFrom(
        cluster_pb2.Cluster.OriginalDstLbConfig(
            use_http_header=True, http_header_name=DESTINATION_KEY
        )
    )


def _go_where_the_metadata_says(cluster: cluster_pb2.Cluster, config: BootstrapConfig) -> None:
    if config.discovery is not None:
        ask_the_picker(cluster, config.discovery)
    elif config.endpoints_file is None:
        cluster.type = cluster_pb2.Cluster.STATIC
        cluster.load_assignment.CopyFrom(assignment(POOL, config.endpoints))
    else:
        follow_a_file(cluster, config.endpoints_file)
    cluster.common_lb_config.CopyFrom(_believe_health_at_once())
    cluster.load_balancing_policy.policies.add().typed_extension_config.CopyFrom(
        extension("envoy.load_balancing_policies.override_host", _override_host())
    )
    asked = health_check_pb2.HealthCheck.HttpHealthCheck(path="/health")
    cluster.health_checks.append(_health_check(2, http_health_check=asked))
    cluster.outlier_detection.CopyFrom(
        outlier_detection_pb2.OutlierDetection(
            interval=seconds(1.0),
            base_ejection_time=seconds(1.0),
            max_ejection_time=seconds(30.0),
            max_ejection_percent=uint32(50),
            consecutive_5xx=uint32(5),
            split_external_local_origin_errors=True,
            consecutive_local_origin_failure=uint32(2),
        )
    )


def _override_host() -> override_host_pb2.OverrideHost:
    key = metadata_pb2.MetadataKey(
        key=DESTINATION_NAMESPACE, path=[metadata_pb2.MetadataKey.PathSegment(key=DESTINATION_KEY)]
    )
    policy = override_host_pb2.OverrideHost(
        override_host_sources=[override_host_pb2.OverrideHost.OverrideHostSource(metadata=key)]
    )
    policy.fallback_policy.policies.add().typed_extension_config.CopyFrom(
        extension(
            "envoy.load_balancing_policies.least_request",
            least_request_pb2.LeastRequest(choice_count=uint32(2)),
        )
    )
    return policy


def picker_cluster(config: BootstrapConfig) -> cluster_pb2.Cluster:
    """Build the picker's cluster. One failed stream, or one failed health check, takes it out of
    use: a request whose body is on its way to a dead picker cannot be saved, the next one can.
    """
    http2 = protocol_pb2.Http2ProtocolOptions(max_concurrent_streams=uint32(2**20))
    asked = health_check_pb2.HealthCheck.GrpcHealthCheck(service_name=EXT_PROC_SERVICE)
    cluster = cluster_pb2.Cluster(
        name=PICKER,
        connect_timeout=seconds(0.25),
        circuit_breakers=_circuit_breakers(config.limits),
        common_lb_config=_believe_health_at_once(),
        typed_extension_protocol_options=_speaking(http2_protocol_options=http2),
        health_checks=[_health_check(1, grpc_health_check=asked)],
        outlier_detection=outlier_detection_pb2.OutlierDetection(
            interval=seconds(1.0),
            base_ejection_time=seconds(1.0),
            max_ejection_time=seconds(2.0),
            max_ejection_percent=uint32(100),
            split_external_local_origin_errors=True,
            consecutive_local_origin_failure=uint32(1),
            successful_active_health_check_uneject_host=boolean(True),
        ),
    )
    if config.pickers_file is None:
        cluster.type = cluster_pb2.Cluster.STATIC
        found = assignment(PICKER, [config.picker], [config.picker_health])
        cluster.load_assignment.CopyFrom(found)
    else:
        follow_a_file(cluster, config.pickers_file)
    return cluster


def _health_check(failures: int, **asked: Message) -> health_check_pb2.HealthCheck:
    return health_check_pb2.HealthCheck(
        timeout=seconds(2.0),
        interval=seconds(1.0),
        # The interval until the first request, when clients wait for a fleet that starts.
        no_traffic_interval=seconds(0.25),
        unhealthy_interval=seconds(0.25),
        unhealthy_edge_interval=seconds(0.25),
        unhealthy_threshold=uint32(failures),
        healthy_threshold=uint32(1),
        **asked,
    )


def _speaking(idle_seconds: float | None = None, **protocol: Message) -> dict[str, any_pb2.Any]:
    options = http_protocol_options_pb2.HttpProtocolOptions(explicit_http_config=protocol)
    if idle_seconds is not None:
        options.common_http_protocol_options.idle_timeout.CopyFrom(seconds(idle_seconds))
    return {_HTTP_OPTIONS: packed(options)}


def follow_a_file(cluster: cluster_pb2.Cluster, path: str) -> None:
    source = config_source_pb2.PathConfigSource(path=path)
    _discovered(cluster).path_config_source.CopyFrom(source)


def ask_the_picker(cluster: cluster_pb2.Cluster, discovery: EndpointDiscovery) -> None:
    """Take the endpoints of `cluster` from a picker. While it does not answer, the last ones stay.
    A picker that returns is found within two seconds; Envoy's default is half a minute.
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
    """A source for the endpoints of `cluster`, to be filled in. Endpoints that leave are removed at
    once: by default Envoy would use them until they fail health checks, which a terminating pod
    passes.
    """
    cluster.type = cluster_pb2.Cluster.EDS
    cluster.ignore_health_on_host_removal = True
    source = cluster.eds_cluster_config.eds_config
    source.resource_api_version = config_source_pb2.V3
    return source


def discovery_cluster(discovery: EndpointDiscovery) -> cluster_pb2.Cluster:
    """The picker as the source of endpoints. It has no health checks, since there is no other one
    to ask; pings detect that it hangs.
    """
    keepalive = protocol_pb2.KeepaliveSettings(interval=seconds(5.0), timeout=seconds(2.0))
    return cluster_pb2.Cluster(
        name=DISCOVERY,
        type=cluster_pb2.Cluster.STATIC,
        connect_timeout=seconds(1.0),
        load_assignment=assignment(DISCOVERY, [discovery.picker]),
        typed_extension_protocol_options=_speaking(
            http2_protocol_options=protocol_pb2.Http2ProtocolOptions(connection_keepalive=keepalive)
        ),
    )


def _believe_health_at_once() -> cluster_pb2.Cluster.CommonLbConfig:
    """Never try a dead endpoint just because too many are dead, and notify the threads that balance
    load of each change at once: by default Envoy collects changes for a second.
    """
    return cluster_pb2.Cluster.CommonLbConfig(
        healthy_panic_threshold=percent_pb2.Percent(value=0), update_merge_window=seconds(0)
    )


def _circuit_breakers(limits: Limits) -> circuit_breaker_pb2.CircuitBreakers:
    return circuit_breaker_pb2.CircuitBreakers(
        thresholds=[
            circuit_breaker_pb2.CircuitBreakers.Thresholds(
                max_connections=uint32(limits.max_upstream_connections),
                max_pending_requests=uint32(limits.max_upstream_requests),
                max_requests=uint32(limits.max_upstream_requests),
                max_retries=uint32(limits.max_retries),
            )
        ]
    )
