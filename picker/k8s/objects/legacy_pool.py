"""InferencePool `inference.networking.x-k8s.io/v1alpha2`, the older form: read, never installed."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from msgspec import Meta

from picker.k8s.objects.pool import FailureMode, LabelValue
from picker.pool.object_parts import (
    GroupName,
    KindName,
    ObjectMeta,
    Part,
    PortNumber,
    ReferentName,
)

DEFAULT_PICKER_PORT: Final = 9002


class ExtensionReference(Part, frozen=True, kw_only=True):
    """The endpoint picker that chooses among the pool's endpoints."""

    group: GroupName = ""
    kind: KindName = "Service"
    name: ReferentName
    port_number: (
        Annotated[PortNumber, Meta(description="Port of the Service, 9002 when left out.")] | None
    ) = None
    failure_mode: FailureMode = "FailClose"


class LegacyPoolSpec(Part, frozen=True, kw_only=True):
    """Which Pods make up the pool, their one port, and who chooses among them."""

    selector: dict[str, LabelValue]
    target_port_number: PortNumber
    extension_ref: ExtensionReference


class LegacyPool(Part, frozen=True, kw_only=True):
    """The endpoints among which one endpoint picker chooses."""

    api_version: str
    kind: Literal["InferencePool"]
    metadata: ObjectMeta
    spec: LegacyPoolSpec
