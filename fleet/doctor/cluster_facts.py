"""What the gatherers have seen of a Kubernetes cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from fleet.doctor.envoy_document import at
from picker.k8s.api import ApiResource
from picker.k8s.lease import LeaseName

Json: TypeAlias = dict[str, Any]

TOKEN_REVIEWS = ApiResource("authentication.k8s.io", "v1", "tokenreviews")
ACCESS_REVIEWS = ApiResource("authorization.k8s.io", "v1", "subjectaccessreviews")


@dataclass(frozen=True, slots=True)
class Right:
    """Something that a picker does. `name` "": with any object of the kind. `namespace` "": the
    kind has none.
    """

    resource: ApiResource
    verb: str
    namespace: str
    name: str = ""


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """A pool's namespace and what is in it; objects as the API server gave them.

    `problem`: the API server was not reached. `unseen` are kinds that could not be read, with the
    reason; what is missing because of that is nobody's fault. `who` is whose rights were asked for,
    `denied` those that are missing, `rights_problem` why nobody could tell. `served` says of kinds
    whether there are such. `slices` are those of the picker's Service. `lease` is what `lease_name`
    names: that of the election, None: there is none. `now` is in seconds since 1970.
    """

    namespace: str
    pool_name: str
    problem: str | None = None
    unseen: Mapping[str, str] = field(default_factory=dict)
    who: str = "you"
    denied: tuple[Right, ...] = ()
    rights_problem: str | None = None
    served: Mapping[ApiResource, bool] = field(default_factory=dict)
    pool: Json | None = None
    pods: tuple[Json, ...] | None = None
    service: Json | None = None
    slices: tuple[Json, ...] | None = None
    policies: tuple[Json, ...] = ()
    lease: Json | None = None
    lease_name: LeaseName | None = None
    now: float = 0.0


def failure_mode(cluster: ClusterFacts | None) -> str | None:
    """What the pool says of a picker that is away: FailOpen or FailClose; None: no pool known."""
    if cluster is None or cluster.pool is None:
        return None
    spec = cluster.pool.get("spec")
    reference = at(spec, "endpointPickerRef") or at(spec, "extensionRef")
    return str(at(reference, "failureMode") or "FailClose")
