"""Reviews of access, which apply the server's own rules to a user."""

from tests.fakes.kube_api.access import Access
from tests.fakes.kube_api.resources import Catalogue, Object, Resource
from tests.fakes.kube_api.statuses import bad_request
from tests.fakes.kube_api.target import Target

PATH = "/apis/authorization.k8s.io/v1/"
_REVIEWS = Resource(
    "authorization.k8s.io", "v1", "subjectaccessreviews", "SubjectAccessReview", namespaced=False
)


def review(
    access: Access, catalogue: Catalogue, path: str, body: object, authorization: str | None
) -> Object | None:
    plural = path.removeprefix(PATH)
    if plural not in ("selfsubjectaccessreviews", "subjectaccessreviews"):
        return None
    if not isinstance(body, dict):
        raise bad_request("a review has to be an object")
    user, spec = access.user_of(authorization), body["spec"]
    if plural == "subjectaccessreviews":
        access.check(Target(_REVIEWS, "create", None, None, None, {}), authorization)
        user = spec["user"]
    allowed = access.may(user, _target(catalogue, spec["resourceAttributes"]))
    return {**body, "status": {"allowed": allowed}}


def _target(catalogue: Catalogue, asked: dict[str, str]) -> Target:
    group, version, plural = asked.get("group", ""), asked.get("version", "v1"), asked["resource"]
    resource = catalogue.find(group, version, plural)
    if resource is None:  # rules are about names, whether or not something is called so
        resource = Resource(group, version, plural, plural)
    return Target(resource, asked["verb"], asked.get("namespace"), asked.get("name"), None, {})
