"""A request's address and query as a verb on a resource."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from tests.fakes.kube_api.resources import Catalogue, Resource
from tests.fakes.kube_api.selectors import Selector, parse_selector
from tests.fakes.kube_api.statuses import bad_request, method_not_allowed

_PATH = re.compile(
    r"/(?:api/(?P<core>v1)|apis/(?P<group>[^/]+)/(?P<version>[^/]+))"
    r"(?:/namespaces/(?P<namespace>[^/]+))?/(?P<plural>[^/]+)(?:/(?P<name>[^/]+)(?:/(?P<sub>[^/]+))?)?"
)
_SPACES = re.compile(r"/api/v1/namespaces/(?P<name>[^/]+)(?:/(?P<sub>status))?")
_ON_COLLECTION = {"GET": "list", "POST": "create"}
_ON_OBJECT = {"GET": "get", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


@dataclass(frozen=True, slots=True)
class Target:
    resource: Resource
    verb: str
    namespace: str | None
    name: str | None
    subresource: str | None
    query: Mapping[str, str]

    @property
    def key(self) -> tuple[str, str]:
        return self.namespace or "", self.name or ""

    @property
    def named(self) -> str | None:
        return self.name or self.selector().name

    def selector(self) -> Selector:
        labels, fields = self.query.get("labelSelector", ""), self.query.get("fieldSelector", "")
        return parse_selector(self.resource, self.namespace, labels, fields)

    def flag(self, name: str) -> bool:
        return self.query.get(name, "").lower() in ("true", "1")

    def version(self) -> int | None:
        return self.number("resourceVersion")

    def number(self, name: str) -> int | None:
        text = self.query.get(name, "")
        if not text:
            return None
        if not text.isdigit():
            raise bad_request(f'{name}: Invalid value: "{text}": invalid syntax')
        return int(text)


def target_of(
    catalogue: Catalogue, method: str, path: str, query: Mapping[str, str]
) -> Target | None:
    spaces = _SPACES.fullmatch(path)
    found = spaces or _PATH.fullmatch(path)
    if found is None:
        return None
    parts = found.groupdict()
    resource = catalogue.find(
        parts.get("group") or "",
        "v1" if spaces or parts["core"] else parts["version"],
        "namespaces" if spaces else parts["plural"],
    )
    sub = parts["sub"]
    if resource is None:
        return None
    known = {"status": resource.has_status, "scale": resource.has_scale}
    if sub and not known.get(sub):
        return None
    if resource.namespaced and parts.get("namespace") is None and method not in ("GET",):
        raise method_not_allowed()
    name = parts["name"]
    verb = (_ON_OBJECT if name else _ON_COLLECTION).get(method)
    if verb is None or (sub and verb == "delete"):
        raise method_not_allowed()
    if verb == "list" and query.get("watch", "").lower() in ("true", "1"):
        verb = "watch"
    return Target(resource, verb, parts.get("namespace"), name, sub, query)
