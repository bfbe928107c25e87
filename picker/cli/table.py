# Apart: the docs are written from it.
"""The table of all flags: name, kind of value, default and meaning, under the headings of `--help`.

A flag without a kind is true without a value and takes `=false`; with the default `?` it is neither
until it is given, and `[no-]` gives it a counterpart. The docs are written from this table
(`scripts/document_flags.py`). Kinds have their readers in `readers`. A flag sets the field of
`Options` that is called as it is; what other fields are made of stands in `flags`, and what does
not go together in `rules`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

FLAGS: Final = """
configuration
--config-file FILE            EndpointPickerConfig in YAML (default: built in)
--config-text YAML            the same as text
--watch-config = true         apply changes of --config-file while running
--allow-experimental-plugins  allow plugin types that are alpha
--strict-data-scope           hide data from plugins that do not declare to read it

pool
--endpoints-file FILE         endpoints, objectives and rewrites in YAML; changes apply at once
--pool-name NAME              InferencePool to follow; without Kubernetes the pool's name in metric
                              labels and as objectives name it (default: default)
--pool-namespace NAMESPACE    of the pool (default: the variable NAMESPACE, the Pod's own, or
                              default)
--pool-group GROUP = inference.networking.k8s.io
                              API group of the pool: inference.networking.k8s.io or
                              inference.networking.x-k8s.io
--endpoint-selector SELECTOR  follow the Pods with these labels instead of an InferencePool, e.g.
                              'app in (a,b),!old'
--endpoint-target-ports PORTS
                              where these serve: 1 to 8 ports, separated by commas
--kubeconfig FILE             how to reach the cluster (default: the variable KUBECONFIG, or as Pods
                              do)
--kube-context NAME           context of that file (default: its current one)
--pool POOL                   one of several pools to serve, each by a flag of its own:
                              [NAMESPACE/]NAME[:PORT], or name=NAME and more of namespace, group,
                              grpc-port, endpoints-file, config-file
--route-by-model              requests at --grpc-port whose proxy names none of them go to the pool
                              that has their model
--refresh-metrics-interval DURATION = 50ms
                              how often endpoints are scraped while requests come; at least 50ms
--metrics-staleness-threshold DURATION = 2s
                              how long failing scrapes may leave old metrics in use

ext_proc
--bind-address ADDRESS = 0.0.0.0
                              where ext_proc and health listen, or unix:///PATH for ext_proc
                              (default: everywhere)
--grpc-port PORT = 9002       ext_proc; 0: a free port
--grpc-max-recv-msg-size SIZE = 65Mi
                              largest gRPC message taken, e.g. 10MiB
--grpc-max-send-msg-size SIZE
                              largest gRPC message sent; the picker sends none over 1MiB, so less is
                              refused
--max-unfinished-bodies SIZE = 512Mi
                              what request bodies may take together while they arrive; beyond it a
                              429
--disable-endpoint-subset-filter
                              ignore the proxy's choice of endpoints
--emit-endpoint-scores        send the proxy every candidate's score as metadata

TLS
--secure-serving = ?          TLS on ext_proc; without --cert-path with a certificate made on the
                              spot (default: unless it listens on loopback or a unix socket and has
                              no --cert-path)
--cert-path DIR               folder with tls.crt and tls.key
--enable-cert-reload = ?      show new certificates as they appear in --cert-path (default: when
                              that is given)
--tls-min-version VERSION     VersionTLS12 or VersionTLS13
--tls-cipher-suites NAMES     names of TLS 1.2 suites, separated by commas (default: the library's)

health and metrics
--grpc-health-port PORT = 9003
                              gRPC health, plain
--enable-grpc-stream-metrics  count ext_proc streams, by how they end
--health-checking             answer health checks on the ext_proc port too
--metrics-port PORT = 9090    /metrics /healthz /readyz /endpoints
--metrics-bind-address ADDRESS = 127.0.0.1
                              where the HTTP port listens (default: loopback only)
--metrics-cert-dir DIR        folder with tls.crt and tls.key for the HTTP port
--metrics-client-ca-file FILE
                              CAs (PEM) that must have signed the certificates of its clients
--metrics-endpoint-auth       require a bearer token on the HTTP port whose account may read
                              nonResourceURLs like /metrics
--refresh-prometheus-metrics-interval DURATION = 0
                              how long gauges of the pool are cached (default: computed at each
                              scrape)

behaviour
--drain-timeout DURATION = 30s
                              how long running requests may take after SIGTERM
--endpoint-ejection-failures N = 3
                              failures in a row (500, 502, 503, 504, no connection) after which an
                              endpoint gets nothing but a probe now and then; 0: never

explanations
--decision-records N = 10000  how many past requests are remembered for `pointsman explain`; 0: none
--[no-]decision-header        send clients the request's id (`x-request-id`) and its endpoint's name
                              (`x-pointsman-endpoint`) in the headers of responses

recording
--record FILE                 write down every decision, for `pointsman replay`; an existing
                              recording is added to
--record-max-bytes SIZE = 1Gi
                              where a recording ends; requests go on
--[no-]record-prompts = true  with the tokens of prompts, which may be read as text; without them
                              prompt caches cannot be replayed with other settings

endpoint discovery
--xds-port PORT               publish the pool's endpoints (xDS, EDS) at this port; 0: a free
                              one (default: off)
--xds-bind-address ADDRESS = 127.0.0.1
                              where that listens; its clients learn the endpoints' addresses
--xds-cluster-name NAME       what proxies call the pool (default: as --pool-name says)

replicas
--peers HOST:PORT,…           replicas to share knowledge with, this one may be among them
--peer-service NAME[:PORT]    name that stands for all replicas, e.g. of a headless Service;
                              resolved again regularly
--peer-slices SERVICE[:PORT]  Service of the pool's namespace whose EndpointSlices name all
                              replicas; followed
--peer-port PORT = 9005       where replicas reach this one; 0: a free port
--peer-bind-address ADDRESS   where that listens (default: everywhere with --peer-cert-path or
                              --peer-insecure, else loopback only)
--peer-cert-path DIR          folder with tls.crt, tls.key and ca.crt, whose CA must have signed
                              replicas' certificates
--peer-server-name NAME       name in the certificates of replicas (default: the one they were found
                              by)
--[no-]peer-insecure          let replicas use plain text, in a network where every client is
                              trusted
--hash-seed-file FILE         secret that hashes of prompts are seeded with, the same for all
                              replicas (default: drawn at the start; peers agree on one)
--ha-enable-leader-election   of several replicas in Kubernetes only one is ready at a time, which
                              holds a Lease
--leader-election-lease-duration DURATION
                              a standby leads after the leader was silent for so long, in whole
                              seconds up to 120 (default: 15s)
--leader-election-renew-deadline DURATION
                              a leader that cannot renew for so long leads no more; less than the
                              lease's (default: 10s)
--leader-election-retry-period DURATION
                              between two renewals; standbys look four times as often (default: 2s)

logging and tracing
--v LEVEL = 2                 2: normal, 4 and above: debug
--zap-log-level LEVEL         debug, info, error, or a number as for -v; wins over -v
--zap-encoder console|json = console
                              console, or json: one object a line
--tracing                     send OpenTelemetry spans where OTEL_* variables say
"""

_LINE: Final = re.compile(
    r"--(?P<no>\[no-\])?(?P<name>[-a-z]+)(?: (?P<metavar>[^ =]\S*))?(?: = (?P<default>\S+))?"
    r"(?:  +(?P<text>.*))?"
)


@dataclass(frozen=True, slots=True)
class Row:
    """A flag. `metavar` None: it is true without a value. `default` is as a user writes it, None:
    there is none.
    """

    group: str
    name: str
    metavar: str | None
    default: str | None
    text: str
    has_counterpart: bool


def rows() -> Iterator[Row]:
    """The table, flag by flag. Lines that begin with spaces belong to the one before."""
    group = ""
    for part in re.split(r"\n+(?! )", FLAGS.strip()):
        first, *more = part.split("\n")
        found = _LINE.fullmatch(first)
        if found is None:
            group = first
            continue
        text = " ".join([found["text"] or "", *map(str.strip, more)]).strip()
        has_counterpart = found["no"] is not None
        yield Row(
            group, f"--{found['name']}", found["metavar"], found["default"], text, has_counterpart
        )
