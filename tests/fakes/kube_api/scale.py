"""The scale subresource: an object of its own that shows, and sets, one number of another."""

import copy
from typing import Any

from tests.fakes.kube_api.resources import Object
from tests.fakes.kube_api.statuses import bad_request

_SHARED = ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")


def scale_of(obj: Object) -> Object:
    """The scale of an object with `spec.replicas`; a 0 is left out, as the server leaves it out."""
    metadata = {name: obj["metadata"][name] for name in _SHARED if name in obj["metadata"]}
    replicas = obj.get("spec", {}).get("replicas", 1)
    spec = {"replicas": replicas} if replicas else {}
    kind = {"kind": "Scale", "apiVersion": "autoscaling/v1"}
    return {**kind, "metadata": metadata, "spec": spec, "status": {"replicas": replicas}}


def with_scale(obj: Object, scale: Any) -> Object:
    """The object as a scale that is put asks for it, of the version that the scale names. Raises
    ApiError 400 for what is no scale.
    """
    if not isinstance(scale, dict) or scale.get("kind") != "Scale":
        raise bad_request("the object provided is unrecognized (must be of type Scale)")
    changed = copy.deepcopy(obj)
    changed.setdefault("spec", {})["replicas"] = (scale.get("spec") or {}).get("replicas", 0)
    version = scale["metadata"].get("resourceVersion")
    changed["metadata"].pop("resourceVersion", None)
    if version:
        changed["metadata"]["resourceVersion"] = version
    return changed
