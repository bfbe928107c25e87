"""The scale subresource: an object that shows and sets one number of another."""

import copy
from typing import Any

from tests.fakes.kube_api.resources import Object
from tests.fakes.kube_api.statuses import bad_request

_SHARED = ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")


def scale_of(obj: Object) -> Object:
    """Return the scale of an object with `spec.replicas`; the server leaves out a 0."""
    metadata = {name: obj["metadata"][name] for name in _SHARED if name in obj["metadata"]}
    replicas = obj.get("spec", {}).get("replicas", 1)
    spec = {"replicas": replicas} if replicas else {}
    kind = {"kind": "Scale", "apiVersion": "autoscaling/v1"}
    return {**kind, "metadata": metadata, "spec": spec, "status": {"replicas": replicas}}


def with_scale(obj: Object, scale: Any) -> Object:
    if not isinstance(scale, dict) or scale.get("kind") != "Scale":
        raise bad_request("the object provided is unrecognized (must be of type Scale)")
    changed = copy.deepcopy(obj)
    changed.setdefault("spec", {})["replicas"] = (scale.get("spec") or {}).get("replicas", 0)
    version = scale["metadata"].get("resourceVersion")
    changed["metadata"].pop("resourceVersion", None)
    if version:
        changed["metadata"]["resourceVersion"] = version
    return changed
