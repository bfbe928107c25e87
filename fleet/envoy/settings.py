"""Frozen settings of a generated bootstrap, and the header names a client may not set itself."""

from dataclasses import dataclass
from enum import Enum

from base.response_bodies import ResponseBodies
from fleet.envoy.tenants import Tenants

DESTINATION_KEY = "x-gateway-destination-endpoint"
DESTINATION_NAMESPACE = "envoy.lb"
# The metadata in which a call to a picker of several pools names the pool, and the request header
# in which a picker that chooses the pool names it.
POOL_METADATA = "x-pointsman-pool"

# The response header that marks Envoy's own answers.
LOCAL_REPLY_HEADER = "x-pointsman-local-reply"

# Every header by which a picker or a worker learns where to send or take something. A client that
# could set one would choose the endpoint itself, or make a worker call an address of its choosing.
ROUTING_HEADERS = (
    DESTINATION_KEY,
    f"{DESTINATION_KEY}-subset",
    f"{DESTINATION_KEY}-served",
    f"{DESTINATION_KEY}-scores",
    "x-gateway-model-name-rewrite",
    "x-llm-d-model-name-rewrite",
    "x-encoder-hosts-ports",
    "x-kv-cache-source-host-port",
)
ROUTING_PREFIXES = ("x-prefiller-", "x-data-parallel-")
# Families that also hold what a trusted hop may say about a request (objective, fairness, SLO).
CONTROL_PREFIXES = ("x-gateway-", "x-llm-d-", "x-slo-")


class Mechanism(Enum):
    OVERRIDE_HOST = "override-host"
    ORIGINAL_DST = "original-dst"


@dataclass(frozen=True, slots=True)
class SocketAddress:
    """A TCP address; `host` is an IP literal."""

    host: str
    port: int

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"


MAX_PIPE_BYTES = 107  # of a path, on Linux


@dataclass(frozen=True, slots=True)
class PipeAddress:
    """A unix socket by its path (at most `MAX_PIPE_BYTES`)."""

    path: str


Address = SocketAddress | PipeAddress


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one client. `request_buffer_bytes` bounds the part of a body that is held for a
    retry: a larger request is never retried. Past `max_heap_bytes` new requests are refused.
    """

    request_buffer_bytes: int = 4 * 1024 * 1024
    max_request_headers_kib: int = 60
    max_request_headers: int = 100
    request_headers_timeout_seconds: float = 10.0
    request_timeout_seconds: float = 300.0
    stream_idle_timeout_seconds: float = 300.0
    max_concurrent_streams: int = 100
    max_downstream_connections: int = 10_000
    max_upstream_connections: int = 10_000
    max_upstream_requests: int = 10_000
    max_retries: int = 1_024  # the death of one busy worker is many retries at once
    max_heap_bytes: int = 1024 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class EndpointDiscovery:
    """A picker that reports its endpoints (`--xds-port`), and its name for the pool."""

    picker: SocketAddress
    pool_name: str = "default"
    is_delta: bool = False


@dataclass(frozen=True, slots=True)
class BootstrapConfig:
    """Everything a generated bootstrap depends on.

    `endpoints_file` names a file holding an EDS `DiscoveryResponse` (see
    `bootstrap.endpoints_document`) which Envoy re-reads when it is replaced by a rename;
    `endpoints` is then ignored. With `discovery` Envoy asks a picker instead, and `ORIGINAL_DST`
    goes wherever the picker says. `pools` are the names of several pools (the picker's `--pool`):
    requests below `/NAME/` are for that one, with the rest as their path, and others are answered
    with 404, or with `route_by_model` go to the pool that the picker chooses by their model.

    `pickers_file` names such a file for the picker; `picker` and `picker_health` (where gRPC health
    checks are answered, if not at `picker`) are then ignored. `trust_control_headers` lets clients
    set objective, fairness and latency-target headers; headers that choose an endpoint are always
    stripped. `buffer_request_body` gives the picker each body in one message and keeps it in Envoy
    until the answer (up to `Limits.request_buffer_bytes`; more is a 413): then the loss of a picker
    fails no request and cuts no stream, which full-duplex streaming cannot promise.
    Only clients of the `tenants` are served, if there are any.
    `response_bodies` must be that of the picker, if it is USAGE. `welcome` is the text at `/`;
    None: a worker answers there.
    """

    listen: SocketAddress
    admin: Address
    picker: Address
    endpoints: tuple[SocketAddress, ...] = ()
    endpoints_file: str | None = None
    discovery: EndpointDiscovery | None = None
    pools: tuple[str, ...] = ()
    route_by_model: bool = False
    mechanism: Mechanism = Mechanism.OVERRIDE_HOST
    picker_health: SocketAddress | None = None
    pickers_file: str | None = None
    failure_mode_allow: bool = True
    buffer_request_body: bool = False
    response_bodies: ResponseBodies = ResponseBodies.OFF
    message_timeout_seconds: float | None = None
    trust_control_headers: bool = False
    tenants: Tenants | None = None
    num_retries: int = 3
    access_log_path: str | None = None
    welcome: str | None = None
    limits: Limits = Limits()

    def __post_init__(self) -> None:
        has_source = self.discovery is not None or self.mechanism is Mechanism.ORIGINAL_DST
        if self.pools and not has_source:
            raise ValueError("several pools need endpoint discovery, or original-dst")
        if self.route_by_model and not self.pools:
            raise ValueError("route_by_model chooses between pools: name them")

    @property
    def effective_message_timeout_seconds(self) -> float:
        """The time that one answer of the picker may take before Envoy continues without it.

        With buffered bodies it is 1 s: each request sent to a picker that hangs waits this long,
        until the health check has detected it. A shorter time would send requests past a picker
        that is merely busy. In full duplex it is 10 s, to no great effect: Envoy applies no timeout
        while a request body is streamed both ways (measured), so a picker that hangs is taken out
        of use by its health check alone.
        """
        if self.message_timeout_seconds is not None:
            return self.message_timeout_seconds
        return 1.0 if self.buffer_request_body else 10.0
