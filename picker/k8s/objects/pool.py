"""InferencePool `inference.networking.k8s.io/v1` as it stands in JSON."""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeAlias

from msgspec import Meta

from picker.k8s.objects.rules import SERVICE_HAS_PORT, UNIQUE_PORTS
from picker.pool.object_parts import (
    DNS_NAME,
    END,
    MAX_CONDITIONS,
    Condition,
    GroupName,
    KindName,
    NamespaceName,
    ObjectMeta,
    Part,
    PortNumber,
    ReferentName,
    conditions_schema,
)

GROUP: Final = "inference.networking.k8s.io"
VERSION: Final = "v1"
KIND: Final = "InferencePool"
GATEWAY_GROUP: Final = "gateway.networking.k8s.io"
MAX_LABELS: Final = 64
MAX_TARGET_PORTS: Final = 8
MAX_PARENTS: Final = 32

LabelValue: TypeAlias = Annotated[
    str,
    Meta(max_length=63, pattern=rf"^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?{END}"),
]
ControllerName: TypeAlias = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=253,
        pattern=rf"^{DNS_NAME}\/[A-Za-z0-9\/\-._~%!$&'()*+,;=:]+{END}",
        description="Who wrote this, as DOMAIN/PATH.",
    ),
]
AppProtocol: TypeAlias = Literal["http", "kubernetes.io/h2c"]
FailureMode: TypeAlias = Literal["FailOpen", "FailClose"]


class LabelSelector(Part, frozen=True, kw_only=True):
    """Which Pods of the pool's own namespace belong to it."""

    match_labels: Annotated[
        dict[str, LabelValue],
        Meta(
            min_length=1,
            max_length=MAX_LABELS,
            description="Labels and their values; a Pod has to have all of them.",
        ),
    ]


class TargetPort(Part, frozen=True, kw_only=True):
    """A port on which every Pod of the pool serves; each is an endpoint of its own."""

    number: Annotated[PortNumber, Meta(description="The number of the port, from 1 to 65535.")]


class PickerPort(Part, frozen=True, kw_only=True):
    """The port of the endpoint picker's Service."""

    number: Annotated[PortNumber, Meta(description="The number of the port, from 1 to 65535.")]


class EndpointPickerReference(Part, frozen=True, kw_only=True):
    """The endpoint picker that chooses among the pool's endpoints."""

    group: Annotated[GroupName, Meta(description='API group of the referent; "" is the core.')] = ""
    kind: Annotated[
        KindName,
        Meta(description="Kind of the referent; a Service must not be of type ExternalName."),
    ] = "Service"
    name: Annotated[ReferentName, Meta(description="Name of the referent.")]
    port: PickerPort | None = None
    failure_mode: Annotated[
        FailureMode,
        Meta(description="Whether requests are served or refused while the picker is away."),
    ] = "FailClose"


class InferencePoolSpec(Part, frozen=True, kw_only=True):
    """Which Pods make up the pool, how to speak with them, and who chooses among them."""

    selector: LabelSelector
    target_ports: Annotated[
        tuple[TargetPort, ...],
        Meta(
            min_length=1,
            max_length=MAX_TARGET_PORTS,
            description="The ports on which every Pod of the pool serves.",
            extra_json_schema={"x-kubernetes-list-type": "atomic"} | UNIQUE_PORTS.schema(),
        ),
    ]
    app_protocol: Annotated[AppProtocol, Meta(description="What is spoken with the endpoints.")] = (
        "http"
    )
    endpoint_picker_ref: (
        Annotated[EndpointPickerReference, Meta(extra_json_schema=SERVICE_HAS_PORT.schema())] | None
    ) = None


class ParentReference(Part, frozen=True, kw_only=True):
    """A parent of the pool, mostly a Gateway."""

    group: Annotated[GroupName, Meta(description="API group of the parent.")] = GATEWAY_GROUP
    kind: Annotated[KindName, Meta(description="Kind of the parent.")] = "Gateway"
    name: Annotated[ReferentName, Meta(description="Name of the parent.")]
    namespace: (
        Annotated[
            NamespaceName,
            Meta(description="Namespace of the parent; the object's own when left out."),
        ]
        | None
    ) = None


class ParentStatus(Part, frozen=True, kw_only=True):
    """How one parent sees the pool; of known types are Accepted, ResolvedRefs and Exported."""

    conditions: Annotated[
        tuple[Condition, ...],
        Meta(max_length=MAX_CONDITIONS, extra_json_schema=conditions_schema()),
    ] = ()
    parent_ref: ParentReference
    controller_name: ControllerName | None = None


class InferencePoolStatus(Part, frozen=True, kw_only=True):
    """What the controllers of gateways say of the pool."""

    parents: Annotated[
        tuple[ParentStatus, ...],
        Meta(
            max_length=MAX_PARENTS,
            description="One entry for each parent that uses the pool.",
            extra_json_schema={"x-kubernetes-list-type": "atomic"},
        ),
    ] = ()


class InferencePool(Part, frozen=True, kw_only=True):
    """The endpoints among which one endpoint picker chooses."""

    api_version: str
    kind: Literal["InferencePool"]
    metadata: ObjectMeta
    spec: InferencePoolSpec
    status: InferencePoolStatus = InferencePoolStatus()
