"""The destinations of requests: the pool of workers and the picker, with their health checks, and
the sources from which Envoy learns of them.
"""

from collections.abc import Sequence
from dataclasses import replace

from fleet.envoy.proto import Json, address, extension, packed
from fleet.envoy.settings import (
    DESTINATION_KEY,
    DESTINATION_NAMESPACE,
    Address,
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
_POLICIES = "envoy.extensions.load_balancing_policies"

# Workers close idle keep-alive connections after 5 s (uvicorn's default); closing first avoids
# sending a request into a connection that is being closed.
_UPSTREAM_IDLE = "4s"
# Never try a dead endpoint just because too many are dead, and notify the threads that balance load
# of each change at once: by default Envoy collects changes for a second.
_BELIEVE_HEALTH_AT_ONCE = {"healthy_panic_threshold": {"value": 0}, "update_merge_window": "0s"}


def assignment(
    cluster: str, endpoints: Sequence[Address], health: Sequence[SocketAddress | None] | None = None
) -> Json:
    """List the endpoints of `cluster`; `health` is the address for health checks if it differs."""
    members = []
    for endpoint, asked in zip(endpoints, health or [None] * len(endpoints), strict=True):
        member = {"address": address(endpoint)}
        if asked is not None:
            member["health_check_config"] = {"address": address(asked)}
        members.append({"endpoint": member})
    return {"cluster_name": cluster, "endpoints": [{"lb_endpoints": members}]}


def pool_clusters(config: BootstrapConfig) -> list[Json]:
    if not config.pools:
        return [_pool_cluster(config, POOL)]
    return [_pool_cluster(_of_pool(config, name), name) for name in config.pools]


def _of_pool(config: BootstrapConfig, name: str) -> BootstrapConfig:
    if config.discovery is None:
        return config
    return replace(config, discovery=replace(config.discovery, pool_name=name))


def _pool_cluster(config: BootstrapConfig, name: str) -> Json:
    is_original = config.mechanism is Mechanism.ORIGINAL_DST
    return {
        "name": name,
        "connect_timeout": "1s",
        "per_connection_buffer_limit_bytes": 1024 * 1024,
        "circuit_breakers": _circuit_breakers(config.limits),
        "typed_extension_protocol_options": _speaking(
            {"http_protocol_options": {}},
            common_http_protocol_options={"idle_timeout": _UPSTREAM_IDLE},
        ),
        **(_where_the_header_says() if is_original else _where_the_metadata_says(config)),
    }


def _where_the_header_says() -> Json:
    return {
        "type": "ORIGINAL_DST",
        "lb_policy": "CLUSTER_PROVIDED",
        "original_dst_lb_config": {"use_http_header": True, "http_header_name": DESTINATION_KEY},
    }


def _where_the_metadata_says(config: BootstrapConfig) -> Json:
    if config.discovery is not None:
        source = _from_the_picker(config.discovery)
    elif config.endpoints_file is None:
        source = {"type": "STATIC", "load_assignment": assignment(POOL, config.endpoints)}
    else:
        source = _from_a_file(config.endpoints_file)
    return {
        **source,
        "common_lb_config": _BELIEVE_HEALTH_AT_ONCE,
        "load_balancing_policy": _override_host(),
        "health_checks": [_health_check(2, http_health_check={"path": "/health"})],
        "outlier_detection": {
            "interval": "1s",
            "base_ejection_time": "1s",
            "max_ejection_time": "30s",
            "max_ejection_percent": 50,
            "consecutive_5xx": 5,
            "split_external_local_origin_errors": True,
            "consecutive_local_origin_failure": 2,
        },
    }


def _override_host() -> Json:
    def one_policy(name: str, kind: str, **fields: object) -> Json:
        typed = extension(
            f"envoy.load_balancing_policies.{name}", f"{_POLICIES}.{name}.v3.{kind}", **fields
        )
        return {"policies": [{"typed_extension_config": typed}]}

    key = {"key": DESTINATION_NAMESPACE, "path": [{"key": DESTINATION_KEY}]}
    return one_policy(
        "override_host",
        "OverrideHost",
        override_host_sources=[{"metadata": key}],
        fallback_policy=one_policy("least_request", "LeastRequest", choice_count=2),
    )


def picker_cluster(config: BootstrapConfig) -> Json:
    """Build the picker's cluster. One failed stream, or one failed health check, takes it out of
    use: a request whose body is on its way to a dead picker cannot be saved, but the next one can.
    """
    if config.pickers_file is None:
        found = assignment(PICKER, [config.picker], [config.picker_health])
        source = {"type": "STATIC", "load_assignment": found}
    else:
        source = _from_a_file(config.pickers_file)
    return {
        "name": PICKER,
        "connect_timeout": "0.25s",
        "circuit_breakers": _circuit_breakers(config.limits),
        "common_lb_config": _BELIEVE_HEALTH_AT_ONCE,
        "typed_extension_protocol_options": _speaking(
            {"http2_protocol_options": {"max_concurrent_streams": 2**20}}
        ),
        "health_checks": [_health_check(1, grpc_health_check={"service_name": EXT_PROC_SERVICE})],
        "outlier_detection": {
            "interval": "1s",
            "base_ejection_time": "1s",
            "max_ejection_time": "2s",
            "max_ejection_percent": 100,  # also the only picker
            "split_external_local_origin_errors": True,  # else the next has no effect
            "consecutive_local_origin_failure": 1,
            "successful_active_health_check_uneject_host": True,
        },
        **source,
    }


def _health_check(failures: int, **asked: Json) -> Json:
    return {
        "timeout": "2s",
        "interval": "1s",
        # The interval until the first request, when clients wait for a fleet that starts.
        "no_traffic_interval": "0.25s",
        "unhealthy_interval": "0.25s",
        "unhealthy_edge_interval": "0.25s",
        "unhealthy_threshold": failures,
        "healthy_threshold": 1,
        **asked,
    }


def _speaking(protocol: Json, **options: Json) -> Json:
    return {_HTTP_OPTIONS: packed(_HTTP_OPTIONS, explicit_http_config=protocol, **options)}


def _from_a_file(path: str) -> Json:
    return _discovered({"path_config_source": {"path": path}})


def _from_the_picker(discovery: EndpointDiscovery) -> Json:
    """Ask a picker for endpoints; old ones stay while none answers. Envoy's own pause is 30 s."""
    back_off = {"base_interval": "0.25s", "max_interval": "2s"}
    service = {"cluster_name": DISCOVERY, "retry_policy": {"retry_back_off": back_off}}
    source = {
        "api_type": "DELTA_GRPC" if discovery.is_delta else "GRPC",
        "transport_api_version": "V3",
        "set_node_on_first_message_only": True,
        "grpc_services": [{"envoy_grpc": service}],
    }
    return _discovered({"api_config_source": source}, service_name=discovery.pool_name)


def _discovered(source: Json, **names: str) -> Json:
    return {
        "type": "EDS",
        # By default Envoy would use endpoints that leave until they fail health checks, which a
        # terminating pod passes.
        "ignore_health_on_host_removal": True,
        "eds_cluster_config": {"eds_config": {"resource_api_version": "V3", **source}, **names},
    }


def discovery_cluster(discovery: EndpointDiscovery) -> Json:
    """Build a cluster without health checks: no other picker can be asked; pings detect a hang."""
    keepalive = {"interval": "5s", "timeout": "2s"}
    return {
        "name": DISCOVERY,
        "type": "STATIC",
        "connect_timeout": "1s",
        "load_assignment": assignment(DISCOVERY, [discovery.picker]),
        "typed_extension_protocol_options": _speaking(
            {"http2_protocol_options": {"connection_keepalive": keepalive}}
        ),
    }


def _circuit_breakers(limits: Limits) -> Json:
    threshold = {
        "max_connections": limits.max_upstream_connections,
        "max_pending_requests": limits.max_upstream_requests,
        "max_requests": limits.max_upstream_requests,
        "max_retries": limits.max_retries,
    }
    return {"thresholds": [threshold]}
