"""What the command line decides, as values, and where a started picker listens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from picker.cli.election_flags import ElectionFlags
from picker.cli.explain_flags import NO_WISHES, ExplainFlags
from picker.cli.health_flags import DEFAULT_FAILURES
from picker.cli.kubernetes_flags import DEFAULT_POOL_NAME, POOL_GROUPS, KubernetesFlags
from picker.cli.peer_flags import PeerFlags
from picker.cli.record_flags import RecordFlags
from picker.cli.xds_flags import XdsFlags
from picker.extproc.server import (
    DEFAULT_MAX_MESSAGE_BYTES,
    DEFAULT_MAX_UNFINISHED_BODY_BYTES,
    ServerOptions,
    Transport,
)

_SERVER = ServerOptions()


@dataclass(frozen=True, slots=True)
class TlsFlags:
    """TLS of the ext_proc port. Without `cert_path` it shows a certificate that it made itself."""

    cert_path: Path | None = None
    reload: bool = False
    min_version: str = ""
    cipher_suites: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class MetricsTls:
    """TLS of the HTTP port, and whose certificates clients must show (None: nobody's)."""

    cert_path: Path
    client_ca_file: Path | None = None


@dataclass(frozen=True, slots=True)
class LogFlags:
    """How to log; see `picker.app.logs`."""

    verbosity: int = 2
    as_json: bool = False


@dataclass(frozen=True, slots=True)
class PoolFlags:
    """One pool of several: the InferencePool of that name, or what a file says.

    `grpc_port` is where only this pool is served, None: nowhere. `config_file` None: as the picker.
    """

    name: str
    namespace: str = ""
    group: str = POOL_GROUPS[0]
    grpc_port: int | None = None
    endpoints_file: Path | None = None
    config_file: Path | None = None


@dataclass(frozen=True, slots=True)
class Options:
    """Ports: 0 takes a free one. `tls` None: plain text.

    `pools` are those of a picker of several, each of which has options of its own made of these
    (`several_pools.split`), with a `pool_key`; a picker of one pool has neither.

    `max_unfinished_body_bytes` is what request bodies may take together while they arrive.
    `endpoint_ejection_failures` in a row eject an endpoint; 0: none is ever ejected.
    `pool_gauges_interval_seconds` is how long gauges of the pool may be told again before they are
    computed anew.
    """

    config_file: Path | None = None
    config_text: str | None = None
    watch_config: bool = True
    allow_experimental_plugins: bool = False
    strict_data_scope: bool = False
    endpoints_file: Path | None = None
    pools: tuple[PoolFlags, ...] = ()
    pool_key: str = ""
    pool_name: str = DEFAULT_POOL_NAME
    kubernetes: KubernetesFlags | None = None
    election: ElectionFlags | None = None
    bind_address: str = "0.0.0.0"
    grpc_port: int = 9002
    grpc_health_port: int = 9003
    grpc_max_recv_msg_bytes: int = DEFAULT_MAX_MESSAGE_BYTES
    max_unfinished_body_bytes: int = DEFAULT_MAX_UNFINISHED_BODY_BYTES
    grpc_transport: Transport = _SERVER.transport
    health_checking: bool = False
    tls: TlsFlags | None = None
    metrics_bind_address: str = "127.0.0.1"
    metrics_port: int = 9090
    grpc_stream_metrics: bool = False
    metrics_tls: MetricsTls | None = None
    metrics_auth: bool = False
    pool_gauges_interval_seconds: float = 0.0
    refresh_metrics_interval_seconds: float = 0.05
    metrics_staleness_threshold_seconds: float = 2.0
    disable_endpoint_subset_filter: bool = False
    emit_endpoint_scores: bool = False
    tracing: bool = False
    drain_timeout_seconds: float = 30.0
    endpoint_ejection_failures: int = DEFAULT_FAILURES
    explain: ExplainFlags = NO_WISHES
    record: RecordFlags | None = None
    xds: XdsFlags | None = None
    peers: PeerFlags | None = None
    hash_seed_file: Path | None = None
    logs: LogFlags = LogFlags()


@dataclass(frozen=True, slots=True)
class Ports:
    """Where a started picker listens; `grpc` 0 is a unix socket, `xds` and `peers` None nowhere.

    `pools` are the ports at which one pool of several is served, by its key.
    """

    grpc: int
    health: int
    metrics: int
    xds: int | None = None
    peers: int | None = None
    pools: Mapping[str, int] = field(default_factory=dict)


__all__ = ["LogFlags", "MetricsTls", "Options", "PoolFlags", "Ports", "TlsFlags"]
