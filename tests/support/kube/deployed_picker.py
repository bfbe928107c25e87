"""A picker as deploy/ renders it, with its flags and rights, run here at other ports."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fleet.run.ports import free_ports
from tests.fakes.kube_api.access import Rule
from tests.fakes.kube_api.server import KubeApi
from tests.support.kube.manifests import NAMESPACE, container_of, file_of, kustomized, of_kind

LIMIT_SECONDS = 120
# What a Pod has at fixed ports, by the names that are used here for those that were free.
FIXED = {"http": 8080, "admin": 9901, "grpc": 9002, "health": 9003, "xds": 9004, "peers": 9005}
_OF_POOL = re.compile(r":(90\d\d)$")


@contextmanager
def running(command: list[str], environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, env=os.environ | environment)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(LIMIT_SECONDS)


def some_ports() -> dict[str, int]:
    """Return free ports that other test processes do not use."""
    names = (*FIXED, "metrics", "worker")
    first = 21000 + os.getpid() % 400 * 20
    return dict(zip(names, free_ports("127.0.0.1", len(names), first), strict=True))


def account(api: KubeApi, overlay: str, folder: Path) -> dict[str, str]:
    rules = [
        Rule(
            one["apiGroups"],
            one["resources"],
            one["verbs"],
            one.get("resourceNames", ()),
            role["metadata"]["namespace"],
        )
        for role in of_kind(kustomized(overlay), "Role")
        for one in role["rules"]
    ]
    api.access.grant("the-token", "the-picker", rules)
    config = api.write_kubeconfig(folder / "kubeconfig", token="the-token")
    return {"KUBECONFIG": str(config), "POD_NAME": "pointsman-picker-6c9h2-abcde"}


def picker_command(overlay: str, ports: dict[str, int], folder: Path) -> list[str]:
    objects = kustomized(overlay)
    container = container_of(objects, "picker")
    (folder / "picker.yaml").write_text(file_of(objects, "picker.yaml"))
    others = {
        "--pool-namespace": NAMESPACE,
        "--config-file": str(folder / "picker.yaml"),
        "--endpoint-target-ports": str(ports["worker"]),
        "--metrics-bind-address": "127.0.0.1",
        "--xds-port": str(ports["xds"]),
        "--peer-slices": f"pointsman-picker-peers:{ports['peers']}",
    }
    given = []
    for word in container["args"]:
        name, sign, value = word.partition("=")
        value = _OF_POOL.sub(":0", value) if name == "--pool" else others.get(name, value)
        given.append(f"{name}{sign}{value}")
    if any(word.startswith("--peer-slices") for word in given):
        given += [f"--peer-port={ports['peers']}", "--peer-bind-address=127.0.0.1"]
    given += [f"--grpc-port={ports['grpc']}", f"--grpc-health-port={ports['health']}"]
    given += [f"--metrics-port={ports['metrics']}"]
    return [sys.executable, "-m", "picker", *given]
