"""Kubernetes objects as kustomize and Helm render them from deploy/."""

import json
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from tests.support.kube.kube_tools import NEWEST, tool

Object: TypeAlias = dict[str, Any]

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
K8S = DEPLOY / "k8s"
CHART = DEPLOY / "helm" / "pointsman"
NAMESPACE = "pointsman"
BUILDS = tuple(
    str(path.parent.relative_to(ROOT))
    for path in sorted((*K8S.rglob("kustomization.yaml"), ROOT / "crds" / "Kustomization"))
    if "kind: Component" not in path.read_text()
)


def kustomized(folder: str, version: str = NEWEST) -> list[Object]:
    """Return the objects of `kubectl kustomize FOLDER`. Raises MissingToolError."""
    words = ("kustomize", str(ROOT / folder))
    return list(yaml.safe_load_all(_output(tool("kubectl", version), *words)))


def composed(folder: Path, kustomization: str) -> list[Object]:
    """Render a kustomization in a folder that also holds a copy of deploy/k8s."""
    shutil.copytree(K8S, folder / "k8s")
    (folder / "kustomization.yaml").write_text(f"namespace: {NAMESPACE}\n{kustomization}")
    return list(yaml.safe_load_all(_output(tool("kubectl"), "kustomize", str(folder))))


def helm_says(*settings: str) -> subprocess.CompletedProcess[str]:
    """Run `helm template` with no other settings than these; it may fail."""
    flags = [word for setting in settings for word in ("--set", setting)]
    command = [tool("helm"), "template", "pointsman", CHART, *flags]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def charted(
    *settings: str,
    release: str = "pointsman",
    namespace: str = NAMESPACE,
    values: Mapping[str, Any] | None = None,
    tests: bool = False,
    version: str = NEWEST,
) -> list[Object]:
    """Return the objects of `helm template`; `tests`: with those of `helm test`.

    `version` is of Kubernetes: that of the wheel that has this Helm.
    """
    flags = [word for setting in settings for word in ("--set", setting)]
    for key, value in (values or {}).items():
        flags += ("--set-json", f"{key}={json.dumps(value)}")
    flags += () if tests else ("--skip-tests",)
    command = ("template", release, str(CHART), "--namespace", namespace, *flags)
    return [one for one in yaml.safe_load_all(_output(tool("helm", version), *command)) if one]


@cache
def _output(program: Path, *words: str) -> str:
    done = subprocess.run(
        [str(program), *words], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def name_of(obj: Object) -> tuple[str, str]:
    return obj["kind"], obj["metadata"]["name"]


def of_kind(objects: Sequence[Object], kind: str) -> list[Object]:
    return [one for one in objects if one["kind"] == kind]


def file_of(objects: Sequence[Object], name: str) -> str:
    """Return the text of the file of that name that a ConfigMap holds."""
    [text] = [one["data"][name] for one in of_kind(objects, "ConfigMap") if name in one["data"]]
    return str(text)


def container_of(objects: Sequence[Object], name: str) -> Object:
    [found] = [
        c for one in workloads(objects) for c in containers(pod_of(one)) if c["name"] == name
    ]
    return found


def workloads(objects: Sequence[Object]) -> list[Object]:
    return [one for one in objects if "template" in one.get("spec", {})]


def pod_of(workload: Object) -> Object:
    return workload["spec"]["template"]["spec"]


def containers(pod: Object) -> Iterator[Object]:
    for field in ("initContainers", "containers", "ephemeralContainers"):
        yield from pod.get(field, ())


def takes(selector: Object, labels: Object) -> bool:
    if any(labels.get(key) != value for key, value in selector.get("matchLabels", {}).items()):
        return False
    return all(_meets(one, labels) for one in selector.get("matchExpressions", ()))


def _meets(expression: Object, labels: Object) -> bool:
    value, values = labels.get(expression["key"]), expression.get("values", ())
    return {
        "In": value in values,
        "NotIn": value not in values,
        "Exists": value is not None,
        "DoesNotExist": value is None,
    }[expression["operator"]]
