"""Checks of workers, by what they answer themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from fleet.doctor.facts import Facts, WorkerFacts
from fleet.doctor.findings import Check, Finding, error, warning
from picker.scrape.engines import ENGINES, PROCESS_START


def _of_each(
    judge: Callable[[WorkerFacts], Iterable[Finding]],
) -> Callable[[Facts], Iterator[Finding]]:
    """A judge of one worker, for all that answer."""

    def judged(facts: Facts) -> Iterator[Finding]:
        for one in facts.workers:
            if one.problem is None:
                yield from judge(one)

    return judged


def _reachable(facts: Facts) -> Iterator[Finding]:
    for one in facts.workers:
        if one.problem is not None:
            yield error(
                f"worker {one.address} does not answer: {one.problem}",
                "requests that are sent there fail, or are tried elsewhere",
                "start it, or take it out of the endpoints file or the pool",
            )


def _health(worker: WorkerFacts) -> Iterator[Finding]:
    if worker.health_status != 200:
        yield error(
            f"worker {worker.address}: /health answers {worker.health_status}",
            "its engine is gone, starts, or drains; Envoy takes it out of use",
            "see the worker's log",
        )


def _metrics(worker: WorkerFacts) -> Iterator[Finding]:
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
        told = f"; these are of {engine}" if engine else ""
        yield error(
            f"worker {worker.address}: /metrics has none of {', '.join(missing)}{told}",
            "it is taken for another engine and looks idle whatever it does",
            fix,
        )


def _engine_of(names: frozenset[str]) -> str | None:
    """The engine whose series these are."""
    for engine, series in ENGINES.items():
        wanted = set(series.names) - {PROCESS_START}
        if wanted & names:
            return engine
    return None


def _models(worker: WorkerFacts) -> Iterator[Finding]:
    if not worker.models and worker.health_status == 200:
        told = "is no list of models" if worker.models is None else "lists no model"
        yield error(
            f"worker {worker.address}: /v1/models {told}",
            "it is no OpenAI-compatible model server, or has nothing loaded",
            f"curl http://{worker.address}/v1/models; name the model server's own port",
        )


def _versions(facts: Facts) -> Iterator[Finding]:
    found: dict[str, list[str]] = {}
    for one in facts.workers:
        if one.version is not None:
            found.setdefault(one.version, []).append(one.address)
    if len(found) > 1:
        told = "; ".join(f"{version}: {', '.join(at)}" for version, at in sorted(found.items()))
        yield warning(
            f"workers of several versions ({told})",
            "answers and speed depend on where a request lands",
            "finish the rollout: pointsman restart workers, or kubectl rollout status",
        )


CHECKS = (
    Check("worker-reachable", "workers answer", _reachable),
    Check("worker-health", "they are well", _of_each(_health)),
    Check("worker-metrics", "they tell their load by the names expected", _of_each(_metrics)),
    Check("worker-models", "they serve a model", _of_each(_models)),
    Check("worker-versions", "they are of one version", _versions),
)
