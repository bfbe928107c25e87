"""Envoy's bootstrap document, built from settings and checked by Envoy's own message types: a
misspelt field is an error when the message is built, not when a proxy starts.
"""

import json
from collections.abc import Sequence
from typing import Any

import yaml
from envoy.config.bootstrap.v3 import bootstrap_pb2
from envoy.extensions.access_loggers.file.v3 import file_pb2
from envoy.extensions.access_loggers.filters.cel.v3 import cel_pb2
from envoy.extensions.access_loggers.grpc.v3 import als_pb2
from envoy.extensions.filters.http.ext_proc.v3 import ext_proc_pb2
from envoy.extensions.filters.http.lua.v3 import lua_pb2
from envoy.extensions.filters.http.router.v3 import router_pb2
from envoy.extensions.filters.network.http_connection_manager.v3 import http_connection_manager_pb2
from envoy.extensions.http.early_header_mutation.header_mutation.v3 import header_mutation_pb2
from envoy.extensions.load_balancing_policies.least_request.v3 import least_request_pb2
from envoy.extensions.load_balancing_policies.override_host.v3 import override_host_pb2
from envoy.extensions.resource_monitors.downstream_connections.v3 import downstream_connections_pb2
from envoy.extensions.resource_monitors.fixed_heap.v3 import fixed_heap_pb2
from envoy.extensions.retry.host.previous_hosts.v3 import previous_hosts_pb2
from envoy.extensions.upstreams.http.v3 import http_protocol_options_pb2
from envoy.service.discovery.v3 import discovery_pb2
from google.protobuf import json_format
from google.protobuf.message import Message

from fleet.envoy.clusters import (
    PICKER,
    POOL,
    assignment,
    discovery_cluster,
    picker_cluster,
    pool_clusters,
)
from fleet.envoy.identity import with_tenants
from fleet.envoy.listener import listener
from fleet.envoy.proto import Json, address, extension, packed
from fleet.envoy.settings import Address, BootstrapConfig, Limits, Mechanism, SocketAddress

# Types of extensions that the documents name; protobuf knows those that are imported.
EXTENSIONS = (
    *(file_pb2, cel_pb2, ext_proc_pb2, router_pb2, http_connection_manager_pb2),
    *(header_mutation_pb2, least_request_pb2, override_host_pb2, downstream_connections_pb2),
    *(fixed_heap_pb2, previous_hosts_pb2, http_protocol_options_pb2, als_pb2, lua_pb2),
)
_HEAP = "envoy.resource_monitors.fixed_heap"
_MONITORS = "envoy.extensions.resource_monitors"


def build(config: BootstrapConfig) -> bootstrap_pb2.Bootstrap:
    clusters = [*pool_clusters(config), picker_cluster(config)]
    if config.discovery is not None and config.mechanism is Mechanism.OVERRIDE_HOST:
        clusters.append(discovery_cluster(config.discovery))
    document = {
        "node": {"id": "pointsman", "cluster": "pointsman"},
        "admin": {"address": address(config.admin)},
        "static_resources": {"listeners": [listener(config)], "clusters": clusters},
        "overload_manager": _overload(config.limits),
    }
    if config.tenants is not None:
        document = with_tenants(document, config.tenants)
    return parsed(document)


def parsed(document: Json) -> bootstrap_pb2.Bootstrap:
    """Return the message. Raises protobuf's `ParseError` for what Envoy would not accept."""
    return json_format.ParseDict(document, bootstrap_pb2.Bootstrap())


def _overload(limits: Limits) -> Json:
    connections = limits.max_downstream_connections
    monitors = [
        extension(
            _HEAP,
            f"{_MONITORS}.fixed_heap.v3.FixedHeapConfig",
            max_heap_size_bytes=limits.max_heap_bytes,
        ),
        extension(
            "envoy.resource_monitors.global_downstream_max_connections",
            f"{_MONITORS}.downstream_connections.v3.DownstreamConnectionsConfig",
            max_active_downstream_connections=connections,
        ),
    ]
    thresholds = {"shrink_heap": 0.85, "stop_accepting_requests": 0.9}
    actions = [
        {
            "name": f"envoy.overload_actions.{name}",
            "triggers": [{"name": _HEAP, "threshold": {"value": threshold}}],
        }
        for name, threshold in thresholds.items()
    ]
    return {"refresh_interval": "0.25s", "resource_monitors": monitors, "actions": actions}


def to_yaml(message: Message, heading: str = "") -> str:
    """Write `message` as YAML with Envoy's own field names; `heading` becomes a comment on top."""
    document = json.loads(to_json(message))
    comment = "".join(f"# {line}\n" for line in heading.splitlines())
    return comment + yaml.safe_dump(document, sort_keys=False, width=100)


def to_json(message: Message) -> str:
    document = json_format.MessageToDict(message, preserving_proto_field_name=True)
    return json.dumps(_in_order(document), indent=1)


def _in_order(value: Any, of_json: bool = False) -> Any:
    """Sort the members of JSON formats in `value`, which protobuf leaves unordered."""
    if isinstance(value, list):
        return [_in_order(one, of_json) for one in value]
    if not isinstance(value, dict):
        return value
    members = sorted(value.items()) if of_json else value.items()
    return {name: _in_order(one, of_json or name == "json_format") for name, one in members}


def endpoints_document(endpoints: Sequence[SocketAddress]) -> str:
    """Return the content of `BootstrapConfig.endpoints_file`; Envoy only notices a rename."""
    return _discovered(assignment(POOL, endpoints))


def pickers_document(pickers: Sequence[tuple[Address, SocketAddress]]) -> str:
    """Return the content of `BootstrapConfig.pickers_file`: pickers' addresses and health."""
    return _discovered(assignment(PICKER, [one for one, _ in pickers], [two for _, two in pickers]))


def _discovered(found: Json) -> str:
    resource = packed("envoy.config.endpoint.v3.ClusterLoadAssignment", **found)
    document = {"resources": [resource]}
    return to_json(json_format.ParseDict(document, discovery_pb2.DiscoveryResponse()))
