"""Data sources and extractors: where the pages of endpoints are, and what is read from them.

A source says where to ask (`location`), an extractor reads what came back. Both are
values without I/O; `datalayer.scrape` does the asking. An extractor that needs no page, only the
endpoint itself, is an `EndpointExtractor`; it belongs to a source without a location.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

from picker.errors import PickerError
from picker.types import Endpoint, EndpointMetrics

MAX_PAGE_BYTES = 16 * 1024 * 1024  # a vLLM of 32 data-parallel engines has 1.4 MB
_EMPTY: Mapping[str, Any] = MappingProxyType({})


def is_request_path(path: str) -> bool:
    """True if `path`, with or without a query, is valid in the first line of a request."""
    return path.startswith("/") and path.isascii() and path.isprintable() and " " not in path


class ExtractError(PickerError):
    """A page from which nothing can be made; the message names what is missing."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """How scrapes over https check the server and authenticate; "" names no file."""

    verify: bool = False
    ca_cert_path: str = ""
    client_cert_path: str = ""
    client_key_path: str = ""


@dataclass(frozen=True, slots=True)
class PageLocation:
    """Where the pages of a source are.

    `port` None: the port of the endpoint's metrics. `use_node_address`: at the address of the node
    that the endpoint runs on. `interval_seconds` None: as often as the load is asked for. No page
    may be larger than `max_page_bytes`.
    """

    scheme: str = "http"
    path: str = "/metrics"
    port: int | None = None
    interval_seconds: float | None = None
    use_node_address: bool = False
    tls: TlsFiles = TlsFiles()
    max_page_bytes: int = MAX_PAGE_BYTES

    def address(self, endpoint: Endpoint) -> str | None:
        """`host:port` to ask about `endpoint`, IPv6 in brackets; None when it is not known."""
        host, _, port = (endpoint.metrics_host_port or endpoint.host_port).rpartition(":")
        if self.use_node_address:
            if endpoint.node_address is None:
                return None
            node = endpoint.node_address
            host = f"[{node}]" if ":" in node else node
        return f"{host}:{port if self.port is None else self.port}"


@dataclass(frozen=True, slots=True)
class Scrape:
    """A page that came from where `endpoint` is asked about.

    `rank` is given when several endpoints are asked about at the same address: only what concerns
    the endpoint's own data-parallel rank is to be taken from the page. `previous` is what was known
    before, `now_seconds` the time on the monotonic clock, and `interval_seconds` when to expect the
    next page.
    """

    page: bytes
    endpoint: Endpoint
    now_seconds: float
    previous: EndpointMetrics | None = None
    rank: int | None = None
    interval_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Extraction:
    """The contents of a page: the endpoint's load (None: nothing), attributes by "Type/producer",
    problems, and the models that the endpoint names.
    """

    metrics: EndpointMetrics | None = None
    attributes: Mapping[str, Any] = field(default_factory=lambda: _EMPTY)
    problems: tuple[str, ...] = ()
    models: frozenset[str] = frozenset()


@runtime_checkable
class DataSource(Protocol):
    """Says where pages are; None: the endpoints themselves are all there is to look at."""

    @property
    def location(self) -> PageLocation | None:
        """Where to ask, the same for the life of the source."""
        ...


@runtime_checkable
class Extractor(Protocol):
    """Reads pages."""

    def extract(self, scrape: Scrape) -> Extraction:
        """What the page says about the endpoint. Raises `ExtractError` when it says nothing."""
        ...


@runtime_checkable
class NamesItsSeries(Protocol):
    """An `Extractor` that reads series of an exposition and nothing else of a page."""

    def series(self, endpoint: Endpoint) -> Sequence[str]:
        """The names of all that it may read on a page about `endpoint`."""
        ...


@runtime_checkable
class EndpointExtractor(Protocol):
    """Derives attributes of endpoints alone, once when they join or change."""

    def describe(self, endpoint: Endpoint) -> Mapping[str, Any]:
        """Attributes by "Type/producer". Never raises for what an endpoint may be."""
        ...


@dataclass(frozen=True, slots=True)
class SourceBinding:
    """A source with what reads its pages, as a configuration puts them together.

    Extractors come with the name of their type, which errors are counted under.
    """

    source_type: str
    source: DataSource
    extractors: tuple[tuple[str, Extractor | EndpointExtractor], ...]

    def __post_init__(self) -> None:
        wanted = EndpointExtractor if self.source.location is None else Extractor
        for name, extractor in self.extractors:
            if not isinstance(extractor, wanted):
                raise ValueError(f"a {self.source_type} has nothing that a {name} can read")


def describers(plugins: Iterable[object]) -> tuple[Callable[[Endpoint], Mapping[str, Any]], ...]:
    """What derives attributes of endpoints alone, for the datastore.

    It does so whether or not a source names it: there is nothing to ask for.
    """
    return tuple(one.describe for one in plugins if isinstance(one, EndpointExtractor))
