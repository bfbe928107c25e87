"""Behaviour of the fake API server that tests rely on and no recording covers."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.depth import examples
from tests.fakes.kube_api.access import Rule
from tests.fakes.kube_api.cluster import Cluster, address_in, open_cluster
from tests.fakes.kube_api.resources import BUILT_IN
from tests.fakes.kube_api.selectors import parse_selector
from tests.fakes.kube_api.statuses import ApiError
from tests.fakes.kube_api.store import Store, key_of
from tests.fakes.kube_api.watch import Feed, WatchRequest

CRDS = sorted((Path(__file__).parents[3] / "crds").glob("*.yaml"))
CONFIGS = next(resource for resource in BUILT_IN if resource.plural == "configmaps")
GROUP = "inference.networking.k8s.io/v1"
WHOLE_WINDOW = 20


def config(name: str, app: str = "x", **data: str) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "default", "labels": {"app": app}}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


def pool(**spec: Any) -> dict[str, Any]:
    selector = {"matchLabels": {"app": "x"}}
    whole = {"selector": selector, "targetPorts": [{"number": 8000}]} | spec
    kind = {"apiVersion": GROUP, "kind": "InferencePool"}
    return kind | {"metadata": {"name": "p"}, "spec": whole}


def applied(objects: dict[str, Any], events: list[dict[str, Any]]) -> dict[str, Any]:
    for event in events:
        name = event["object"]["metadata"]["name"]
        assert (event["type"] == "ADDED") is (name not in objects)
        if event["type"] == "DELETED":
            del objects[name]
        else:
            objects[name] = event["object"]
    return objects


WRITES = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "put", "delete"]),
        st.sampled_from("abc"),
        st.sampled_from("xy"),
        st.integers(0, 2),
    ),
    max_size=40,
)


def write(store: Store, how: str, name: str, app: str, value: int) -> None:
    obj = config(name, app, value=str(value))
    found = store.find(CONFIGS, key_of(obj))
    if how == "delete":
        if found is not None:
            store.delete(CONFIGS, key_of(obj))
    elif found is None:
        store.insert(CONFIGS, obj)
    else:
        store.replace(CONFIGS, obj)


@examples(60)
@given(WRITES, WRITES, st.data())
def test_list_and_watch_lead_to_the_same_objects(
    before: list[Any], after: list[Any], data: st.DataObject
) -> None:
    store = Store(window=WHOLE_WINDOW)
    selector = parse_selector(CONFIGS, "default", "app=x", "")
    for one in before:
        write(store, *one)
    listed = {o.obj["metadata"]["name"]: o.obj for o in store.all(CONFIGS) if selector(o.obj)}
    request = WatchRequest(CONFIGS, selector, store.version)
    late = data.draw(st.integers(0, len(after)))
    for one in after[:late]:
        write(store, *one)
    feed = Feed(request, store)
    feed.start()
    for one in after[late:]:
        write(store, *one)
    store.check_integrity()
    events = [json.loads(line) for line in feed.take().splitlines()]
    if events and events[-1]["type"] == "ERROR":
        assert events[-1]["object"]["code"] == 410
        assert late > WHOLE_WINDOW
        return
    versions = [int(event["object"]["metadata"]["resourceVersion"]) for event in events]
    assert versions == sorted(set(versions))
    now = {o.obj["metadata"]["name"]: o.obj for o in store.all(CONFIGS) if selector(o.obj)}
    assert applied(listed, events) == now


def test_the_window_of_changes_is_bounded() -> None:
    store = Store(window=3)
    store.insert(CONFIGS, config("a"))
    versions = [store.replace(CONFIGS, config("a", n=str(n))).version for n in range(5)]
    assert [change.version for change in store.since(CONFIGS, versions[1])] == versions[2:]
    with pytest.raises(ApiError) as refused:
        store.since(CONFIGS, versions[0])
    assert refused.value.code == 410


async def test_a_rule_with_names_needs_the_field_selector_of_that_name(tmp_path: Path) -> None:
    rule = Rule(["inference.networking.k8s.io"], ["inferencepools"], ["list"], ["p"], "default")
    async with open_cluster(*CRDS) as cluster:
        if cluster.fake is None:
            pytest.skip("the roles of a real server are not ours to change")
        cluster.fake.access.grant("secret", "system:serviceaccount:default:picker", [rule])
        path = cluster.path("inferencepools", group=GROUP)
        assert (await cluster.call("GET", path)).short == (401, "Unauthorized")
        address = address_in(cluster.fake.write_kubeconfig(tmp_path / "config", "secret"))
        picker = Cluster(cluster.session, address, "default")
        assert (await picker.call("GET", path, fieldSelector="metadata.name=p")).code == 200
        assert (await picker.call("GET", path, fieldSelector="metadata.name=q")).code == 403
        assert (await picker.call("GET", path)).code == 403
        refused = await picker.call("GET", picker.path("pods"))
        assert refused.body["message"] == (
            'pods is forbidden: User "system:serviceaccount:default:picker" cannot list resource '
            '"pods" in API group "" in the namespace "default"'
        )


async def test_unknown_fields_are_refused_warned_of_or_dropped_in_silence() -> None:
    async with open_cluster(*CRDS) as cluster:
        path = cluster.path("inferencepools", group=GROUP)
        body = pool(targetPortNumber=8000)
        strict = await cluster.call("POST", path, body, dryRun="All", fieldValidation="Strict")
        assert strict.short == (400, "BadRequest")
        warned = await cluster.call("POST", path, body, dryRun="All", fieldValidation="Warn")
        assert warned.headers["Warning"] == r'299 - "unknown field \"spec.targetPortNumber\""'
        assert (await cluster.call("GET", f"{path}/p")).short == (404, "NotFound")
        ignored = await cluster.call("POST", path, body, fieldValidation="Ignore")
        assert "Warning" not in ignored.headers
        assert "targetPortNumber" not in ignored.body["spec"]
        assert ignored.body["spec"]["appProtocol"] == "http"


async def test_an_object_that_breaks_a_newer_schema_may_change_elsewhere() -> None:
    async with open_cluster(*CRDS) as cluster:
        if cluster.fake is None:
            pytest.skip("a real server's schema is not ours to loosen")
        ten = [{"number": number} for number in range(8000, 8010)]
        cluster.fake.write(pool(targetPorts=ten))
        one = cluster.path("inferencepools", "p", group=GROUP)
        moved = await cluster.call("PATCH", one, {"spec": {"appProtocol": "kubernetes.io/h2c"}})
        assert (moved.code, moved.body["metadata"]["generation"]) == (200, 2)
        worse = await cluster.call("PATCH", one, {"spec": {"targetPorts": ten[:9]}})
        assert worse.short == (422, "Invalid")
        better = await cluster.call("PATCH", one, {"spec": {"targetPorts": ten[:8]}})
        assert better.code == 200
