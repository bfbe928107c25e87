"""Envoy's bootstrap: a listener for each way in which a gateway may follow a picker.

Everything follows the protocol: bodies in full duplex both ways, trailers, the metadata of the
subset hint and of the destination, and a report of the served endpoint. No listener strips anything
that clients send, so the picker alone decides what a client can do.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from conformance.wire.messages import DESTINATION, DESTINATION_NAMESPACE, SERVED, SUBSET_NAMESPACE

Fragment = dict[str, Any]
_TYPES = "type.googleapis.com/envoy.extensions"
_HTTP_OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
EXT_PROC = "envoy.service.ext_proc.v3.ExternalProcessor"
SERVED_ADDRESS = "x-gateway-upstream-address"
BODY_LIMIT_BYTES = 8 * 2**20


class Following(StrEnum):
    """The mechanism by which a listener finds the endpoint that the picker named."""

    BY_METADATA = "metadata"
    BY_HEADER = "header"


@dataclass(frozen=True, slots=True)
class PickerAt:
    """A picker's address. Envoy verifies no certificate."""

    address: str
    health_address: str | None = None
    is_tls: bool = False


@dataclass(frozen=True, slots=True)
class PoolBehind:
    """A pool as the gateway knows it: its picker, its members, and whether they speak h2c.

    `is_open` is the pool's failure mode: without a picker requests pass (FailOpen) or are refused.
    """

    name: str
    picker: PickerAt
    endpoints: Sequence[str] = ()
    is_open: bool = False
    is_h2c: bool = False
    following: Following = Following.BY_METADATA


@dataclass(frozen=True, slots=True)
class Route:
    """Requests under a path, to pools by weight."""

    prefix: str
    pools: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Listener:
    """One port of the gateway."""

    name: str
    routes: Sequence[Route]


def bootstrap(pools: Sequence[PoolBehind], listeners: Sequence[Listener]) -> Fragment:
    """The whole document. A pool's picker is its own; listeners take free ports."""
    by_name = {pool.name: pool for pool in pools}
    clusters = [cluster for pool in pools for cluster in (_pool(pool), _picker(pool))]
    return {
        "node": {"id": "conformance", "cluster": "conformance"},
        "admin": {"address": _address("127.0.0.1:0")},
        "static_resources": {
            "listeners": [_listener(one, by_name) for one in listeners],
            "clusters": clusters,
        },
    }


def _listener(listener: Listener, pools: Mapping[str, PoolBehind]) -> Fragment:
    # One ext_proc filter for each pool, which is on for the routes of that pool alone.
    processors = sorted({name for route in listener.routes for name in route.pools})
    manager = {
        "@type": f"{_TYPES}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": listener.name,
        "use_remote_address": True,
        "request_timeout": "120s",
        "route_config": {
            "name": listener.name,
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "routes": [_route(route, processors) for route in listener.routes],
                }
            ],
        },
        "http_filters": [
            *(_ext_proc(pools[name]) for name in processors),
            _served_as_metadata(),
            {"name": "router", "typed_config": _typed("filters.http.router.v3.Router")},
        ],
    }
    return {
        "name": listener.name,
        "address": _address("127.0.0.1:0"),
        "enable_reuse_port": False,
        "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
    }


def _route(route: Route, processors: Sequence[str]) -> Fragment:
    weighted = [
        {
            "name": _cluster(name),
            "weight": weight,
            "typed_per_filter_config": _only(name, processors),
        }
        for name, weight in route.pools.items()
    ]
    return {
        "match": {"prefix": route.prefix},
        "request_body_buffer_limit": BODY_LIMIT_BYTES,
        "response_headers_to_add": [
            {"header": {"key": SERVED_ADDRESS, "value": "%UPSTREAM_REMOTE_ADDRESS%"}}
        ],
        "route": {
            "timeout": "0s",
            "weighted_clusters": {"clusters": weighted},
            "retry_policy": {
                "retry_on": "connect-failure,refused-stream,reset",
                "num_retries": 3,
                "retry_back_off": {"base_interval": "0.01s", "max_interval": "0.1s"},
            },
        },
    }


def _only(name: str, processors: Sequence[str]) -> Fragment:
    """Turn the processors of other pools off."""
    off = {**_typed("filters.http.ext_proc.v3.ExtProcPerRoute"), "disabled": True}
    return {_filter(other): off for other in processors if other != name}


def _ext_proc(pool: PoolBehind) -> Fragment:
    return {
        "name": _filter(pool.name),
        "typed_config": {
            **_typed("filters.http.ext_proc.v3.ExternalProcessor"),
            "grpc_service": {"envoy_grpc": {"cluster_name": _picker_cluster(pool.name)}},
            "failure_mode_allow": pool.is_open,
            "message_timeout": "10s",
            "processing_mode": {
                "request_header_mode": "SEND",
                "response_header_mode": "SEND",
                "request_body_mode": "FULL_DUPLEX_STREAMED",
                "response_body_mode": "FULL_DUPLEX_STREAMED",
                "request_trailer_mode": "SEND",
                "response_trailer_mode": "SEND",
            },
            "metadata_options": {
                "forwarding_namespaces": {"untyped": [DESTINATION_NAMESPACE, SUBSET_NAMESPACE]},
                "receiving_namespaces": {"untyped": [DESTINATION_NAMESPACE]},
            },
        },
    }


def _served_as_metadata() -> Fragment:
    """The address that served, in the metadata that the protocol prescribes."""
    rule = {
        "header": SERVED_ADDRESS,
        "on_header_present": {
            "metadata_namespace": DESTINATION_NAMESPACE,
            "key": SERVED,
            "type": "STRING",
        },
        "remove": False,
    }
    config = _typed("filters.http.header_to_metadata.v3.Config")
    return {"name": "served", "typed_config": {**config, "response_rules": [rule]}}


def _pool(pool: PoolBehind) -> Fragment:
    http: Fragment = (
        {"http2_protocol_options": {}} if pool.is_h2c else {"http_protocol_options": {}}
    )
    options = {**_typed("upstreams.http.v3.HttpProtocolOptions"), "explicit_http_config": http}
    cluster: Fragment = {
        "name": _cluster(pool.name),
        "connect_timeout": "1s",
        "typed_extension_protocol_options": {_HTTP_OPTIONS: options},
        "circuit_breakers": {"thresholds": [{"max_retries": 1000}]},
    }
    if pool.following is Following.BY_HEADER:
        by_header = {"use_http_header": True, "http_header_name": DESTINATION}
        return {
            **cluster,
            "type": "ORIGINAL_DST",
            "lb_policy": "CLUSTER_PROVIDED",
            "original_dst_lb_config": by_header,
        }
    return {
        **cluster,
        "type": "STATIC",
        "load_assignment": _assignment(_cluster(pool.name), pool.endpoints),
        "common_lb_config": {"update_merge_window": "0s"},
        "load_balancing_policy": {"policies": [_policy("override_host", _override_host())]},
    }


def _override_host() -> Fragment:
    key = {"key": DESTINATION_NAMESPACE, "path": [{"key": DESTINATION}]}
    robin = _typed("load_balancing_policies.round_robin.v3.RoundRobin")
    return {
        **_typed("load_balancing_policies.override_host.v3.OverrideHost"),
        "override_host_sources": [{"metadata": key}],
        "fallback_policy": {"policies": [_policy("round_robin", robin)]},
    }


def _policy(name: str, config: Fragment) -> Fragment:
    full = f"envoy.load_balancing_policies.{name}"
    return {"typed_extension_config": {"name": full, "typed_config": config}}


def _picker(pool: PoolBehind) -> Fragment:
    picker = pool.picker
    http2: Fragment = {"explicit_http_config": {"http2_protocol_options": {}}}
    member: Fragment = {"address": _address(picker.address)}
    if picker.health_address is not None:
        member["health_check_config"] = {"address": _address(picker.health_address)}
    name = _picker_cluster(pool.name)
    cluster: Fragment = {
        "name": name,
        "type": "STATIC",
        "connect_timeout": "0.5s",
        "common_lb_config": {"healthy_panic_threshold": {"value": 0}, "update_merge_window": "0s"},
        "typed_extension_protocol_options": {
            _HTTP_OPTIONS: {**_typed("upstreams.http.v3.HttpProtocolOptions"), **http2}
        },
        "load_assignment": {
            "cluster_name": name,
            "endpoints": [{"lb_endpoints": [{"endpoint": member}]}],
        },
        "health_checks": [_health_check(picker)],
    }
    return {**cluster, **(_tls() if picker.is_tls else {})}


def _health_check(picker: PickerAt) -> Fragment:
    how: Fragment = {"tcp_health_check": {}}
    if picker.health_address is not None:
        how = {"grpc_health_check": {"service_name": EXT_PROC}}
        how["transport_socket_match_criteria"] = {"plain": True}
    every = ("interval", "no_traffic_interval", "unhealthy_interval", "unhealthy_edge_interval")
    return {
        **how,
        **dict.fromkeys(every, "0.1s"),
        "timeout": "2s",
        "unhealthy_threshold": 1,
        "healthy_threshold": 1,
    }


def _tls() -> Fragment:
    """TLS to the picker's port and none to its health port; any certificate is accepted."""
    context = {"alpn_protocols": ["h2"], "validation_context": {}}
    tls = {
        "name": "tls",
        "typed_config": {
            **_typed("transport_sockets.tls.v3.UpstreamTlsContext"),
            "common_tls_context": context,
        },
    }
    raw = {"name": "raw", "typed_config": _typed("transport_sockets.raw_buffer.v3.RawBuffer")}
    return {
        "transport_socket": tls,
        "transport_socket_matches": [
            {"name": "plain", "match": {"plain": True}, "transport_socket": raw}
        ],
    }


def _assignment(cluster: str, endpoints: Sequence[str]) -> Fragment:
    members = [{"endpoint": {"address": _address(endpoint)}} for endpoint in endpoints]
    return {"cluster_name": cluster, "endpoints": [{"lb_endpoints": members}]}


def _address(endpoint: str) -> Fragment:
    host, _, port = endpoint.rpartition(":")
    return {"socket_address": {"address": host.strip("[]"), "port_value": int(port)}}


def _typed(name: str) -> Fragment:
    return {"@type": f"{_TYPES}.{name}"}


def _cluster(pool: str) -> str:
    return f"pool-{pool}"


def _picker_cluster(pool: str) -> str:
    return f"picker-{pool}"


def _filter(pool: str) -> str:
    return f"ext_proc-{pool}"
