"""Checks of pickers in a cluster: where they serve the pool, and how several of them go along."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from fleet.doctor.cluster_facts import ClusterFacts, Json
from fleet.doctor.cluster_view import flag_of, is_election_on, is_ready, picker_pods, pool_value
from fleet.doctor.envoy_document import at, listed, number
from fleet.doctor.findings import Check, Finding, error, warning
from fleet.doctor.kubernetes_checks import of_cluster
from fleet.doctor.picker_flags import PEER_FLAGS, Serving, serving_of

_LEASE_SECONDS = 15
_HOST_NAME_LETTERS = 63


def _port(cluster: ClusterFacts) -> Iterator[Finding]:
    """Pickers that do not say what they serve are passed over."""
    pool = pool_value(cluster)
    reference = None if pool is None else pool.picker
    if reference is None or cluster.service is None:
        return
    told: set[tuple[str, ...]] = set()
    for pod in picker_pods(cluster):
        serving = serving_of(pod)
        number_asked = reference.port
        if serving is None or number_asked is None:
            continue
        found = _served_elsewhere(cluster, pod, serving, number_asked)
        if found is not None and (key := (found.why, found.fix)) not in told:
            told.add(key)
            yield found


def _served_elsewhere(
    cluster: ClusterFacts, pod: Json, serving: Serving, asked: int
) -> Finding | None:
    """What is wrong with the port at which gateways ask this picker about the pool."""
    name = at(pod, "metadata", "name")
    own = serving.find(cluster.namespace, cluster.pool_name)
    if own is None:
        pools = ", ".join(f"{one.namespace}/{one.name}" for one in serving.pools)
        return error(
            f"{name}, behind the Service of endpointPickerRef, serves {pools} and not "
            f"{cluster.namespace}/{cluster.pool_name}",
            "requests for this pool are answered with endpoints of another one, or with 500",
            f"start it with --pool-name={cluster.pool_name}, or with --pool for each of its pools; "
            "or name the Service of this pool's picker in spec.endpointPickerRef.name",
        )
    behind = _port_behind(cluster, pod, asked)
    port = serving.port if own.grpc_port is None else own.grpc_port
    if not port or behind is None:
        return None
    if behind != port:
        return error(
            f"endpointPickerRef leads to port {behind} of {name}, which serves the pool at {port}",
            "gateways find nobody there, or are told of endpoints of another pool",
            f"ports: [{{port: {asked}, targetPort: {port}}}] in the Service, or "
            f"spec.endpointPickerRef.port.number: the port of the Service that leads to {port}",
        )
    if own.grpc_port is None and len(serving.pools) > 1:
        return warning(
            f"endpointPickerRef leads to port {port} of {name}, where it serves "
            f"{len(serving.pools)} pools",
            "a gateway does not say which pool a request is for: each is answered with 500",
            f"--pool {own.name}:9013 for the picker, or another port that is free, with the same "
            "number in the Service and in spec.endpointPickerRef.port.number",
        )
    return None


def _port_behind(cluster: ClusterFacts, pod: Json, asked: int) -> int | None:
    """The port of the Pod that a port of the picker's Service leads to; None: there is none."""
    ports = listed(cluster.service, "spec", "ports")
    found = next((one for one in ports if at(one, "port") == asked), None)
    if found is None:
        return None
    target = at(found, "targetPort")
    if target is None:
        return asked
    if isinstance(target, int):
        return target
    for container in listed(pod, "spec", "containers"):
        for one in listed(container, "ports"):
            if at(one, "name") == target:
                return number(at(one, "containerPort"))
    return None


def _replicas(cluster: ClusterFacts) -> Iterator[Finding]:
    ready = [one for one in picker_pods(cluster) if is_ready(one)]
    alone = [
        one
        for one in ready
        if not is_election_on(one) and not any(flag_of(one, flag) for flag in PEER_FLAGS)
    ]
    if len(alone) > 1:
        yield warning(
            f"{len(alone)} pickers serve the pool and know nothing of each other ({_names(alone)})",
            "each sees a part of the load and of the prefixes: cache hits fall, endpoints are "
            "overrun",
            "start them with --peer-service NAME (deploy/k8s/components/active-active) or with "
            "--ha-enable-leader-election (deploy/k8s/components/leader-election)",
        )


def _lease(cluster: ClusterFacts) -> Iterator[Finding]:
    electing = [one for one in picker_pods(cluster) if is_election_on(one)]
    lease = cluster.lease_name
    if lease is None or "leases" in cluster.unseen:
        return
    spec = at(cluster.lease, "spec")
    holder, renewed = at(spec, "holderIdentity"), _time(at(spec, "renewTime"))
    lasts = number(at(spec, "leaseDurationSeconds")) or _LEASE_SECONDS
    fix = f"kubectl get lease {lease.name} -n {lease.namespace} -o yaml, and the pickers' logs"
    why = "no picker leads, so none is ready"
    if not holder:
        yield error(f"Lease {lease} has no holder", why, fix)
    elif renewed is not None and cluster.now - renewed > lasts:
        yield error(
            f"Lease {lease}, held by {holder}, was renewed {cluster.now - renewed:.0f} s ago",
            why,
            fix,
        )
    elif not any(_may_be(one, str(holder)) for one in electing):
        yield warning(
            f"Lease {lease} is held by {holder}, none of the Pods behind the pool's Service "
            f"({_names(electing)})",
            "while a picker of another installation keeps it, none of these is ever ready; one "
            f"that was killed keeps it for {lasts} s",
            "if that does not pass: give every installation a pool of its own, or take "
            "--ha-enable-leader-election from the other one; kubectl get pods -A shows whose it is",
        )
    ready = [one for one in electing if is_ready(one)]
    if len(ready) > 1:
        yield warning(
            f"{len(ready)} pickers are ready though one leads ({_names(ready)})",
            "gateways ask those that stand by, too: each sees a part of the load and of the "
            "prefixes",
            "a readinessProbe that asks who leads, and not whether the process lives: "
            "readinessProbe: {grpc: {port: 9003, service: readiness}, periodSeconds: 2}",
        )


def _may_be(pod: Json, holder: str) -> bool:
    """Whether a Lease's holder is the picker in this Pod: it is called after the Pod, or after the
    host where it does not know its Pod's name.
    """
    if at(pod, "spec", "hostNetwork") or at(pod, "spec", "hostname"):
        return True
    name = str(at(pod, "metadata", "name"))
    return holder.rpartition("_")[0] in (name, name[:_HOST_NAME_LETTERS])


def _time(text: object) -> float | None:
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except (ValueError, OverflowError):
        return None


def _names(pods: list[Json]) -> str:
    return ", ".join(str(at(one, "metadata", "name")) for one in pods)


CHECKS = (
    Check("k8s-picker-port", "gateways ask about this pool", of_cluster(_port)),
    Check("k8s-replicas", "several pickers know of each other", of_cluster(_replicas)),
    Check("k8s-lease", "one picker leads", of_cluster(_lease)),
)
