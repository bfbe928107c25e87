"""Data sources and extractors: the locations of pages, and the values read from them. No I/O."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

from base.durations import parse_duration
from picker.errors import PickerError
from picker.framework.registry import Parameters, PositiveInt
from picker.types import Endpoint, EndpointMetrics

MAX_PAGE_BYTES = 16 * 1024 * 1024  # a vLLM of 32 data-parallel engines has 1.4 MB
_EMPTY: Mapping[str, Any] = MappingProxyType({})


def is_request_path(path: str) -> bool:
    """Return whether `path`, with or without a query, is valid in the first line of a request."""
    return path.startswith("/") and path.isascii() and path.isprintable() and " " not in path


class ExtractError(PickerError):
    """The page has no usable value; the message names what is missing."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    verify: bool = False
    ca_cert_path: str = ""
    client_cert_path: str = ""
    client_key_path: str = ""


@dataclass(frozen=True, slots=True)
class PageLocation:
    """The location of a source's pages; a port or interval of None is that of the load."""

    scheme: str = "http"
    path: str = "/metrics"
    port: int | None = None
    interval_seconds: float | None = None
    use_node_address: bool = False
    tls: TlsFiles = TlsFiles()
    max_page_bytes: int = MAX_PAGE_BYTES

    def address(self, endpoint: Endpoint) -> str | None:
        """Return the `host:port` of the page, IPv6 in brackets; None if it is unknown."""
        host, _, port = (endpoint.metrics_host_port or endpoint.host_port).rpartition(":")
        if self.use_node_address:
            if endpoint.node_address is None:
                return None
            node = endpoint.node_address
            host = f"[{node}]" if ":" in node else node
        return f"{host}:{port if self.port is None else self.port}"


class PageParameters(Parameters, frozen=True, kw_only=True):
    """The parameters that all HTTP data sources share."""

    scheme: str = "http"
    insecure_skip_verify: bool = True
    ca_cert_path: str = ""
    client_cert_path: str = ""
    client_key_path: str = ""
    interval: str = ""
    max_page_bytes: PositiveInt = MAX_PAGE_BYTES

    def locate(
        self, path: str, port: int | None = None, *, use_node_address: bool = False
    ) -> PageLocation:
        if self.scheme not in ("http", "https"):
            raise ValueError(f"scheme must be http or https, got '{self.scheme}'")
        if not is_request_path(path):
            raise ValueError(f"path must begin with '/' and be printable ASCII, got '{path}'")
        if port is not None and not 1 <= port <= 65535:
            raise ValueError(f"port must be within 1..65535, got {port}")
        if bool(self.client_cert_path) != bool(self.client_key_path):
            raise ValueError("clientCertPath and clientKeyPath go together")
        return PageLocation(
            scheme=self.scheme,
            path=path,
            port=port,
            interval_seconds=self._interval_seconds(),
            use_node_address=use_node_address,
            max_page_bytes=self.max_page_bytes,
            tls=TlsFiles(
                verify=not self.insecure_skip_verify,
                ca_cert_path=self.ca_cert_path,
                client_cert_path=self.client_cert_path,
                client_key_path=self.client_key_path,
            ),
        )

    def _interval_seconds(self) -> float | None:
        if not self.interval:
            return None
        seconds = parse_duration(self.interval)
        if seconds <= 0:
            raise ValueError(f"interval must be more than nothing, got '{self.interval}'")
        return seconds


@dataclass(frozen=True, slots=True)
class Scrape:
    """A page about `endpoint`; with `rank` only the values of that rank count."""

    page: bytes
    endpoint: Endpoint
    now_seconds: float
    previous: EndpointMetrics | None = None
    rank: int | None = None
    interval_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Extraction:
    """The contents of a page: load (None: the page has none), attributes, problems and models."""

    metrics: EndpointMetrics | None = None
    attributes: Mapping[str, Any] = field(default_factory=lambda: _EMPTY)
    problems: tuple[str, ...] = ()
    models: frozenset[str] = frozenset()


@runtime_checkable
class DataSource(Protocol):
    @property
    def location(self) -> PageLocation | None:
        """The location, constant for the life of the source; None for a source without pages."""


@runtime_checkable
class Extractor(Protocol):
    def extract(self, scrape: Scrape) -> Extraction:
        """Extract the values of the endpoint. Raises `ExtractError` if there are none."""


def checked_source(parameters: DataSource) -> DataSource:
    """Build a data source from its parameters. Raises `ValueError` for senseless values."""
    _ = parameters.location
    return parameters


@runtime_checkable
class NamesItsSeries(Protocol):
    """An `Extractor` that reads only series of an exposition from a page."""

    def series(self, endpoint: Endpoint) -> Sequence[str]:
        """Return the names of all series that it may read on a page about `endpoint`."""


@runtime_checkable
class EndpointExtractor(Protocol):
    """Derives attributes from an endpoint alone, when it joins or changes."""

    def describe(self, endpoint: Endpoint) -> Mapping[str, Any]:
        """Return the attributes by "Type/producer". Never raises, whatever the endpoint."""


@dataclass(frozen=True, slots=True)
class SourceBinding:
    """A source with its extractors, each under the name of its type."""

    source_type: str
    source: DataSource
    extractors: tuple[tuple[str, Extractor | EndpointExtractor], ...]

    def __post_init__(self) -> None:
        wanted = EndpointExtractor if self.source.location is None else Extractor
        for name, extractor in self.extractors:
            if not isinstance(extractor, wanted):
                raise ValueError(f"a {self.source_type} has nothing that a {name} can read")


def describers(plugins: Iterable[object]) -> tuple[Callable[[Endpoint], Mapping[str, Any]], ...]:
    """Return the functions that derive attributes from endpoints alone; they need no source."""
    return tuple(one.describe for one in plugins if isinstance(one, EndpointExtractor))
