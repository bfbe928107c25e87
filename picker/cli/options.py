"""The options of a picker, as values; the table of flags (`table`) says what a field is for."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from base.response_bodies import ResponseBodies
from picker.extproc.machine.request_phase import DEFAULT_MAX_BODY_BYTES
from picker.k8s.api import LEGACY_POOLS, POOLS
from picker.k8s.elector import LeaseName, Timings
from picker.metrics.label_caps import MAX_ROOM_BYTES
from picker.outliers.breaker import OutlierSettings
from picker.peers.discovery import PeerName
from picker.rpc.options import DEFAULT_MAX_MESSAGE_BYTES

DEFAULT_NAMESPACE: Final = "default"
DEFAULT_POOL_NAME: Final = "default"
POOL_GROUPS: Final = (POOLS.group, LEGACY_POOLS.group)
LOOPBACK: Final = "127.0.0.1"
_DEFAULT_FAILURES: Final = OutlierSettings().failures
_TIMINGS: Final = Timings()
# Eight of the largest bodies at once; a small body arrives in one piece and is not counted.
_DEFAULT_MAX_UNFINISHED_BODY_BYTES: Final = 8 * DEFAULT_MAX_BODY_BYTES


@dataclass(frozen=True, slots=True)
class TlsFlags:
    cert_path: Path | None = None
    reload: bool = False
    min_version: str = ""
    cipher_suites: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class MetricsTls:
    cert_path: Path
    client_ca_file: Path | None = None


@dataclass(frozen=True, slots=True)
class LogFlags:
    verbosity: int = 2
    as_json: bool = False


@dataclass(frozen=True, slots=True)
class ExplainFlags:
    decision_records: int = 10_000
    decision_header: bool = False


@dataclass(frozen=True, slots=True)
class RecordFlags:
    path: Path
    max_bytes: int = 2**30
    keeps_prompts: bool = True


@dataclass(frozen=True, slots=True)
class XdsFlags:
    port: int
    bind_address: str = LOOPBACK
    cluster_name: str = DEFAULT_POOL_NAME


@dataclass(frozen=True, slots=True)
class KubernetesFlags:
    """A pool of a cluster: the InferencePool `pool_name` of `pool_group`, or selected Pods.
    `endpoint_selector` selects Pods that serve at `endpoint_target_ports`; then `pool_name` is only
    a label. If `kubeconfig` is None, `KUBECONFIG` or the Pod's service account is used.
    """

    pool_name: str
    pool_namespace: str = DEFAULT_NAMESPACE
    pool_group: str = POOLS.group
    endpoint_selector: str = ""
    endpoint_target_ports: tuple[int, ...] = ()
    kubeconfig: Path | None = None
    context: str = ""


@dataclass(frozen=True, slots=True)
class ElectionFlags:
    lease: LeaseName
    identity: str
    timings: Timings = _TIMINGS


@dataclass(frozen=True, slots=True)
class PeerFlags:
    """Either `names` are resolved, or the EndpointSlices of the Service `slices` are followed. If
    empty, `server_name` (in peers' certificates) is the name they were found by, `namespace` (of
    the Service) is the pool's, and `pool` (the name among replicas) is the pool's own.
    """

    names: tuple[PeerName, ...]
    port: int = 9005
    bind_address: str = LOOPBACK
    cert_path: Path | None = None
    server_name: str = ""
    slices: PeerName | None = None
    namespace: str = ""
    pool: str = ""


@dataclass(frozen=True, slots=True)
class PoolFlags:
    """One pool of several: the InferencePool of that name, or the contents of a file."""

    name: str
    namespace: str = ""
    group: str = POOLS.group
    grpc_port: int | None = None
    endpoints_file: Path | None = None
    config_file: Path | None = None


@dataclass(frozen=True, slots=True)
class Options:
    """A port of 0 takes a free one; without `tls` it uses plain text. A picker of several pools has
    `pools`, for each of which `pools.split` derives options with a `pool_key`, and the `pool_keys`
    of all; a picker of one pool has none of them.
    """

    config_file: Path | None = None
    config_text: str | None = None
    watch_config: bool = True
    allow_experimental_plugins: bool = False
    strict_data_scope: bool = False
    endpoints_file: Path | None = None
    pools: tuple[PoolFlags, ...] = ()
    pool_key: str = ""
    pool_keys: tuple[str, ...] = ()
    route_by_model: bool = False
    model_header_only: bool = False
    pool_name: str = DEFAULT_POOL_NAME
    kubernetes: KubernetesFlags | None = None
    election: ElectionFlags | None = None
    refresh_metrics_interval_seconds: float = 0.05
    metrics_staleness_threshold_seconds: float = 2.0
    bind_address: str = "0.0.0.0"
    grpc_port: int = 9002
    grpc_max_recv_msg_bytes: int = DEFAULT_MAX_MESSAGE_BYTES
    max_unfinished_body_bytes: int = _DEFAULT_MAX_UNFINISHED_BODY_BYTES
    disable_endpoint_subset_filter: bool = False
    response_bodies: ResponseBodies = ResponseBodies.OFF
    token_limits: bool = False
    emit_endpoint_scores: bool = False
    conformance: bool = False
    tls: TlsFlags | None = None
    grpc_health_port: int = 9003
    grpc_stream_metrics: bool = False
    health_checking: bool = False
    metrics_port: int = 9090
    metrics_bind_address: str = LOOPBACK
    metrics_tls: MetricsTls | None = None
    metrics_auth: bool = False
    pool_gauges_interval_seconds: float = 0.0
    metrics_client_label_bytes: int = MAX_ROOM_BYTES
    drain_timeout_seconds: float = 30.0
    endpoint_ejection_failures: int = _DEFAULT_FAILURES
    explain: ExplainFlags = ExplainFlags()
    record: RecordFlags | None = None
    xds: XdsFlags | None = None
    peers: PeerFlags | None = None
    hash_seed_file: Path | None = None
    autoscale: Path | None = None
    logs: LogFlags = LogFlags()
    tracing: bool = False


@dataclass(frozen=True, slots=True)
class Ports:
    """The ports of a started picker; `grpc` is 0 for a unix socket, others None if not served."""

    grpc: int
    health: int
    metrics: int
    xds: int | None = None
    peers: int | None = None
    pools: Mapping[str, int] = field(default_factory=dict)
