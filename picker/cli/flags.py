"""The flags of the picker, named as the reference picker names them.

A flag of the reference that this picker cannot honour is refused with the reason; it is never
ignored.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from ipaddress import ip_address
from pathlib import Path
from typing import Any, TypeVar

from picker.cli.election_flags import add_election_flags, election_flags_of
from picker.cli.explain_flags import add_explain_flags, explain_flags_of
from picker.cli.health_flags import add_health_flags
from picker.cli.kubernetes_flags import (
    DEFAULT_POOL_NAME,
    add_kubernetes_flags,
    kubernetes_flags_of,
)
from picker.cli.metrics_auth import metrics_auth_of
from picker.cli.options import LogFlags, MetricsTls, Options, TlsFlags
from picker.cli.peer_flags import add_peer_flags, peer_flags_of
from picker.cli.record_flags import add_record_flags, record_flags_of
from picker.cli.several_pools import add_pools_flag, pools_of
from picker.cli.xds_flags import add_xds_flags, xds_flags_of
from picker.config.units import duration_seconds, quantity_bytes
from picker.config.unsupported import FLAGS, reason
from picker.errors import ConfigError
from picker.extproc.request_phase import DEFAULT_MAX_BODY_BYTES
from picker.rpc.options import UNIX_SCHEME, Transport

T = TypeVar("T")
_DEFAULTS = Options()
# The largest message that the picker ever sends: a piece of a body and what is said about it.
MIN_SENT_MESSAGE_BYTES = 1024 * 1024
# The headers of a request alone may take this much.
MIN_TAKEN_MESSAGE_BYTES = 64 * 1024
MIN_UNFINISHED_BYTES = DEFAULT_MAX_BODY_BYTES  # one body of the largest size has to fit
_PROCESSES = (
    "is gone: two processes decided fewer requests a second than one, each knew only its own "
    "prefixes; run replicas that are peers (docs/high-availability.md)"
)
_ENGINE_METRICS = (
    "--total-queued-requests-metric",
    "--total-running-requests-metric",
    "--kv-cache-usage-percentage-metric",
    "--lora-info-metric",
    "--cache-info-metric",
)


def build_parser() -> argparse.ArgumentParser:
    """All flags, in groups."""
    parser = argparse.ArgumentParser(
        prog="pointsman picker",
        description="Endpoint picker: an Envoy external processor that sends each LLM request to "
        "the right worker.",
        allow_abbrev=False,
    )
    _add_configuration(parser.add_argument_group("configuration"))
    _add_pool(parser.add_argument_group("pool"))
    _add_ext_proc(parser.add_argument_group("ext_proc"))
    _add_tls(parser.add_argument_group("TLS"))
    _add_http(parser.add_argument_group("health and metrics"))
    behaviour = parser.add_argument_group("behaviour")
    _add_behaviour(behaviour)
    add_health_flags(behaviour)
    add_explain_flags(parser.add_argument_group("explanations"))
    add_record_flags(parser.add_argument_group("recording"))
    add_xds_flags(parser.add_argument_group("endpoint discovery"))
    replicas = parser.add_argument_group("replicas")
    add_peer_flags(replicas)
    add_election_flags(replicas)
    _add_logging(parser.add_argument_group("logging and tracing"))
    _add_refused(parser.add_argument_group("refused"))
    return parser


def options_of(arguments: argparse.Namespace) -> Options:
    """What the parsed flags ask for. Raises `ConfigError` for flags that contradict each other."""
    kubernetes = kubernetes_flags_of(arguments)
    named = arguments.pool_name or DEFAULT_POOL_NAME
    return Options(
        config_file=arguments.config_file,
        config_text=arguments.config_text,
        watch_config=arguments.watch_config,
        allow_experimental_plugins=arguments.allow_experimental_plugins,
        strict_data_scope=arguments.strict_data_scope,
        endpoints_file=arguments.endpoints_file,
        pools=pools_of(arguments, kubernetes),
        pool_name=named if kubernetes is None else kubernetes.pool_name,
        kubernetes=kubernetes,
        election=election_flags_of(arguments, kubernetes),
        bind_address=arguments.bind_address,
        grpc_port=arguments.grpc_port,
        grpc_health_port=arguments.grpc_health_port,
        grpc_max_recv_msg_bytes=arguments.grpc_max_recv_msg_size,
        max_unfinished_body_bytes=arguments.max_unfinished_bodies,
        grpc_transport=arguments.grpc_transport,
        health_checking=arguments.health_checking,
        tls=_tls_of(arguments),
        metrics_bind_address=arguments.metrics_bind_address,
        metrics_port=arguments.metrics_port,
        grpc_stream_metrics=arguments.enable_grpc_stream_metrics,
        metrics_tls=_metrics_tls_of(arguments),
        metrics_auth=metrics_auth_of(arguments, kubernetes),
        pool_gauges_interval_seconds=arguments.refresh_prometheus_metrics_interval,
        refresh_metrics_interval_seconds=arguments.refresh_metrics_interval,
        metrics_staleness_threshold_seconds=arguments.metrics_staleness_threshold,
        disable_endpoint_subset_filter=arguments.disable_endpoint_subset_filter,
        emit_endpoint_scores=arguments.emit_endpoint_scores,
        tracing=arguments.tracing,
        drain_timeout_seconds=arguments.drain_timeout,
        endpoint_ejection_failures=arguments.endpoint_ejection_failures,
        explain=explain_flags_of(arguments),
        record=record_flags_of(arguments),
        xds=xds_flags_of(arguments),
        peers=peer_flags_of(arguments),
        hash_seed_file=arguments.hash_seed_file,
        logs=_logs_of(arguments),
    )


def _logs_of(arguments: argparse.Namespace) -> LogFlags:
    verbosity = _DEFAULTS.logs.verbosity if arguments.v < 0 else arguments.v
    if arguments.zap_log_level is not None:
        verbosity = arguments.zap_log_level
    return LogFlags(verbosity, as_json=arguments.zap_encoder == "json")


def _tls_of(arguments: argparse.Namespace) -> TlsFlags | None:
    secure = arguments.secure_serving
    if arguments.enable_cert_reload and arguments.cert_path is None:
        raise ConfigError("--enable-cert-reload needs --cert-path, the folder to follow")
    if secure is None:
        secure = arguments.cert_path is not None or not is_local(arguments.bind_address)
    if not secure:
        asked = arguments.tls_min_version or arguments.tls_cipher_suites
        if asked or arguments.enable_cert_reload:
            raise ConfigError("flags about TLS have no effect without --secure-serving")
        return None
    return TlsFlags(
        cert_path=arguments.cert_path,
        reload=arguments.cert_path is not None and arguments.enable_cert_reload is not False,
        min_version=arguments.tls_min_version,
        cipher_suites=arguments.tls_cipher_suites,
    )


def is_local(bind_address: str) -> bool:
    """Whether nobody but this machine can reach what listens there."""
    if bind_address.startswith(("/", UNIX_SCHEME)) or bind_address == "localhost":
        return True
    try:
        return ip_address(bind_address).is_loopback
    except ValueError:
        return False


def _metrics_tls_of(arguments: argparse.Namespace) -> MetricsTls | None:
    if arguments.metrics_cert_dir is None:
        if arguments.metrics_client_ca_file is not None:
            raise ConfigError("--metrics-client-ca-file needs --metrics-cert-dir")
        return None
    return MetricsTls(arguments.metrics_cert_dir, arguments.metrics_client_ca_file)


class _Group:
    """Adds flags to a group of argparse; every flag takes `--flag value` and `--flag=value`."""

    def __init__(self, group: argparse._ArgumentGroup) -> None:
        self._group = group

    def flag(
        self, name: str, parse: Callable[[str], Any], metavar: str, text: str, default: Any
    ) -> None:
        """A flag with a value."""
        self._group.add_argument(
            name, type=_checked(parse), metavar=metavar, help=text, default=default
        )

    def switch(self, name: str, text: str, default: bool | None = False) -> None:
        """A flag that is true without a value, as with Go's programs."""
        self._group.add_argument(
            name,
            type=_checked(_truth),
            nargs="?",
            const=True,
            default=default,
            metavar="true|false",
            help=text,
        )

    def refused(self, name: str, why: str, harmless: tuple[str, ...] = ("false",)) -> None:
        """A flag that may only ask for what is so anyway: for one of `harmless`."""

        def refuse(text: str) -> str:
            if text.lower() not in harmless:
                raise ConfigError(why)
            return text

        self._group.add_argument(
            name,
            type=_checked(refuse),
            nargs="?",
            const="true",
            default=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
        )


def _add_configuration(arguments: argparse._ArgumentGroup) -> None:
    group = _Group(arguments)
    group.flag(
        "--config-file", _path, "FILE", "EndpointPickerConfig in YAML (default: built in)", None
    )
    group.flag("--config-text", _text, "YAML", "the same as text", None)
    group.switch("--watch-config", "apply changes of --config-file while running", default=True)
    group.switch("--allow-experimental-plugins", "allow plugin types that are alpha")
    group.switch(
        "--strict-data-scope", "keep from plugins the findings that they do not declare to read"
    )


def _add_pool(arguments: argparse._ArgumentGroup) -> None:
    group = _Group(arguments)
    text = "endpoints, objectives and rewrites in YAML; changes apply at once"
    group.flag("--endpoints-file", _path, "FILE", text, None)
    add_kubernetes_flags(arguments)
    add_pools_flag(arguments)
    text = "how often endpoints are scraped while requests come; at least 50ms"
    group.flag("--refresh-metrics-interval", duration_seconds, "DURATION", text, "50ms")
    text = "how long failing scrapes may leave old metrics in use"
    group.flag("--metrics-staleness-threshold", duration_seconds, "DURATION", text, "2s")


def _add_ext_proc(arguments: argparse._ArgumentGroup) -> None:
    group = _Group(arguments)
    text = "where ext_proc and health listen, or unix:///PATH for ext_proc (default: everywhere)"
    group.flag("--bind-address", str, "ADDRESS", text, _DEFAULTS.bind_address)
    group.flag("--grpc-port", _port, "PORT", "ext_proc; 0: a free port", _DEFAULTS.grpc_port)
    text = "largest gRPC message taken, e.g. 10MiB"
    default = f"{_DEFAULTS.grpc_max_recv_msg_bytes // 1024**2}Mi"
    group.flag("--grpc-max-recv-msg-size", _taken_bytes, "SIZE", text, default)
    text = "largest gRPC message sent; the picker sends none over 1MiB, so less is refused"
    group.flag("--grpc-max-send-msg-size", _sent_bytes, "SIZE", text, None)
    text = "what request bodies may take together while they arrive; beyond it a 429"
    default = f"{_DEFAULTS.max_unfinished_body_bytes // 1024**2}Mi"
    group.flag("--max-unfinished-bodies", _unfinished_bytes, "SIZE", text, default)
    text = "what carries gRPC: own HTTP/2 frames, the h2 library or grpc.aio"
    names = "|".join(transport.value for transport in Transport)
    group.flag("--grpc-transport", _transport, names, text, _DEFAULTS.grpc_transport)
    group.switch("--disable-endpoint-subset-filter", "ignore the proxy's choice of endpoints")
    group.switch("--emit-endpoint-scores", "tell the proxy every candidate's score as metadata")


def _add_tls(arguments: argparse._ArgumentGroup) -> None:
    group = _Group(arguments)
    text = "TLS on ext_proc; without --cert-path with a certificate made on the spot "
    text += "(default: unless it listens on loopback or a unix socket and has no --cert-path)"
    group.switch("--secure-serving", text, default=None)
    group.flag("--cert-path", _path, "DIR", "folder with tls.crt and tls.key", None)
    text = "show new certificates as they appear in --cert-path (default: when that is given)"
    group.switch("--enable-cert-reload", text, default=None)
    text = "VersionTLS12 or VersionTLS13"
    group.flag("--tls-min-version", str, "VERSION", text, "")
    text = "names of TLS 1.2 suites, separated by commas (default: the library's)"
    group.flag("--tls-cipher-suites", _names, "NAMES", text, ())


def _add_http(arguments: argparse._ArgumentGroup) -> None:
    group = _Group(arguments)
    default: Any = _DEFAULTS.grpc_health_port
    group.flag("--grpc-health-port", _port, "PORT", "gRPC health, plain", default)
    group.switch("--enable-grpc-stream-metrics", "count ext_proc streams, by how they end")
    group.switch("--health-checking", "answer health checks on the ext_proc port too")
    text = "/metrics /healthz /readyz /endpoints"
    group.flag("--metrics-port", _port, "PORT", text, _DEFAULTS.metrics_port)
    text = "where the HTTP port listens (default: loopback only)"
    group.flag("--metrics-bind-address", str, "ADDRESS", text, _DEFAULTS.metrics_bind_address)
    text = "folder with tls.crt and tls.key for the HTTP port"
    group.flag("--metrics-cert-dir", _path, "DIR", text, None)
    text = "CAs (PEM) that must have signed the certificates of its clients"
    group.flag("--metrics-client-ca-file", _path, "FILE", text, None)
    text = "answer on the HTTP port only whom the cluster lets read nonResourceURLs like /metrics"
    group.switch("--metrics-endpoint-auth", text)
    text = "how long gauges of the pool are told again (default: computed whenever asked)"
    flag = "--refresh-prometheus-metrics-interval"
    group.flag(flag, duration_seconds, "DURATION", text, "0")


def _add_behaviour(arguments: argparse._ArgumentGroup) -> None:
    text = "how long requests under way may take after SIGTERM"
    _Group(arguments).flag("--drain-timeout", duration_seconds, "DURATION", text, "30s")


def _add_logging(arguments: argparse._ArgumentGroup) -> None:
    arguments.add_argument(
        "-v", "--v", type=int, default=2, metavar="LEVEL", help="2: normal, 4 and above: debug"
    )
    group = _Group(arguments)
    text = "debug, info, error, or a number as for -v; wins over -v"
    group.flag("--zap-log-level", _log_level, "LEVEL", text, None)
    text = "console, or json: one object a line"
    group.flag("--zap-encoder", _encoder, "console|json", text, "console")
    group.switch("--tracing", "send OpenTelemetry spans where OTEL_* variables say")


def _add_refused(arguments: argparse._ArgumentGroup) -> None:
    group = _Group(arguments)
    for name, feature in FLAGS.items():
        group.refused(name, reason(feature))
    for name in _ENGINE_METRICS:
        why = "is gone: use engineConfigs in the parameters of a core-metrics-extractor"
        group.refused(name, why, harmless=())
    group.refused("--processes", _PROCESSES, harmless=("1",))
    group.refused("--enable-pprof", "profiles of Go programs; of this one: py-spy")
    for name in ("--zap-devel", "--zap-stacktrace-level", "--zap-time-encoding"):
        why = "settings of Go's zap: use --zap-encoder, --zap-log-level and -v"
        group.refused(name, why)


def _checked(parse: Callable[[str], T]) -> Callable[[str], T]:
    """`parse` as an argparse type, whose errors become argparse's."""

    def convert(text: str) -> T:
        try:
            return parse(text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return convert


def _port(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or int(text) > 65535:
        raise ConfigError(f"'{text}' is no port; write a number from 0 to 65535")
    return int(text)


def _path(text: str) -> Path | None:
    """None for "", which is the reference's default and what templates render for it."""
    return Path(text) if text else None


def _text(text: str) -> str | None:
    return text or None


def _taken_bytes(text: str) -> int:
    size = quantity_bytes(text) if text else _DEFAULTS.grpc_max_recv_msg_bytes
    if size < MIN_TAKEN_MESSAGE_BYTES:
        raise ConfigError(f"'{text}' is too little: the headers of a request may have 64KiB")
    return size


def _unfinished_bytes(text: str) -> int:
    size = quantity_bytes(text)
    if size < MIN_UNFINISHED_BYTES:
        raise ConfigError(f"'{text}' is too little: one request body may have 64MiB")
    return size


def _sent_bytes(text: str) -> int:
    size = quantity_bytes(text) if text else 0
    if 0 < size < MIN_SENT_MESSAGE_BYTES:
        raise ConfigError(f"'{text}' is too little: the picker's messages may have 1MiB")
    return size


def _transport(text: str) -> Transport:
    try:
        return Transport(text)
    except ValueError:
        names = ", ".join(transport.value for transport in Transport)
        raise ConfigError(f"'{text}' is no transport; write one of {names}") from None


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _log_level(text: str) -> int:
    named = {"debug": 4, "info": 2, "error": 0}
    if text.isascii() and text.isdecimal():
        return int(text)
    if text not in named:
        raise ConfigError(f"'{text}' is no level; write debug, info, error or a number")
    return named[text]


def _encoder(text: str) -> str:
    if text not in ("console", "json"):
        raise ConfigError(f"'{text}' is no encoder; write console or json")
    return text


def _truth(text: str) -> bool:
    if text.lower() in ("true", "t", "1"):
        return True
    if text.lower() in ("false", "f", "0"):
        return False
    raise ConfigError(f"'{text}' is neither true nor false")
