"""Parts that Kubernetes objects of several kinds share, with the limits of `crds/`.

Patterns end with `END`, Python's equivalent of "$" in an API server.
"""

from datetime import datetime
from typing import Annotated, Any, Final, TypeAlias

import msgspec
from msgspec import Meta

DEFAULT_NAMESPACE: Final = "default"
MAX_PORT: Final = 65535
MAX_TARGET_PORTS: Final = 8  # of an InferencePool
END: Final = r"$(?!\n)"  # "$" alone would accept a trailing line break

_DNS_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_DNS_NAME = rf"{_DNS_LABEL}(\.{_DNS_LABEL})*"

Int32: TypeAlias = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
PortNumber: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_PORT)]
ObjectName: TypeAlias = Annotated[
    str, Meta(min_length=1, max_length=253, pattern=f"^{_DNS_NAME}{END}")
]
NamespaceName: TypeAlias = Annotated[
    str, Meta(min_length=1, max_length=63, pattern=f"^{_DNS_LABEL}{END}")
]
ReferentName: TypeAlias = Annotated[str, Meta(min_length=1, max_length=253)]
GroupName: TypeAlias = Annotated[
    str,
    Meta(
        max_length=253,
        pattern=f"^{END}|^{_DNS_NAME}{END}",
        description="a DNS name in lower case, or nothing",
    ),
]
KindName: TypeAlias = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=63,
        pattern=f"^[a-zA-Z]([-a-zA-Z0-9]*[a-zA-Z0-9])?{END}",
        description="letters, digits and '-', with a letter first",
    ),
]
Timestamp: TypeAlias = Annotated[datetime, Meta(tz=True)]  # RFC 3339


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """A part of an object; unknown fields are errors."""


class ObjectMeta(Part, frozen=True, kw_only=True):
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
