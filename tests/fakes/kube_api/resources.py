"""The resources of the fake API server: some built-in ones and those of installed CRDs."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from tests.support.kube.crd_rules import CrdRules, FieldError

Object: TypeAlias = dict[str, Any]
_ANY_FIELDS = frozenset({"metadata.name", "metadata.namespace"})
_POD_FIELDS = _ANY_FIELDS | {
    "spec.nodeName",
    "spec.restartPolicy",
    "spec.schedulerName",
    "spec.serviceAccountName",
    "status.phase",
    "status.podIP",
    "status.nominatedNodeName",
}


@dataclass(frozen=True, slots=True)
class Resource:
    """A resource; `rules` are a CRD's, `check` returns the errors of a built-in one's objects."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True
    has_status: bool = True
    has_scale: bool = False
    has_generation: bool = True
    graceful: bool = False
    fields: frozenset[str] = _ANY_FIELDS
    rules: CrdRules | None = None
    defaults: Callable[[Object], None] | None = None
    check: Callable[[Object], Iterable[FieldError]] | None = None

    @property
    def qualified(self) -> str:
        return f"{self.plural}.{self.group}" if self.group else self.plural

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    def is_called(self, name: str | None) -> bool:
        return name in (None, "*", self.plural, self.qualified)

    @property
    def custom(self) -> bool:
        return self.rules is not None


def _pod_defaults(pod: Object) -> None:
    spec = pod.setdefault("spec", {})
    spec.setdefault("restartPolicy", "Always")
    spec.setdefault("terminationGracePeriodSeconds", 30)
    pod.setdefault("status", {"phase": "Pending", "qosClass": "BestEffort"})


def _pod_errors(pod: Object) -> Iterator[FieldError]:
    if not pod.get("spec", {}).get("containers"):
        yield FieldError("spec.containers", "FieldValueRequired", "Required value")


BUILT_IN = (
    Resource("", "v1", "namespaces", "Namespace", namespaced=False, has_generation=False),
    Resource(
        "",
        "v1",
        "pods",
        "Pod",
        graceful=True,
        fields=_POD_FIELDS,
        defaults=_pod_defaults,
        check=_pod_errors,
    ),
    Resource("", "v1", "services", "Service", has_generation=False),
    Resource("", "v1", "configmaps", "ConfigMap", has_status=False, has_generation=False),
    Resource("", "v1", "events", "Event", has_status=False, has_generation=False),
    Resource("discovery.k8s.io", "v1", "endpointslices", "EndpointSlice", has_status=False),
    Resource("apps", "v1", "deployments", "Deployment", has_scale=True),
    Resource(
        "coordination.k8s.io", "v1", "leases", "Lease", has_status=False, has_generation=False
    ),
    Resource(
        "admissionregistration.k8s.io",
        "v1",
        "validatingadmissionpolicies",
        "ValidatingAdmissionPolicy",
        namespaced=False,
    ),
    Resource(
        "admissionregistration.k8s.io",
        "v1",
        "validatingadmissionpolicybindings",
        "ValidatingAdmissionPolicyBinding",
        namespaced=False,
        has_status=False,
    ),
)


def custom_resources(document: Object) -> Iterator[Resource]:
    spec = document["spec"]
    for version in spec["versions"]:
        if version.get("served", True):
            yield Resource(
                group=spec["group"],
                version=version["name"],
                plural=spec["names"]["plural"],
                kind=spec["names"]["kind"],
                namespaced=spec.get("scope") != "Cluster",
                has_status="status" in version.get("subresources", {}),
                rules=CrdRules(document, version["name"]),
            )


class Catalogue:
    """The resources that are served now.

    The versions of a CRD share their objects, stored under the first version installed.
    """

    def __init__(self) -> None:
        self._served = {(r.group, r.version, r.plural): r for r in BUILT_IN}

    def find(self, group: str, version: str, plural: str) -> Resource | None:
        return self._served.get((group, version, plural))

    def of_kind(self, api_version: str, kind: str) -> Resource:
        for resource in self._served.values():
            if (resource.api_version, resource.kind) == (api_version, kind):
                return resource
        raise LookupError(f"nothing serves {api_version} {kind}")

    def named(self, plural: str) -> Resource:
        for resource in self._served.values():
            if resource.is_called(plural):
                return resource
        raise LookupError(f"nothing serves {plural}")

    def install(self, definition: Object) -> list[Resource]:
        resources = list(custom_resources(definition))
        for resource in resources:
            self.serve(resource)
        return resources

    def serve(self, resource: Resource) -> None:
        self._served[(resource.group, resource.version, resource.plural)] = resource

    def remove(self, name: str) -> list[Resource]:
        gone = [r for r in self._served.values() if r.is_called(name)]
        for resource in gone:
            del self._served[(resource.group, resource.version, resource.plural)]
        return gone

    def __iter__(self) -> Iterator[Resource]:
        return iter(list(self._served.values()))


def typed(resource: Resource, obj: Object) -> Object:
    return {"apiVersion": resource.api_version, "kind": resource.kind} | obj


def value_at(obj: Object, path: str) -> Any:
    value: Any = obj
    for name, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", path):
        if index:
            value = (
                value[int(index)] if isinstance(value, list) and int(index) < len(value) else None
            )
        else:
            value = value.get(name) if isinstance(value, dict) else None
    return value
