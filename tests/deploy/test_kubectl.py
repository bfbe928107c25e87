"""`kubectl apply` takes every folder, against the API server of the tests.

That has no OpenAPI, so kubectl cannot check fields (`--validate=false`); test_rendering does, by
the same schemas. Objects of our own kinds are checked by the server, by their definitions.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.fakes.kube_api.resources import Resource
from tests.fakes.kube_api.server import KubeApi, running_kube_api
from tests.support.kube.manifests import BUILDS, ROOT, Object, kustomized, name_of

pytestmark = pytest.mark.full

KINDS = {
    "v1": ("ServiceAccount", "Secret"),
    "apps/v1": ("Deployment",),
    "policy/v1": ("PodDisruptionBudget",),
    "autoscaling/v2": ("HorizontalPodAutoscaler",),
    "rbac.authorization.k8s.io/v1": ("Role", "RoleBinding"),
    "networking.k8s.io/v1": ("NetworkPolicy",),
    "gateway.networking.k8s.io/v1": ("Gateway", "HTTPRoute"),
    "monitoring.coreos.com/v1": ("ServiceMonitor", "PodMonitor", "PrometheusRule"),
    "keda.sh/v1alpha1": ("ScaledObject",),
    "networking.istio.io/v1": ("DestinationRule",),
    "networking.istio.io/v1alpha3": ("EnvoyFilter",),
    "cert-manager.io/v1": ("Issuer", "Certificate"),
    "networking.gke.io/v1": ("GCPBackendPolicy", "HealthCheckPolicy"),
    "gateway.envoyproxy.io/v1alpha1": (
        "Backend",
        "BackendTrafficPolicy",
        "ClientTrafficPolicy",
        "EnvoyExtensionPolicy",
    ),
}
CLUSTER_WIDE = {"rbac.authorization.k8s.io/v1": ("ClusterRole", "ClusterRoleBinding")}


def _resources() -> list[Resource]:
    found = []
    for namespaced, table in ((True, KINDS), (False, CLUSTER_WIDE)):
        for api_version, kinds in table.items():
            group, _, version = api_version.rpartition("/")
            for kind in kinds:
                lower = kind.lower()
                plural = f"{lower[:-1]}ies" if lower.endswith("y") else f"{lower}s"
                found.append(Resource(group, version, plural, kind, namespaced=namespaced))
    return found


@pytest.fixture
async def cluster() -> AsyncIterator[KubeApi]:
    definitions = sorted((ROOT / "crds").glob("*.yaml"))
    async with running_kube_api(None, *definitions) as api:
        for resource in _resources():
            api.catalogue.serve(resource)
        api.write({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "pointsman"}})
        yield api


class Kubectl:
    def __init__(self, program: Path, config: Path) -> None:
        self._command = (str(program), f"--kubeconfig={config}", "--cache-dir", str(config.parent))

    async def run(self, *words: str) -> str:
        process = await asyncio.create_subprocess_exec(
            *self._command, *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        async with asyncio.timeout(60):
            out, err = await process.communicate()
        assert process.returncode == 0, err.decode()
        return out.decode()


@pytest.fixture
def run(kubectl: Path, cluster: KubeApi, tmp_path: Path) -> Kubectl:
    return Kubectl(kubectl, cluster.write_kubeconfig(tmp_path / "config"))


@pytest.mark.parametrize("folder", BUILDS)
async def test_a_dry_run_takes_every_object(run: Kubectl, folder: str) -> None:
    applied = await run.run(
        "apply", "--dry-run=client", "--validate=false", "-k", str(ROOT / folder)
    )
    assert applied.count("(dry run)") == len(kustomized(folder))


def _stored(cluster: KubeApi, one: Object) -> Object:
    kind, name = name_of(one)
    plural = cluster.catalogue.of_kind(one["apiVersion"], kind).qualified
    return cluster.read(plural, name, "pointsman")


@pytest.mark.parametrize(
    "folder",
    [
        "deploy/k8s/overlays/active-active",
        "deploy/k8s/overlays/standalone",
        "deploy/k8s/addons/admission-policy",
    ],
)
async def test_a_second_apply_changes_nothing(run: Kubectl, cluster: KubeApi, folder: str) -> None:
    command = ("apply", "--validate=false", "-k", str(ROOT / folder))
    objects = kustomized(folder)
    assert (await run.run(*command)).count(" created") == len(objects)
    before = [_stored(cluster, one) for one in objects]
    # (kubectl calls a budget "configured" whatever it finds: it always sends the selector.)
    assert (await run.run(*command)).count(" unchanged") >= len(objects) - 1
    assert [_stored(cluster, one) for one in objects] == before
    deleted = await run.run("delete", "--wait=false", "-k", str(ROOT / folder))
    assert deleted.count(" deleted") == len(objects)
