"""Envoy's bootstrap document, built from settings by way of Envoy's own message types: a misspelt
field is an error when the message is built, not when a proxy starts.
"""

import json
from collections.abc import Sequence
from typing import Any

import yaml
from envoy.config.bootstrap.v3 import bootstrap_pb2
from envoy.config.cluster.v3 import cluster_pb2
from envoy.config.overload.v3 import overload_pb2
from envoy.extensions.resource_monitors.downstream_connections.v3 import downstream_connections_pb2
from envoy.extensions.resource_monitors.fixed_heap.v3 import fixed_heap_pb2
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
from fleet.envoy.listener import listener
from fleet.envoy.proto import address, packed, seconds
from fleet.envoy.settings import BootstrapConfig, Limits, Mechanism, SocketAddress

_HEAP = "envoy.resource_monitors.fixed_heap"
_CONNECTIONS = "envoy.resource_monitors.global_downstream_max_connections"


def build(config: BootstrapConfig) -> bootstrap_pb2.Bootstrap:
    return bootstrap_pb2.Bootstrap(
        node={"id": "pointsman", "cluster": "pointsman"},
        admin=bootstrap_pb2.Admin(address=address(config.admin)),
        static_resources=bootstrap_pb2.Bootstrap.StaticResources(
            listeners=[listener(config)], clusters=_clusters(config)
        ),
        overload_manager=_overload(config.limits),
    )


def _clusters(config: BootstrapConfig) -> list[cluster_pb2.Cluster]:
    clusters = [*pool_clusters(config), picker_cluster(config)]
    if config.discovery is not None and config.mechanism is Mechanism.OVERRIDE_HOST:
        clusters.append(discovery_cluster(config.discovery))
    return clusters


def _overload(limits: Limits) -> overload_pb2.OverloadManager:
    monitors = [
        overload_pb2.ResourceMonitor(
            name=_HEAP,
            typed_config=packed(
                fixed_heap_pb2.FixedHeapConfig(max_heap_size_bytes=limits.max_heap_bytes)
            ),
        ),
        overload_pb2.ResourceMonitor(
            name=_CONNECTIONS,
            typed_config=packed(
                downstream_connections_pb2.DownstreamConnectionsConfig(
                    max_active_downstream_connections=limits.max_downstream_connections
                )
            ),
        ),
    ]
    actions = [
        overload_pb2.OverloadAction(
            name=name, triggers=[overload_pb2.Trigger(name=_HEAP, threshold={"value": threshold})]
        )
        for name, threshold in (
            ("envoy.overload_actions.shrink_heap", 0.85),
            ("envoy.overload_actions.stop_accepting_requests", 0.9),
        )
    ]
    return overload_pb2.OverloadManager(
        refresh_interval=seconds(0.25), resource_monitors=monitors, actions=actions
    )


def to_yaml(message: Message, heading: str = "") -> str:
    """Write `message` as YAML with Envoy's own field names; `heading` becomes a comment on top."""
    document = json.loads(to_json(message))
    comment = "".join(f"# {line}\n" for line in heading.splitlines())
    return comment + yaml.safe_dump(document, sort_keys=False, width=100)


def to_json(message: Message) -> str:
    document = json_format.MessageToDict(message, preserving_proto_field_name=True)
    return json.dumps(_in_order(document), indent=1)


def _in_order(value: Any, of_json: bool = False) -> Any:
    """Sort the members of JSON formats in `value`, which protobuf has in no order."""
    if isinstance(value, list):
        return [_in_order(one, of_json) for one in value]
    if not isinstance(value, dict):
        return value
    members = sorted(value.items()) if of_json else value.items()
    return {name: _in_order(one, of_json or name == "json_format") for name, one in members}


def endpoints_document(endpoints: Sequence[SocketAddress]) -> str:
    """The content of `BootstrapConfig.endpoints_file`. Replace the file by a rename, which Envoy
    watches for; it does not notice a write in place.
    """
    return _discovered(assignment(POOL, endpoints))


def pickers_document(pickers: Sequence[tuple[SocketAddress, SocketAddress]]) -> str:
    """The content of `BootstrapConfig.pickers_file`: the address of each picker, and that of its
    health checks. As with `endpoints_document`, Envoy only notices a rename.
    """
    return _discovered(assignment(PICKER, [one for one, _ in pickers], [two for _, two in pickers]))


def _discovered(found: Message) -> str:
    return to_json(discovery_pb2.DiscoveryResponse(resources=[packed(found)]))
