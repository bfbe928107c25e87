"""The picker may ask of the API server what it asks, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from manifests import BUILDS, Object, charted, kustomized, of_kind

pytestmark = pytest.mark.usefixtures("kubectl")
Right = tuple[str, str, str, str]  # group, resource, name or "", verb

PODS = {("", "pods", "", verb) for verb in ("list", "watch")}
POOL = {
    ("inference.networking.k8s.io", "inferencepools", "pointsman", verb)
    for verb in ("get", "list", "watch")
}
POLICIES = {
    ("llm-d.ai", resource, "", verb)
    for resource in ("inferenceobjectives", "inferencemodelrewrites")
    for verb in ("list", "watch")
}
LEASE = {
    ("coordination.k8s.io", "leases", "epp-pointsman-pointsman.llm-d.ai", "get"),
    ("coordination.k8s.io", "leases", "epp-pointsman-pointsman.llm-d.ai", "update"),
    ("coordination.k8s.io", "leases", "", "create"),
}
EXPECTED = {
    "base": PODS | POOL | POLICIES,
    "gateway": PODS | POOL | POLICIES,
    "standalone": PODS,
    "active-active": PODS | POOL | POLICIES,
    "ha": PODS | POOL | POLICIES | LEASE,
}


def rights(objects: list[Object]) -> Iterator[Right]:
    """One by one what all Roles of a rendering allow."""
    for role in of_kind(objects, "Role"):
        for rule in role["rules"]:
            for group in rule["apiGroups"]:
                for resource in rule["resources"]:
                    for name in rule.get("resourceNames", [""]):
                        yield from ((group, resource, name, verb) for verb in rule["verbs"])


@pytest.mark.parametrize("name", EXPECTED)
def test_rights_are_exactly_these(name: str) -> None:
    """Neither more nor less; none of them twice."""
    folder = next(folder for folder in BUILDS if folder.split("/")[-1] == name)
    found = list(rights(kustomized(folder)))
    assert set(found) == EXPECTED[name]
    assert len(found) == len(set(found))


@pytest.mark.parametrize("folder", BUILDS)
def test_nothing_is_allowed_beyond_the_namespace(folder: str) -> None:
    """No cluster role, no binding but the picker's, no wildcard, nothing about secrets."""
    objects = kustomized(folder)
    assert not of_kind(objects, "ClusterRole") + of_kind(objects, "ClusterRoleBinding")
    for group, resource, _, verb in rights(objects):
        assert "*" not in (group, resource, verb)
        assert resource not in ("secrets", "serviceaccounts", "pods/exec")
    for binding in of_kind(objects, "RoleBinding"):
        assert [one["name"] for one in binding["subjects"]] == ["pointsman-picker"]


@pytest.mark.usefixtures("helm")
def test_rights_of_another_release_are_about_its_own_pool() -> None:
    """Names in the chart's Role follow the release and the namespace."""
    objects = charted("picker.highAvailability=leader-election", release="chat", namespace="team-a")
    named = {name for _, _, name, _ in rights(objects)}
    assert named == {"", "chat", "epp-team-a-chat.llm-d.ai"}
