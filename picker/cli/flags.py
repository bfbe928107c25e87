"""The command line of the picker. Its flags are named like those of the reference picker.

A flag of the reference that this picker cannot honour is refused with the reason, never ignored.
"""

import argparse
import os
import re
import socket
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from base.flags import Parser, add_flags, configured, refuse
from picker.admin.loopback import is_loopback
from picker.cli.options import (
    DEFAULT_NAMESPACE,
    DEFAULT_POOL_NAME,
    LOOPBACK,
    ElectionFlags,
    ExplainFlags,
    KubernetesFlags,
    LogFlags,
    MetricsTls,
    Options,
    PeerFlags,
    RecordFlags,
    TlsFlags,
    XdsFlags,
)
from picker.cli.pools import pools_of
from picker.cli.readers import DIALECT, namespace
from picker.cli.rules import check, first_pool, follows_cluster, has_peers, is_secure
from picker.cli.table import FLAGS
from picker.errors import ConfigError
from picker.k8s.elector import LeaseName, Timings
from picker.peers.discovery import PeerName, peer_name
from picker.pool.object_parts import MAX_TARGET_PORTS

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
MAX_LEASE_NAME: Final = 253  # the limit of names in Kubernetes
MAX_LEASE_SECONDS: Final = 120.0
MIN_RETRY_SECONDS: Final = 0.1
_TIMINGS: Final = Timings()
_DEPLOYMENT: Final = re.compile(r"(.+)-[a-z0-9]+-[a-z0-9]+")
_SERVICE: Final = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")

_PROCESSES: Final = (
    "is gone: two processes decided fewer requests a second than one, each knew only its own "
    "prefixes; run replicas that are peers (docs/high-availability.md)"
)
_TRANSPORT: Final = "is gone: there is one transport, that of `native`; leave the flag out"
_NO_METRIC: Final = "is gone: use engineConfigs in the parameters of a core-metrics-extractor"
_NO_PAGE: Final = "is gone: use port, path, scheme and insecureSkipVerify of a metrics-data-source"
_NO_ZAP: Final = "settings of Go's zap: use --zap-encoder, --zap-log-level and -v"
# Flags that are accepted only with values that change nothing: why, and the values.
_REFUSED: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "--processes": (_PROCESSES, ("1",)),
    "--grpc-transport": (_TRANSPORT, ("native",)),
    "--total-queued-requests-metric": (_NO_METRIC, ()),
    "--total-running-requests-metric": (_NO_METRIC, ()),
    "--kv-cache-usage-percentage-metric": (_NO_METRIC, ()),
    "--lora-info-metric": (_NO_METRIC, ()),
    "--cache-info-metric": (_NO_METRIC, ()),
    "--model-server-metrics-port": (_NO_PAGE, ()),
    "--model-server-metrics-path": (_NO_PAGE, ("/metrics",)),
    "--model-server-metrics-scheme": (_NO_PAGE, ("http",)),
    "--model-server-metrics-https-insecure-skip-verify": (_NO_PAGE, ("true",)),
    "--enable-pprof": ("profiles of Go programs; of this one: py-spy", ("false",)),
    "--zap-devel": (_NO_ZAP, ("false",)),
    "--zap-stacktrace-level": (_NO_ZAP, ("false",)),
    "--zap-time-encoding": (_NO_ZAP, ("false",)),
}


def build_parser() -> Parser:
    parser = Parser(
        prog="pointsman picker",
        description="Endpoint picker: an Envoy external processor that sends each LLM request to "
        "the right worker.",
    )
    add_flags(parser, FLAGS, DIALECT)
    refuse(parser, _REFUSED)
    return parser


def options_of(arguments: argparse.Namespace, environ: Mapping[str, str] | None = None) -> Options:
    """Return the options for parsed flags and environment variables. Raises `ConfigError`."""
    environ = os.environ if environ is None else environ
    check(arguments)
    kubernetes, given = _kubernetes_of(arguments, environ), arguments
    pool_name = given.pool_name or DEFAULT_POOL_NAME
    pool_name = pool_name if kubernetes is None else kubernetes.pool_name
    made: dict[str, Any] = {
        "pools": pools_of(given, kubernetes),
        "pool_name": pool_name,
        "kubernetes": kubernetes,
        "election": _election_of(given, kubernetes, environ),
        "tls": _tls_of(given),
        "peers": _peers_of(given),
        "explain": ExplainFlags(given.decision_records, given.decision_header),
        "logs": LogFlags(_verbosity(given), as_json=given.zap_encoder == "json"),
        "record": None,
    }
    if given.metrics_cert_dir is not None:
        made["metrics_tls"] = MetricsTls(given.metrics_cert_dir, given.metrics_client_ca_file)
    if given.record is not None:
        made["record"] = RecordFlags(given.record, given.record_max_bytes, given.record_prompts)
    if given.xds_port is not None:
        cluster_name = given.xds_cluster_name or pool_name
        made["xds"] = XdsFlags(given.xds_port, given.xds_bind_address, cluster_name)
    return configured(Options, given, **made)


def _verbosity(arguments: argparse.Namespace) -> int:
    if arguments.zap_log_level is not None:
        return int(arguments.zap_log_level)
    return LogFlags().verbosity if arguments.v < 0 else int(arguments.v)


def _tls_of(arguments: argparse.Namespace) -> TlsFlags | None:
    if not is_secure(arguments):
        return None
    # A self-signed certificate has no file to follow.
    follows = arguments.cert_path is not None and arguments.enable_cert_reload is not False
    version, suites = arguments.tls_min_version, arguments.tls_cipher_suites
    return TlsFlags(arguments.cert_path, follows, version, suites)


def _kubernetes_of(
    arguments: argparse.Namespace, environ: Mapping[str, str]
) -> KubernetesFlags | None:
    if not follows_cluster(arguments):
        return None
    name: str = arguments.pool_name or first_pool(arguments) or ""
    if arguments.endpoint_selector:
        name = _selected_name(arguments, environ)
    return KubernetesFlags(
        pool_name=name,
        pool_namespace=arguments.pool_namespace or _own_namespace(environ),
        pool_group=arguments.pool_group,
        endpoint_selector=arguments.endpoint_selector,
        endpoint_target_ports=tuple(dict.fromkeys(arguments.endpoint_target_ports)),
        kubeconfig=arguments.kubeconfig,
        context=arguments.kube_context,
    )


def _selected_name(arguments: argparse.Namespace, environ: Mapping[str, str]) -> str:
    """Return the name for a pool of selected Pods: that of the picker's own Deployment."""
    ports = frozenset(arguments.endpoint_target_ports)
    if len(ports) > MAX_TARGET_PORTS:
        raise ConfigError(
            f"--endpoint-target-ports has {len(ports)} ports; {MAX_TARGET_PORTS} at most"
        )
    pod_name = environ.get("POD_NAME", "")
    if not pod_name:
        raise ConfigError(
            "--endpoint-selector needs the variable POD_NAME, the picker's own Pod (fieldRef "
            "metadata.name): the pool has the name of its Deployment"
        )
    found = _DEPLOYMENT.fullmatch(pod_name)
    if found is None:
        raise ConfigError(
            f"POD_NAME is '{pod_name}', which is no Pod of a Deployment (NAME-xxxxx-yyyyy); "
            "--endpoint-selector names the pool after the picker's Deployment"
        )
    return found[1]


def _own_namespace(environ: Mapping[str, str]) -> str:
    named = environ.get("NAMESPACE", "")
    if named:
        try:
            return namespace(named)
        except ConfigError as error:
            raise ConfigError(f"the variable NAMESPACE: {error}") from error
    try:
        written = (SERVICE_ACCOUNT / "namespace").read_text().strip()
    except OSError:
        return DEFAULT_NAMESPACE
    return written or DEFAULT_NAMESPACE


def _election_of(
    arguments: argparse.Namespace, cluster: KubernetesFlags | None, environ: Mapping[str, str]
) -> ElectionFlags | None:
    if cluster is None or not arguments.ha_enable_leader_election:
        return None
    namespace = cluster.pool_namespace
    lease = LeaseName(namespace, f"epp-{namespace}-{cluster.pool_name}.llm-d.ai")
    if len(lease.name) > MAX_LEASE_NAME:
        raise ConfigError(
            f"the lease of --ha-enable-leader-election would have the name {lease.name}, which has "
            f"more than {MAX_LEASE_NAME} letters: use a shorter name of the pool"
        )
    # A restarted container keeps its name, but must not take over the Lease of its predecessor.
    name = environ.get("POD_NAME") or socket.gethostname()
    return ElectionFlags(lease, f"{name}_{uuid.uuid4()}", _timings(arguments))


def _timings(arguments: argparse.Namespace) -> Timings:
    lease = _or(arguments.leader_election_lease_duration, _TIMINGS.lease_seconds)
    renew = _or(arguments.leader_election_renew_deadline, _TIMINGS.renew_seconds)
    retry = _or(arguments.leader_election_retry_period, _TIMINGS.retry_seconds)
    if not 1 <= lease <= MAX_LEASE_SECONDS or lease != int(lease):
        raise ConfigError(
            f"--leader-election-lease-duration is {lease:g}s; a Lease holds for whole seconds, 1 "
            f"to {MAX_LEASE_SECONDS:.0f}"
        )
    if renew >= lease:
        raise ConfigError(
            f"--leader-election-renew-deadline is {renew:g}s, which is not less than the "
            f"{lease:g}s of --leader-election-lease-duration: two replicas would lead at once"
        )
    if retry < MIN_RETRY_SECONDS or retry * 1.2 >= renew:
        raise ConfigError(
            f"--leader-election-retry-period is {retry:g}s; at least {MIN_RETRY_SECONDS:g}s, and "
            f"well below the {renew:g}s of --leader-election-renew-deadline, or renewals are late"
        )
    return Timings(lease, renew, retry)


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _peers_of(arguments: argparse.Namespace) -> PeerFlags | None:
    if not has_peers(arguments):
        return None
    port, service = arguments.peer_port, arguments.peer_service
    names = [peer_name(text.strip()) for text in arguments.peers.split(",") if text.strip()]
    names += [peer_name(service, port or None)] if service else []
    is_open = arguments.peer_cert_path is not None or arguments.peer_insecure
    address = arguments.peer_bind_address or ("0.0.0.0" if is_open else LOOPBACK)
    if not is_open and not is_loopback(address):
        raise ConfigError(
            f"--peer-bind-address {address}: every client that reaches this port is trusted; give "
            "--peer-cert-path DIR, or --peer-insecure where the network can be trusted"
        )
    return PeerFlags(
        tuple(dict.fromkeys(names)),
        port,
        address,
        arguments.peer_cert_path,
        arguments.peer_server_name,
        _slices(arguments.peer_slices, port),
    )


def _slices(service: str, port: int) -> PeerName | None:
    if not service:
        return None
    found = peer_name(service, port or None)
    if not _SERVICE.fullmatch(found.host):
        raise ConfigError(f"--peer-slices: '{found.host}' is no name of a Service")
    return found
