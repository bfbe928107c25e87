"""Facts about an Envoy, from a file with its bootstrap or a config dump, or from its admin port.

A configuration stays plain JSON, because gateways add extensions of unknown types. Field names may
be spelt as in protobuf or as in JSON.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import yaml

from fleet.doctor.paths import ConfigPart, Json, at, listed, mapped, number, type_of
from fleet.doctor.web import NO_JSON, NoPageError, PageClient, WebPage
from fleet.envoy.binary import parse_version
from fleet.errors import FleetError

PROCESSOR = ".ext_proc.v3.ExternalProcessor"
ROUTER = ".router.v3.Router"
_AUTHENTICATORS = (".ApiKeyAuth", ".JwtAuthentication", ".ExtAuthz", ".BasicAuth", ".OAuth2")
OVERRIDE_HOST = ".OverrideHost"
_MANAGER = ".HttpConnectionManager"
_PARTS = {"configs", "static_resources", "staticResources", "dynamic_resources", "node"}
_WORD = re.compile(r"[A-Za-z0-9]+")
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_TOO_DEEP = "is nested more deeply than a configuration can be"
_DUMP_SECONDS = 20.0  # thousands of clusters are tens of megabytes
Version: TypeAlias = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Manager:
    """An HTTP connection manager of a listener. Each route has its virtual host under "host"."""

    listener: str
    listener_buffer_bytes: int | None
    config: Json
    routes: tuple[Json, ...]

    @property
    def filters(self) -> list[Json]:
        return listed(self.config, "http_filters")


@dataclass(frozen=True, slots=True)
class Lane:
    """A path of requests through a processor; parts that the document lacks are empty."""

    manager: Manager
    processor: Json
    route: Json
    cluster: Json
    picker: Json

    @property
    def place(self) -> str:
        return f"listener '{self.manager.listener}'"

    @property
    def document(self) -> Json:
        return {"filter": self.processor, "route": self.route}

    @property
    def body_mode(self) -> str:
        return str(at(self.processor, "processing_mode", "request_body_mode") or "NONE")

    def strips(self, name: str) -> bool:
        found = listed(self.manager.config, "early_header_mutation_extensions")
        mutations = [one for it in found for one in listed(it, "typed_config", "mutations")]
        for one in self.manager.filters:
            if type_of(one).endswith(PROCESSOR):
                break
            mutations += listed(one, "typed_config", "mutations", "request_mutations")
        return any(_removes(one, name) for one in mutations)

    @property
    def authenticates(self) -> bool:
        """True if a filter before the picker's identifies clients."""
        for one in self.manager.filters:
            wrapped = at(one, "typed_config", "extension_config")
            kind = type_of(wrapped if isinstance(wrapped, dict) else one)
            if kind.endswith(_AUTHENTICATORS):
                return True
            if kind.endswith(PROCESSOR):
                return False
        return False

    @property
    def picker_name(self) -> str:
        return str(at(self.processor, "grpc_service", "envoy_grpc", "cluster_name") or "")

    @property
    def policy(self) -> Json | None:
        return override_host(self.cluster)


@dataclass(frozen=True)
class EnvoySetup:
    managers: tuple[Manager, ...] = ()
    clusters: Mapping[str, Json] = field(default_factory=dict)
    version: Version | None = None

    @cached_property
    def lanes(self) -> tuple[Lane, ...]:
        return tuple(one for manager in self.managers for one in self._lanes_of(manager))

    @cached_property
    def picked(self) -> tuple[Lane, ...]:
        pickable = tuple(
            one
            for one in self.lanes
            if is_original_destination(one.cluster) or one.policy is not None
        )
        return pickable or self.lanes

    @cached_property
    def pools(self) -> tuple[ConfigPart, ...]:
        return _clusters(one.cluster for one in self.picked)

    @cached_property
    def pickers(self) -> tuple[ConfigPart, ...]:
        return _clusters(one.picker for one in self.picked if one.picker)

    def _lanes_of(self, manager: Manager) -> Iterator[Lane]:
        # Of several processors the last one: the last decision on the destination counts.
        asking = [one for one in manager.filters if type_of(one).endswith(PROCESSOR)]
        for route in (manager.routes or ({},)) if asking else ():
            processor = _effective(asking[-1], route)
            if processor is None:
                continue
            for name in _destinations(route) or ("",):
                lane = Lane(manager, processor, route, self.clusters.get(name, {}), {})
                yield replace(lane, picker=self.clusters.get(lane.picker_name, {}))


def _clusters(found: Iterable[Json]) -> tuple[ConfigPart, ...]:
    by_name = {at(one, "name"): one for one in found}
    return tuple(ConfigPart(f"cluster '{name}'", one) for name, one in by_name.items())


def _removes(mutation: Json, name: str) -> bool:
    if str(at(mutation, "remove") or "").lower() == name:
        return True
    matcher = at(mutation, "remove_on_match", "key_matcher")
    pattern = at(matcher, "safe_regex", "regex")
    tests: dict[str, Callable[[str], bool]] = {
        "exact": lambda text: name == text,
        "prefix": name.startswith,
        "suffix": name.endswith,
        "contains": lambda text: text in name,
    }
    found = any(
        test(str(at(matcher, key)).lower()) for key, test in tests.items() if at(matcher, key)
    )
    return found or (isinstance(pattern, str) and _matches(pattern, name))


def _matches(pattern: str, name: str) -> bool:
    try:
        return re.fullmatch(pattern, name) is not None
    except re.error:
        return False  # RE2 has syntax that Python lacks: report rather than trust it


@dataclass(frozen=True, slots=True)
class HostSeen:
    address: str
    ailments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EnvoyFacts:
    """One Envoy. `hosts` are known only for a running one; `problem` is why there are no facts."""

    source: str
    setup: EnvoySetup = field(default_factory=EnvoySetup)
    hosts: Mapping[str, tuple[HostSeen, ...]] = field(default_factory=dict)
    problem: str | None = None


def is_original_destination(cluster: Json) -> bool:
    return bool(at(cluster, "type") == "ORIGINAL_DST")


def override_host(cluster: Json) -> Json | None:
    for policy in listed(cluster, "load_balancing_policy", "policies"):
        config = at(policy, "typed_extension_config", "typed_config")
        if isinstance(config, dict) and type_of(config).endswith(OVERRIDE_HOST):
            return config
    return None


def read_setup(document: Any, version: Version | None = None) -> EnvoySetup:
    """Read a bootstrap or the answer of `/config_dump`. Unknown parts are left out."""
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
    given = at(bootstrap, "node", "user_agent_build_version", "version")
    if not isinstance(given, dict):
        return None
    major, minor, patch = (
        number(given.get(key, 0)) for key in ("major_number", "minor_number", "patch")
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


def _effective(one: Json, route: Json) -> Json | None:
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
    """Convert names to those of protobuf, and structs that state their type to that type."""
    if isinstance(value, list):
        return [_normalised(one) for one in value]
    if not isinstance(value, dict):
        return value
    found = {_spelt_as_in_protobuf(str(key)): _normalised(one) for key, one in value.items()}
    if str(found.get("@type", "")).endswith(".TypedStruct"):
        return {**mapped(found, "value"), "@type": found.get("type_url", "")}
    return found


def _spelt_as_in_protobuf(key: str) -> str:
    return _HUMP.sub("_", key).lower() if _WORD.fullmatch(key) else key


def read_envoy_file(path: Path) -> EnvoyFacts:
    source = str(path)
    try:
        document = _parsed(path.read_bytes())
        if not isinstance(document, dict) or _PARTS.isdisjoint(document):
            return EnvoyFacts(source, problem="is neither a bootstrap nor a config dump of Envoy")
        return EnvoyFacts(source, read_setup(document))
    except OSError as error:
        return EnvoyFacts(source, problem=f"cannot be read: {error.strerror or error}")
    except RecursionError:
        return EnvoyFacts(source, problem=_TOO_DEEP)
    except (ValueError, yaml.YAMLError) as error:
        line = str(error).partition("\n")[0]
        return EnvoyFacts(source, problem=f"is neither YAML nor JSON: {line}")


async def ask_envoy(url: str) -> EnvoyFacts:
    site = PageClient(url, _DUMP_SECONDS)
    try:
        dump = _decoded(await site.page("/config_dump"), "/config_dump")
        if not isinstance(at(dump, "configs"), list):
            raise NoPageError("/config_dump answers no config dump: is that an admin port?")
        info = _decoded(await site.page("/server_info"), "/server_info")
        clusters = _decoded(await site.page("/clusters?format=json"), "/clusters")
        setup = read_setup(dump, _version(at(info, "version")))
    except NoPageError as error:
        return EnvoyFacts(site.url, problem=f"its admin port does not answer ({error})")
    except RecursionError:
        return EnvoyFacts(site.url, problem=_TOO_DEEP)
    return EnvoyFacts(site.url, setup, _hosts(clusters))


def _parsed(content: bytes) -> Any:
    if content.lstrip().startswith(b"{"):
        try:
            return msgspec.json.decode(content)
        except NO_JSON:
            pass  # a mapping in YAML's short form
    return yaml.safe_load(content)


def _decoded(page: WebPage, path: str) -> Any:
    if page.status != 200:
        raise NoPageError(f"{path} answers {page.status}")
    try:
        return msgspec.json.decode(page.content)
    except NO_JSON as error:
        raise NoPageError(f"{path} answers no JSON: is that an admin port?") from error


def _version(text: Any) -> Version | None:
    try:
        return parse_version(str(text))
    except FleetError:
        return None  # a private build names no release


def _hosts(clusters: Any) -> dict[str, tuple[HostSeen, ...]]:
    return {
        str(at(one, "name")): tuple(map(_host, listed(one, "host_statuses")))
        for one in listed(clusters, "cluster_statuses")
    }


def _host(one: dict[str, Any]) -> HostSeen:
    found = at(one, "address", "socket_address")
    pipe = at(one, "address", "pipe", "path")
    address = pipe or f"{at(found, 'address')}:{at(found, 'port_value')}"
    health = mapped(one, "health_status")
    # Every failure of an endpoint is a field of its own, beside the health from discovery.
    ailments = [name for name, value in health.items() if value is True]
    if health.get("eds_health_status") in ("UNHEALTHY", "TIMEOUT"):
        ailments.append(f"discovery says {health['eds_health_status']}")
    return HostSeen(str(address), tuple(ailments))
