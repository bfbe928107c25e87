"""Parts that Kubernetes objects of several kinds have in common, with their limits.

The structs and their annotations are the one description of the kinds: objects are read by them,
and the schemas under `crds/` are written from them. What msgspec has no word for stands in
`extra_json_schema`, in the words of a CustomResourceDefinition. Patterns end with `END`, which
means in Python what "$" means to an API server.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

DEFAULT_NAMESPACE: Final = "default"
MAX_CONDITIONS: Final = 8
MAX_PORT: Final = 65535
END: Final = r"$(?!\n)"  # "$" alone lets a line break follow

DNS_LABEL: Final = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
DNS_NAME: Final = rf"{DNS_LABEL}(\.{DNS_LABEL})*"
_CONDITION_TYPE = rf"^({DNS_NAME}/)?(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]){END}"

Int32: TypeAlias = Annotated[
    int, Meta(ge=-(2**31), le=2**31 - 1, extra_json_schema={"format": "int32"})
]
PortNumber: TypeAlias = Annotated[
    int, Meta(ge=1, le=MAX_PORT, extra_json_schema={"format": "int32"})
]
ObjectName: TypeAlias = Annotated[
    str, Meta(min_length=1, max_length=253, pattern=f"^{DNS_NAME}{END}")
]
NamespaceName: TypeAlias = Annotated[
    str, Meta(min_length=1, max_length=63, pattern=f"^{DNS_LABEL}{END}")
]
ReferentName: TypeAlias = Annotated[str, Meta(min_length=1, max_length=253)]
GroupName: TypeAlias = Annotated[str, Meta(max_length=253, pattern=f"^{END}|^{DNS_NAME}{END}")]
KindName: TypeAlias = Annotated[
    str, Meta(min_length=1, max_length=63, pattern=f"^[a-zA-Z]([-a-zA-Z0-9]*[a-zA-Z0-9])?{END}")
]
Timestamp: TypeAlias = Annotated[datetime, Meta(tz=True)]  # RFC 3339


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """A part of an object; nothing may stand in it but its fields."""


class ObjectMeta(Part, frozen=True, kw_only=True):
    """What every Kubernetes object has."""

    name: ObjectName
    namespace: NamespaceName = DEFAULT_NAMESPACE
    creation_timestamp: Timestamp | None = None
    generate_name: str = ""
    uid: str = ""
    resource_version: str = ""
    generation: int | None = None
    deletion_timestamp: Timestamp | None = None
    deletion_grace_period_seconds: int | None = None
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    finalizers: tuple[str, ...] = ()
    owner_references: tuple[dict[str, Any], ...] = ()
    managed_fields: tuple[dict[str, Any], ...] = ()
    self_link: str = ""


class Condition(Part, frozen=True, kw_only=True):
    """One condition of a status."""

    type: Annotated[
        str,
        Meta(max_length=316, pattern=_CONDITION_TYPE, description="What it is about."),
    ]
    status: Annotated[
        Literal["True", "False", "Unknown"], Meta(description="Whether the condition holds.")
    ]
    reason: Annotated[
        str,
        Meta(
            min_length=1,
            max_length=1024,
            pattern=f"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?{END}",
            description="Why the status is what it is, in one word for programs.",
        ),
    ]
    message: Annotated[str, Meta(max_length=32768, description="The same for people.")]
    last_transition_time: Annotated[Timestamp, Meta(description="When the status last changed.")]
    observed_generation: (
        Annotated[
            int,
            Meta(
                ge=0,
                description="The generation of the object that the condition was found for.",
                extra_json_schema={"format": "int64"},
            ),
        ]
        | None
    ) = None


def conditions_schema(waiting_for: str | None = None) -> dict[str, Any]:
    """What a list of conditions has beyond its length: one of each type; with `waiting_for` the
    condition of that type with which it begins.
    """
    schema: dict[str, Any] = {
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": ["type"],
    }
    if waiting_for is not None:
        schema["default"] = [
            {
                "type": waiting_for,
                "status": "Unknown",
                "reason": "Pending",
                "message": "Waiting for controller",
                "lastTransitionTime": "1970-01-01T00:00:00Z",
            }
        ]
    return schema
