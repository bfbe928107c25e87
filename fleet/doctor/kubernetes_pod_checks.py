"""Checks of the Pods of a pool and of its pickers."""

from __future__ import annotations

from collections.abc import Iterator

from fleet.doctor.cluster_facts import ClusterFacts, Json
from fleet.doctor.cluster_view import (
    every_container,
    flag_in,
    is_ready,
    picker_pods,
    pool_pods,
    pool_value,
    words_of,
)
from fleet.doctor.envoy_document import at, listed, number
from fleet.doctor.findings import Check, Finding, error, warning
from fleet.doctor.kubernetes_checks import of_cluster
from picker.framework.durations import parse_duration

DEFAULT_GRACE_SECONDS = 30
_DRAIN_FLAGS = ("--drain-timeout", "--shutdown-timeout")
_SHOWN = 5


def _selected(cluster: ClusterFacts) -> Iterator[Finding]:
    pool = pool_value(cluster)
    if pool is None or cluster.pods is None:
        return
    found = pool_pods(cluster)
    selector = pool.label_selector
    look = f"kubectl get pods -n {cluster.namespace} -l {selector}"
    if not found:
        yield error(
            f"the pool selects no Pod ({selector})",
            "every request is a 503",
            f"{look}; give the workers' Deployment these labels in spec.template.metadata.labels, "
            "or correct spec.selector.matchLabels of the pool",
        )
    elif not any(is_ready(one) for one in found):
        names = _names(found)
        yield error(
            f"none of the pool's {len(found)} Pods is ready ({names})",
            "every request is a 503",
            f"{look}; kubectl describe pod and kubectl logs tell why they are not",
        )


def _ports(cluster: ClusterFacts) -> Iterator[Finding]:
    """Pods need not declare their ports; those that declare some and not this one are doubtful."""
    pool = pool_value(cluster)
    if pool is None:
        return
    for port in pool.target_ports:
        wrong: list[Json] = []
        declared: set[int] = set()
        for pod in pool_pods(cluster):
            own = _declared(pod)
            if own and port not in own:
                wrong.append(pod)
                declared |= own
        if wrong:
            told = ", ".join(map(str, sorted(declared)))
            yield error(
                f"targetPorts has {port}, which no container of {_names(wrong)} declares "
                f"(they declare {told})",
                "requests and scrapes go to a port where nobody listens, or somebody else",
                f"spec.targetPorts: [{{number: {min(declared)}}}] in the pool, or containerPort: "
                f"{port} if the server listens there",
            )


def _declared(pod: Json) -> set[int]:
    ports = (
        number(at(port, "containerPort"))
        for container in listed(pod, "spec", "containers")
        for port in listed(container, "ports")
        if at(port, "protocol") in (None, "TCP")
    )
    return {one for one in ports if one is not None}


def _probes(cluster: ClusterFacts) -> Iterator[Finding]:
    for what, pods in (("worker", pool_pods(cluster)), ("picker", picker_pods(cluster))):
        without = tuple(
            pod
            for pod in pods
            if not any(at(one, "readinessProbe") for one in listed(pod, "spec", "containers"))
        )
        if without:
            probe = (
                "httpGet: {path: /health, port: 8000}"
                if what == "worker"
                else "grpc: {port: 9003, service: readiness}"
            )
            yield warning(
                f"Pods without a readinessProbe: {_names(without)} ({what})",
                "they count as ready while they still load, and requests to them fail",
                f"readinessProbe: {{{probe}, periodSeconds: 2, failureThreshold: 2}}",
            )


def _grace(cluster: ClusterFacts) -> Iterator[Finding]:
    told: set[tuple[str, float]] = set()
    for pod, container in every_container((*pool_pods(cluster), *picker_pods(cluster))):
        flag, drain = _drain(words_of(pod, container))
        if drain is None:
            continue
        waits = number(at(container, "lifecycle", "preStop", "sleep", "seconds")) or 0
        needed = drain + waits
        grace = number(at(pod, "spec", "terminationGracePeriodSeconds"))
        grace = DEFAULT_GRACE_SECONDS if grace is None else grace
        key = (str(at(container, "name")), needed)
        if grace < needed and key not in told:
            told.add(key)
            yield error(
                f"{at(pod, 'metadata', 'name')}: terminationGracePeriodSeconds is {grace}, "
                f"{flag} {drain:g} s" + (f" after {waits} s of preStop" if waits else ""),
                "it is killed with requests under way",
                f"spec.template.spec.terminationGracePeriodSeconds: {needed + 5:.0f}",
            )


def _drain(words: list[str]) -> tuple[str, float | None]:
    for flag in _DRAIN_FLAGS:
        text = flag_in(words, flag)
        if text:
            try:
                return flag, float(text) if text[-1].isdigit() else parse_duration(text)
            except ValueError:
                continue
    return "", None


def _names(pods: tuple[Json, ...] | list[Json]) -> str:
    names = [str(at(one, "metadata", "name")) for one in pods]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


CHECKS = (
    Check("k8s-pods", "the pool has Pods that are ready", of_cluster(_selected)),
    Check("k8s-target-ports", "workers listen where the pool says", of_cluster(_ports)),
    Check("k8s-probes", "Pods say when they can serve", of_cluster(_probes)),
    Check("k8s-grace-period", "Pods may finish their requests", of_cluster(_grace)),
)
