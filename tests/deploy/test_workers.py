"""Workers as deploy/ renders them: what they ask of a node, and that they serve."""

import json
import re
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import pytest

from fleet.command_lines import parser_of
from tests.support.kube.manifests import (
    DEPLOY,
    ROOT,
    Object,
    charted,
    containers,
    kustomized,
    name_of,
    pod_of,
    workloads,
)
from tests.support.worker.running_worker import running_worker
from worker.cli.speculation import LOOKUP, parse, speculative_config
from worker.config import SpeculativeConfig

pytestmark = pytest.mark.usefixtures("kubectl")
OVERLAYS = "deploy/k8s/overlays"
NODE_CPUS = Decimal(2)
# What kind's own pods ask for: API server 0.25, controller manager 0.2, scheduler, etcd and the
# network 0.1 each, and two name servers of 0.1.
KINDS_OWN = Decimal("0.95")


def cpus(objects: list[Object]) -> Decimal:
    total = Decimal(0)
    for workload in workloads(objects):
        for one in containers(pod_of(workload)):
            asked = str(one["resources"]["requests"]["cpu"])
            amount = Decimal(asked[:-1]) / 1000 if asked.endswith("m") else Decimal(asked)
            total += amount * workload["spec"]["replicas"]
    return total


@pytest.mark.parametrize("workers", ["sim-workers", "cpu-workers"])
def test_envoy_picker_and_workers_fit_a_kind_node_of_two_cpus(workers: str) -> None:
    objects = [one for name in ("standalone", workers) for one in kustomized(f"{OVERLAYS}/{name}")]
    assert len(workloads(objects)) == 2
    assert cpus(objects) <= NODE_CPUS - KINDS_OWN


@pytest.mark.parametrize("image", ["worker-cpu", "worker-gpu"])
def test_the_images_fetch_models(image: str, tmp_path: Path) -> None:
    folder = DEPLOY / "docker"
    entry = re.findall(r"^ENTRYPOINT (.*)$", (folder / f"{image}.Dockerfile").read_text(), re.M)
    assert entry == ['["pointsman", "worker"]']
    assert "\nenvoy-server==" not in (folder / f"{image}.lock").read_text()
    (tmp_path / "model.gguf").touch()
    program = (
        "import sys\n"
        "sys.modules['envoy'] = None\n"
        "from fleet.commands.cli import with_default_model\n"
        "print(*with_default_model(['--model', sys.argv[1]]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "model.gguf")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-2:] == ["--model", str(tmp_path / "model.gguf")]


def speculation(objects: list[Object], name: str) -> SpeculativeConfig | None:
    [workload] = [one for one in workloads(objects) if name_of(one)[1] == name]
    [container] = containers(pod_of(workload))
    assert not [one for one in container["env"] if "SPECULATIVE" in one["name"]]
    return speculative_config(parser_of("worker").parse_args(container["args"]))


@pytest.mark.usefixtures("helm")
def test_workers_with_a_model_speculate_as_by_default() -> None:
    default = parse(json.loads(LOOKUP))
    for kind in ("cpu", "gpu"):
        name = f"pointsman-worker-{kind}"
        assert speculation(kustomized(f"{OVERLAYS}/{kind}-workers"), name) == default
        assert speculation(charted(f"workers.{kind}.enabled=true"), name) == default


@pytest.mark.model
async def test_a_worker_on_cpus_serves_the_model(model_path: Path) -> None:
    [workload] = workloads(kustomized(f"{OVERLAYS}/cpu-workers"))
    [container] = containers(pod_of(workload))
    flags = [one for one in container["args"] if not one.startswith(("--host=", "--port="))]
    async with running_worker(*flags, "--model", str(model_path)) as worker:
        answer = await worker.ask(model="SmolLM2-135M-Instruct")
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] == 4
