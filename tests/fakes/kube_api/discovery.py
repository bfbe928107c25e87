"""The server's description of itself for kubectl: health, version, groups and resources."""

from typing import Any

from tests.fakes.kube_api.resources import Catalogue, Resource

_VERBS = ["create", "delete", "get", "list", "patch", "update", "watch"]
_HEALTH = ("/healthz", "/livez", "/readyz")


def answer_about_itself(
    catalogue: Catalogue, method: str, path: str
) -> dict[str, Any] | str | None:
    if method != "GET":
        return None
    if path in _HEALTH:
        return "ok"
    if path == "/version":
        return {
            "major": "1",
            "minor": "36",
            "gitVersion": "v1.36.0-fake",
            "platform": "linux/amd64",
        }
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        groups = sorted({r.group for r in catalogue if r.group})
        listed = [_group(catalogue, group) for group in groups]
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": listed}
    served = [r for r in catalogue if path in (f"/apis/{r.api_version}", f"/api/{r.api_version}")]
    if served:
        resources = [one for r in served for one in _resource(r)]
        version = served[0].api_version
        head = {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version}
        return head | {"resources": resources}
    return None


def _group(catalogue: Catalogue, group: str) -> dict[str, Any]:
    names = dict.fromkeys(r.version for r in catalogue if r.group == group)
    versions = [{"groupVersion": f"{group}/{name}", "version": name} for name in names]
    return {"name": group, "versions": versions, "preferredVersion": versions[0]}


def _resource(resource: Resource) -> list[dict[str, Any]]:
    one = {
        "name": resource.plural,
        "singularName": resource.kind.lower(),
        "namespaced": resource.namespaced,
        "kind": resource.kind,
        "verbs": _VERBS,
    }
    if not resource.has_status:
        return [one]
    status = one | {"name": f"{resource.plural}/status", "verbs": ["get", "patch", "update"]}
    return [one, status]
