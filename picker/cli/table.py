"""The table of all flags, in the notation of `base.flags`, from which the docs are written too.

A flag sets the field of `Options` that has its name; `flags` makes the other fields.
"""

from typing import Final

FLAGS: Final = """
configuration
--config-file FILE            EndpointPickerConfig in YAML (default: built in)
--config-text YAML            the same as text
--watch-config = true         apply changes of --config-file while running
--allow-experimental-plugins  allow alpha plugin types
--strict-data-scope           hide data from plugins that do not declare it

pool
--endpoints-file FILE         endpoints, objectives and rewrites in YAML, followed
--pool-name NAME              InferencePool to follow; without Kubernetes the pool's name in metric
                              labels and objectives (default: `default`)
--pool-namespace NAMESPACE    the pool's namespace (default: the variable NAMESPACE, the Pod's own,
                              or `default`)
--pool-group GROUP = inference.networking.k8s.io
                              API group of the pool; the other one is inference.networking.x-k8s.io
--endpoint-selector SELECTOR  follow the Pods with these labels, not an InferencePool, e.g. 'app in
                              (a,b),!old'
--endpoint-target-ports PORTS
                              their ports: 1 to 8, separated by commas
--kubeconfig FILE             access to the cluster (default: variable KUBECONFIG, the Pod's service
                              account, or ~/.kube/config)
--kube-context NAME           context of that file (default: its current one)
--pool POOL                   one of several pools, repeatable: [NAMESPACE/]NAME[:PORT], or
                              name=NAME and any of namespace, group, grpc-port, endpoints-file,
                              config-file
--route-by-model              at --grpc-port, send requests whose proxy names no pool to the one
                              that serves their model
--model-header-only           with --route-by-model: only name the model, in X-Gateway-Model-Name,
                              for a gateway whose routes match that header
--refresh-metrics-interval DURATION = 50ms
                              interval of scrapes while requests arrive, at least 50ms
--metrics-staleness-threshold DURATION = 2s
                              age above which metrics count as unknown

ext_proc
--bind-address ADDRESS = 0.0.0.0
                              address of ext_proc and health, or unix:///PATH for ext_proc (default:
                              all)
--grpc-port PORT = 9002       port of ext_proc; 0: a free one
--grpc-max-recv-msg-size SIZE = 65Mi
                              largest gRPC message accepted
--grpc-max-send-msg-size SIZE
                              largest gRPC message sent, at least 1MiB; the picker sends none larger
--max-unfinished-bodies SIZE = 512Mi
                              most memory for all arriving bodies; beyond it, a 429
--disable-endpoint-subset-filter
                              ignore the proxy's subset hint
--response-bodies off|usage|all = off
                              what Envoy shows of responses; usage: accept the reports of an Envoy
                              with `--response-bodies usage`; off, all: what its bootstrap says
--token-limits                reject requests of tenants that have used their tokens a minute; the
                              gateway names limits in x-pointsman-token-limit
--emit-endpoint-scores        send the proxy all scores as metadata
--conformance                 the reference picker's texts, for its test suites: plain-text errors,
                              and `x-went-into-resp-headers` on responses

TLS
--secure-serving = ?          TLS on ext_proc, self-signed without --cert-path (default: yes, except
                              on loopback or a unix socket without --cert-path)
--cert-path DIR               folder with tls.crt and tls.key
--enable-cert-reload = ?      load new certificates from --cert-path (default: yes with that flag)
--tls-min-version VERSION     VersionTLS12 or VersionTLS13 (default: VersionTLS12)
--tls-cipher-suites NAMES     TLS 1.2 suites, separated by commas (default: the library's)

health and metrics
--grpc-health-port PORT = 9003
                              gRPC health service, in plain text
--enable-grpc-stream-metrics  count ext_proc streams by outcome
--health-checking             answer health checks on the ext_proc port too
--metrics-port PORT = 9090    HTTP port for metrics, health and dashboard
--metrics-bind-address ADDRESS = 127.0.0.1
                              address of the HTTP port (default: loopback only)
--metrics-cert-dir DIR        folder with tls.crt and tls.key for the HTTP port
--metrics-client-ca-file FILE
                              CAs (PEM) that must have signed its clients' certificates
--metrics-endpoint-auth       on the HTTP port, require the bearer token of an account that may read
                              nonResourceURLs like /metrics
--refresh-prometheus-metrics-interval DURATION = 0
                              time for which the pool's gauges are cached; 0: compute them at each
                              scrape
--metrics-client-label-bytes SIZE = 900Ki
                              most bytes of the metrics page for label values that clients choose;
                              more become "other"

behaviour
--drain-timeout DURATION = 30s
                              time that requests have to finish after SIGTERM
--endpoint-ejection-failures N[0..1000] = 3
                              consecutive failures (500, 502, 503, 504, no connection) that eject an
                              endpoint; 0: never

explanations
--decision-records N[0..1000000] = 10000
                              finished requests retained for `pointsman explain`; 0: none
--[no-]decision-header        send clients the request's id (`x-request-id`) and endpoint
                              (`x-pointsman-endpoint`) in response headers

recording
--record FILE                 record every decision for `pointsman replay`, behind what the file has
--record-max-bytes SIZE = 1Gi
                              largest recording; requests continue without it
--[no-]record-prompts = true  record prompts' tokens, readable as text; without them a replay cannot
                              change prompt caches

endpoint discovery
--xds-port PORT               publish the endpoints to Envoy (xDS, EDS) at this port; 0: a free one
                              (default: off)
--xds-bind-address ADDRESS = 127.0.0.1
                              address of --xds-port; its clients can read the endpoints' addresses
--xds-cluster-name NAME       the pool's cluster in Envoy (default: that of --pool-name)

replicas
--peers HOST:PORT,…           the replicas to exchange state with; this one may be among them
--peer-service NAME[:PORT]    host name of all replicas, e.g. of a headless Service, resolved every
                              5 s
--peer-slices SERVICE[:PORT]  Service in the pool's namespace whose EndpointSlices name all replicas
--peer-port PORT = 9005       port for the replicas; 0: a free one
--peer-bind-address ADDRESS   address of --peer-port (default: all with --peer-cert-path or
                              --peer-insecure, else loopback)
--peer-cert-path DIR          folder with tls.crt, tls.key and ca.crt, the CA of all replicas'
                              certificates
--peer-server-name NAME       name in the replicas' certificates (default: the name used to find
                              them)
--[no-]peer-insecure          plain text between replicas, for a network where every client is
                              trusted
--hash-seed-file FILE         secret seed of prompt hashes, the same for all replicas (default:
                              random, and replicas agree on one)
--ha-enable-leader-election   only the replica that holds a Lease is ready
--leader-election-lease-duration DURATION
                              silence of the leader until a standby takes over, whole seconds up to
                              120 (default: 15s)
--leader-election-renew-deadline DURATION
                              time without a renewal until a leader steps down, shorter than the
                              lease (default: 10s)
--leader-election-retry-period DURATION
                              interval of renewals; standbys read four times as often (default: 2s)

autoscaling
--autoscale FILE              scale the Deployments that the file names (docs/autoscaling.md)

logging and tracing
-v, --v LEVEL = 2                 2: normal, 4 and above: debug
--zap-log-level LEVEL         debug, info, error, or a number as for -v, which it overrides
--zap-encoder console|json = console
                              json: one object per line
--tracing                     send OpenTelemetry spans, configured by OTEL_* variables
"""
