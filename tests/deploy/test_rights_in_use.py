"""Rights are those that the picker uses: run as rendered it becomes ready with them, and none is
there for nothing.
"""

from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from aiohttp import ClientConnectionError, ClientSession

from tests.fakes.kube_api.kubelet import Kubelet
from tests.fakes.kube_api.server import KubeApi, running_kube_api
from tests.support.kube.deployed_picker import account, picker_command, running, some_ports
from tests.support.kube.manifests import ROOT, kustomized, of_kind
from tests.support.waiting import until

pytestmark = [pytest.mark.usefixtures("kubectl"), pytest.mark.full]
OVERLAYS = ["gateway", "active-active", "ha", "several-pools", "several-namespaces"]
Use = tuple[str, str, str]  # namespace, resource, verb


def granted(overlay: str) -> set[Use]:
    return {
        (role["metadata"]["namespace"], resource, verb)
        for role in of_kind(kustomized(overlay), "Role")
        for rule in role["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def asked(api: KubeApi) -> set[Use]:
    return {(one.namespace or "", one.plural, one.verb) for one in api.asked}


def furnish(api: KubeApi, overlay: str) -> None:
    objects = kustomized(overlay)
    for namespace in sorted({one["metadata"]["namespace"] for one in objects}):
        api.write({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
    for kind in ("InferencePool", "InferenceObjective"):
        for one in of_kind(objects, kind):
            api.write(one)
    nodes = Kubelet(api)
    for number, pool in enumerate(of_kind(objects, "InferencePool"), 2):
        labels = pool["spec"]["selector"]["matchLabels"]
        namespace = pool["metadata"]["namespace"]
        nodes.run(f"w{number}", f"127.0.0.{number}", labels, namespace=namespace)


@pytest.mark.parametrize("name", OVERLAYS)
async def test_rights_are_those_that_the_picker_uses(tmp_path: Path, name: str) -> None:
    overlay = f"deploy/k8s/overlays/{name}"
    async with AsyncExitStack() as stack:
        definitions = sorted((ROOT / "crds").glob("*.yaml"))
        api = await stack.enter_async_context(running_kube_api(None, *definitions))
        session = await stack.enter_async_context(ClientSession())
        furnish(api, overlay)
        ports, environment = some_ports(), account(api, overlay, tmp_path)
        stack.enter_context(running(picker_command(overlay, ports, tmp_path), environment))

        async def is_ready() -> bool:
            try:
                async with session.get(f"http://127.0.0.1:{ports['metrics']}/readyz") as reply:
                    return reply.status == 200
            except ClientConnectionError:
                return False

        await until(is_ready)
        await until(lambda: granted(overlay) <= asked(api))
        assert asked(api) == granted(overlay)
        if name.startswith("several"):
            pools = {
                one["metadata"]["name"] for one in of_kind(kustomized(overlay), "InferencePool")
            }
            async with session.get(f"http://127.0.0.1:{ports['metrics']}/metrics") as reply:
                page = await reply.text()
            for pool in pools:
                assert f'llm_d_epp_ready_endpoints{{inference_pool="{pool}"' in page
