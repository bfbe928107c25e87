"""The Pod Security Standard `restricted` (kubernetes.io, Linux only), and the project's rules."""

from collections.abc import Iterator

from tests.support.kube.manifests import Object, containers

ALLOWED_VOLUMES = frozenset(
    {
        "configMap",
        "csi",
        "downwardAPI",
        "emptyDir",
        "ephemeral",
        "persistentVolumeClaim",
        "projected",
        "secret",
    }
)
ALLOWED_SYSCTLS = frozenset(
    {
        "kernel.shm_rmid_forced",
        "net.ipv4.ip_local_port_range",
        "net.ipv4.ip_unprivileged_port_start",
        "net.ipv4.tcp_syncookies",
        "net.ipv4.ping_group_range",
        "net.ipv4.ip_local_reserved_ports",
        "net.ipv4.tcp_keepalive_time",
        "net.ipv4.tcp_fin_timeout",
        "net.ipv4.tcp_keepalive_intvl",
        "net.ipv4.tcp_keepalive_probes",
    }
)
_SECCOMP = ("RuntimeDefault", "Localhost")


def violations(pod: Object) -> list[str]:
    return [*_of_pod(pod), *(f for one in containers(pod) for f in _of_container(one, pod))]


def wishes(pod: Object, *, may_ask_the_api: bool) -> list[str]:
    return list(_wished(pod, may_ask_the_api))


def _of_pod(pod: Object) -> Iterator[str]:
    context = pod.get("securityContext", {})
    for field in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.get(field):
            yield f"{field}: must not be set"
    for volume in pod.get("volumes", ()):
        kinds = set(volume) - {"name"}
        if not kinds <= ALLOWED_VOLUMES:
            yield f"volumes.{volume['name']}: {sorted(kinds - ALLOWED_VOLUMES)} is not allowed"
    for one in context.get("sysctls", ()):
        if one["name"] not in ALLOWED_SYSCTLS:
            yield f"securityContext.sysctls: {one['name']}"
    yield from _of_user("securityContext", context)
    seccomp = context.get("seccompProfile", {}).get("type")
    if seccomp is not None and seccomp not in _SECCOMP:
        yield f"securityContext.seccompProfile: {seccomp}"


def _of_user(at: str, context: Object) -> Iterator[str]:
    if context.get("runAsUser") == 0:
        yield f"{at}.runAsUser: must not be root"
    if context.get("seLinuxOptions"):
        yield f"{at}.seLinuxOptions: are not ours to choose"
    if context.get("appArmorProfile", {}).get("type") == "Unconfined":
        yield f"{at}.appArmorProfile: must not be off"


def _of_container(container: Object, pod: Object) -> Iterator[str]:
    at = container["name"]
    context, outer = container.get("securityContext", {}), pod.get("securityContext", {})
    if context.get("privileged"):
        yield f"{at}.privileged: must not be set"
    if context.get("allowPrivilegeEscalation") is not False:
        yield f"{at}.allowPrivilegeEscalation: must be false"
    if context.get("runAsNonRoot", outer.get("runAsNonRoot")) is not True:
        yield f"{at}.runAsNonRoot: must be true here or of the Pod"
    seccomp = context.get("seccompProfile", outer.get("seccompProfile", {})).get("type")
    if seccomp not in _SECCOMP:
        yield f"{at}.seccompProfile: must be RuntimeDefault or Localhost here or of the Pod"
    if context.get("procMount", "Default") != "Default":
        yield f"{at}.procMount: must be Default"
    yield from _of_user(at, context)
    yield from _capabilities(at, context.get("capabilities", {}))
    yield from _outside(at, container)


def _capabilities(at: str, capabilities: Object) -> Iterator[str]:
    if "ALL" not in capabilities.get("drop", ()):
        yield f"{at}.capabilities.drop: must have ALL"
    if set(capabilities.get("add", ())) - {"NET_BIND_SERVICE"}:
        yield f"{at}.capabilities.add: only NET_BIND_SERVICE"


def _outside(at: str, container: Object) -> Iterator[str]:
    if any(port.get("hostPort") for port in container.get("ports", ())):
        yield f"{at}.hostPort: must not be set"
    for hook in ("livenessProbe", "readinessProbe", "startupProbe"):
        if any("host" in container.get(hook, {}).get(how, {}) for how in ("httpGet", "tcpSocket")):
            yield f"{at}.{hook}: must not ask another host"


def _wished(pod: Object, may_ask_the_api: bool) -> Iterator[str]:
    if pod.get("automountServiceAccountToken") is not may_ask_the_api:
        yield f"automountServiceAccountToken: must be {may_ask_the_api}"
    if pod.get("enableServiceLinks") is not False:
        yield "enableServiceLinks: must be false: the variables would be taken for settings"
    if not pod.get("serviceAccountName"):
        yield "serviceAccountName: must be an own one"
    if pod.get("terminationGracePeriodSeconds", 30) < 130:
        yield "terminationGracePeriodSeconds: at least 130"
    for one in containers(pod):
        yield from _wished_of_container(one)


def _wished_of_container(one: Object) -> Iterator[str]:
    at = one["name"]
    if one.get("securityContext", {}).get("readOnlyRootFilesystem") is not True:
        yield f"{at}.readOnlyRootFilesystem: must be true"
    limits, requests = (one.get("resources", {}).get(f, {}) for f in ("limits", "requests"))
    if "memory" not in limits or not {"cpu", "memory"} <= requests.keys():
        yield f"{at}.resources: memory and CPU must be asked for, memory be limited"
    if ":" not in one["image"] or one["image"].endswith(":latest"):
        yield f"{at}.image: must have a tag that means one version"
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        if probe not in one:
            yield f"{at}.{probe}: must be there"
