"""Objects for a Kubernetes API server, and the definitions that they follow."""

from enum import Enum
from pathlib import Path
from typing import Any

from tests.support.kube.crd_rules import CrdRules

CRDS = Path(__file__).parents[3] / "crds"
POOL_FILE = CRDS / "inference.networking.k8s.io_inferencepools.yaml"
IMPORT_FILE = CRDS / "inference.networking.x-k8s.io_inferencepoolimports.yaml"
OBJECTIVE_FILE = CRDS / "llm-d.ai_inferenceobjectives.yaml"
REWRITE_FILE = CRDS / "llm-d.ai_inferencemodelrewrites.yaml"

POOL_RULES = CrdRules.load(POOL_FILE)
IMPORT_RULES = CrdRules.load(IMPORT_FILE)
OBJECTIVE_RULES = CrdRules.load(OBJECTIVE_FILE)
REWRITE_RULES = CrdRules.load(REWRITE_FILE)


class _LeftOut(Enum):
    LEFT_OUT = "left out"


LEFT_OUT = _LeftOut.LEFT_OUT


def pool(status: Any = LEFT_OUT, name: str = "c", **spec: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "selector": {"matchLabels": {"app": "vllm"}},
        "targetPorts": [{"number": 8000}],
    } | spec
    return _object("inference.networking.k8s.io/v1", "InferencePool", name, fields, status)


def objective(status: Any = LEFT_OUT, **spec: Any) -> dict[str, Any]:
    fields = {"poolRef": {"name": "p"}} | spec
    return _object("llm-d.ai/v1alpha2", "InferenceObjective", "c", fields, status)


def rewrite(*rules: Any, status: Any = LEFT_OUT, **spec: Any) -> dict[str, Any]:
    fields = {"poolRef": {"name": "p"}, "rules": list(rules)} | spec
    return _object("llm-d.ai/v1alpha2", "InferenceModelRewrite", "c", fields, status)


def legacy_pool(**spec: Any) -> dict[str, Any]:
    fields = {
        "selector": {"app": "vllm"},
        "targetPortNumber": 8000,
        "extensionRef": {"name": "epp"},
    } | spec
    version = "inference.networking.x-k8s.io/v1alpha2"
    return _object(version, "InferencePool", "c", fields, LEFT_OUT)


def _object(version: str, kind: str, name: str, spec: Any, status: Any) -> dict[str, Any]:
    fields = {key: value for key, value in spec.items() if value is not LEFT_OUT}
    made = {"apiVersion": version, "kind": kind, "metadata": {"name": name}, "spec": fields}
    return made if status is LEFT_OUT else made | {"status": status}


def condition(**fields: Any) -> dict[str, Any]:
    made = {
        "type": "Accepted",
        "status": "True",
        "reason": "Accepted",
        "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    } | fields
    return {key: value for key, value in made.items() if value is not LEFT_OUT}
