"""Checks of a picker, of its replicas, certificates and workers, by what they answer."""

from __future__ import annotations

import re
from collections.abc import Iterator

from fleet.doctor.cluster_look import (
    PEER_FLAGS,
    ClusterFacts,
    flag_in,
    flag_of,
    is_ready,
    picker_pods,
    serving_of,
)
from fleet.doctor.diagnosis import Check, Diagnosis, Facts, each, error, warning
from fleet.doctor.picker_look import (
    ENDPOINTS,
    PAGES_LACKING,
    PEERS_CONNECTED,
    PEERS_HEARD,
    SCRAPES_FAILED,
    PickerFacts,
    WorkerFacts,
)
from picker.admin.views import EndpointView
from picker.scrape.engines import ENGINES, PROCESS_START

STALE_SECONDS = 5.0  # an idle pool is asked once a second
SKEW_SECONDS = 5.0  # the header has whole seconds
LEAST_FILES = 512
FILES_PER_ENDPOINT = 4  # scrapes, probes and subscriptions
FILES_SHARE = 0.8
EXPIRY_WARNING_DAYS = 14.0
# With an election all but one are so; those that wait for the first leader, or cannot ask, are not.
_STANDS_BY = re.compile(r"on standby; the leader is (?!unknown)")
# Told of by `_scrapes`, endpoint by endpoint.
_SILENCE = re.compile(r"(; )?\d+ of \d+ endpoints do not answer: .*\s*$")
_SHOWN = 5


def _pickers(facts: Facts) -> Iterator[PickerFacts]:
    """The one that answers."""
    if facts.picker is not None and facts.picker.problem is None:
        yield facts.picker


def _workers(facts: Facts) -> Iterator[WorkerFacts]:
    return (one for one in facts.workers if one.problem is None)


def _reachable(facts: Facts) -> Iterator[Diagnosis]:
    picker = facts.picker
    if picker is not None and picker.problem is not None:
        yield error(
            f"{picker.url}: {picker.problem}",
            "without a picker Envoy decides by itself, or refuses every request",
            "start one (`pointsman up`, `pointsman picker`), or name its --metrics-port with "
            "--picker URL; in a cluster: kubectl port-forward deploy/pointsman-picker 9090",
        )


def _ready(picker: PickerFacts) -> Iterator[Diagnosis]:
    first, _, detail = picker.readiness.partition("\n")
    detail = _SILENCE.sub("", detail)
    if not picker.is_ready and _STANDS_BY.match(detail):
        return
    if not picker.is_ready:
        yield error(
            f"{picker.url}/readyz: {first or 'not ready'}" + (f" ({detail})" if detail else ""),
            "gateways send nothing to a picker that is not ready",
            f"it is ready once its pool is known: {detail or 'see its log'}; a picker that drains "
            "is not ready on purpose",
        )
    elif detail:
        yield warning(
            f"{picker.url}/readyz: {detail}",
            "it goes on with what it knew; endpoints that changed since are not seen",
            "see that what it follows (endpoints file, API server) can be read, and its log",
        )


def _endpoints(picker: PickerFacts) -> Iterator[Diagnosis]:
    if picker.is_ready and not picker.endpoints:
        yield error(
            f"{picker.url}/endpoints: none",
            "every request is a 503",
            "add some to the endpoints file (`pointsman config check --endpoints-file FILE`), or "
            "give Pods the labels of the pool's selector and see that they are ready",
        )


def _scrapes(picker: PickerFacts) -> Iterator[Diagnosis]:
    blind = [one for one in picker.endpoints if _is_blind(one)]
    if blind:
        failed = picker.metrics.get(SCRAPES_FAILED, 0.0)
        shown = ", ".join(_age(one) for one in blind[:_SHOWN])
        more = f" and {len(blind) - _SHOWN} more" if len(blind) > _SHOWN else ""
        yield (error if len(blind) == len(picker.endpoints) else warning)(
            f"{len(blind)} of {len(picker.endpoints)} endpoints without fresh metrics: {shown}"
            f"{more} ({failed:g} scrapes failed since the start)",
            "their load is not known: they are picked blindly, or not at all",
            f"curl http://{blind[0].address}/metrics from where the picker runs; if another port "
            "or path answers, set it in the pool (targetPorts) or in the configuration's dataLayer",
        )
    lacking = picker.metrics.get(PAGES_LACKING, 0.0)
    if lacking and not blind:
        yield warning(
            f"{lacking:g} metrics pages lacked a series or had an unusable value",
            "what an engine does not say counts as 0: it looks idle",
            "name the engine: label llm-d.ai/engine-type: sglang (vllm, trtllm-serve, triton) on "
            "the Pods or endpoints",
        )


def _is_blind(one: EndpointView) -> bool:
    age = one.metrics_age_seconds
    return one.metrics is None or age is None or age > STALE_SECONDS


def _age(one: EndpointView) -> str:
    age = one.metrics_age_seconds
    return f"{one.key} ({'never read' if age is None else f'{age:.1f} s old'})"


def _health(picker: PickerFacts) -> Iterator[Diagnosis]:
    for one in picker.endpoints:
        if one.health.state not in ("healthy", "unknown"):
            yield warning(
                f"{one.key} ({one.address}) is {one.health.state} after "
                f"{one.health.consecutive_failures} failures in a row",
                "requests are kept away from it until it answers again",
                f"curl http://{one.address}/health from where the picker runs, and its log",
            )


def _queues(picker: PickerFacts) -> Iterator[Diagnosis]:
    queues = picker.queues
    if queues.is_on and queues.queued_requests and queues.saturation >= 1.0:
        yield warning(
            f"{queues.queued_requests} requests wait; the pool's saturation is "
            f"{queues.saturation:.2f} ({queues.detector})",
            "clients wait for a place, and are refused (429) once their time is over",
            "add workers, or see docs/flow-control.md for limits and priorities; "
            "`pointsman top` shows who waits",
        )


def _gauges(picker: PickerFacts) -> Iterator[Diagnosis]:
    if ENDPOINTS not in picker.metrics:
        yield warning(
            f"{picker.url}/metrics has no {ENDPOINTS}",
            "dashboards, alerts and autoscalers of the pool see nothing",
            "is this a picker of ours? see `curl PICKER/metrics` and docs/metrics.md",
        )


def _config(picker: PickerFacts) -> Iterator[Diagnosis]:
    config = picker.config
    if config is None:
        return
    if config.last_error is not None:
        yield error(
            f"{config.source}: {config.last_error}",
            "the changed file is not in use: the picker goes on with what was before, and will not "
            "start again with it",
            f"pointsman config check {config.source}",
        )
    for text in config.warnings:
        yield warning(
            f"{config.source}: {text}",
            "the picker doubts that it was meant so",
            f"pointsman config check {config.source}",
        )


def _experimental(picker: PickerFacts) -> Iterator[Diagnosis]:
    if picker.config is None:
        return
    for name in picker.config.experimental:
        yield warning(
            f"{picker.config.source}: plugin '{name}' is experimental",
            "its parameters and behaviour may change with any release",
            "take it out, or pin the picker's version and read CHANGELOG.md before an update",
        )


def _files(picker: PickerFacts) -> Iterator[Diagnosis]:
    if picker.files is None:
        return
    used, limit = picker.files
    if used > FILES_SHARE * limit:
        yield error(
            f"the picker has {used} of {limit} file descriptors open",
            "without one it takes no connection and scrapes no endpoint",
            "ulimit -n 65536 before it starts (systemd: LimitNOFILE=65536)",
        )
    elif limit < LEAST_FILES + FILES_PER_ENDPOINT * len(picker.endpoints):
        yield warning(
            f"the picker may open {limit} files and has {len(picker.endpoints)} endpoints",
            "it keeps a connection to every endpoint and one to every proxy's thread",
            "ulimit -n 65536 before it starts (systemd: LimitNOFILE=65536)",
        )


def _clock(picker: PickerFacts) -> Iterator[Diagnosis]:
    ahead = picker.ahead_seconds
    if ahead is not None and abs(ahead) > SKEW_SECONDS:
        yield warning(
            f"the picker's clock is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} "
            "this machine's",
            "certificates, leases and tokens are judged by it, and logs do not fit together",
            "chronyc tracking on both machines; start a time daemon (systemctl start chronyd)",
        )


def _certificates(facts: Facts) -> Iterator[Diagnosis]:
    for one in facts.certificates:
        days = one.days_left
        if one.problem is not None:
            yield error(
                f"{one.address}: {one.problem}",
                "who insists on TLS cannot connect",
                "see --cert-path of the picker, and that the port is the one meant",
            )
        elif days is not None and days < EXPIRY_WARNING_DAYS:
            left = f"ended {-days:.0f} days ago" if days < 0 else f"ends in {days:.1f} days"
            yield (error if days < 0 else warning)(
                f"{one.address}: its certificate {left}",
                "whoever verifies it refuses the connection from then on",
                "renew tls.crt and tls.key in --cert-path; the picker takes them without a restart",
            )


def _peers(facts: Facts) -> Iterator[Diagnosis]:
    picker = facts.picker
    if picker is None or picker.problem is not None:
        return
    connected, heard = picker.metrics.get(PEERS_CONNECTED), picker.metrics.get(PEERS_HEARD)
    if connected is None or heard is None:
        return
    named = max(_named(picker), _replicas(facts.cluster))
    others = max(named, int(connected), int(heard))
    if min(connected, heard) < others:
        yield warning(
            f"{picker.url}: of {others} other replicas it hears {heard:g} and tells {connected:g}",
            "what it does not hear of is not there for it: prompts are computed again elsewhere, "
            "and endpoints are overrun",
            "its log says `peer at …` with the reason; see names and port of --peers, "
            "--peer-service or --peer-slices, NetworkPolicies, and the certificates of "
            "--peer-cert-path (docs/high-availability.md)",
        )


def _named(picker: PickerFacts) -> int:
    """The other replicas that its command line names one by one; it may name itself as well, and
    one of them twice, which only calls show.
    """
    text = flag_in(list(picker.words), "--peers") or ""
    named = len({one.strip() for one in text.split(",") if one.strip()})
    if picker.peer_calls.get("known"):
        return 0
    return max(named - (1 if picker.peer_calls.get("self") else 0), 0)


def _replicas(cluster: ClusterFacts | None) -> int:
    """The other ones that are ready in the cluster, and exchange what they know of the pool."""
    if cluster is None:
        return 0
    pool = cluster.namespace, cluster.pool_name
    found = 0
    for pod in picker_pods(cluster):
        serving = serving_of(pod)
        is_of_pool = serving is None or serving.find(*pool) is not None
        if is_ready(pod) and is_of_pool and any(flag_of(pod, flag) for flag in PEER_FLAGS):
            found += 1
    return max(found - 1, 0)


def _answer(facts: Facts) -> Iterator[Diagnosis]:
    for one in facts.workers:
        if one.problem is not None:
            yield error(
                f"worker {one.address} does not answer: {one.problem}",
                "requests that are sent there fail, or are tried elsewhere",
                "start it, or take it out of the endpoints file or the pool",
            )


def _worker_health(worker: WorkerFacts) -> Iterator[Diagnosis]:
    if worker.health_status != 200:
        yield error(
            f"worker {worker.address}: /health answers {worker.health_status}",
            "its engine is gone, starts, or drains; Envoy takes it out of use",
            "see the worker's log",
        )


def _worker_metrics(worker: WorkerFacts) -> Iterator[Diagnosis]:
    if worker.metrics_names is None:
        yield error(
            f"worker {worker.address}: /metrics is {worker.metrics_kind or 'no metrics page'}",
            "that is another port, or another program: its load stays unknown",
            "name the model server's own port in the endpoints file or in spec.targetPorts; "
            f"curl -s http://{worker.address}/metrics | head shows what answers",
        )
        return
    missing = [name for name in worker.expected if name not in worker.metrics_names]
    if missing and len(missing) == len(worker.expected):
        engine = _engine_of(worker.metrics_names)
        fix = (
            f"give it the label llm-d.ai/engine-type: {engine}"
            if engine
            else "name its series in the configuration: engineConfigs of metrics-data-source, see "
            "docs/configuration.md"
        )
        instead = f"; these are of {engine}" if engine else ""
        yield error(
            f"worker {worker.address}: /metrics has none of {', '.join(missing)}{instead}",
            "it is taken for another engine and looks idle whatever it does",
            fix,
        )


def _engine_of(names: frozenset[str]) -> str | None:
    for engine, series in ENGINES.items():
        wanted = set(series.names) - {PROCESS_START}
        if wanted & names:
            return engine
    return None


def _models(worker: WorkerFacts) -> Iterator[Diagnosis]:
    if not worker.models and worker.health_status == 200:
        what = "is no list of models" if worker.models is None else "lists no model"
        yield error(
            f"worker {worker.address}: /v1/models {what}",
            "it is no OpenAI-compatible model server, or has nothing loaded",
            f"curl http://{worker.address}/v1/models; name the model server's own port",
        )


def _versions(facts: Facts) -> Iterator[Diagnosis]:
    found: dict[str, list[str]] = {}
    for one in facts.workers:
        if one.version is not None:
            found.setdefault(one.version, []).append(one.address)
    if len(found) > 1:
        by = "; ".join(f"{version}: {', '.join(at)}" for version, at in sorted(found.items()))
        yield warning(
            f"workers of several versions ({by})",
            "answers and speed depend on where a request lands",
            "finish the rollout: pointsman restart workers, or kubectl rollout status",
        )


CHECKS = (
    Check("picker-reachable", "a picker answers", _reachable),
    Check("picker-ready", "it is ready, and its pool is current", each(_pickers, _ready)),
    Check("picker-endpoints", "it knows endpoints", each(_pickers, _endpoints)),
    Check("picker-scrapes", "it knows how busy they are", each(_pickers, _scrapes)),
    Check("picker-health", "no endpoint is held back", each(_pickers, _health)),
    Check("picker-queues", "nobody waits for a full pool", each(_pickers, _queues)),
    Check("picker-gauges", "the pool's series are there", each(_pickers, _gauges)),
    Check("picker-config", "its configuration is the file's", each(_pickers, _config)),
    Check("picker-experimental", "no experimental plugins", each(_pickers, _experimental)),
    Check("picker-files", "it may open enough files", each(_pickers, _files)),
    Check("picker-clock", "its clock is right", each(_pickers, _clock)),
    Check("tls-expiry", "certificates are valid", _certificates),
    Check("picker-peers", "it hears the other replicas", _peers),
    Check("worker-reachable", "workers answer", _answer),
    Check("worker-health", "they are well", each(_workers, _worker_health)),
    Check(
        "worker-metrics",
        "they tell their load by the names expected",
        each(_workers, _worker_metrics),
    ),
    Check("worker-models", "they serve a model", each(_workers, _models)),
    Check("worker-versions", "they are of one version", _versions),
)
