"""Judges of a cluster: rights, kinds, the pool and its references, its Pods and its pickers."""

from collections.abc import Iterator, Sequence
from datetime import datetime

from base.durations import parse_duration
from fleet.doctor.cluster_look import (
    ACCESS_REVIEWS,
    PEER_FLAGS,
    TOKEN_REVIEWS,
    ClusterFacts,
    ServedPools,
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
from fleet.doctor.diagnosis import Facts, JudgeFinding, each, found
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

DEFAULT_GRACE_SECONDS = 30  # Kubernetes' own
_GRPC_PROTOCOLS = (None, "grpc", "http2", "kubernetes.io/h2c", "https")
_NO_PAGES = "its HTTP port answers 503 to every request with a token: no metrics, no pages"
_LOSSES = {
    OBJECTIVES.plural: "inferenceobjectives have no effect",
    REWRITES.plural: "inferencemodelrewrites have no effect",
    LEASES.plural: "it never leads, and is never ready",
    ENDPOINT_SLICES.plural: "it finds no other replica, and shares nothing",
    TOKEN_REVIEWS.plural: _NO_PAGES,
    ACCESS_REVIEWS.plural: _NO_PAGES,
}
_LEASE_SECONDS = 15  # the picker's default, for a Lease that does not say
_HOST_NAME_LETTERS = 63  # the kubelet cuts a Pod's host name there
_DRAIN_FLAGS = ("--drain-timeout", "--shutdown-timeout")
_SHOWN = 5


def _clusters(facts: Facts) -> Iterator[ClusterFacts]:
    if facts.cluster is not None and facts.cluster.problem is None:
        yield facts.cluster


def _reachable(facts: Facts) -> Iterator[JudgeFinding]:
    if facts.cluster is not None and facts.cluster.problem is not None:
        yield found("silent", problem=facts.cluster.problem)


def _unseen(cluster: ClusterFacts) -> Iterator[JudgeFinding]:
    for kind, reason in cluster.unseen.items():
        yield found("unread", kind=kind, namespace=cluster.namespace, reason=reason)


def _rights(cluster: ClusterFacts) -> Iterator[JudgeFinding]:
    if cluster.rights_problem is not None:
        yield found("unknown", who=cluster.who, problem=cluster.rights_problem)
    for right in cluster.denied:
        named = f" '{right.name}'" if right.name else ""
        where = f" in {right.namespace}" if right.namespace else ""
        role = "Role" if right.namespace == cluster.namespace else f"Role{where}"
        yield found(
            "denied",
            who=cluster.who,
            verb=right.verb,
            what=f"{right.resource.qualified}{named}{where}",
            loss=_LOSSES.get(right.resource.plural, "it knows no endpoints and is never ready"),
            role=role if right.namespace else "ClusterRole",
            group=right.resource.group,
            plural=right.resource.plural,
            names=f", resourceNames: [{right.name}]" if right.name else "",
        )


def _kinds(cluster: ClusterFacts) -> Iterator[JudgeFinding]:
    served = cluster.served
    if not served:
        return
    if not served.get(POOLS, False):
        if served.get(LEGACY_POOLS, False):
            yield found(
                "old-pool",
                current=POOLS.qualified,
                legacy=LEGACY_POOLS.qualified,
                version=POOLS.api_version,
            )
        else:
            yield found("no-pool", current=f"{POOLS.qualified}/{POOLS.version}")
    for current in (OBJECTIVES, REWRITES):
        legacy = next(
            (one for one in served if one.plural == current.plural and one != current), None
        )
        if not served.get(current, False):
            is_old = legacy is not None and served.get(legacy, False)
            yield found(
                "policy",
                current=f"{current.qualified}/{current.version}",
                instead=f", the deprecated {LEGACY_OBJECTIVES.group} is" if is_old else "",
                plural=current.plural,
            )


def _pool(cluster: ClusterFacts) -> Iterator[JudgeFinding]:
    where = f"{cluster.namespace}/{cluster.pool_name}"
    if cluster.pool is None:
        is_served = any(cluster.served.get(one, False) for one in (POOLS, LEGACY_POOLS))
        if is_served and POOLS.plural not in cluster.unseen:
            yield found("missing", where=where)
        return
    reading = read_pool(cluster.pool)
    yield from (_object_finding(f"InferencePool {where}", one) for one in reading.problems)
    if reading.value is not None and reading.value.is_deleting:
        yield found("deleting", where=where, name=cluster.pool_name, namespace=cluster.namespace)


def _object_finding(what: str, one: Finding) -> JudgeFinding:
    key = "invalid" if one.severity is Severity.ERROR else "doubtful"
    return found(key, problem=f"{what}: {one.text}")


def _parents(cluster: ClusterFacts) -> Iterator[JudgeFinding]:
    for parent in listed(cluster.pool, "status", "parents"):
        reference = mapped(parent, "parentRef")
        for one in listed(parent, "conditions"):
            if one.get("status") == "False" and one.get("type") != "Exported":
                words = f"{one.get('type')} is False, {one.get('reason')}: {one.get('message', '')}"
                yield found(
                    "refused",
                    parent=f"{reference.get('kind', 'Gateway')} {reference.get('name')}",
                    condition=words.rstrip(": "),
                    name=cluster.pool_name,
                    namespace=cluster.namespace,
                )


def _service(cluster: ClusterFacts) -> Iterator[JudgeFinding]:
    pool = pool_value(cluster)
    reference = None if pool is None else pool.picker
    if reference is None or reference.kind != "Service" or "services" in cluster.unseen:
        return
    where = f"Service {cluster.namespace}/{reference.name}"
    if cluster.service is None:
        yield found("missing", where=where)
        return
    yield from _service_port(cluster.service, reference, where)
    endpoints = [one for it in cluster.slices or () for one in listed(it, "endpoints")]
    # The API counts an endpoint without the condition as ready.
    ready = (one for one in endpoints if at(one, "conditions", "ready") is not False)
    if cluster.slices is not None and not any(texts(one, "addresses") for one in ready):
        labels = mapped(cluster.service, "spec", "selector")
        selector = ",".join(f"{key}={value}" for key, value in labels.items())
        yield found("no-endpoints", where=where, namespace=cluster.namespace, selector=selector)


def _service_port(service: Json, reference: PickerReference, where: str) -> Iterator[JudgeFinding]:
    ports = listed(service, "spec", "ports")
    own = next((one for one in ports if at(one, "port") == reference.service_port), None)
    place = {"where": where, "port": reference.service_port}
    if own is None:
        known = ", ".join(str(at(one, "port")) for one in ports)
        yield found("no-port", **place, known=known or "none")
    elif at(own, "appProtocol") not in _GRPC_PROTOCOLS:
        yield found("protocol", **place, protocol=at(own, "appProtocol"))


def _policies(cluster: ClusterFacts) -> Iterator[JudgeFinding]:
    group = "" if cluster.pool is None else str(at(cluster.pool, "apiVersion")).partition("/")[0]
    group = group or POOLS.group
    for document in cluster.policies:
        what = f"{at(document, 'kind')} {cluster.namespace}/{at(document, 'metadata', 'name')}"
        reference = mapped(document, "spec", "poolRef")
        name, named = reference.get("name"), reference.get("group", POOLS.group)
        if (name, named) == (cluster.pool_name, group):
            # An API server validates only kinds whose definitions have rules.
            yield from (_object_finding(what, one) for one in read_policy(document).problems)
        elif name == cluster.pool_name:
            yield found("group", what=what, named=named, group=group, name=name)


def _port(cluster: ClusterFacts) -> Iterator[JudgeFinding]:
    pool = pool_value(cluster)
    reference = None if pool is None else pool.picker
    if reference is None or cluster.service is None:
        return
    kinds: dict[tuple[str, object], JudgeFinding] = {}  # one finding for Pods that are alike
    for pod in picker_pods(cluster):
        serving = serving_of(pod)
        if serving is not None and reference.service_port is not None:
            one = _served_elsewhere(cluster, pod, serving, reference.service_port)
            if one is not None:
                port = one.values["port"] if one.key == "other-port" else None
                kinds.setdefault((one.key, port), one)
    yield from kinds.values()


def _served_elsewhere(
    cluster: ClusterFacts, pod: Json, serving: ServedPools, asked: int
) -> JudgeFinding | None:
    picker = at(pod, "metadata", "name")
    own = serving.find(cluster.namespace, cluster.pool_name)
    if own is None:
        pools = ", ".join(f"{one.namespace}/{one.name}" for one in serving.pools)
        where = f"{cluster.namespace}/{cluster.pool_name}"
        name = cluster.pool_name
        return found("other-pools", picker=picker, pools=pools, where=where, name=name)
    behind = _port_behind(cluster, pod, asked)
    port = serving.port if own.grpc_port is None else own.grpc_port
    if not port or behind is None:
        return None
    if behind != port:
        return found("other-port", picker=picker, behind=behind, port=port, asked=asked)
    if own.grpc_port is None and len(serving.pools) > 1:
        pools = str(len(serving.pools))
        return found("shared", picker=picker, pools=pools, port=port, name=own.name)
    return None


def _port_behind(cluster: ClusterFacts, pod: Json, asked: int) -> int | None:
    ports = listed(cluster.service, "spec", "ports")
    own = next((one for one in ports if at(one, "port") == asked), None)
    if own is None:
        return None
    target = at(own, "targetPort")
    if target is None:  # Kubernetes then takes the same port
        return asked
    if isinstance(target, int):
        return target
    for container in listed(pod, "spec", "containers"):
        for one in listed(container, "ports"):
            if at(one, "name") == target:
                return number(at(one, "containerPort"))
    return None


def _replicas(cluster: ClusterFacts) -> Iterator[JudgeFinding]:
    alone = [
        one
        for one in picker_pods(cluster)
        if is_ready(one) and not is_on(one) and not any(flag_of(one, flag) for flag in PEER_FLAGS)
    ]
    if len(alone) > 1:
        yield found("alone", count=len(alone), names=_names(alone))


def _lease(cluster: ClusterFacts) -> Iterator[JudgeFinding]:
    electing = [one for one in picker_pods(cluster) if is_on(one)]
    lease = cluster.lease_name
    if lease is None or "leases" in cluster.unseen:
        return
    spec = at(cluster.lease, "spec")
    holder, renewed = at(spec, "holderIdentity"), _time(at(spec, "renewTime"))
    lasts = number(at(spec, "leaseDurationSeconds")) or _LEASE_SECONDS
    place = {"lease": lease, "name": lease.name, "namespace": lease.namespace}
    if not holder:
        yield found("no-holder", **place)
    elif renewed is not None and cluster.now - renewed > lasts:
        yield found("lapsed", **place, holder=holder, age=f"{cluster.now - renewed:.0f}")
    elif not any(_may_be(one, str(holder)) for one in electing):
        yield found("foreign", lease=lease, holder=holder, names=_names(electing), lasts=lasts)
    ready = [one for one in electing if is_ready(one)]
    if len(ready) > 1:
        yield found("several", count=len(ready), names=_names(ready))


def _may_be(pod: Json, holder: str) -> bool:
    """Check if `holder` may be this Pod; one that does not know its Pod has its host's name."""
    if at(pod, "spec", "hostNetwork") or at(pod, "spec", "hostname"):  # its host has another name
        return True
    name = str(at(pod, "metadata", "name"))
    return holder.rpartition("_")[0] in (name, name[:_HOST_NAME_LETTERS])


def _time(text: object) -> float | None:
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except (ValueError, OverflowError):
        return None


def _selected(cluster: ClusterFacts) -> Iterator[JudgeFinding]:
    pool = pool_value(cluster)
    if pool is None or cluster.pods is None:
        return
    pods = pool_pods(cluster)
    place = {"selector": pool.label_selector, "namespace": cluster.namespace}
    if not pods:
        yield found("none", **place)
    elif not any(is_ready(one) for one in pods):
        yield found("not-ready", **place, count=len(pods), names=_names(pods, _SHOWN))


def _ports(cluster: ClusterFacts) -> Iterator[JudgeFinding]:
    """Find the Pods that declare ports, but not the pool's; Pods need not declare any."""
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
            yield found(
                "undeclared",
                port=port,
                names=_names(wrong, _SHOWN),
                declared=", ".join(map(str, sorted(declared))),
                first=min(declared),
            )


def _declared(pod: Json) -> set[int]:
    ports = (
        number(at(port, "containerPort"))
        for container in listed(pod, "spec", "containers")
        for port in listed(container, "ports")
        if at(port, "protocol") in (None, "TCP")  # TCP is the default
    )
    return {one for one in ports if one is not None}


def _probes(cluster: ClusterFacts) -> Iterator[JudgeFinding]:
    for key, pods in (("worker", pool_pods(cluster)), ("picker", picker_pods(cluster))):
        without = tuple(
            pod
            for pod in pods
            if not any(at(one, "readinessProbe") for one in listed(pod, "spec", "containers"))
        )
        if without:
            yield found(key, names=_names(without, _SHOWN))


def _grace(cluster: ClusterFacts) -> Iterator[JudgeFinding]:
    kinds: dict[tuple[str, float], JudgeFinding] = {}  # one finding for Pods that are alike
    pods = (*pool_pods(cluster), *picker_pods(cluster))
    for pod, container in ((it, one) for it in pods for one in listed(it, "spec", "containers")):
        flag, drain = _drain(words_of(pod, container))
        waits = number(at(container, "lifecycle", "preStop", "sleep", "seconds")) or 0
        grace = number(at(pod, "spec", "terminationGracePeriodSeconds"))
        grace = DEFAULT_GRACE_SECONDS if grace is None else grace
        if drain is not None and grace < (needed := drain + waits):
            one = found(
                "short",
                pod=at(pod, "metadata", "name"),
                grace=grace,
                flag=flag,
                drain=f"{drain:g}",
                after=f" after {waits} s of preStop" if waits else "",
                needed=f"{needed + 5:.0f}",
            )
            kinds.setdefault((str(at(container, "name")), needed), one)
    yield from kinds.values()


def _drain(words: list[str]) -> tuple[str, float | None]:
    for flag in _DRAIN_FLAGS:
        text = flag_in(words, flag)
        if text:
            try:
                # A worker takes seconds, a picker a duration as Go writes it.
                return flag, float(text) if text[-1].isdigit() else parse_duration(text)
            except ValueError:
                continue
    return "", None


def _names(pods: Sequence[Json], most: int | None = None) -> str:
    names = [str(at(one, "metadata", "name")) for one in pods]
    left = len(names[most:]) if most else 0
    return ", ".join(names[:most]) + (f" and {left} more" if left else "")


JUDGES = {
    "k8s-reachable": _reachable,
    "k8s-unseen": each(_clusters, _unseen),
    "k8s-rights": each(_clusters, _rights),
    "k8s-kinds": each(_clusters, _kinds),
    "k8s-pool": each(_clusters, _pool),
    "k8s-parents": each(_clusters, _parents),
    "k8s-service": each(_clusters, _service),
    "k8s-policies": each(_clusters, _policies),
    "k8s-picker-port": each(_clusters, _port),
    "k8s-replicas": each(_clusters, _replicas),
    "k8s-lease": each(_clusters, _lease),
    "k8s-pods": each(_clusters, _selected),
    "k8s-target-ports": each(_clusters, _ports),
    "k8s-probes": each(_clusters, _probes),
    "k8s-grace-period": each(_clusters, _grace),
}
