"""The flags of `pointsman doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from fleet.command_line import Parser

_CHECKS: Final = """
picker-reachable picker-ready picker-endpoints picker-scrapes picker-health picker-queues
picker-gauges picker-config picker-experimental picker-files picker-clock tls-expiry
picker-peers worker-reachable worker-health worker-metrics worker-models worker-versions
envoy-reachable envoy-version envoy-ext-proc envoy-filter-order envoy-processing-mode
envoy-mode-override envoy-message-timeout envoy-queue-patience envoy-header-strip envoy-metadata
envoy-response-attributes envoy-destination envoy-picker-cluster envoy-picker-http2
envoy-picker-health-check envoy-outlier-detection envoy-panic-threshold envoy-original-dst
envoy-override-host envoy-circuit-breakers envoy-route-timeout envoy-retries envoy-buffers
envoy-hosts envoy-failure-mode k8s-reachable k8s-unseen k8s-rights k8s-kinds k8s-pool
k8s-parents k8s-service k8s-policies k8s-picker-port k8s-replicas k8s-lease k8s-pods
k8s-target-ports k8s-probes k8s-grace-period
"""
CHECK_NAMES: Final = tuple(_CHECKS.split())  # of all checks, in their order


def build_parser() -> Parser:
    parser = Parser(
        prog="pointsman doctor",
        description="Look at a picker, Envoys, workers and a cluster, and say what is wrong and "
        "how to put it right. Without a flag that names something: the fleet that runs here. "
        "Exit status: 0 nothing wrong, 1 warnings, 2 errors.",
    )
    parser.add_argument("--picker", metavar="URL", help="the picker's HTTP port")
    parser.add_argument(
        "--envoy-config",
        metavar="FILE",
        type=Path,
        action="append",
        default=[],
        help="a bootstrap, or what /config_dump answered",
    )
    parser.add_argument(
        "--envoy-admin",
        metavar="URL",
        action="append",
        default=[],
        help="a running Envoy's admin port: http://HOST:PORT or unix:///PATH",
    )
    parser.add_argument(
        "--certificate",
        metavar="HOST:PORT",
        action="append",
        default=[],
        help="a port that speaks TLS, the picker's for instance",
    )
    text = "check all of the picker's endpoints, not only those on this machine"
    parser.add_argument("--workers", action="store_true", help=text)
    parser.add_argument("--pool", metavar="NAME", help="InferencePool of a cluster")
    parser.add_argument("--namespace", metavar="NAME", default="default", help="of the pool")
    parser.add_argument("--kubeconfig", metavar="FILE", type=Path, help="access to the cluster")
    parser.add_argument("--kube-context", metavar="NAME", default="", help="of that file")
    text = "account whose permissions are checked (default: the picker's Pods', else yours)"
    parser.add_argument("--as", dest="user", metavar="USER", help=text)
    parser.add_argument("--json", action="store_true", help="findings as JSON")
    parser.add_argument(
        "--only",
        metavar="CHECK",
        action="append",
        default=[],
        choices=CHECK_NAMES,
        help="run this check alone; may be given several times (see --list)",
    )
    parser.add_argument("--list", action="store_true", help="list all checks")
    return parser
