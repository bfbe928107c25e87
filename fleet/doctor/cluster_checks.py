"""Checks of a cluster: rights, kinds, the pool and what it refers to, its Pods and its pickers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime

from base.durations import parse_duration
from fleet.doctor.cluster_look import (
    ACCESS_REVIEWS,
    PEER_FLAGS,
    TOKEN_REVIEWS,
    ClusterFacts,
    Serving,
    flag_in,
    flag_of,
    is_on,
    is_ready,
    picker_pods,
    pool_pods,
    pool_value,
    serving_of,
    words_of,
)
from fleet.doctor.diagnosis import Check, Diagnosis, Facts, each, error, warning
from fleet.doctor.paths import Json, at, listed, mapped, number, texts
from picker.config.findings import Finding, Severity
from picker.k8s.api import (
    ENDPOINT_SLICES,
    LEASES,
    LEGACY_OBJECTIVES,
    LEGACY_POOLS,
    OBJECTIVES,
    POOLS,
    REWRITES,
)
from picker.k8s.objects import PickerReference, read_policy, read_pool

DEFAULT_GRACE_SECONDS = 30
_GRPC_PROTOCOLS = (None, "grpc", "http2", "kubernetes.io/h2c", "https")
_NO_PAGES = "its HTTP port answers 503 to all who ask with a token: no metrics, no pages"
_LOSSES = {
    OBJECTIVES.plural: "inferenceobjectives have no effect",
    REWRITES.plural: "inferencemodelrewrites have no effect",
    LEASES.plural: "it never leads, and is never ready",
    ENDPOINT_SLICES.plural: "it finds no other replica, and shares nothing",
    TOKEN_REVIEWS.plural: _NO_PAGES,
    ACCESS_REVIEWS.plural: _NO_PAGES,
}
_LEASE_SECONDS = 15
_HOST_NAME_LETTERS = 63
_DRAIN_FLAGS = ("--drain-timeout", "--shutdown-timeout")
_SHOWN = 5


def _clusters(facts: Facts) -> Iterator[ClusterFacts]:
    """The one that answers."""
    if facts.cluster is not None and facts.cluster.problem is None:
        yield facts.cluster


def _reachable(facts: Facts) -> Iterator[Diagnosis]:
    cluster = facts.cluster
    if cluster is not None and cluster.problem is not None:
        yield error(
            f"the API server: {cluster.problem}",
            "a picker there follows nothing either, and goes on with what it knew",
            "kubectl cluster-info; --kubeconfig FILE and --kube-context NAME choose another",
        )


def _unseen(cluster: ClusterFacts) -> Iterator[Diagnosis]:
    for kind, reason in cluster.unseen.items():
        yield warning(
            f"{kind} in {cluster.namespace} could not be read: {reason}",
            "what is wrong there is not found by this run",
            f"run it as somebody who may: kubectl auth can-i list {kind} -n {cluster.namespace}",
        )


def _rights(cluster: ClusterFacts) -> Iterator[Diagnosis]:
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
        names = f", resourceNames: [{right.name}]" if right.name else ""
        yield error(
            f"{cluster.who} may not {right.verb} {right.resource.qualified}{named}{where}",
            _LOSSES.get(right.resource.plural, "it knows no endpoints and is never ready"),
            f"add to the {role if right.namespace else 'ClusterRole'}: {{apiGroups: "
            f'["{right.resource.group}"], resources: [{right.resource.plural}]{names}, '
            f"verbs: [{right.verb}]}}",
        )


def _kinds(cluster: ClusterFacts) -> Iterator[Diagnosis]:
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
            instead = f", the deprecated {LEGACY_OBJECTIVES.group} is" if is_old else ""
            yield warning(
                f"{current.qualified}/{current.version} is not served{instead}",
                f"{current.plural} of that group cannot be made and have no effect",
                apply,
            )


def _pool(cluster: ClusterFacts) -> Iterator[Diagnosis]:
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


def _object_finding(what: str, one: Finding) -> Diagnosis:
    text, fix = f"{what}: {one.text}", "correct the object (docs/kubernetes-objects.md)"
    if one.severity is Severity.ERROR:
        return error(text, "an invalid object is not followed: its last valid state applies", fix)
    return warning(text, "the object probably does not do what its author meant", fix)


def _parents(cluster: ClusterFacts) -> Iterator[Diagnosis]:
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


def _service(cluster: ClusterFacts) -> Iterator[Diagnosis]:
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
    endpoints = [one for it in cluster.slices or () for one in listed(it, "endpoints")]
    ready = (one for one in endpoints if at(one, "conditions", "ready") is not False)
    if cluster.slices is not None and not any(texts(one, "addresses") for one in ready):
        labels = mapped(cluster.service, "spec", "selector")
        selector = ",".join(f"{key}={value}" for key, value in labels.items())
        yield error(
            f"{where} has no ready endpoints",
            "gateways cannot ask a picker",
            f"kubectl get pods -n {cluster.namespace} -l {selector}: the picker's Pods have to run "
            "and be ready",
        )


def _service_port(service: Json, reference: PickerReference, where: str) -> Iterator[Diagnosis]:
    ports = listed(service, "spec", "ports")
    found = next((one for one in ports if at(one, "port") == reference.service_port), None)
    if found is None:
        known = ", ".join(str(at(one, "port")) for one in ports) or "none"
        yield error(
            f"{where} has no port {reference.service_port} (it has {known})",
            "gateways cannot ask a picker",
            f"spec.endpointPickerRef.port.number has to be one of the Service's ports ({known})",
        )
    elif at(found, "appProtocol") not in _GRPC_PROTOCOLS:
        yield warning(
            f"{where}: port {reference.service_port} has appProtocol {at(found, 'appProtocol')}",
            "ext_proc is gRPC: a gateway that heeds it speaks HTTP/1 to the picker",
            "appProtocol: kubernetes.io/h2c (http2 for Istio)",
        )


def _policies(cluster: ClusterFacts) -> Iterator[Diagnosis]:
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


def _port(cluster: ClusterFacts) -> Iterator[Diagnosis]:
    """Pickers that do not say what they serve are passed over."""
    pool = pool_value(cluster)
    reference = None if pool is None else pool.picker
    if reference is None or cluster.service is None:
        return
    found: dict[tuple[str, str], Diagnosis] = {}
    for pod in picker_pods(cluster):
        serving = serving_of(pod)
        if serving is not None and reference.service_port is not None:
            one = _served_elsewhere(cluster, pod, serving, reference.service_port)
            if one is not None:
                found.setdefault((one.why, one.fix), one)
    yield from found.values()


def _served_elsewhere(
    cluster: ClusterFacts, pod: Json, serving: Serving, asked: int
) -> Diagnosis | None:
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


def _replicas(cluster: ClusterFacts) -> Iterator[Diagnosis]:
    ready = [one for one in picker_pods(cluster) if is_ready(one)]
    alone = [
        one
        for one in ready
        if not is_on(one) and not any(flag_of(one, flag) for flag in PEER_FLAGS)
    ]
    if len(alone) > 1:
        yield warning(
            f"{len(alone)} pickers serve the pool and know nothing of each other ({_names(alone)})",
            "each sees a part of the load and of the prefixes: cache hits fall, endpoints are "
            "overrun",
            "start them with --peer-service NAME (deploy/k8s/components/active-active) or with "
            "--ha-enable-leader-election (deploy/k8s/components/leader-election)",
        )


def _lease(cluster: ClusterFacts) -> Iterator[Diagnosis]:
    electing = [one for one in picker_pods(cluster) if is_on(one)]
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


def _selected(cluster: ClusterFacts) -> Iterator[Diagnosis]:
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
        yield error(
            f"none of the pool's {len(found)} Pods is ready ({_names(found, _SHOWN)})",
            "every request is a 503",
            f"{look}; kubectl describe pod and kubectl logs tell why they are not",
        )


def _ports(cluster: ClusterFacts) -> Iterator[Diagnosis]:
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
            own_ports = ", ".join(map(str, sorted(declared)))
            yield error(
                f"targetPorts has {port}, which no container of {_names(wrong, _SHOWN)} declares "
                f"(they declare {own_ports})",
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


def _probes(cluster: ClusterFacts) -> Iterator[Diagnosis]:
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
                f"Pods without a readinessProbe: {_names(without, _SHOWN)} ({what})",
                "they count as ready while they still load, and requests to them fail",
                f"readinessProbe: {{{probe}, periodSeconds: 2, failureThreshold: 2}}",
            )


def _grace(cluster: ClusterFacts) -> Iterator[Diagnosis]:
    found: dict[tuple[str, float], Diagnosis] = {}
    pods = (*pool_pods(cluster), *picker_pods(cluster))
    for pod, container in ((it, one) for it in pods for one in listed(it, "spec", "containers")):
        flag, drain = _drain(words_of(pod, container))
        waits = number(at(container, "lifecycle", "preStop", "sleep", "seconds")) or 0
        grace = number(at(pod, "spec", "terminationGracePeriodSeconds"))
        grace = DEFAULT_GRACE_SECONDS if grace is None else grace
        if drain is not None and grace < (needed := drain + waits):
            one = error(
                f"{at(pod, 'metadata', 'name')}: terminationGracePeriodSeconds is {grace}, "
                f"{flag} {drain:g} s" + (f" after {waits} s of preStop" if waits else ""),
                "it is killed with requests under way",
                f"spec.template.spec.terminationGracePeriodSeconds: {needed + 5:.0f}",
            )
            found.setdefault((str(at(container, "name")), needed), one)
    yield from found.values()


def _drain(words: list[str]) -> tuple[str, float | None]:
    for flag in _DRAIN_FLAGS:
        text = flag_in(words, flag)
        if text:
            try:
                return flag, float(text) if text[-1].isdigit() else parse_duration(text)
            except ValueError:
                continue
    return "", None


def _names(pods: Sequence[Json], most: int | None = None) -> str:
    """Their names, of at most so many of them."""
    names = [str(at(one, "metadata", "name")) for one in pods]
    left = len(names[most:]) if most else 0
    return ", ".join(names[:most]) + (f" and {left} more" if left else "")


CHECKS = (
    Check("k8s-reachable", "the API server answers", _reachable),
    Check("k8s-unseen", "this run may read what it judges", each(_clusters, _unseen)),
    Check("k8s-rights", "the picker may do what it has to", each(_clusters, _rights)),
    Check("k8s-kinds", "our definitions are installed", each(_clusters, _kinds)),
    Check("k8s-pool", "the pool is there and valid", each(_clusters, _pool)),
    Check("k8s-parents", "gateways accept the pool", each(_clusters, _parents)),
    Check("k8s-service", "gateways can ask the picker", each(_clusters, _service)),
    Check("k8s-policies", "objectives and rewrites are valid", each(_clusters, _policies)),
    Check("k8s-picker-port", "gateways ask about this pool", each(_clusters, _port)),
    Check("k8s-replicas", "several pickers know of each other", each(_clusters, _replicas)),
    Check("k8s-lease", "one picker leads", each(_clusters, _lease)),
    Check("k8s-pods", "the pool has Pods that are ready", each(_clusters, _selected)),
    Check("k8s-target-ports", "workers listen where the pool says", each(_clusters, _ports)),
    Check("k8s-probes", "Pods say when they can serve", each(_clusters, _probes)),
    Check("k8s-grace-period", "Pods may finish their requests", each(_clusters, _grace)),
)
