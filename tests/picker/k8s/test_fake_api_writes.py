"""Writes to the fake API server (or a real one): conflicts, validation, deletion, pages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from kube_api.cluster import Cluster, open_cluster

CRDS = sorted((Path(__file__).parents[3] / "crds").glob("*.yaml"))
POOLS = "inference.networking.k8s.io/v1"
LEASES = "coordination.k8s.io/v1"


@pytest_asyncio.fixture
async def cluster() -> AsyncIterator[Cluster]:
    """The API server to ask, with the CRDs installed."""
    async with open_cluster(*CRDS) as opened:
        yield opened


def pool(**spec: Any) -> dict[str, Any]:
    """A pool called p."""
    selector = {"matchLabels": {"app": "x"}}
    whole = {"selector": selector, "targetPorts": [{"number": 8000}]} | spec
    kind = {"apiVersion": POOLS, "kind": "InferencePool"}
    return kind | {"metadata": {"name": "p"}, "spec": whole}


def config(name: str, **data: str) -> dict[str, Any]:
    """A ConfigMap: the simplest of objects."""
    kind = {"apiVersion": "v1", "kind": "ConfigMap"}
    return kind | {"metadata": {"name": name, "labels": {"test": "fake-api"}}, "data": data}


async def test_of_writers_that_read_one_version_exactly_one_succeeds(cluster: Cluster) -> None:
    """Optimistic concurrency: the others are told of a conflict and change nothing."""
    path = cluster.path("configmaps")
    made = await cluster.call("POST", path, config("c"))
    writes = [
        cluster.call("PUT", f"{path}/c", made.body | {"data": {"writer": str(number)}})
        for number in range(8)
    ]
    answers = await asyncio.gather(*writes)
    won = [answer for answer in answers if answer.code == 200]
    assert len(won) == 1
    assert {answer.short for answer in answers if answer not in won} == {(409, "Conflict")}
    after = await cluster.call("GET", f"{path}/c")
    assert after.body["data"] == won[0].body["data"]


async def test_a_patch_conflicts_only_when_it_names_a_version(cluster: Cluster) -> None:
    """Without one it is applied to whatever is there."""
    path = cluster.path("configmaps")
    made = await cluster.call("POST", path, config("c"))
    await cluster.call("PATCH", f"{path}/c", {"data": {"a": "1"}})
    stale = {"metadata": {"resourceVersion": made.version}, "data": {"b": "2"}}
    assert (await cluster.call("PATCH", f"{path}/c", stale)).short == (409, "Conflict")
    blind = await cluster.call("PATCH", f"{path}/c", {"data": {"b": "3"}})
    assert blind.body["data"] == {"a": "1", "b": "3"}


async def test_a_put_must_name_a_version_where_the_resource_asks_for_it(cluster: Cluster) -> None:
    """Custom resources and Leases are never overwritten unseen; a Lease may be created by PUT."""
    pools = cluster.path("inferencepools", group=POOLS)
    await cluster.call("POST", pools, pool())
    assert (await cluster.call("PUT", f"{pools}/p", pool())).short == (422, "Invalid")
    leases = cluster.path("leases", group=LEASES)
    lease = {"apiVersion": LEASES, "kind": "Lease", "metadata": {"name": "l"}}
    assert (await cluster.call("PUT", f"{leases}/l", lease)).code == 201
    assert (await cluster.call("PUT", f"{leases}/l", lease)).short == (422, "Invalid")


async def test_unknown_fields_are_refused_warned_of_or_dropped_in_silence(
    cluster: Cluster,
) -> None:
    """The three values of fieldValidation; what is let through is pruned."""
    path = cluster.path("inferencepools", group=POOLS)
    body = pool(targetPortNumber=8000)
    strict = await cluster.call("POST", path, body, dryRun="All", fieldValidation="Strict")
    assert strict.short == (400, "BadRequest")
    warned = await cluster.call("POST", path, body, dryRun="All", fieldValidation="Warn")
    assert warned.code == 201
    assert warned.headers["Warning"] == r'299 - "unknown field \"spec.targetPortNumber\""'
    ignored = await cluster.call("POST", path, body, fieldValidation="Ignore")
    assert "Warning" not in ignored.headers
    assert "targetPortNumber" not in ignored.body["spec"]
    assert ignored.body["spec"]["appProtocol"] == "http"


async def test_a_dry_run_changes_nothing(cluster: Cluster) -> None:
    """It answers as the write would, and there is no object after it."""
    path = cluster.path("inferencepools", group=POOLS)
    assert (await cluster.call("POST", path, pool(), dryRun="All")).code == 201
    assert (await cluster.call("GET", f"{path}/p")).short == (404, "NotFound")


async def test_a_delete_can_ask_for_one_uid(cluster: Cluster) -> None:
    """Another object of the same name is left alone."""
    path = cluster.path("configmaps")
    made = await cluster.call("POST", path, config("c"))
    other = {"preconditions": {"uid": "00000000-0000-0000-0000-000000000000"}}
    assert (await cluster.call("DELETE", f"{path}/c", other)).short == (409, "Conflict")
    uid = made.body["metadata"]["uid"]
    gone = await cluster.call("DELETE", f"{path}/c", {"preconditions": {"uid": uid}})
    assert gone.body["status"] == "Success"
    assert (await cluster.call("GET", f"{path}/c")).code == 404


async def test_an_object_with_finalizers_goes_when_the_last_is_taken_away(
    cluster: Cluster,
) -> None:
    """Until then it is there, with the time of its deletion."""
    path = cluster.path("configmaps")
    body = config("c")
    body["metadata"]["finalizers"] = ["example.com/hold"]
    await cluster.call("POST", path, body)
    await cluster.call("DELETE", f"{path}/c")
    held = await cluster.call("GET", f"{path}/c")
    assert held.body["metadata"]["deletionTimestamp"]
    await cluster.call("PATCH", f"{path}/c", {"metadata": {"finalizers": None}})
    assert (await cluster.call("GET", f"{path}/c")).code == 404


async def test_a_list_read_in_pages_is_of_one_version(cluster: Cluster) -> None:
    """What is written between two pages is in neither; a lost token is 410."""
    path = cluster.path("configmaps")
    for name in ("c1", "c2", "c3"):
        await cluster.call("POST", path, config(name))
    chosen = {"limit": "2", "labelSelector": "test=fake-api"}
    first = await cluster.call("GET", path, **chosen)
    await cluster.call("POST", path, config("c0"))
    await cluster.call("POST", path, config("c4"))
    token = first.body["metadata"]["continue"]
    rest = await cluster.call("GET", path, **chosen | {"continue": token})
    names = [one["metadata"]["name"] for one in first.body["items"] + rest.body["items"]]
    assert names == ["c1", "c2", "c3"]
    assert rest.version == first.version
    if cluster.fake is not None:
        cluster.fake.lists.expire()
        lost = await cluster.call("GET", path, **chosen | {"continue": token})
        assert lost.short == (410, "Expired")


async def test_a_list_of_a_version_of_the_future_is_a_timeout(cluster: Cluster) -> None:
    """As after a restored backup."""
    ahead = await cluster.call("GET", cluster.path("configmaps"), resourceVersion="999999999999")
    assert ahead.short == (504, "Timeout")
    assert "Too large resource version" in ahead.body["message"]


async def test_an_object_that_breaks_a_newer_schema_may_change_elsewhere() -> None:
    """What was stored under a looser schema is refused only where it is changed for the worse."""
    async with open_cluster(*CRDS) as cluster:
        if cluster.fake is None:
            pytest.skip("a real server's schema is not ours to loosen")
        ten = [{"number": number} for number in range(8000, 8010)]
        cluster.fake.write(pool(targetPorts=ten))
        one = cluster.path("inferencepools", "p", group=POOLS)
        labelled = await cluster.call("PATCH", one, {"metadata": {"labels": {"a": "b"}}})
        assert labelled.code == 200
        moved = await cluster.call("PATCH", one, {"spec": {"appProtocol": "kubernetes.io/h2c"}})
        assert (moved.code, moved.body["metadata"]["generation"]) == (200, 2)
        worse = await cluster.call("PATCH", one, {"spec": {"targetPorts": ten[:9]}})
        assert worse.short == (422, "Invalid")
        better = await cluster.call("PATCH", one, {"spec": {"targetPorts": ten[:8]}})
        assert better.code == 200


async def test_bodies_that_are_not_the_object_are_bad_requests(cluster: Cluster) -> None:
    """Another kind, another name and another namespace than the address says."""
    path = cluster.path("configmaps")
    wrong = config("c") | {"kind": "Secret"}
    assert (await cluster.call("POST", path, wrong)).short == (400, "BadRequest")
    await cluster.call("POST", path, config("c"))
    assert (await cluster.call("PUT", f"{path}/c", config("d"))).short == (400, "BadRequest")
    elsewhere = config("e")
    elsewhere["metadata"]["namespace"] = "kube-system"
    assert (await cluster.call("POST", path, elsewhere)).short == (400, "BadRequest")
    missing = "/api/v1/namespaces/nowhere-at-all/configmaps"
    assert (await cluster.call("POST", missing, config("c"))).short == (404, "NotFound")


@pytest.mark.parametrize(
    "metadata",
    [
        {"name": 5},
        {"labels": ["a"]},
        {"labels": {"a": 1}},
        {"annotations": {"a": 1}},
        {"finalizers": "f"},
    ],
)
async def test_metadata_of_another_type_is_a_bad_request(
    cluster: Cluster, metadata: dict[str, Any]
) -> None:
    """Though no schema of a definition says anything of metadata."""
    path = cluster.path("inferencepools", group=POOLS)
    given = pool()
    given["metadata"] = {"name": "c"} | metadata
    assert (await cluster.call("POST", path, given)).short == (400, "BadRequest")
