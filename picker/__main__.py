"""The command line of the picker: flags in the spelling of the reference picker.

A flag of the reference that is not listed here is refused as unknown, never ignored.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import uvloop

from picker.app import Options, Ports, serve
from picker.config.units import duration_seconds, quantity_bytes
from picker.errors import ConfigError, PickerError
from picker.extproc.options import Transport

log = logging.getLogger("picker")

T = TypeVar("T")
_DEFAULTS = Options()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the picker; returns the exit status: 0 after a drain, 1 when it cannot start or fails.

    A command line that cannot be understood ends with status 2 (`SystemExit`), as usual.
    """
    arguments = build_parser().parse_args(argv)
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.DEBUG if arguments.v >= 4 else logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    logging.getLogger("watchfiles").setLevel(logging.WARNING)
    options = _options(arguments)
    try:
        uvloop.run(serve(options, lambda ports: _announce(options, ports)))
    except PickerError as error:
        log.error("%s", error)
        return 1
    return 0


def _announce(options: Options, ports: Ports) -> None:
    log.info(
        "picker ready: ext_proc %s:%d%s, health %s:%d, http %s:%d",
        options.bind_address,
        ports.grpc,
        " (TLS)" if options.secure_serving else "",
        options.bind_address,
        ports.health,
        options.metrics_bind_address,
        ports.metrics,
    )


def _options(arguments: argparse.Namespace) -> Options:
    secure = arguments.secure_serving
    return Options(
        config_file=arguments.config_file,
        config_text=arguments.config_text,
        endpoints_file=arguments.endpoints_file,
        pool_name=arguments.pool_name,
        bind_address=arguments.bind_address,
        grpc_port=arguments.grpc_port,
        grpc_health_port=arguments.grpc_health_port,
        metrics_bind_address=arguments.metrics_bind_address,
        metrics_port=arguments.metrics_port,
        refresh_metrics_interval_seconds=arguments.refresh_metrics_interval,
        metrics_staleness_threshold_seconds=arguments.metrics_staleness_threshold,
        drain_timeout_seconds=arguments.drain_timeout,
        secure_serving=arguments.cert_path is not None if secure is None else secure,
        cert_path=arguments.cert_path,
        grpc_max_recv_msg_bytes=arguments.grpc_max_recv_msg_size,
        health_checking=arguments.health_checking,
        grpc_transport=arguments.grpc_transport,
    )


def build_parser() -> argparse.ArgumentParser:
    """The flags, named as the reference picker names them."""
    parser = argparse.ArgumentParser(
        prog="pointsman picker",
        description="Endpoint picker: an Envoy external processor that sends each LLM request to "
        "the right worker.",
        allow_abbrev=False,
    )
    _add_sources(parser)
    _add_ports(parser)
    _add_behaviour(parser)
    return parser


def _add_sources(parser: argparse.ArgumentParser) -> None:
    config = parser.add_mutually_exclusive_group()
    config.add_argument(
        "--config-file",
        type=Path,
        metavar="FILE",
        help="EndpointPickerConfig in YAML (default: built in)",
    )
    config.add_argument("--config-text", metavar="YAML", help="the same as text")
    parser.add_argument(
        "--endpoints-file",
        type=Path,
        metavar="FILE",
        help="the pool as a YAML list of endpoints; changes apply at once",
    )
    parser.add_argument(
        "--pool-name", default=_DEFAULTS.pool_name, help="name of the pool in metric labels"
    )


def _add_ports(parser: argparse.ArgumentParser) -> None:
    port = _checked(_port)
    parser.add_argument(
        "--bind-address",
        default=_DEFAULTS.bind_address,
        help="where ext_proc and health listen (default: all addresses, for use in a pod)",
    )
    parser.add_argument("--grpc-port", type=port, default=9002, help="ext_proc; 0: a free port")
    parser.add_argument("--grpc-health-port", type=port, default=9003, help="gRPC health, plain")
    parser.add_argument(
        "--metrics-bind-address",
        default=_DEFAULTS.metrics_bind_address,
        help="where the HTTP port listens; it has no authentication (default: loopback only)",
    )
    parser.add_argument(
        "--metrics-port", type=port, default=9090, help="/metrics /healthz /readyz /endpoints"
    )
    parser.add_argument(
        "--secure-serving",
        type=_checked(_truth),
        nargs="?",
        const=True,
        help="TLS on ext_proc (default: exactly when --cert-path is given)",
    )
    parser.add_argument(
        "--cert-path", type=Path, metavar="DIR", help="folder with tls.crt and tls.key"
    )
    parser.add_argument(
        "--health-checking",
        type=_checked(_truth),
        nargs="?",
        const=True,
        default=False,
        help="answer health checks on the ext_proc port too",
    )
    parser.add_argument(
        "--grpc-max-recv-msg-size",
        type=_checked(quantity_bytes),
        default=_DEFAULTS.grpc_max_recv_msg_bytes,
        metavar="SIZE",
        help="largest gRPC message, e.g. 10MiB",
    )
    parser.add_argument(
        "--grpc-transport",
        type=_checked(_transport),
        default=_DEFAULTS.grpc_transport,
        metavar="|".join(transport.value for transport in Transport),
        help="what carries gRPC: the h2 library or grpc.aio (default: %(default)s)",
    )


def _add_behaviour(parser: argparse.ArgumentParser) -> None:
    duration = _checked(duration_seconds)
    parser.add_argument(
        "--refresh-metrics-interval",
        type=duration,
        default=_DEFAULTS.refresh_metrics_interval_seconds,
        metavar="DURATION",
        help="how often endpoints are scraped; at least 50ms",
    )
    parser.add_argument(
        "--metrics-staleness-threshold",
        type=duration,
        default=_DEFAULTS.metrics_staleness_threshold_seconds,
        metavar="DURATION",
        help="how long failing scrapes may leave old metrics in use",
    )
    parser.add_argument(
        "--drain-timeout",
        type=duration,
        default=_DEFAULTS.drain_timeout_seconds,
        metavar="DURATION",
        help="how long requests under way may take after SIGTERM",
    )
    parser.add_argument(
        "-v", "--v", type=int, default=2, metavar="LEVEL", help="2: normal, 4 and above: debug"
    )


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


def _transport(text: str) -> Transport:
    try:
        return Transport(text)
    except ValueError:
        raise ConfigError(f"'{text}' is no transport; write h2 or grpcio") from None


def _truth(text: str) -> bool:
    if text.lower() in ("true", "t", "1"):
        return True
    if text.lower() in ("false", "f", "0"):
        return False
    raise ConfigError(f"'{text}' is neither true nor false")


if __name__ == "__main__":
    sys.exit(main())
