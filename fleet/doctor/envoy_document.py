"""A bootstrap or a `/config_dump`, as the ways that requests take through it.

Documents are kept as plain JSON: gateways put extensions in them that nobody here has types for.
Field names may be spelt as in protobuf or as in JSON; both are read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

from fleet.envoy.settings import DESTINATION_KEY

Json: TypeAlias = dict[str, Any]
Version: TypeAlias = tuple[int, int, int]

_MANAGER = ".HttpConnectionManager"
PROCESSOR = ".ext_proc.v3.ExternalProcessor"
ROUTER = ".router.v3.Router"
OVERRIDE_HOST = ".OverrideHost"
_WORD = re.compile(r"[A-Za-z0-9]+")
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def at(value: Any, *path: str) -> Any:
    """What stands at the end of a path of keys; None where it does not lead there."""
    for step in path:
        value = value.get(step) if isinstance(value, dict) else None
    return value


def listed(value: Any, *path: str) -> list[Json]:
    """The mappings of a list there; empty where there is none."""
    found = at(value, *path)
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def mapped(value: Any, *path: str) -> Json:
    """The mapping there; empty where there is none."""
    found = at(value, *path)
    return found if isinstance(found, dict) else {}


def texts(value: Any, *path: str) -> list[str]:
    """The texts of a list there; empty where there is none."""
    found = at(value, *path)
    return [one for one in found if isinstance(one, str)] if isinstance(found, list) else []


def seconds(value: Any) -> float | None:
    """A duration as JSON spells it ("0.250s"); None for anything else."""
    if not isinstance(value, str) or not value.endswith("s"):
        return None
    try:
        return float(value[:-1])
    except ValueError:
        return None


def number(value: Any) -> int | None:
    """A number, also one that JSON has in quotes because it may be large."""
    try:
        return None if value is None or isinstance(value, bool) else int(value)
    except (TypeError, ValueError):
        return None


def type_of(value: Any) -> str:
    """The name of what is in `typed_config`, or in the mapping itself."""
    config = at(value, "typed_config")
    return str(at(value if config is None else config, "@type") or "")


@dataclass(frozen=True, slots=True)
class Manager:
    """An HTTP connection manager of a listener."""

    listener: str
    listener_buffer_bytes: int | None
    config: Json
    routes: tuple[Json, ...]  # each with what its virtual host says as well, under "host"

    @property
    def filters(self) -> list[Json]:
        """In the order in which requests meet them."""
        return listed(self.config, "http_filters")


@dataclass(frozen=True, slots=True)
class Lane:
    """A way that requests take past a processor: the settings that count there, the route and its
    cluster (empty where the document does not say), and the processor's cluster.
    """

    manager: Manager
    processor: Json
    route: Json
    cluster: Json
    picker: Json

    @property
    def place(self) -> str:
        """For people."""
        return f"listener '{self.manager.listener}'"

    @property
    def body_mode(self) -> str:
        """How the picker is shown the bodies of requests."""
        return str(at(self.processor, "processing_mode", "request_body_mode") or "NONE")


@dataclass(frozen=True)
class EnvoySetup:
    """All that is judged of a configuration."""

    managers: tuple[Manager, ...] = ()
    clusters: Mapping[str, Json] = field(default_factory=dict)
    version: Version | None = None

    @cached_property
    def lanes(self) -> tuple[Lane, ...]:
        """Every way past a processor."""
        return tuple(one for manager in self.managers for one in self._lanes_of(manager))

    @cached_property
    def picked(self) -> tuple[Lane, ...]:
        """Those whose destination a picker can choose; all when that is so of none."""
        return tuple(one for one in self.lanes if is_pickable(one.cluster)) or self.lanes

    @cached_property
    def pools(self) -> tuple[Json, ...]:
        """The clusters of workers."""
        return tuple({at(one.cluster, "name"): one.cluster for one in self.picked}.values())

    @cached_property
    def pickers(self) -> tuple[Json, ...]:
        """The clusters of pickers, as far as they are in the document."""
        found = {at(one.picker, "name"): one.picker for one in self.picked if one.picker}
        return tuple(found.values())

    def _lanes_of(self, manager: Manager) -> Iterator[Lane]:
        found = _processor(manager.filters)
        if found is None:
            return
        for route in manager.routes or ({},):
            processor = _effective(found, route)
            if processor is None:
                continue
            picker = self.clusters.get(picker_name(processor), {})
            for name in _destinations(route) or ("",):
                yield Lane(manager, processor, route, self.clusters.get(name, {}), picker)


def picker_name(processor: Json) -> str:
    """The cluster that a processor is reached by."""
    return str(at(processor, "grpc_service", "envoy_grpc", "cluster_name") or "")


def is_pickable(cluster: Json) -> bool:
    """Whether a picker's answer has a say in where this cluster sends a request."""
    return is_original_destination(cluster) or override_host(cluster) is not None


def is_original_destination(cluster: Json) -> bool:
    """Whether it goes to an address that the request brings along."""
    return bool(at(cluster, "type") == "ORIGINAL_DST")


def override_host(cluster: Json) -> Json | None:
    """The settings of that policy; None where another balances."""
    for policy in listed(cluster, "load_balancing_policy", "policies"):
        config = at(policy, "typed_extension_config", "typed_config")
        if isinstance(config, dict) and type_of(config).endswith(OVERRIDE_HOST):
            return config
    return None


def reads_metadata(cluster: Json) -> bool:
    """Whether the choice has to come as dynamic metadata, with no header that would do."""
    policy = override_host(cluster)
    if policy is None:
        return at(cluster, "original_dst_lb_config", "metadata_key") is not None
    sources = listed(policy, "override_host_sources")
    return not any(at(one, "header") == DESTINATION_KEY for one in sources)


def read_setup(document: Any, version: Version | None = None) -> EnvoySetup:
    """A bootstrap or the answer of `/config_dump`. What cannot be understood is left out."""
    plain = _normalised(document)
    parts = listed(plain, "configs") or [{"bootstrap": plain}]
    bootstrap: Json = next((at(one, "bootstrap") for one in parts if at(one, "bootstrap")), {})
    clusters = listed(bootstrap, "static_resources", "clusters")
    listeners = listed(bootstrap, "static_resources", "listeners")
    tables: list[Json] = []
    for part in parts:
        for group in ("static_clusters", "dynamic_active_clusters"):
            clusters += [one["cluster"] for one in listed(part, group) if at(one, "cluster")]
        for one in listed(part, "dynamic_listeners"):
            listeners += [at(one, "active_state", "listener")] if at(one, "active_state") else []
        for group in ("static_route_configs", "dynamic_route_configs"):
            tables += [
                one["route_config"] for one in listed(part, group) if at(one, "route_config")
            ]
    named = {str(at(one, "name")): one for one in tables}
    managers = tuple(one for listener in listeners for one in _managers(listener, named))
    by_name = {str(at(one, "name")): one for one in clusters}
    return EnvoySetup(managers, by_name, version or _built(bootstrap))


def _built(bootstrap: Any) -> Version | None:
    """The version of the Envoy that a dump is of."""
    told = at(bootstrap, "node", "user_agent_build_version", "version")
    if not isinstance(told, dict):
        return None
    major, minor, patch = (
        number(told.get(key, 0)) for key in ("major_number", "minor_number", "patch")
    )
    return None if major is None or minor is None or patch is None else (major, minor, patch)


def _managers(listener: Json, tables: Mapping[str, Json]) -> Iterator[Manager]:
    chains = listed(listener, "filter_chains")
    if isinstance(default := at(listener, "default_filter_chain"), dict):
        chains.append(default)
    for chain in chains:
        for one in listed(chain, "filters"):
            config = at(one, "typed_config")
            if isinstance(config, dict) and type_of(config).endswith(_MANAGER):
                table = at(config, "route_config") or tables.get(
                    str(at(config, "rds", "route_config_name")), {}
                )
                limit = number(at(listener, "per_connection_buffer_limit_bytes"))
                name = str(at(listener, "name") or "unnamed")
                yield Manager(name, limit, config, tuple(_routes(table)))


def _routes(table: Json) -> Iterator[Json]:
    for host in listed(table, "virtual_hosts"):
        yield from (
            {**route, "host": host} for route in listed(host, "routes") if at(route, "route")
        )


def _processor(filters: list[Json]) -> Json | None:
    """The last processor: whoever decides where a request goes does so at the end."""
    found = [one for one in filters if type_of(one).endswith(PROCESSOR)]
    return found[-1] if found else None


def _effective(one: Json, route: Json) -> Json | None:
    """A processor's settings on a route; None where it is switched off there."""
    base, name = at(one, "typed_config"), str(at(one, "name"))
    own = at(route, "typed_per_filter_config", name)
    own = at(route, "host", "typed_per_filter_config", name) if own is None else own
    is_off = bool(at(one, "disabled"))
    if isinstance(own, dict):
        if type_of(own).endswith(".FilterConfig"):
            is_off, own = bool(at(own, "disabled")), mapped(own, "config")
        else:
            is_off = False
        if at(own, "disabled"):
            return None
    if is_off or not isinstance(base, dict):
        return None
    return {**base, **mapped(own, "overrides")}


def _destinations(route: Json) -> tuple[str, ...]:
    action = at(route, "route")
    if isinstance(name := at(action, "cluster"), str):
        return (name,)
    return tuple(str(at(one, "name")) for one in listed(action, "weighted_clusters", "clusters"))


def _normalised(value: Any) -> Any:
    """The same with protobuf's field names, and structs of a stated type as that type."""
    if isinstance(value, list):
        return [_normalised(one) for one in value]
    if not isinstance(value, dict):
        return value
    found = {_field(str(key)): _normalised(one) for key, one in value.items()}
    if str(found.get("@type", "")).endswith(".TypedStruct"):
        return {**mapped(found, "value"), "@type": found.get("type_url", "")}
    return found


def _field(key: str) -> str:
    return _HUMP.sub("_", key).lower() if _WORD.fullmatch(key) else key
