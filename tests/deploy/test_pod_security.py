"""Every Pod meets the Pod Security Standard `restricted`, and the house's own wishes."""

import copy
import re
from collections.abc import Callable

import pytest

from tests.support.kube.manifests import (
    BUILDS,
    Object,
    containers,
    kustomized,
    of_kind,
    pod_of,
    workloads,
)
from tests.support.kube.pod_security import violations, wishes

pytestmark = pytest.mark.usefixtures("kubectl")
WITH_PODS = [folder for folder in BUILDS if re.search("/(overlays|gateways)/|/base$", folder)]


@pytest.mark.parametrize("folder", WITH_PODS)
def test_pods_are_restricted_and_have_what_the_house_wishes(folder: str) -> None:
    found = workloads(kustomized(folder))
    assert found
    for workload in found:
        assert violations(pod_of(workload)) == []
        is_picker = "picker" in workload["metadata"]["name"]
        assert wishes(pod_of(workload), may_ask_the_api=is_picker) == []


@pytest.mark.parametrize("folder", sorted(set(BUILDS) - set(WITH_PODS)))
def test_no_pod_is_left_out(folder: str) -> None:
    assert workloads(kustomized(folder)) == []


def test_the_namespace_enforces_the_profile() -> None:
    [namespace] = of_kind(kustomized("deploy/k8s/namespace"), "Namespace")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"


def _first(pod: Object) -> Object:
    return next(containers(pod))


def _context(**fields: object) -> Callable[[Object], None]:
    return lambda pod: _first(pod)["securityContext"].update(fields)


def _of_pod(**fields: object) -> Callable[[Object], None]:
    return lambda pod: pod.update(fields)


def _without(*path: str) -> Callable[[Object], None]:
    def cut(pod: Object) -> None:
        place = pod if path[0] == "pod" else _first(pod)
        for name in path[1:-1]:
            place = place[name]
        del place[path[-1]]

    return cut


def _volume(**source: object) -> Callable[[Object], None]:
    return lambda pod: pod["volumes"].append({"name": "more", **source})


FORBIDDEN = {
    "privileged": _context(privileged=True),
    "escalation": _context(allowPrivilegeEscalation=True),
    "escalation by default": _without("container", "securityContext", "allowPrivilegeEscalation"),
    "root": _context(runAsUser=0),
    "root of the Pod": lambda pod: pod["securityContext"].update(runAsUser=0),
    "perhaps root": _without("pod", "securityContext", "runAsNonRoot"),
    "perhaps root after all": _context(runAsNonRoot=False),
    "no seccomp": _without("pod", "securityContext", "seccompProfile"),
    "seccomp off": _context(seccompProfile={"type": "Unconfined"}),
    "seccomp of the Pod off": lambda pod: pod["securityContext"].update(
        seccompProfile={"type": "Unconfined"}
    ),
    "capabilities kept": _without("container", "securityContext", "capabilities"),
    "capability added": _context(capabilities={"drop": ["ALL"], "add": ["SYS_ADMIN"]}),
    "proc unmasked": _context(procMount="Unmasked"),
    "AppArmor off": _context(appArmorProfile={"type": "Unconfined"}),
    "SELinux chosen": _context(seLinuxOptions={"type": "spc_t"}),
    "host network": _of_pod(hostNetwork=True),
    "host processes": _of_pod(hostPID=True),
    "host memory": _of_pod(hostIPC=True),
    "host path": _volume(hostPath={"path": "/"}),
    "foreign volume": _volume(nfs={"server": "x", "path": "/"}),
    "host port": lambda pod: _first(pod)["ports"][0].update(hostPort=80),
    "sysctl": lambda pod: pod["securityContext"].update(sysctls=[{"name": "kernel.msgmax"}]),
    "probe of another host": lambda pod: _first(pod).update(
        livenessProbe={"httpGet": {"host": "10.0.0.1", "port": 1}}
    ),
    "a bad container of the start": lambda pod: pod.setdefault("initContainers", []).append(
        {"name": "init", "image": "x:1"}
    ),
}


@pytest.mark.parametrize("change", FORBIDDEN.values(), ids=FORBIDDEN.keys())
def test_each_field_of_the_profile_is_looked_at(change: Callable[[Object], None]) -> None:
    [workload] = workloads(kustomized("deploy/k8s/base"))
    pod = copy.deepcopy(pod_of(workload))
    change(pod)
    assert violations(pod)


UNWISHED = {
    "token": _of_pod(automountServiceAccountToken=False),
    "links": _of_pod(enableServiceLinks=True),
    "account of the namespace": _without("pod", "serviceAccountName"),
    "little grace": _of_pod(terminationGracePeriodSeconds=30),
    "root that can be written": _without("container", "securityContext", "readOnlyRootFilesystem"),
    "memory without a limit": _without("container", "resources", "limits"),
    "any version": lambda pod: _first(pod).update(image="pointsman-picker:latest"),
    "no probe": _without("container", "readinessProbe"),
}


@pytest.mark.parametrize("change", UNWISHED.values(), ids=UNWISHED.keys())
def test_each_wish_is_looked_at(change: Callable[[Object], None]) -> None:
    [workload] = workloads(kustomized("deploy/k8s/base"))
    pod = copy.deepcopy(pod_of(workload))
    change(pod)
    assert not violations(pod)
    assert wishes(pod, may_ask_the_api=True)
