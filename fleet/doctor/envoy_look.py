"""Looks at an Envoy: a file with its bootstrap or a config dump, or its admin port."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import yaml

from fleet.doctor.envoy_document import Version, at, listed, mapped, read_setup
from fleet.doctor.facts import EnvoyFacts, HostSeen
from fleet.doctor.web import NO_JSON, NoPageError, Page, Site
from fleet.envoy.binary import parse_version
from fleet.errors import FleetError

_TOO_DEEP = "holds more within each other than a configuration does"
_DUMP_SECONDS = 20.0  # thousands of clusters are tens of megabytes


def read_envoy_file(path: Path) -> EnvoyFacts:
    """A bootstrap in YAML or JSON, or what `/config_dump` has answered."""
    source = str(path)
    try:
        document = _parsed(path.read_bytes())
        if not isinstance(document, dict) or not _is_envoy(document):
            return EnvoyFacts(source, problem="is neither a bootstrap nor a config dump of Envoy")
        return EnvoyFacts(source, read_setup(document))
    except OSError as error:
        return EnvoyFacts(source, problem=f"cannot be read: {error.strerror or error}")
    except RecursionError:
        return EnvoyFacts(source, problem=_TOO_DEEP)
    except (ValueError, yaml.YAMLError) as error:
        return EnvoyFacts(source, problem=f"is neither YAML nor JSON: {_first_line(error)}")


async def ask_envoy(url: str) -> EnvoyFacts:
    """A running Envoy, at its admin port."""
    async with Site(url, _DUMP_SECONDS) as site:
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


def _is_envoy(document: dict[str, Any]) -> bool:
    return any(
        key in document
        for key in ("configs", "static_resources", "staticResources", "dynamic_resources", "node")
    )


def _decoded(page: Page, path: str) -> Any:
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
        return None  # built by somebody who tells no release


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
    # Whatever ails an endpoint is a field of its own, beside the health that discovery states.
    ailments = [name for name, value in health.items() if value is True]
    if health.get("eds_health_status") in ("UNHEALTHY", "TIMEOUT"):
        ailments.append(f"discovery says {health['eds_health_status']}")
    return HostSeen(str(address), tuple(ailments))


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
