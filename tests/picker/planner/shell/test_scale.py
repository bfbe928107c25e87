"""The scale of a Deployment, over real sockets."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from picker.k8s.client import KubernetesClient
from picker.k8s.credentials import Access
from picker.planner.shell.scale import DeploymentScale, ScaleError, replicas_of
from tests.fakes.kube_api import statuses
from tests.fakes.kube_api.access import Rule
from tests.fakes.kube_api.server import KubeApi, running_kube_api
from tests.support.kube.wired_client import client_of

PATIENCE_SECONDS = 60
SCALE = DeploymentScale("default", "workers")


def deployment(replicas: int) -> dict[str, Any]:
    metadata = {"name": "workers", "namespace": "default"}
    spec = {"replicas": replicas, "template": {}}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": spec}


@pytest_asyncio.fixture
async def api() -> AsyncIterator[KubeApi]:
    async with asyncio.timeout(PATIENCE_SECONDS), running_kube_api() as running:
        running.write(deployment(2))
        yield running


@pytest_asyncio.fixture
async def client(api: KubeApi) -> AsyncIterator[KubernetesClient]:
    async with client_of(Access(api.url)) as opened:
        yield opened


@pytest.mark.parametrize("replicas", [5, 0])
async def test_a_write_changes_nothing_but_the_replicas(
    api: KubeApi, client: KubernetesClient, replicas: int
) -> None:
    known = await SCALE.read(client)
    assert replicas_of(known) == 2
    await SCALE.write(client, known, replicas)
    assert api.read("deployments", "workers")["spec"] == {"replicas": replicas, "template": {}}
    assert replicas_of(await SCALE.read(client)) == replicas


async def test_the_write_of_another_program_is_not_undone(
    api: KubeApi, client: KubernetesClient
) -> None:
    known = await SCALE.read(client)
    api.write(deployment(7))
    with pytest.raises(ScaleError, match="changed by another program") as caught:
        await SCALE.write(client, known, 3)
    assert caught.value.result == "409"
    assert api.read("deployments", "workers")["spec"]["replicas"] == 7


async def test_an_absent_deployment_is_named(client: KubernetesClient) -> None:
    with pytest.raises(ScaleError, match="there is no deployment default/others") as caught:
        await DeploymentScale("default", "others").read(client)
    assert caught.value.result == "404"


async def test_missing_rights_are_named(api: KubeApi) -> None:
    api.access.grant("token", "picker", [])
    async with client_of(Access(api.url, "Bearer token")) as client:
        with pytest.raises(ScaleError, match=r"resources: \[deployments/scale\]") as caught:
            await SCALE.read(client)
        assert caught.value.result == "403"
        rule = Rule(("apps",), ("deployments/scale",), ("get", "update"), ("workers",))
        api.access.grant("token", "picker", [rule])
        await SCALE.write(client, await SCALE.read(client), 3)
    assert api.read("deployments", "workers")["spec"]["replicas"] == 3


async def test_an_error_of_the_server_is_a_scale_error(
    api: KubeApi, client: KubernetesClient
) -> None:
    api.faults.answer(statuses.bad_request("no"), "get", plural="deployments", times=1)
    with pytest.raises(ScaleError, match="cannot be read: 400"):
        await SCALE.read(client)
    await api.go_away()
    with pytest.raises(ScaleError, match="cannot be read: no connection") as caught:
        await SCALE.read(client)
    assert caught.value.result == "unreachable"
