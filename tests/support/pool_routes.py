"""Bootstraps for several pools: the generated ones, and how other gateways would say the same."""

from __future__ import annotations

import copy
import json
from typing import Any

from pools_behind_envoy import CHOSEN, PickerProcess, PoolsScene

from fleet.envoy.bootstrap import build, to_json
from fleet.envoy.settings import (
    POOL_METADATA,
    BootstrapConfig,
    EndpointDiscovery,
    Mechanism,
    SocketAddress,
)

Document = dict[str, Any]
PER_ROUTE = "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute"
HOST = "127.0.0.1"


def bootstrap(
    scene: PoolsScene,
    picker: PickerProcess,
    mechanism: Mechanism = Mechanism.ORIGINAL_DST,
    **changes: Any,
) -> Document:
    """As it is generated for one picker of all pools, but with patience: a machine that is busy is
    not to look like a picker that is gone.
    """
    config = BootstrapConfig(
        listen=SocketAddress(HOST, scene.listen),
        admin=SocketAddress(HOST, scene.admin),
        picker=SocketAddress(HOST, picker.grpc),
        picker_health=SocketAddress(HOST, picker.health),
        discovery=EndpointDiscovery(SocketAddress(HOST, picker.xds)),
        pools=tuple(scene.workers),
        mechanism=mechanism,
        **changes,
    )
    document: Document = json.loads(to_json(build(config)))
    clusters = document["static_resources"]["clusters"]
    (asked,) = (one for one in clusters if one["name"] == "picker")
    asked["connect_timeout"] = "10s"
    return document


def by_metadata(name: str) -> Document:
    """Ask at the common port, and name the pool."""
    return _overrides({"grpc_initial_metadata": [{"key": POOL_METADATA, "value": name}]})


def by_cluster(cluster: str) -> Document:
    """Ask another cluster than the filter says."""
    return _overrides({"grpc_service": {"envoy_grpc": {"cluster_name": cluster}}})


def add_picker(document: Document, cluster: str, port: int, health_port: int) -> None:
    """A cluster like that of the picker, at another port."""
    clusters = document["static_resources"]["clusters"]
    made = copy.deepcopy(next(one for one in clusters if one["name"] == "picker"))
    made["name"] = made["load_assignment"]["cluster_name"] = cluster
    (member,) = made["load_assignment"]["endpoints"][0]["lb_endpoints"]
    endpoint = member["endpoint"]
    endpoint["address"]["socket_address"]["port_value"] = port
    health = endpoint["health_check_config"]["address"]["socket_address"]
    health["port_value"] = health_port
    clusters.append(made)


def asking(document: Document, pool: str, settings: Document) -> None:
    """Let the route of a pool ask in this way."""
    (route,) = (one for one in routes(document) if one["name"] == pool)
    route["typed_per_filter_config"] = settings


def add_route(document: Document, place: str, pool: str, settings: Document | None) -> None:
    """A further route to a pool, which asks in this way; None: as the filter does."""
    (route,) = (copy.deepcopy(one) for one in routes(document) if one["name"] == pool)
    route["name"], route["match"] = place, {"prefix": f"/{place}/"}
    route["typed_per_filter_config"] = settings or {}
    routes(document).insert(0, route)


def add_split(document: Document, place: str, shares: dict[str, tuple[int, Document]]) -> None:
    """A route to several pools by weight, each asked for in its way; the answer says which."""
    first = next(iter(shares))
    add_route(document, place, first, None)
    action = routes(document)[0]["route"]
    del action["cluster"]
    action["weighted_clusters"] = {
        "clusters": [
            {
                "name": pool,
                "weight": weight,
                "typed_per_filter_config": settings,
                "response_headers_to_add": [{"header": {"key": CHOSEN, "value": pool}}],
            }
            for pool, (weight, settings) in shares.items()
        ]
    }


def routes(document: Document) -> list[Document]:
    """Of the one listener."""
    (listener,) = document["static_resources"]["listeners"]
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    found: list[Document] = manager["route_config"]["virtual_hosts"][0]["routes"]
    return found


def ext_proc(document: Document) -> Document:
    """The filter's settings."""
    (listener,) = document["static_resources"]["listeners"]
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    found: Document = manager["http_filters"][0]["typed_config"]
    return found


def _overrides(overrides: Document) -> Document:
    return {"envoy.filters.http.ext_proc": {"@type": PER_ROUTE, "overrides": overrides}}
