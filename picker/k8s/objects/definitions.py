"""Every kind that the picker knows of, and the CustomResourceDefinitions made from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from picker.k8s.objects import pool, pool_import
from picker.k8s.objects.legacy_pool import LegacyPool
from picker.k8s.objects.pool import InferencePool
from picker.k8s.objects.pool_import import InferencePoolImport
from picker.k8s.objects.schema import Schema, schema_of
from picker.pool import policy_objects
from picker.pool.policy_objects import (
    InferenceModelRewrite,
    InferenceObjective,
    LegacyModelRewrite,
)

_API_VERSION = "The group and version in whose form the object is written."
_KIND = "What the object is; never changes."
_APPROVED = "https://github.com/kubernetes-sigs/gateway-api-inference-extension/pull/1173"
_BUNDLE_VERSION = "v1.6.0"


@dataclass(frozen=True, slots=True)
class Column:
    """What `kubectl get` shows of an object."""

    name: str
    path: str
    type: str = "string"


@dataclass(frozen=True, slots=True, eq=False)
class Definition:
    """One kind in one version of a group; it is equal to itself alone.

    `needs_spec` is what the API says: where it is False, objects without a `spec` may stand in a
    cluster, and say nothing to the picker.
    """

    group: str
    version: str
    shape: type[msgspec.Struct]
    kind: str
    needs_spec: bool = False
    short_names: tuple[str, ...] = ()
    columns: tuple[Column, ...] = ()
    annotations: Mapping[str, str] | None = None

    @property
    def api_version(self) -> str:
        """As objects say it."""
        return f"{self.group}/{self.version}"

    @property
    def plural(self) -> str:
        """As it stands in paths of the API."""
        return f"{self.kind.lower()}s"

    @property
    def name(self) -> str:
        """The name of the definition itself."""
        return f"{self.plural}.{self.group}"

    @property
    def file_name(self) -> str:
        """The name of its file under `crds/`."""
        return f"{self.group}_{self.plural}.yaml"

    def schema(self) -> Schema:
        """The schema of whole objects."""
        schema = schema_of(self.shape)
        properties = schema["properties"]
        properties["apiVersion"] = {"type": "string", "description": _API_VERSION}
        properties["kind"] = {"type": "string", "description": _KIND}
        schema.pop("required")
        return schema | ({"required": ["spec"]} if self.needs_spec else {})

    def document(self) -> dict[str, Any]:
        """The CustomResourceDefinition `apiextensions.k8s.io/v1`."""
        version: dict[str, Any] = {
            "name": self.version,
            "served": True,
            "storage": True,
            "schema": {"openAPIV3Schema": self.schema()},
            "subresources": {"status": {}},
        }
        if self.columns:
            version["additionalPrinterColumns"] = [
                {"name": one.name, "jsonPath": one.path, "type": one.type} for one in self.columns
            ]
        names: dict[str, Any] = {
            "kind": self.kind,
            "listKind": f"{self.kind}List",
            "plural": self.plural,
            "singular": self.kind.lower(),
        }
        if self.short_names:
            names["shortNames"] = list(self.short_names)
        return {
            "apiVersion": "apiextensions.k8s.io/v1",
            "kind": "CustomResourceDefinition",
            "metadata": {"name": self.name, "annotations": dict(self.annotations or {})},
            "spec": {
                "group": self.group,
                "names": names,
                "scope": "Namespaced",
                "versions": [version],
            },
        }


_POOL_COLUMN = Column("Inference Pool", ".spec.poolRef.name")
_AGE = Column("Age", ".metadata.creationTimestamp", "date")
_OBJECTIVE_COLUMNS = (_POOL_COLUMN, Column("Priority", ".spec.priority"), _AGE)
_REWRITE_COLUMNS = (_POOL_COLUMN, _AGE)

POOL: Final = Definition(
    pool.GROUP,
    pool.VERSION,
    InferencePool,
    pool.KIND,
    needs_spec=True,
    short_names=("infpool",),
    annotations={
        "api-approved.kubernetes.io": _APPROVED,
        f"{pool.GROUP}/bundle-version": _BUNDLE_VERSION,
    },
)
POOL_IMPORT: Final = Definition(
    policy_objects.LEGACY_GROUP,
    pool_import.VERSION,
    InferencePoolImport,
    "InferencePoolImport",
    short_names=("infpimp",),
    annotations={f"{pool.GROUP}/bundle-version": _BUNDLE_VERSION},
)
OBJECTIVE: Final = Definition(
    policy_objects.GROUP,
    policy_objects.VERSION,
    InferenceObjective,
    "InferenceObjective",
    columns=_OBJECTIVE_COLUMNS,
    annotations={f"{policy_objects.GROUP}/bundle-version": "main-dev"},
)
REWRITE: Final = Definition(
    policy_objects.GROUP,
    policy_objects.VERSION,
    InferenceModelRewrite,
    "InferenceModelRewrite",
    columns=_REWRITE_COLUMNS,
    annotations={f"{policy_objects.GROUP}/bundle-version": "main-dev"},
)
LEGACY_POOL: Final = Definition(
    policy_objects.LEGACY_GROUP, policy_objects.VERSION, LegacyPool, pool.KIND
)
LEGACY_OBJECTIVE: Final = Definition(
    policy_objects.LEGACY_GROUP,
    policy_objects.VERSION,
    InferenceObjective,
    "InferenceObjective",
    columns=_OBJECTIVE_COLUMNS,
)
LEGACY_REWRITE: Final = Definition(
    policy_objects.LEGACY_GROUP,
    policy_objects.VERSION,
    LegacyModelRewrite,
    "InferenceModelRewrite",
    columns=_REWRITE_COLUMNS,
)

# What stands under `crds/`. The legacy group is read where a cluster has it, and never installed:
# its kinds are deprecated, and a definition of ours would take over that of whoever uses them.
INSTALLED: Final = (POOL, POOL_IMPORT, OBJECTIVE, REWRITE)
LEGACY: Final = (LEGACY_POOL, LEGACY_OBJECTIVE, LEGACY_REWRITE)
