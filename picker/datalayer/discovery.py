"""Endpoints from a watched YAML (or JSON) file.

    endpoints:
    - {name: w0, address: 127.0.0.1, port: 8000, namespace: default, labels: {role: decode}}

A bad entry is skipped and reported, the good ones apply. The file must be readable when the picker
starts; afterwards an unreadable file leaves the pool as it is.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml
from watchfiles import Change, awatch

from picker.datalayer.datastore import Datastore
from picker.errors import ConfigError
from picker.metrics import PickerMetrics
from picker.types import Endpoint

log = logging.getLogger(__name__)

MAX_FILE_BYTES = 1024 * 1024
WATCH_STEP_MS = 50
WATCH_DEBOUNCE_MS = 100
RECHECK_MS = 1000  # finds what a file system without change events, or a race at start, hides
_FIELDS = ("name", "namespace", "address", "port", "labels")
_Loader: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True, slots=True)
class EndpointList:
    """The usable entries of an endpoints file, and what is wrong with the others."""

    endpoints: tuple[Endpoint, ...]
    problems: tuple[str, ...] = ()


def parse_endpoints(content: bytes) -> EndpointList:
    """Decode an endpoints file. Raises `ConfigError` when it is not one at all."""
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"the file is larger than {MAX_FILE_BYTES} bytes")
    try:
        document = yaml.load(content, Loader=_Loader)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(document, dict) or not isinstance(document.get("endpoints"), list):
        raise ConfigError("expected a mapping with a list under the key 'endpoints'")
    endpoints: dict[str, Endpoint] = {}
    problems = [f"unknown key '{key}'" for key in document if key != "endpoints"]
    for index, entry in enumerate(document["endpoints"]):
        try:
            endpoint = _endpoint(entry)
            if endpoint.key in endpoints:
                raise ValueError(f"'{endpoint.key}' is already taken by an earlier entry")
        except ValueError as error:
            problems.append(f"endpoints[{index}]: {error}")
        else:
            endpoints[endpoint.key] = endpoint
    return EndpointList(tuple(endpoints.values()), tuple(problems))


def _endpoint(entry: object) -> Endpoint:
    if not isinstance(entry, dict):
        raise ValueError(f"expected a mapping, got {type(entry).__name__}")
    unknown = [str(key) for key in entry if key not in _FIELDS]
    if unknown:
        raise ValueError(f"unknown key '{unknown[0]}', allowed: {', '.join(_FIELDS)}")
    return Endpoint(
        name=_text(entry, "name"),
        namespace=_text(entry, "namespace", "default"),
        address=_address(_text(entry, "address")),
        port=_port(entry.get("port")),
        labels=_labels(entry.get("labels")),
    )


def _text(entry: Mapping[str, Any], key: str, default: str | None = None) -> str:
    value = entry.get(key, default)
    if not isinstance(value, str) or not value:
        raise ValueError(f"'{key}' must be a non-empty string")
    return value


def _address(text: str) -> str:
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        raise ValueError(
            f"'address' must be an IP address, got '{text}' (a proxy cannot route to a name)"
        ) from None


def _port(value: object) -> int:
    if isinstance(value, str) and value.isascii() and value.isdecimal():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 65535:
        raise ValueError(f"'port' must be a number from 1 to 65535, got {value!r}")
    return value


def _labels(value: object) -> Mapping[str, str]:
    if value is None:
        return MappingProxyType({})
    if not isinstance(value, dict):
        raise ValueError("'labels' must be a mapping")
    for key, text in value.items():
        if not isinstance(key, str) or not isinstance(text, str):
            raise ValueError(f"label {key!r} must map a string to a string (quote numbers)")
    return MappingProxyType(dict(value))


class FileDiscovery:
    """Keeps the datastore's endpoints equal to those of a file."""

    def __init__(self, path: Path, datastore: Datastore, metrics: PickerMetrics) -> None:
        self._path = path
        self._datastore = datastore
        self._errors = metrics.discovery_errors_total
        self._content: bytes | None = None

    def load(self) -> None:
        """Read the file now. Raises `ConfigError` when it cannot be read or is not a list of
        endpoints.
        """
        try:
            with self._path.open("rb") as file:
                content = file.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConfigError(f"{self._path}: cannot read the endpoints file: {reason}") from error
        if content == self._content:
            return
        self._content = content
        try:
            found = parse_endpoints(content)
        except ConfigError as error:
            raise ConfigError(f"{self._path}: {error}") from error
        for problem in found.problems:
            self._errors.inc()
            log.warning("%s: skipped %s", self._path, problem)
        changes = self._datastore.set_endpoints(found.endpoints)
        log.info(
            "%s: %d endpoints (%d added, %d removed)",
            self._path,
            len(found.endpoints),
            len(changes.added),
            len(changes.removed),
        )

    async def run(self) -> None:
        """Follow the file until cancelled.

        The directory is watched, not the file: editors and Kubernetes replace files by renaming.
        """
        stop = asyncio.Event()
        try:
            async for _ in awatch(
                self._path.parent.absolute(),
                step=WATCH_STEP_MS,
                debounce=WATCH_DEBOUNCE_MS,
                rust_timeout=RECHECK_MS,
                yield_on_timeout=True,
                stop_event=stop,
                recursive=False,
                watch_filter=self._concerns,
            ):
                self._reload()
        finally:
            stop.set()

    def _concerns(self, _change: Change, path: str) -> bool:
        """The file itself, or the `..data` link that Kubernetes turns when a volume changes."""
        name = Path(path).name
        return name == self._path.name or name.startswith("..")

    def _reload(self) -> None:
        try:
            self.load()
        except ConfigError as error:
            self._errors.inc()
            log.error("%s; keeping the endpoints of before", error)
