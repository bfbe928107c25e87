"""Judges of a picker, of its replicas, certificates and workers, by their answers."""

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
from fleet.doctor.diagnosis import Facts, JudgeFinding, each, found
from fleet.doctor.picker_look import (
    ENDPOINTS,
    PAGES_LACKING,
    PEERS_CONNECTED,
    PEERS_PUBLISHING,
    SCRAPES_FAILED,
    PickerFacts,
    WorkerFacts,
)
from picker.admin.views import EndpointView
from picker.config.findings import Severity
from picker.scrape.engines import ENGINES, PROCESS_START

STALE_SECONDS = 5.0  # an idle pool is scraped once a second
SKEW_SECONDS = 5.0  # the header has whole seconds
MIN_FILES = 512
FILES_PER_ENDPOINT = 4  # scrapes, probes and subscriptions
FILES_SHARE = 0.8
EXPIRY_WARNING_DAYS = 14.0
# With an election all replicas but one stand by. Those without a leader yet are not ready, either,
# but that is a finding.
_STANDS_BY = re.compile(r"on standby; the leader is (?!unknown)")
# `_scrapes` reports this, endpoint by endpoint.
_SILENCE = re.compile(r"(; )?\d+ of \d+ endpoints do not answer: .*\s*$")
_SHOWN = 5


def _pickers(facts: Facts) -> Iterator[PickerFacts]:
    if facts.picker is not None and facts.picker.problem is None:
        yield facts.picker


def _workers(facts: Facts) -> Iterator[WorkerFacts]:
    return (one for one in facts.workers if one.problem is None)


def _reachable(facts: Facts) -> Iterator[JudgeFinding]:
    picker = facts.picker
    if picker is not None and picker.problem is not None:
        yield found("silent", url=picker.url, problem=picker.problem)


def _ready(picker: PickerFacts) -> Iterator[JudgeFinding]:
    first, _, detail = picker.readiness.partition("\n")
    detail = _SILENCE.sub("", detail)
    if not picker.is_ready and _STANDS_BY.match(detail):
        return
    if not picker.is_ready:
        state = (first or "not ready") + (f" ({detail})" if detail else "")
        yield found("not-ready", url=picker.url, state=state, detail=detail or "see its log")
    elif detail:
        yield found("outdated", url=picker.url, detail=detail)


def _endpoints(picker: PickerFacts) -> Iterator[JudgeFinding]:
    if picker.is_ready and not picker.endpoints:
        yield found("none", url=picker.url)


def _scrapes(picker: PickerFacts) -> Iterator[JudgeFinding]:
    blind = [one for one in picker.endpoints if _is_blind(one)]
    if blind:
        shown = ", ".join(_age(one) for one in blind[:_SHOWN])
        more = f" and {len(blind) - _SHOWN} more" if len(blind) > _SHOWN else ""
        yield found(
            "blind",
            Severity.ERROR if len(blind) == len(picker.endpoints) else Severity.WARNING,
            blind=len(blind),
            all=len(picker.endpoints),
            shown=shown + more,
            failed=f"{picker.metrics.get(SCRAPES_FAILED, 0.0):g}",
            address=blind[0].address,
        )
    lacking = picker.metrics.get(PAGES_LACKING, 0.0)
    if lacking and not blind:
        yield found("lacking", lacking=f"{lacking:g}")


def _is_blind(one: EndpointView) -> bool:
    age = one.metrics_age_seconds
    return one.metrics is None or age is None or age > STALE_SECONDS


def _age(one: EndpointView) -> str:
    age = one.metrics_age_seconds
    return f"{one.key} ({'never read' if age is None else f'{age:.1f} s old'})"


def _health(picker: PickerFacts) -> Iterator[JudgeFinding]:
    for one in picker.endpoints:
        if one.health.state not in ("healthy", "unknown"):
            yield found(
                "ill",
                key=one.key,
                address=one.address,
                state=one.health.state,
                failures=one.health.consecutive_failures,
            )


def _queues(picker: PickerFacts) -> Iterator[JudgeFinding]:
    queues = picker.queues
    if queues.is_on and queues.queued_requests and queues.saturation >= 1.0:
        yield found(
            "full",
            queued=queues.queued_requests,
            saturation=f"{queues.saturation:.2f}",
            detector=queues.detector,
        )


def _gauges(picker: PickerFacts) -> Iterator[JudgeFinding]:
    if ENDPOINTS not in picker.metrics:
        yield found("missing", url=picker.url, series=ENDPOINTS)


def _config(picker: PickerFacts) -> Iterator[JudgeFinding]:
    config = picker.config
    if config is None:
        return
    if config.last_error is not None:
        yield found("rejected", source=config.source, problem=config.last_error)
    for text in config.warnings:
        yield found("doubtful", source=config.source, problem=text)


def _experimental(picker: PickerFacts) -> Iterator[JudgeFinding]:
    if picker.config is not None:
        for name in picker.config.experimental:
            yield found("used", source=picker.config.source, name=name)


def _files(picker: PickerFacts) -> Iterator[JudgeFinding]:
    if picker.files is None:
        return
    used, limit = picker.files
    if used > FILES_SHARE * limit:
        yield found("used-up", used=used, limit=limit)
    elif limit < MIN_FILES + FILES_PER_ENDPOINT * len(picker.endpoints):
        yield found("low", limit=limit, endpoints=len(picker.endpoints))


def _clock(picker: PickerFacts) -> Iterator[JudgeFinding]:
    ahead = picker.ahead_seconds
    if ahead is not None and abs(ahead) > SKEW_SECONDS:
        direction = "ahead of" if ahead > 0 else "behind"
        yield found("wrong", seconds=f"{abs(ahead):.0f}", direction=direction)


def _certificates(facts: Facts) -> Iterator[JudgeFinding]:
    for one in facts.certificates:
        days = one.days_left
        if one.problem is not None:
            yield found("no-tls", address=one.address, problem=one.problem)
        elif days is not None and days < EXPIRY_WARNING_DAYS:
            left = f"ended {-days:.0f} days ago" if days < 0 else f"ends in {days:.1f} days"
            severity = Severity.ERROR if days < 0 else Severity.WARNING
            yield found("ends", severity, address=one.address, left=left)


def _peers(facts: Facts) -> Iterator[JudgeFinding]:
    picker = facts.picker
    if picker is None or picker.problem is not None:
        return
    connected, publishing = (
        picker.metrics.get(PEERS_CONNECTED),
        picker.metrics.get(PEERS_PUBLISHING),
    )
    if connected is None or publishing is None:
        return
    others = max(_named(picker), _replicas(facts.cluster), int(connected), int(publishing))
    if min(connected, publishing) < others:
        yield found(
            "fewer",
            url=picker.url,
            others=others,
            publishing=f"{publishing:g}",
            connected=f"{connected:g}",
        )


def _named(picker: PickerFacts) -> int:
    """Count the other replicas on the command line, which may name itself, or one twice."""
    text = flag_in(list(picker.words), "--peers") or ""
    named = len({one.strip() for one in text.split(",") if one.strip()})
    # It reached a replica twice, so the flag names more than there are.
    if picker.peer_calls.get("known"):
        return 0
    return max(named - (1 if picker.peer_calls.get("self") else 0), 0)


def _replicas(cluster: ClusterFacts | None) -> int:
    if cluster is None:
        return 0
    pool = cluster.namespace, cluster.pool_name
    count = 0
    for pod in picker_pods(cluster):
        serving = serving_of(pod)
        is_of_pool = serving is None or serving.find(*pool) is not None
        if is_ready(pod) and is_of_pool and any(flag_of(pod, flag) for flag in PEER_FLAGS):
            count += 1
    return max(count - 1, 0)


def _answer(facts: Facts) -> Iterator[JudgeFinding]:
    for one in facts.workers:
        if one.problem is not None:
            yield found("silent", address=one.address, problem=one.problem)


def _worker_health(worker: WorkerFacts) -> Iterator[JudgeFinding]:
    if worker.health_status != 200:
        yield found("ill", address=worker.address, status=worker.health_status)


def _worker_metrics(worker: WorkerFacts) -> Iterator[JudgeFinding]:
    if worker.metrics_names is None:
        kind = worker.metrics_kind or "no metrics page"
        yield found("no-page", address=worker.address, kind=kind)
        return
    missing = [name for name in worker.expected if name not in worker.metrics_names]
    if missing and len(missing) == len(worker.expected):
        engine = _engine_of(worker.metrics_names)
        yield found(
            "other-engine" if engine else "unknown-engine",
            address=worker.address,
            missing=", ".join(missing),
            engine=engine,
        )


def _engine_of(names: frozenset[str]) -> str | None:
    for engine, series in ENGINES.items():
        wanted = set(series.names) - {PROCESS_START}  # which any program has
        if wanted & names:
            return engine
    return None


def _models(worker: WorkerFacts) -> Iterator[JudgeFinding]:
    if not worker.models and worker.health_status == 200:
        what = "is no list of models" if worker.models is None else "lists no model"
        yield found("none", address=worker.address, what=what)


def _versions(facts: Facts) -> Iterator[JudgeFinding]:
    addresses: dict[str, list[str]] = {}
    for one in facts.workers:
        if one.version is not None:
            addresses.setdefault(one.version, []).append(one.address)
    if len(addresses) > 1:
        by = "; ".join(f"{version}: {', '.join(at)}" for version, at in sorted(addresses.items()))
        yield found("several", versions=by)


JUDGES = {
    "picker-reachable": _reachable,
    "picker-ready": each(_pickers, _ready),
    "picker-endpoints": each(_pickers, _endpoints),
    "picker-scrapes": each(_pickers, _scrapes),
    "picker-health": each(_pickers, _health),
    "picker-queues": each(_pickers, _queues),
    "picker-gauges": each(_pickers, _gauges),
    "picker-config": each(_pickers, _config),
    "picker-experimental": each(_pickers, _experimental),
    "picker-files": each(_pickers, _files),
    "picker-clock": each(_pickers, _clock),
    "tls-expiry": _certificates,
    "picker-peers": _peers,
    "worker-reachable": _answer,
    "worker-health": each(_workers, _worker_health),
    "worker-metrics": each(_workers, _worker_metrics),
    "worker-models": each(_workers, _models),
    "worker-versions": _versions,
}
