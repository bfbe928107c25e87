"""The way to the upstream suite: our picker in its manifests, and what is applied beside them."""

import copy
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from conformance.kind.put_picker import put_picker
from tests.fakes.kube_api.server import running_kube_api

ROOT = Path(__file__).parents[2]
KIND = ROOT / "conformance" / "kind"
NAMESPACE = "inference-conformance-app-backend"
POOLS = ("primary", "secondary", "dp", "appprotocol-http", "appprotocol-h2c")
KUBERNETES = re.search(r"kindest/node:v(\d+\.\d+)", (KIND / "run.sh").read_text())[1]  # type: ignore[index]


def deployment(name: str, *containers: dict[str, Any]) -> dict[str, Any]:
    labels = {"app": name}
    spec = {
        "terminationGracePeriodSeconds": 130,
        "containers": list(containers),
        "volumes": [{"name": "config", "configMap": {"name": "plugins-config"}}],
    }
    template = {"metadata": {"labels": labels}, "spec": spec}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {"selector": {"matchLabels": labels}, "template": template},
    }


def picker(*arguments: str) -> dict[str, Any]:
    probe = {"grpc": {"port": 9003, "service": "inference-extension"}}
    return {
        "name": "epp",
        "image": "upstream/lwepp:main",
        "imagePullPolicy": "Always",
        "args": list(arguments),
        "ports": [{"containerPort": 9002}],
        "readinessProbe": probe,
        "volumeMounts": [{"name": "config", "mountPath": "/config"}],
    }


def manifests() -> list[dict[str, Any]]:
    echo = {"name": "echo", "image": "echo:1", "args": ["--verbose"]}
    return [
        deployment("model-server", echo),
        deployment("epp-a", picker("--pool-name", "pool-a", "--pool-namespace", NAMESPACE)),
        deployment("epp-b", picker("--pool-name=pool-b", f"--pool-namespace={NAMESPACE}")),
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "epp-a-svc"}, "spec": {}},
    ]


def test_pickers_are_found_by_their_pool_and_nothing_else_changes() -> None:
    before, after = manifests(), manifests()
    assert put_picker(after, "ours:1", "some: config\n") == ["epp-a", "epp-b"]
    assert (after[0], after[3]) == (before[0], before[3])
    for index, pool in ((1, "pool-a"), (2, "pool-b")):
        spec = after[index]["spec"]["template"]["spec"]
        (container,) = spec["containers"]
        assert container["image"] == "ours:1"
        assert f"--pool-name={pool}" in container["args"]
        assert f"--pool-namespace={NAMESPACE}" in container["args"]
        assert "--config-text=some: config\n" in container["args"]
        assert "volumes" not in spec
        assert "volumeMounts" not in container
        old = before[index]["spec"]["template"]["spec"]["containers"][0]
        assert container["readinessProbe"] == old["readinessProbe"]
        kubernetes_validate.validate(after[index], KUBERNETES, strict=True)


def run(*command: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        **options,
    )


def put(path: Path, output: Path) -> subprocess.CompletedProcess[str]:
    flags = ("--image", "ours:1", "--config", KIND / "picker-config.yaml", "--output", output)
    return run(sys.executable, KIND / "put_picker.py", path, *flags)


def test_the_file_is_written_anew(tmp_path: Path) -> None:
    gateway = {"kind": "Gateway", "spec": {"gatewayClassName": "{GATEWAY_CLASS_NAME}"}}
    path = tmp_path / "base.yaml"
    path.write_text("# comment\n---\n" + yaml.safe_dump_all([gateway, *manifests()]))
    texts = []
    for _ in range(2):
        assert put(path, path).returncode == 0
        texts.append(path.read_text())
    assert texts[0] == texts[1]
    assert next(iter(yaml.safe_load_all(texts[0]))) == gateway


def test_manifests_without_a_picker_are_an_error(tmp_path: Path) -> None:
    path = tmp_path / "base.yaml"
    path.write_text(yaml.safe_dump(copy.deepcopy(manifests()[0])))
    result = put(path, tmp_path / "out")
    assert result.returncode == 1
    assert "no container has --pool-name" in result.stderr
    assert not (tmp_path / "out").exists()


def test_the_pickers_arguments_are_understood(tmp_path: Path) -> None:
    documents = manifests()
    put_picker(documents, "ours:1", (KIND / "picker-config.yaml").read_text())
    arguments = documents[1]["spec"]["template"]["spec"]["containers"][0]["args"]
    environment = {**os.environ, "KUBECONFIG": str(tmp_path / "nowhere")}
    result = run(sys.executable, "-m", "picker", *arguments, cwd=ROOT, env=environment)
    assert result.returncode == 1, result.stderr
    assert "nowhere" in result.stderr


async def test_the_other_applied_objects_are_sound() -> None:
    (namespace,) = yaml.safe_load_all((KIND / "namespace.yaml").read_text())
    kubernetes_validate.validate(namespace, KUBERNETES, strict=True)
    async with running_kube_api(None, *sorted((ROOT / "crds").glob("*.yaml"))) as api:
        assert api.write(namespace).obj["metadata"]["name"] == NAMESPACE
    rules = list(yaml.safe_load_all((KIND / "destination-rules.yaml").read_text()))
    assert {rule["spec"]["host"] for rule in rules} == {
        f"{pool}-endpoint-picker-svc" for pool in POOLS
    }
    for rule in rules:
        assert rule["metadata"]["namespace"] == NAMESPACE
        assert rule["spec"]["trafficPolicy"]["tls"]["insecureSkipVerify"] is True
    addresses, _ = yaml.safe_load_all((KIND / "address-pool.yaml").read_text())
    assert addresses["spec"]["addresses"] == ["PREFIX.200-PREFIX.250"]
    assert yaml.safe_load((KIND / "cluster.yaml").read_text())["kind"] == "Cluster"


@pytest.mark.parametrize(
    ("arguments", "path", "said"),
    [
        (["--frobnicate"], None, "unknown argument '--frobnicate'"),
        (["--only"], None, "--only needs the short name"),
        ([], "/usr/bin:/bin", "these tools are needed and not on PATH"),
        (["--delete"], "/usr/bin:/bin", "kind: https://kind.sigs.k8s.io"),
    ],
)
def test_missing_tools_are_reported_before_anything_is_done(
    tmp_path: Path, arguments: list[str], path: str | None, said: str
) -> None:
    environment = {**os.environ, "WORK": str(tmp_path)}
    if path is not None:
        environment["PATH"] = path
    result = run(KIND / "run.sh", *arguments, env=environment)
    assert result.returncode == 2
    assert said in result.stderr


def test_the_help_names_every_flag() -> None:
    result = run(KIND / "run.sh", "--help")
    assert result.returncode == 0
    assert all(flag in result.stdout for flag in ("--keep", "--only", "--delete"))
