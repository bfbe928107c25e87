"""The endpoints file: endpoints, objectives and rewrites of a pool from a watched file.

    endpoints:
    - {name: w0, namespace: default, address: 127.0.0.1, port: "8000", labels: {role: decode}}

`port` may be a number or a string, `address` IPv4, IPv6 or a host name. Beyond the reference's keys
there are `rank`, the data-parallel rank of the entry's pod that it serves, and `nodeAddress`. The
labels `metricsAddress` and `metricsPort` locate metrics elsewhere; the port alone has no effect.

Host names are resolved every few seconds, unless the proxy itself routes to names; a name yields an
endpoint at each of its addresses, and one that fails retains its last ones. All changes of the file
(in place, by renaming, by a link on its path) apply at once, without the bad entries. It must be
readable when the picker starts; afterwards an unreadable file changes nothing.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from types import MappingProxyType
from typing import Any, TypeAlias

from msgspec.structs import replace

from picker.errors import ConfigError
from picker.file_changes import moments_to_look
from picker.metrics.picker_metrics import PickerMetrics
from picker.pool.datastore import Datastore
from picker.pool.policies import NO_RULES, RequestRules, RuleSet
from picker.types import Endpoint

log = logging.getLogger(__name__)

MAX_FILE_BYTES = 1024 * 1024  # that of the reference; some 8,000 endpoints
MAX_NAME_LENGTH = 253  # that of Kubernetes
RESOLVE_SECONDS = 5.0  # between two resolutions of the host names
MAX_LOOKUPS = 16  # at a time
METRICS_ADDRESS_LABEL = "metricsAddress"
METRICS_PORT_LABEL = "metricsPort"
_FIELDS = ("name", "namespace", "address", "port", "labels", "rank", "nodeAddress")
_SHOWN_LENGTH = 60
_NOTHING_WRONG: Mapping[int, str] = MappingProxyType({})
_NAME = re.compile(r"[^/\s\x00-\x1f\x7f]+")
_LOOKS_LIKE_IP = re.compile(r"[0-9.]+$")  # a mistyped one
_DNS_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_DNS_NAME = re.compile(rf"{_DNS_LABEL}(\.{_DNS_LABEL})*")


# Returns the addresses of a host name in a stable order. Blocks; raises `OSError` with the reason.
Resolve: TypeAlias = Callable[[str], tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class PoolContents:
    """The contents of an endpoints file; `skipped`, with reasons, and `remarks` are truncated."""

    endpoints: tuple[Endpoint, ...]
    rules: RuleSet = NO_RULES
    skipped: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    num_skipped: int = 0


class FileDiscovery:
    """Synchronizes the datastore and the rules of requests with a file, and addresses with DNS."""

    def __init__(
        self,
        path: Path,
        datastore: Datastore,
        rules: RequestRules,
        metrics: PickerMetrics,
        read: Callable[[bytes, str], PoolContents],
        resolve: Resolve | None = None,
        *,
        follows: bool = True,
    ) -> None:
        """`read` raises `ConfigError`; without `resolve` the proxy itself routes to host names."""
        self._path, self._decode, self._follows = path, read, follows
        self._names = None if resolve is None else HostNames(resolve)
        self._datastore, self._rules = datastore, rules
        self._errors = metrics.discovery_errors_total
        self._content: bytes | None = None
        self._listed: tuple[Endpoint, ...] = ()
        self._num_endpoints: int | None = None  # None: not read yet
        self._complaint = ""

    def load(self) -> None:
        content = self._read()
        if content != self._content:
            self._content = content
            self._apply(self._parse(content))

    def is_absent(self) -> bool:
        """Return False: the picker does not start without the file."""
        return False

    def problem(self) -> str | None:
        unresolved = () if self._names is None else self._names.problems.values()
        return "; ".join((*filter(None, [self._complaint]), *unresolved)) or None

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            if self._follows:
                group.create_task(self._follow_file(), name="endpoints file")
            if self._names is not None:
                group.create_task(self._follow_names(self._names), name="host names")

    async def _follow_names(self, names: HostNames) -> None:
        while True:
            await asyncio.sleep(RESOLVE_SECONDS)
            if names.wanted:
                await asyncio.to_thread(names.look_up)
                self._set_endpoints()

    async def _follow_file(self) -> None:
        folder, name = self._path.parent.absolute(), self._path.name
        async with aclosing(moments_to_look(folder, name)) as moments:
            async for _ in moments:
                await self._reload()

    async def _reload(self) -> None:
        """Apply the changes; a large file is decoded in a thread, so that decisions continue."""
        try:
            content = self._read()
            if content == self._content:
                return
            # Before it is parsed, so that a malformed file is read and reported once.
            self._content = content
            self._apply(await asyncio.to_thread(self._parse, content))
        except ConfigError as error:
            self._complain(str(error))
        else:
            self._complaint = ""

    def _complain(self, text: str) -> None:
        """Log a complaint once, not after every check of the file."""
        if text != self._complaint:
            self._complaint = text
            self._errors.inc()
            log.error("%s; keeping what the file said before", text)

    def _read(self) -> bytes:
        try:
            if not self._path.is_file():
                # Raises the error of a missing file, which `is_file` hides.
                self._path.stat()
                raise ConfigError(f"{self._path}: the endpoints file is not a file")
            with self._path.open("rb") as file:
                # One byte more, so that the decoder refuses a file that is too large.
                return file.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConfigError(f"{self._path}: cannot read the endpoints file: {reason}") from error

    def _parse(self, content: bytes) -> PoolContents:
        found = self._decode(content, str(self._path))
        if self._names is not None:
            self._names.want(found.endpoints)
        return found

    def _apply(self, found: PoolContents) -> None:
        """Apply all changes before the next request."""
        self._errors.inc(found.num_skipped)
        for line in found.skipped:
            log.warning("skipped %s", line)
        for line in found.remarks:
            log.warning("%s", line)
        if self._rules.use(found.rules):
            rules = found.rules
            log.info(
                "%s: %d objectives, %d rules of rewrites",
                self._path,
                len(rules.objectives),
                len(rules.rewrites),
            )
        self._listed = found.endpoints
        self._set_endpoints()

    def _set_endpoints(self) -> None:
        endpoints = self._listed if self._names is None else self._names.located(self._listed)
        changes = self._datastore.set_endpoints(endpoints)
        if changes or self._num_endpoints != len(endpoints):
            text = "%s: %d endpoints (%d added, %d removed)"
            log.info(text, self._path, len(endpoints), len(changes.added), len(changes.removed))
        self._num_endpoints = len(endpoints)


class HostNames:
    """Owns the addresses of the host names in a list of endpoints, and the last problems."""

    def __init__(self, resolve: Resolve) -> None:
        self._resolve, self._lock = resolve, Lock()
        self._addresses: dict[str, tuple[str, ...]] = {}
        self.wanted: frozenset[str] = frozenset()
        self.problems: dict[str, str] = {}

    def want(self, endpoints: Iterable[Endpoint]) -> None:
        """Track exactly the names in `endpoints`. Blocks, as `look_up` does."""
        with self._lock:
            self.wanted = frozenset(one.address for one in endpoints if _ip(one.address) is None)
        self.look_up()

    def look_up(self) -> None:
        """Resolve all names again. Blocks until the slowest is resolved."""
        with self._lock, ThreadPoolExecutor(MAX_LOOKUPS, "host names") as threads:
            names = sorted(self.wanted)
            found = dict(zip(names, threads.map(self._look_up_one, names), strict=True))
            good = {name: one for name, one in found.items() if not isinstance(one, str)}
            known = {name: one for name, one in self._addresses.items() if name in found}
            self._addresses = known | good
            problems = {name: one for name, one in found.items() if isinstance(one, str)}
            for name in problems.keys() - self.problems.keys():
                log.warning("%s", problems[name])
            self.problems = problems

    def located(self, endpoints: Iterable[Endpoint]) -> tuple[Endpoint, ...]:
        """Return endpoints with addresses for names: one per address, suffixed if several."""
        found: list[Endpoint] = []
        for endpoint in endpoints:
            addresses = self._addresses.get(endpoint.address, ())
            if endpoint.address not in self.wanted:
                found.append(endpoint)
            elif len(addresses) == 1:
                found.append(replace(endpoint, address=addresses[0]))
            else:
                name = endpoint.name
                found += [replace(endpoint, name=f"{name}-{at}", address=at) for at in addresses]
        return tuple(found)

    def _look_up_one(self, name: str) -> tuple[str, ...] | str:
        try:
            return self._resolve(name)
        except OSError as error:
            return f"the host name '{name}' cannot be resolved: {error.strerror or error}"


# The list of endpoints


@dataclass(frozen=True, slots=True)
class EntryProblem:
    path: tuple[str | int, ...]
    text: str


@dataclass(frozen=True, slots=True)
class EndpointList:
    """The usable entries, the errors of the others, and the entries with a duplicate address."""

    endpoints: tuple[Endpoint, ...]
    problems: tuple[EntryProblem, ...] = ()
    shared: tuple[EntryProblem, ...] = ()


def endpoints_of(document: Any, wrong: Mapping[int, str] = _NOTHING_WRONG) -> EndpointList:
    """Parse the endpoints of a document, where entries may be `wrong`. Raises `ConfigError`."""
    if not isinstance(document, dict) or not isinstance(document.get("endpoints"), list):
        raise ConfigError("expected a mapping with a list under the key 'endpoints'")
    endpoints: dict[str, Endpoint] = {}
    at: dict[str, str] = {}  # keys of endpoints, by their addresses
    shared: list[EntryProblem] = []
    unknown = [key for key in document if key != "endpoints"]
    problems = [EntryProblem((), f"unknown key {_shown(key)}") for key in unknown]
    for index, entry in enumerate(document["endpoints"]):
        try:
            if index in wrong:
                raise ValueError(wrong[index])
            endpoint = _endpoint(entry)
            if endpoint.key in endpoints:
                raise ValueError(f"'{endpoint.key}' is already taken by an earlier entry")
        except ValueError as error:
            problems.append(EntryProblem(("endpoints", index), f"{_named(entry)}{error}"))
        else:
            endpoints[endpoint.key] = endpoint
            first = at.setdefault(endpoint.host_port, endpoint.key)
            if first != endpoint.key:
                text = f"'{endpoint.key}' and '{first}' have the same address {endpoint.host_port}"
                shared.append(EntryProblem(("endpoints", index), text))
    return EndpointList(tuple(endpoints.values()), tuple(problems), tuple(shared))


def _named(entry: object) -> str:
    name = entry.get("name") if isinstance(entry, dict) else None
    return f"{_shown(name)}: " if isinstance(name, str) else ""


def _shown(value: object) -> str:
    """Return `value` as text, truncated because anchors make huge values in small files."""
    if isinstance(value, str):
        return repr(value if len(value) <= _SHOWN_LENGTH else f"{value[:_SHOWN_LENGTH]}…")
    if isinstance(value, int) and value.bit_length() > 64:
        return "a huge number"
    if value is None or isinstance(value, int | float):
        return repr(value)
    return f"a {type(value).__name__}"


def _endpoint(entry: object) -> Endpoint:
    if not isinstance(entry, dict):
        raise ValueError(f"expected a mapping, got {_shown(entry)}")
    unknown = [key for key in entry if key not in _FIELDS]
    if unknown:
        raise ValueError(f"unknown key {_shown(unknown[0])}, allowed: {', '.join(_FIELDS)}")
    node = entry.get("nodeAddress")
    address, port = _host(entry), _port(entry.get("port"), "port")
    labels = _labels(entry.get("labels"))
    return Endpoint(
        name=_name(entry, "name"),
        namespace=_name(entry, "namespace", "default"),
        address=address,
        port=port,
        labels=labels,
        rank_index=_rank(entry.get("rank", 0)),
        metrics_host_port=_metrics_host_port(labels, port),
        node_address=None if node is None else _address(entry, "nodeAddress"),
    )


def _text(entry: Mapping[str, Any], key: str, default: str | None = None) -> str:
    value = entry.get(key, default)
    if not isinstance(value, str) or not value:
        raise ValueError(f"'{key}' must be a non-empty string")
    return value


def _name(entry: Mapping[str, Any], key: str, default: str | None = None) -> str:
    text = _text(entry, key, default)
    if len(text) > MAX_NAME_LENGTH or not _NAME.fullmatch(text):
        raise ValueError(
            f"'{key}' must have at most {MAX_NAME_LENGTH} characters, no blanks and no '/'"
        )
    return text


def _address(entry: Mapping[str, Any], key: str) -> str:
    text = _text(entry, key)
    address = _ip(text)
    if address is None:
        raise ValueError(f"'{key}' must be an IP address, got {_shown(text)}")
    if address.is_unspecified or address.is_multicast or "%" in text:
        raise ValueError(f"'{key}' must be the address of one host, got '{address}'")
    return str(address)


def _host(entry: Mapping[str, Any]) -> str:
    """Return the address, or the host name in lower case."""
    text = _text(entry, "address")
    if _ip(text) is not None or "%" in text:
        return _address(entry, "address")
    name = text.lower()
    if len(name) > MAX_NAME_LENGTH or not _DNS_NAME.fullmatch(name) or _LOOKS_LIKE_IP.match(name):
        raise ValueError(f"'address' must be an IP address or a host name, got {_shown(text)}")
    return name


def _ip(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _port(value: object, key: str) -> int:
    number = value
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) <= 5:
        number = int(value)
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= 65535:
        raise ValueError(f"'{key}' must be a number from 1 to 65535, got {_shown(value)}")
    return number


def _rank(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 65535:
        raise ValueError(f"'rank' must be a number from 0, got {_shown(value)}")
    return value


def _labels(value: object) -> Mapping[str, str]:
    if value is None:
        return MappingProxyType({})
    if not isinstance(value, dict):
        raise ValueError("'labels' must be a mapping")
    for key, text in value.items():
        if not isinstance(key, str) or not isinstance(text, str):
            raise ValueError(f"label {_shown(key)} must map a string to a string (quote numbers)")
    return MappingProxyType(dict(value))


def _metrics_host_port(labels: Mapping[str, str], port: int) -> str | None:
    """Return the address of the metrics in the labels; None: the endpoint's own address."""
    host = labels.get(METRICS_ADDRESS_LABEL)
    if host is None:
        return None
    address = _ip(host)
    if address is None and (len(host) > MAX_NAME_LENGTH or not _DNS_NAME.fullmatch(host)):
        text = f"the label '{METRICS_ADDRESS_LABEL}' must be an IP address or a DNS name"
        raise ValueError(f"{text}, got {_shown(host)}")
    at = labels.get(METRICS_PORT_LABEL)
    metrics_port = port if at is None else _port(at, METRICS_PORT_LABEL)
    return f"[{address}]:{metrics_port}" if host.count(":") else f"{host}:{metrics_port}"
