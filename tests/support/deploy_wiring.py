"""Whether the objects of a rendering fit together: names, selectors, ports, mounts, hooks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from manifests import Object, containers, of_kind, pod_of, takes, workloads


def loose_ends(objects: Sequence[Object]) -> list[str]:
    """Everything that leads nowhere, as `object: why`."""
    return [
        *_selectors(objects),
        *_services(objects),
        *_pods(objects),
        *_bindings(objects),
        *_references(objects),
    ]


def _labels(workload: Object) -> Object:
    labels: Object = workload["spec"]["template"]["metadata"]["labels"]
    return labels


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
            yield from _probes(f"{name}.{container['name']}", container)
            yield from _patience(f"{name}.{container['name']}", container, pod)
        if mounted != volumes.keys():
            yield f"{name}: volumes and mounts differ by {sorted(mounted ^ volumes.keys())}"


def _probes(at: str, container: Object) -> Iterator[str]:
    ports = {p["containerPort"] for p in container.get("ports", ())}
    ports |= {p.get("name") for p in container.get("ports", ())}
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
    accounts = {one["metadata"]["name"] for one in of_kind(objects, "ServiceAccount")}
    roles = {one["metadata"]["name"] for one in of_kind(objects, "Role")}
    for binding in of_kind(objects, "RoleBinding"):
        name = binding["metadata"]["name"]
        if binding["roleRef"]["name"] not in roles:
            yield f"{name}: there is no Role {binding['roleRef']['name']}"
        for subject in binding["subjects"]:
            if subject["name"] not in accounts:
                yield f"{name}: there is no ServiceAccount {subject['name']}"
            if subject.get("namespace") != binding["metadata"]["namespace"]:
                yield f"{name}: the account is of another namespace"
    for workload in workloads(objects):
        if pod_of(workload)["serviceAccountName"] not in accounts:
            yield f"{workload['metadata']['name']}: its ServiceAccount is missing"


def _references(objects: Sequence[Object]) -> Iterator[str]:
    services = {one["metadata"]["name"]: one for one in of_kind(objects, "Service")}
    pools = {one["metadata"]["name"] for one in of_kind(objects, "InferencePool")}
    for pool in of_kind(objects, "InferencePool"):
        picker = pool["spec"]["endpointPickerRef"]
        service = services.get(picker["name"], {"spec": {"ports": ()}})
        if picker["port"]["number"] not in {port["port"] for port in service["spec"]["ports"]}:
            yield f"{pool['metadata']['name']}: no Service {picker['name']} has its picker's port"
    for route in of_kind(objects, "HTTPRoute"):
        for backend in (b for rule in route["spec"]["rules"] for b in rule["backendRefs"]):
            if backend["name"] not in pools:
                yield f"{route['metadata']['name']}: there is no pool {backend['name']}"
    yield from _aims(objects, pools)


def _aims(objects: Sequence[Object], pools: set[str]) -> Iterator[str]:
    for objective in of_kind(objects, "InferenceObjective"):
        if objective["spec"]["poolRef"]["name"] not in pools:
            yield f"{objective['metadata']['name']}: its pool is missing"
    deployments = {one["metadata"]["name"] for one in of_kind(objects, "Deployment")}
    for kind in ("HorizontalPodAutoscaler", "ScaledObject"):
        for one in of_kind(objects, kind):
            if one["spec"]["scaleTargetRef"]["name"] not in deployments:
                yield f"{one['metadata']['name']}: there is nothing to scale"
