"""Selectors and patches of the fake API server, as pure functions."""

from __future__ import annotations

from typing import Any

import pytest
from kube_api.patches import MERGE_PATCH, STRATEGIC_PATCH, patched
from kube_api.resources import BUILT_IN
from kube_api.selectors import parse_selector
from kube_api.statuses import ApiError

PODS = next(resource for resource in BUILT_IN if resource.plural == "pods")
LEASES = next(resource for resource in BUILT_IN if resource.plural == "leases")


def labelled(**labels: str) -> dict[str, Any]:
    """A Pod with these labels."""
    return {"metadata": {"name": "a", "namespace": "default", "labels": labels}}


def test_a_label_selector_selects_or_is_refused() -> None:
    """Keys and values that no label can have are a bad request, not an empty list."""
    assert parse_selector(PODS, None, "app in (x,y)", "")(labelled(app="y"))
    assert not parse_selector(PODS, None, "app in (x,y)", "")(labelled())
    with pytest.raises(ApiError, match="unable to parse requirement") as refused:
        parse_selector(PODS, None, "bad key!=v", "")
    assert refused.value.code == 400


@pytest.mark.parametrize(
    ("selector", "selected"),
    [
        ("metadata.name=a", True),
        ("metadata.name=b", False),
        ("metadata.name!=b,metadata.namespace=default", True),
        ("status.phase=Running", True),
        ("status.phase!=Running", False),
        ("spec.nodeName=", True),
    ],
)
def test_a_field_selector_selects(selector: str, selected: bool) -> None:
    """Fields that the resource lets be selected; one that is not there is empty."""
    obj = labelled() | {"status": {"phase": "Running"}}
    assert parse_selector(PODS, "default", "", selector)(obj) is selected


def test_a_field_that_the_resource_does_not_offer_is_refused() -> None:
    """Leases have names and namespaces to select by, Pods a few fields more."""
    with pytest.raises(ApiError, match="field label not supported"):
        parse_selector(LEASES, None, "", "status.phase=Running")


def test_a_selector_keeps_to_its_namespace() -> None:
    """Another namespace's objects are not seen."""
    assert not parse_selector(PODS, "other", "", "")(labelled())


OBJECT = {"metadata": {"name": "a"}, "spec": {"items": [1, 2], "a/b": {"c": 1}}}


def test_a_merge_patch_removes_what_is_null_and_replaces_lists() -> None:
    """RFC 7386."""
    patch = {"spec": {"items": [9], "a/b": None, "new": {"x": None, "y": 1}}}
    spec = patched(LEASES, OBJECT, MERGE_PATCH, patch)["spec"]
    assert spec == {"items": [9], "new": {"y": 1}}


def test_a_strategic_merge_patch_joins_conditions_by_their_type() -> None:
    """How kubelets write one condition without the others."""
    ready = {"type": "Ready", "status": "False"}
    pod = {"status": {"conditions": [ready, {"type": "Initialized", "status": "True"}]}}
    patch = {"status": {"conditions": [{"type": "Ready", "status": "True"}]}}
    conditions = patched(PODS, pod, STRATEGIC_PATCH, patch)["status"]["conditions"]
    assert [one["status"] for one in conditions] == ["True", "True"]


def test_server_side_apply_is_refused_as_unknown() -> None:
    """It is the one kind of patch that a real server takes and this one does not."""
    with pytest.raises(ApiError) as refused:
        patched(PODS, OBJECT, "application/apply-patch+yaml", {})
    assert refused.value.code == 415
