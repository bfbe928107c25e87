"""Checks of a cluster: rights, kinds, the pool and what it refers to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from fleet.doctor.cluster_facts import (
    ACCESS_REVIEWS,
    TOKEN_REVIEWS,
    ClusterFacts,
    Json,
    Right,
)
from fleet.doctor.cluster_view import pool_value
from fleet.doctor.envoy_document import at, listed, mapped, texts
from fleet.doctor.facts import Facts
from fleet.doctor.findings import Check, Finding, error, warning
from picker.k8s.api import (
    ENDPOINT_SLICES,
    LEASES,
    LEGACY_OBJECTIVES,
    LEGACY_POOLS,
    OBJECTIVES,
    POOLS,
    REWRITES,
)
from picker.k8s.object_check import ObjectProblem
from picker.k8s.objects import PickerReference, read_policy, read_pool

_GRPC_PROTOCOLS = (None, "grpc", "http2", "kubernetes.io/h2c", "https")
_NO_PAGES = "its HTTP port answers 503 to all who ask with a token: no metrics, no pages"

Judge = Callable[[ClusterFacts], Iterable[Finding]]


def of_cluster(judge: Judge) -> Callable[[Facts], Iterator[Finding]]:
    """A judge of a cluster that answers."""

    def judged(facts: Facts) -> Iterator[Finding]:
        if facts.cluster is not None and facts.cluster.problem is None:
            yield from judge(facts.cluster)

    return judged


def _reachable(facts: Facts) -> Iterator[Finding]:
    cluster = facts.cluster
    if cluster is not None and cluster.problem is not None:
        yield error(
            f"the API server: {cluster.problem}",
            "a picker there follows nothing either, and goes on with what it knew",
            "kubectl cluster-info; --kubeconfig FILE and --kube-context NAME choose another",
        )


def _unseen(cluster: ClusterFacts) -> Iterator[Finding]:
    for kind, reason in cluster.unseen.items():
        yield warning(
            f"{kind} in {cluster.namespace} could not be read: {reason}",
            "what is wrong there is not found by this run",
            f"run it as somebody who may: kubectl auth can-i list {kind} -n {cluster.namespace}",
        )


def _rights(cluster: ClusterFacts) -> Iterator[Finding]:
    if cluster.rights_problem is not None:
        yield warning(
            f"rights of {cluster.who} are not known: {cluster.rights_problem}",
            "a picker that may not read something follows nothing",
            "give --as system:serviceaccount:NAMESPACE:NAME to somebody who may create "
            "subjectaccessreviews.authorization.k8s.io",
        )
    for right in cluster.denied:
        named = f" '{right.name}'" if right.name else ""
        where = f" in {right.namespace}" if right.namespace else ""
        role = "Role" if right.namespace == cluster.namespace else f"Role{where}"
        yield error(
            f"{cluster.who} may not {right.verb} {right.resource.qualified}{named}{where}",
            _loss(right),
            f"add to the {role if right.namespace else 'ClusterRole'}: {_rule(right)}",
        )


def _loss(right: Right) -> str:
    kind = right.resource.plural
    lost = {
        OBJECTIVES.plural: f"{kind} have no effect",
        REWRITES.plural: f"{kind} have no effect",
        LEASES.plural: "it never leads, and is never ready",
        ENDPOINT_SLICES.plural: "it finds no other replica, and shares nothing",
        TOKEN_REVIEWS.plural: _NO_PAGES,
        ACCESS_REVIEWS.plural: _NO_PAGES,
    }
    return lost.get(kind, "it knows no endpoints and is never ready")


def _rule(right: Right) -> str:
    names = f", resourceNames: [{right.name}]" if right.name else ""
    return (
        f'{{apiGroups: ["{right.resource.group}"], resources: [{right.resource.plural}]{names}, '
        f"verbs: [{right.verb}]}}"
    )


def _kinds(cluster: ClusterFacts) -> Iterator[Finding]:
    served = cluster.served
    if not served:
        return
    apply = "kubectl apply -f crds/"
    if not served.get(POOLS, False):
        if served.get(LEGACY_POOLS, False):
            yield warning(
                f"{POOLS.qualified} is not served, the deprecated {LEGACY_POOLS.qualified} is",
                "only a picker with --pool-group inference.networking.x-k8s.io finds its pool",
                f"{apply} and move the pool to {POOLS.api_version}",
            )
        else:
            yield error(
                f"{POOLS.qualified}/{POOLS.version} is not served",
                "there can be no InferencePool, and a picker with --pool-name follows nothing",
                apply,
            )
    for current in (OBJECTIVES, REWRITES):
        legacy = next(
            (one for one in served if one.plural == current.plural and one != current), None
        )
        if not served.get(current, False):
            is_old = legacy is not None and served.get(legacy, False)
            told = f", the deprecated {LEGACY_OBJECTIVES.group} is" if is_old else ""
            yield warning(
                f"{current.qualified}/{current.version} is not served{told}",
                f"{current.plural} of that group cannot be made and have no effect",
                apply,
            )


def _pool(cluster: ClusterFacts) -> Iterator[Finding]:
    where = f"{cluster.namespace}/{cluster.pool_name}"
    if cluster.pool is None:
        is_served = any(cluster.served.get(one, False) for one in (POOLS, LEGACY_POOLS))
        if is_served and POOLS.plural not in cluster.unseen:
            yield error(
                f"there is no InferencePool {where}",
                "a picker that follows it has no endpoints and is never ready",
                "make it (deploy/k8s/overlays/gateway/inferencepool.yaml), or name the one that is "
                "there: kubectl get inferencepools -A",
            )
        return
    reading = read_pool(cluster.pool)
    yield from (_object_finding(f"InferencePool {where}", one) for one in reading.problems)
    if reading.value is not None and reading.value.is_deleting:
        yield error(
            f"InferencePool {where} is being deleted",
            "its endpoints are gone as far as pickers go",
            f"kubectl get inferencepool {cluster.pool_name} -n {cluster.namespace} -o yaml tells "
            "by its finalizers who holds it",
        )


def _object_finding(what: str, one: ObjectProblem) -> Finding:
    got = "" if one.value is None else f", got {one.value}"
    return (error if one.is_error else warning)(
        f"{what}: {one.path or 'the object'} {one.message}{got}",
        "an object with an error is not followed: what it said before stays"
        if one.is_error
        else "it hardly means what was meant",
        one.fix,
    )


def _parents(cluster: ClusterFacts) -> Iterator[Finding]:
    for parent in listed(cluster.pool, "status", "parents"):
        reference = mapped(parent, "parentRef")
        name = f"{reference.get('kind', 'Gateway')} {reference.get('name')}"
        for condition in listed(parent, "conditions"):
            if condition.get("status") == "False" and condition.get("type") != "Exported":
                yield error(
                    f"{name} says of the pool: {condition.get('type')} is False, "
                    f"{condition.get('reason')}: {condition.get('message', '')}".rstrip(": "),
                    "the gateway sends no request to the pool",
                    f"kubectl describe inferencepool {cluster.pool_name} -n {cluster.namespace}, "
                    "and the same of the HTTPRoute that names it",
                )


def _service(cluster: ClusterFacts) -> Iterator[Finding]:
    pool = pool_value(cluster)
    reference = None if pool is None else pool.picker
    if reference is None or reference.kind != "Service" or "services" in cluster.unseen:
        return
    where = f"Service {cluster.namespace}/{reference.name}"
    if cluster.service is None:
        yield error(
            f"{where}, the pool's endpointPickerRef, is not there",
            "gateways cannot ask a picker",
            "apply deploy/k8s/base/service.yaml, or name the Service that is there in "
            "spec.endpointPickerRef.name",
        )
        return
    yield from _service_port(cluster.service, reference, where)
    if cluster.slices is not None and not _ready_addresses(cluster.slices):
        yield error(
            f"{where} has no ready endpoints",
            "gateways cannot ask a picker",
            f"kubectl get pods -n {cluster.namespace} -l "
            f"{_selector(cluster.service)}: the picker's Pods have to run and be ready",
        )


def _service_port(service: Json, reference: PickerReference, where: str) -> Iterator[Finding]:
    ports = listed(service, "spec", "ports")
    found = next((one for one in ports if at(one, "port") == reference.port), None)
    if found is None:
        told = ", ".join(str(at(one, "port")) for one in ports) or "none"
        yield error(
            f"{where} has no port {reference.port} (it has {told})",
            "gateways cannot ask a picker",
            f"spec.endpointPickerRef.port.number has to be one of the Service's ports ({told})",
        )
    elif at(found, "appProtocol") not in _GRPC_PROTOCOLS:
        yield warning(
            f"{where}: port {reference.port} has appProtocol {at(found, 'appProtocol')}",
            "ext_proc is gRPC: a gateway that heeds it speaks HTTP/1 to the picker",
            "appProtocol: kubernetes.io/h2c (http2 for Istio)",
        )


def _ready_addresses(slices: Iterable[Json]) -> list[str]:
    return [
        address
        for one in slices
        for endpoint in listed(one, "endpoints")
        if at(endpoint, "conditions", "ready") is not False
        for address in texts(endpoint, "addresses")
    ]


def _selector(service: Json) -> str:
    labels = mapped(service, "spec", "selector")
    return ",".join(f"{key}={value}" for key, value in labels.items())


def _policies(cluster: ClusterFacts) -> Iterator[Finding]:
    group = "" if cluster.pool is None else str(at(cluster.pool, "apiVersion")).partition("/")[0]
    for document in cluster.policies:
        kind, name = at(document, "kind"), at(document, "metadata", "name")
        what = f"{kind} {cluster.namespace}/{name}"
        reference = mapped(document, "spec", "poolRef")
        named = reference.get("name"), reference.get("group", POOLS.group)
        if named == (cluster.pool_name, group or POOLS.group):
            yield from (_object_finding(what, one) for one in read_policy(document).problems)
        elif reference.get("name") == cluster.pool_name:
            yield warning(
                f"{what}: spec.poolRef names the pool in group '{named[1]}'",
                f"the pool is of '{group or POOLS.group}': the object has no effect",
                f"spec.poolRef: {{group: {group or POOLS.group}, name: {cluster.pool_name}}}",
            )


CHECKS = (
    Check("k8s-reachable", "the API server answers", _reachable),
    Check("k8s-unseen", "this run may read what it judges", of_cluster(_unseen)),
    Check("k8s-rights", "the picker may do what it has to", of_cluster(_rights)),
    Check("k8s-kinds", "our definitions are installed", of_cluster(_kinds)),
    Check("k8s-pool", "the pool is there and valid", of_cluster(_pool)),
    Check("k8s-parents", "gateways accept the pool", of_cluster(_parents)),
    Check("k8s-service", "gateways can ask the picker", of_cluster(_service)),
    Check("k8s-policies", "objectives and rewrites are valid", of_cluster(_policies)),
)
