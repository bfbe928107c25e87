"""Checks that the objects of a rendering fit together: names, selectors, ports, mounts, hooks."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from tests.support.kube.manifests import Object, containers, of_kind, pod_of, takes, workloads

Place: TypeAlias = tuple[str | None, str]  # namespace and name


def loose_ends(objects: Sequence[Object]) -> list[str]:
    """Return everything that refers to nothing, as `object: why`."""
    return [
        *_selectors(objects),
        *_services(objects),
        *_pods(objects),
        *_bindings(objects),
        *_references(objects),
    ]


def _labels(workload: Object) -> Object:
    return workload["spec"]["template"]["metadata"]["labels"]


def _selectors(objects: Sequence[Object]) -> Iterator[str]:
    for one in workloads(objects):
        name = one["metadata"]["name"]
        if not takes(one["spec"]["selector"], _labels(one)):
            yield f"{name}: the selector does not take its own Pods"
        others = [
            other["metadata"]["name"]
            for other in workloads(objects)
            if other is not one and takes(one["spec"]["selector"], _labels(other))
        ]
        if others:
            yield f"{name}: the selector takes Pods of {others}"
        for constraint in pod_of(one).get("topologySpreadConstraints", ()):
            if not takes(constraint["labelSelector"], _labels(one)):
                yield f"{name}: spread constraints are about other Pods"
    for kind in ("PodDisruptionBudget", "NetworkPolicy"):
        field = {"PodDisruptionBudget": "selector", "NetworkPolicy": "podSelector"}[kind]
        for one in of_kind(objects, kind):
            taken = [w for w in workloads(objects) if takes(one["spec"][field], _labels(w))]
            if not taken:
                yield f"{one['metadata']['name']}: this {kind} is about no Pod"


def _services(objects: Sequence[Object]) -> Iterator[str]:
    for service in of_kind(objects, "Service"):
        name = service["metadata"]["name"]
        selector = {"matchLabels": service["spec"]["selector"]}
        behind = [w for w in workloads(objects) if takes(selector, _labels(w))]
        if not behind:
            yield f"{name}: nothing is behind it"
        for port in service["spec"]["ports"]:
            target = port.get("targetPort", port["port"])
            for workload in behind:
                if target not in _ports(workload):
                    yield f"{name}: no container has the port {target}"


def _ports(workload: Object) -> set[str | int]:
    found = [port for one in containers(pod_of(workload)) for port in one.get("ports", ())]
    return {p["containerPort"] for p in found} | {p["name"] for p in found if "name" in p}


def _pods(objects: Sequence[Object]) -> Iterator[str]:
    config_maps = {one["metadata"]["name"]: one for one in of_kind(objects, "ConfigMap")}
    for workload in workloads(objects):
        name, pod = workload["metadata"]["name"], pod_of(workload)
        volumes = {volume["name"]: volume for volume in pod.get("volumes", ())}
        for volume in volumes.values():
            source = volume.get("configMap", {}).get("name")
            if source is not None and source not in config_maps:
                yield f"{name}: there is no ConfigMap {source}"
        mounted = set()
        numbers = [p["containerPort"] for c in containers(pod) for p in c.get("ports", ())]
        if len(numbers) != len(set(numbers)):
            yield f"{name}: two containers have one port"
        for container in containers(pod):
            mounted |= {mount["name"] for mount in container.get("volumeMounts", ())}
            yield from _probes(f"{name}.{container['name']}", container, numbers)
            yield from _patience(f"{name}.{container['name']}", container, pod)
        if mounted != volumes.keys():
            yield f"{name}: volumes and mounts differ by {sorted(mounted ^ volumes.keys())}"


def _probes(at: str, container: Object, numbers: Sequence[int]) -> Iterator[str]:
    ports = {*numbers, *(p.get("name") for p in container.get("ports", ()))}
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        for how in ("grpc", "httpGet", "tcpSocket"):
            port = container.get(probe, {}).get(how, {}).get("port")
            if port is not None and port not in ports:
                yield f"{at}: {probe} asks a port that is not there: {port}"


def _patience(at: str, container: Object, pod: Object) -> Iterator[str]:
    grace = pod.get("terminationGracePeriodSeconds", 30)
    hook = container.get("lifecycle", {}).get("preStop", {})
    waits = hook.get("sleep", {}).get("seconds", 0)
    for flag, unit in (("--drain-timeout=", "s"), ("--shutdown-timeout=", "")):
        for word in container.get("args", ()):
            if word.startswith(flag) and waits + int(word[len(flag) :].removesuffix(unit)) > grace:
                yield f"{at}: is killed before {word} has passed"


def _bindings(objects: Sequence[Object]) -> Iterator[str]:
    accounts = {_place(one) for one in of_kind(objects, "ServiceAccount")}
    for kind in ("Role", "ClusterRole"):
        roles = {_place(one) for one in of_kind(objects, kind)}
        for binding in of_kind(objects, f"{kind}Binding"):
            name, (namespace, _) = binding["metadata"]["name"], _place(binding)
            role = binding["roleRef"]
            if role["kind"] != kind or (namespace, role["name"]) not in roles:
                yield f"{name}: there is no {kind} {role['name']}"
            for subject in binding["subjects"]:
                if (subject.get("namespace"), subject["name"]) not in accounts:
                    yield f"{name}: there is no ServiceAccount {subject['name']} there"
    for workload in workloads(objects):
        if (_place(workload)[0], pod_of(workload)["serviceAccountName"]) not in accounts:
            yield f"{workload['metadata']['name']}: its ServiceAccount is missing"


def _place(one: Object) -> Place:
    return one["metadata"].get("namespace"), one["metadata"]["name"]


def _references(objects: Sequence[Object]) -> Iterator[str]:
    pools = {_place(one): one for one in of_kind(objects, "InferencePool")}
    for pool in pools.values():
        if not _has_picker(pool, of_kind(objects, "Service")):
            yield f"{pool['metadata']['name']}: no Service has its picker's port"
    gateways = {_place(one) for one in of_kind(objects, "Gateway")}
    services = {_place(one) for one in of_kind(objects, "Service")}
    for route in of_kind(objects, "HTTPRoute"):
        name, (namespace, _) = route["metadata"]["name"], _place(route)
        if not {(namespace, one["name"]) for one in route["spec"]["parentRefs"]} <= gateways:
            yield f"{name}: its gateway is missing"
        for backend in (b for rule in route["spec"]["rules"] for b in rule["backendRefs"]):
            found = pools.get((namespace, backend["name"]))
            if backend.get("kind", "Service") == "Service":
                if (namespace, backend["name"]) not in services:
                    yield f"{name}: there is no Service {backend['name']}"
            elif found is None:
                yield f"{name}: there is no pool {backend['name']}"
            elif not _has_picker(found, of_kind(objects, "Service"), namespace):
                yield f"{name}: the picker of {backend['name']} is in another namespace"
    for one in of_kind(objects, "EnvoyFilter"):
        yield from _filter(one, gateways, of_kind(objects, "Service"))
    yield from _flagged(objects, pools)
    yield from _aims(objects, {name for _, name in pools})


def _filter(one: Object, gateways: set[Place], services: Sequence[Object]) -> Iterator[str]:
    """Check an ext_proc filter of Istio's gateways; its cluster is Istio's name of a port."""
    name, (namespace, _) = one["metadata"]["name"], _place(one)
    if not {(namespace, ref["name"]) for ref in one["spec"]["targetRefs"]} <= gateways:
        yield f"{name}: its gateway is missing"
    there = {
        f"outbound|{port['port']}||{place[1]}.{place[0]}.svc.cluster.local"
        for place, ports in ((_place(service), service["spec"]["ports"]) for service in services)
        for port in ports
    }
    for patch in one["spec"]["configPatches"]:
        asked = patch["patch"]["value"]["typed_config"]["grpc_service"]["envoy_grpc"]
        if asked["cluster_name"] not in there:
            yield f"{name}: no Service has the port {asked['cluster_name']}"


def _has_picker(pool: Object, services: Sequence[Object], namespace: str | None = None) -> bool:
    """Check that a picker has its port, in `namespace`, where gateways look, or anywhere."""
    picker = pool["spec"]["endpointPickerRef"]
    ports = [
        port["port"]
        for one in services
        if one["metadata"]["name"] == picker["name"]
        and namespace in (None, one["metadata"]["namespace"])
        for port in one["spec"]["ports"]
    ]
    return picker["port"]["number"] in ports


def _flagged(objects: Sequence[Object], pools: Mapping[Place, Object]) -> Iterator[str]:
    for workload in workloads(objects):
        home = _place(workload)[0]
        words = [word for one in containers(pod_of(workload)) for word in one.get("args", ())]
        given = [word.removeprefix("--pool=") for word in words if word.startswith("--pool=")]
        asked = {
            f"{name if namespace == home else f'{namespace}/{name}'}:"
            f"{pool['spec']['endpointPickerRef']['port']['number']}"
            for (namespace, name), pool in pools.items()
        }
        if given and set(given) != asked:
            yield f"{workload['metadata']['name']}: serves {given}, and there are {sorted(asked)}"


def _aims(objects: Sequence[Object], pools: set[str]) -> Iterator[str]:
    for objective in of_kind(objects, "InferenceObjective"):
        if objective["spec"]["poolRef"]["name"] not in pools:
            yield f"{objective['metadata']['name']}: its pool is missing"
    deployments = {one["metadata"]["name"] for one in of_kind(objects, "Deployment")}
    for kind in ("HorizontalPodAutoscaler", "ScaledObject"):
        for one in of_kind(objects, kind):
            if one["spec"]["scaleTargetRef"]["name"] not in deployments:
                yield f"{one['metadata']['name']}: there is nothing to scale"
