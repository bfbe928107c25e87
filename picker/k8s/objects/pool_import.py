"""InferencePoolImport `inference.networking.x-k8s.io/v1alpha1`: a pool of another cluster.

The picker does not read it; a gateway's controller writes and reads its status.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from msgspec import Meta

from picker.k8s.objects.pool import ControllerName, ParentStatus
from picker.pool.object_parts import (
    MAX_CONDITIONS,
    Condition,
    ObjectMeta,
    Part,
    ReferentName,
    conditions_schema,
)

VERSION: Final = "v1alpha1"
MAX_CONTROLLERS: Final = 8


class ExportingCluster(Part, frozen=True, kw_only=True):
    """A cluster that exports the pool."""

    name: Annotated[ReferentName, Meta(description="Name of the cluster, unique in the list.")]


class ImportController(Part, frozen=True, kw_only=True):
    """What one controller says of the import; the known type of its conditions is Accepted."""

    name: ControllerName
    exporting_clusters: Annotated[
        tuple[ExportingCluster, ...], Meta(description="The clusters that export the pool.")
    ] = ()
    parents: Annotated[
        tuple[ParentStatus, ...],
        Meta(
            description="One entry for each parent that uses the import.",
            extra_json_schema={"x-kubernetes-list-type": "atomic"},
        ),
    ] = ()
    conditions: Annotated[
        tuple[Condition, ...],
        Meta(max_length=MAX_CONDITIONS, extra_json_schema=conditions_schema()),
    ] = ()


class InferencePoolImportStatus(Part, frozen=True, kw_only=True):
    """What controllers say of the import."""

    controllers: Annotated[
        tuple[ImportController, ...],
        Meta(
            max_length=MAX_CONTROLLERS,
            description="One entry for each controller that looks after the import.",
            extra_json_schema={
                "x-kubernetes-list-type": "map",
                "x-kubernetes-list-map-keys": ["name"],
            },
        ),
    ]


class InferencePoolImport(Part, frozen=True, kw_only=True):
    """A pool that another cluster exports, under the same namespace and name."""

    api_version: str
    kind: Literal["InferencePoolImport"]
    metadata: ObjectMeta
    status: InferencePoolImportStatus | None = None
