"""The fake API server: its recorded answers (`api_contract.txt`), and what tests rely on beyond.

With `KUBECONFIG` set the same calls go to a real API server.
"""

import json
import re
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from tests.depth import examples
from tests.fakes.kube_api.access import Rule
from tests.fakes.kube_api.cluster import Answer, Cluster, address_in, open_cluster
from tests.fakes.kube_api.resources import BUILT_IN
from tests.fakes.kube_api.selectors import parse_selector
from tests.fakes.kube_api.server import running_kube_api
from tests.fakes.kube_api.statuses import ApiError
from tests.fakes.kube_api.store import Store, key_of
from tests.fakes.kube_api.watch import Feed, WatchRequest

ROOT = Path(__file__).parents[3]
CRDS = sorted((ROOT / "crds").glob("*.yaml"))
LINES = [
    line.partition(" => ")[::2]
    for line in (ROOT / "tests/data/kubernetes/api_contract.txt").read_text().splitlines()
]
RECORDED = dict(LINES)
SHOWN = 230  # characters of a message in the recording
GROUP = "inference.networking.k8s.io/v1"
REF = {"name": "epp", "port": {"number": 9002}}


def pool(name: str = "c", **changes: Any) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "selector": {"matchLabels": {"app": "vllm"}},
        "targetPorts": [{"number": 8000}],
        "endpointPickerRef": REF,
    }
    spec |= changes
    spec = {key: value for key, value in spec.items() if value is not None}
    kind = {"apiVersion": GROUP, "kind": "InferencePool"}
    return kind | {"metadata": {"name": name}, "spec": spec}


def labels(**labels: Any) -> dict[str, Any]:
    return {"matchLabels": labels}


def ports(*numbers: Any) -> list[dict[str, Any]]:
    return [{"number": number} for number in numbers]


POOLS = {
    "no selector": pool(selector=None),
    "empty matchLabels": pool(selector=labels()),
    "null label": pool(selector=labels(a=None, b="c")),
    "long value": pool(selector=labels(a="x" * 64)),
    "bad value": pool(selector=labels(a="-x-")),
    "bad key accepted": pool(selector={"matchLabels": {"bad key!": "v"}}),
    "no ports": pool(targetPorts=None),
    "ports []": pool(targetPorts=[]),
    "9 ports": pool(targetPorts=ports(*range(8000, 8009))),
    "dup port": pool(targetPorts=ports(8000, 8000)),
    "port 0": pool(targetPorts=ports(0)),
    "port 65536": pool(targetPorts=ports(65536)),
    "port str": pool(targetPorts=ports("8000")),
    "unknown field": pool(foo=1),
    "service without port": pool(endpointPickerRef={"name": "epp"}),
    "deployment without port": pool(endpointPickerRef={"kind": "Deployment", "name": "e"}),
    "empty name": pool(endpointPickerRef=REF | {"name": ""}),
    "bad failureMode": pool(endpointPickerRef=REF | {"failureMode": "F"}),
    "no picker": pool(endpointPickerRef=None),
    "bad appProtocol": pool(appProtocol="grpc"),
    "good": pool(),
    "Bad_Name": pool("Bad_Name"),
}


ABOUT_STATUS = (
    "status dropped on create",
    "again",
    "status via main",
    "status via sub",
    "cond dup cond",
    "cond empty reason",
    "cond bad status",
    "cond bad time",
    "cond ok",
    "label patch keeps generation",
    "spec patch bumps",
    "stale PUT",
    "no-op keeps rv",
)
ABOUT_REFUSALS = ("smp on CR", "fieldSelector", "missing", "unknown group", "bad selector")
CREATED_PODS = ("pod", "pod")
ABOUT_PODS = (
    "list by label",
    "set selector",
    "name selector",
    "watch rv unset",
    "watch from list rv",
    "watch rv=1",
    "timeoutSeconds=1",
    "sendInitialEvents",
    "selector moves, graceful delete",
    "resume replays the same",
)
ABOUT_LEASES = ("lease", "lease put", "lease stale put")


# Whether the type that was found is named again after the one wanted differs between servers.
FOUND_AGAIN = re.compile(r'(must be of type \w+): "\w+"')


def described(answer: Answer) -> str:
    if answer.reason is not None:
        message = FOUND_AGAIN.sub(r"\1", answer.body["message"])
        return f"{answer.short} {message[:SHOWN]}"
    return f"{answer.short} {json.dumps(answer.body['spec'], sort_keys=True)}"


def names(events: list[dict[str, Any]]) -> str:
    shown: list[Any] = []
    for event in events:
        if event["type"] == "EOF":
            shown.append("EOF")
        elif event["type"] == "ERROR":
            shown.append(("ERROR", event["object"]["code"]))
        elif event["type"] == "BOOKMARK":
            shown.append(("BOOKMARK", list(event["object"]["metadata"]["annotations"])))
        else:
            shown.append((event["type"], event["object"]["metadata"]["name"]))
    return str(shown)


@pytest_asyncio.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with open_cluster(*CRDS) as opened:
        yield opened


def test_every_recorded_line_is_compared() -> None:
    asked = [f"pool {name}" for name in POOLS]
    asked += [*ABOUT_STATUS, *ABOUT_REFUSALS, *CREATED_PODS, *ABOUT_PODS, *ABOUT_LEASES]
    assert sorted(name for name, _ in LINES) == sorted(asked)


def recorded(names: Iterable[str]) -> dict[str, str]:
    return {name: RECORDED[name] for name in names}


@pytest.mark.parametrize("name", POOLS)
async def test_a_pool_is_taken_or_refused_in_the_recorded_words(
    cluster: Cluster, name: str
) -> None:
    path = cluster.path("inferencepools", group=GROUP)
    answer = await cluster.call("POST", path, POOLS[name], dryRun="All", fieldValidation="Strict")
    assert described(answer) == RECORDED[f"pool {name}"]


def parent(name: str = "g", **fields: Any) -> dict[str, Any]:
    return {"parentRef": {"name": name}} | fields


def condition(**changes: Any) -> dict[str, Any]:
    return {
        "type": "Accepted",
        "status": "True",
        "reason": "Accepted",
        "message": "",
        "lastTransitionTime": "2026-11-21T10:00:00Z",
    } | changes


CONDITIONS = {
    "dup cond": [condition(), condition()],
    "empty reason": [condition(reason="")],
    "bad status": [condition(status="Yes")],
    "bad time": [condition(lastTransitionTime="yesterday")],
    "ok": [condition()],
}


async def test_the_status_of_a_pool_is_its_own_subresource(cluster: Cluster) -> None:
    path = cluster.path("inferencepools", group=GROUP)
    one = f"{path}/c"
    status = {"status": {"parents": [parent()]}}
    found = {}
    made = await cluster.call("POST", path, pool() | status)
    shown = f"{made.short} {made.body.get('status')} {made.body['metadata']['generation']}"
    found["status dropped on create"] = shown
    found["again"] = str((await cluster.call("POST", path, pool())).short)
    main = await cluster.call("PATCH", one, status)
    found["status via main"] = f"{main.short} {main.body.get('status')}"
    sub = await cluster.call(
        "PATCH", f"{one}/status", status | {"spec": {"appProtocol": "kubernetes.io/h2c"}}
    )
    rest = f"{sub.body['spec']['appProtocol']} {sub.body['metadata']['generation']}"
    found["status via sub"] = f"{sub.short} {json.dumps(sub.body['status'], sort_keys=True)} {rest}"
    for name, conditions in CONDITIONS.items():
        body = {"status": {"parents": [parent(conditions=conditions)]}}
        found[f"cond {name}"] = str((await cluster.call("PATCH", f"{one}/status", body)).short)
    label = await cluster.call("PATCH", one, {"metadata": {"labels": {"a": "b"}}})
    found["label patch keeps generation"] = str(label.body["metadata"]["generation"])
    spec = await cluster.call("PATCH", one, {"spec": {"targetPorts": ports(8001)}})
    found["spec patch bumps"] = str(spec.body["metadata"]["generation"])
    found["stale PUT"] = str((await cluster.call("PUT", one, label.body)).short)
    again = await cluster.call("PATCH", one, {"spec": {"targetPorts": ports(8001)}})
    found["no-op keeps rv"] = str(again.version == spec.version)
    assert found == recorded(ABOUT_STATUS)


async def test_requests_that_make_no_sense_are_refused_as_recorded(cluster: Cluster) -> None:
    path = cluster.path("inferencepools", group=GROUP)
    await cluster.call("POST", path, pool())
    strategic = "application/strategic-merge-patch+json"
    smp = await cluster.call("PATCH", f"{path}/c", {"spec": {}}, kind=strategic)
    unknown = await cluster.call("GET", "/apis/nobody.example/v1/things")
    found = {
        "smp on CR": str(smp.code),
        "fieldSelector": str((await cluster.call("GET", path, fieldSelector="spec.x=1")).short),
        "missing": str((await cluster.call("GET", f"{path}/nobody")).short),
        "unknown group": str(unknown.code),
        "bad selector": str(
            (await cluster.call("GET", cluster.path("pods"), labelSelector="bad key!=v")).short
        ),
    }
    assert unknown.body == "404 page not found\n"
    assert found == recorded(ABOUT_REFUSALS)


def pod(name: str, app: str) -> dict[str, Any]:
    containers = [{"name": "c", "image": "none.invalid/none:1"}]
    spec = {"nodeName": "nowhere", "containers": containers, "terminationGracePeriodSeconds": 30}
    metadata = {"name": name, "labels": {"app": app}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


async def test_pods_are_listed_and_watched_by_selector_as_recorded(cluster: Cluster) -> None:
    path = cluster.path("pods")
    found = {}
    created = [await cluster.call("POST", path, pod(*one)) for one in (("a", "x"), ("b", "y"))]
    assert [("pod", str(made.code)) for made in created] == [
        one for one in LINES if one[0] == "pod"
    ]
    by_label = await cluster.call("GET", path, labelSelector="app=x")
    found["list by label"] = str([one["metadata"]["name"] for one in by_label.body["items"]])
    by_set = await cluster.call("GET", path, labelSelector="app in (x, y)")
    found["set selector"] = str(len(by_set.body["items"]))
    by_name = await cluster.call("GET", path, fieldSelector="metadata.name=a")
    found["name selector"] = str(len(by_name.body["items"]))
    selected = {"labelSelector": "app=x"}
    found["watch rv unset"] = names(await cluster.watch(path, events=1, **selected))
    since = selected | {"resourceVersion": by_label.version}
    quiet = await cluster.watch(path, timeoutSeconds="1", **since)
    found["watch from list rv"] = names(quiet[:-1])
    found["timeoutSeconds=1"] = names(quiet)
    found["watch rv=1"] = names(as_forgotten(await from_the_beginning(cluster)))
    initial = {"sendInitialEvents": "true", "resourceVersionMatch": "NotOlderThan"}
    initial |= {"allowWatchBookmarks": "true"}
    found["sendInitialEvents"] = names(await cluster.watch(path, events=2, **selected, **initial))
    await cluster.call("PATCH", f"{path}/b", {"metadata": {"labels": {"app": "x"}}})
    await cluster.call("PATCH", f"{path}/a", {"metadata": {"labels": {"app": "z"}}})
    await cluster.call("PATCH", f"{path}/b/status", {"status": {"podIP": "10.0.0.1"}})
    await cluster.call("DELETE", f"{path}/b")
    await cluster.call("DELETE", f"{path}/b", {"gracePeriodSeconds": 0})
    await cluster.call("POST", path, pod("c", "x"))
    for name in ("selector moves, graceful delete", "resume replays the same"):
        found[name] = names(await cluster.watch(path, events=7, **since))
    assert found == recorded(ABOUT_PODS)


async def from_the_beginning(cluster: Cluster) -> list[dict[str, Any]]:
    beginning = {"resourceVersion": "1", "timeoutSeconds": "1"}
    return await cluster.watch(cluster.path("pods"), **beginning)


def as_forgotten(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the events as a server sends them that no longer knows its beginning.

    Its etcd is compacted every five minutes. Before that all is replayed, which was not recorded.
    """
    if names(events) == str([("ADDED", "a"), ("ADDED", "b"), "EOF"]):
        return [{"type": "ERROR", "object": {"code": 410}}, {"type": "EOF"}]
    return events


async def test_a_new_server_replays_its_whole_history() -> None:
    async with open_cluster(first_version=1) as cluster:
        for one in (("a", "x"), ("b", "y")):
            await cluster.call("POST", cluster.path("pods"), pod(*one))
        events = await from_the_beginning(cluster)
        if cluster.fake is not None:
            assert names(events) == str([("ADDED", "a"), ("ADDED", "b"), "EOF"])
        assert names(as_forgotten(events)) == RECORDED["watch rv=1"]


async def test_a_lease_is_taken_and_lost_as_recorded(cluster: Cluster) -> None:
    path = cluster.path("leases", group="coordination.k8s.io/v1")
    body = {"metadata": {"name": "l"}, "spec": {"holderIdentity": "a", "leaseDurationSeconds": 15}}
    kind = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease"}
    made = await cluster.call("POST", path, kind | body)
    taken = made.body | {"spec": {"holderIdentity": "b", "leaseDurationSeconds": 15}}
    put = await cluster.call("PUT", f"{path}/l", taken)
    other = made.body | {"spec": {"holderIdentity": "c", "leaseDurationSeconds": 15}}
    stale = await cluster.call("PUT", f"{path}/l", other)
    found = {
        "lease": str(made.code),
        "lease put": str(put.short),
        "lease stale put": str(stale.short),
    }
    assert found == recorded(ABOUT_LEASES)


async def test_a_server_named_by_kubeconfig_gets_a_namespace_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_kube_api() as api:
        monkeypatch.setenv("KUBECONFIG", str(api.write_kubeconfig(tmp_path / "config")))
        async with open_cluster(*CRDS) as opened:
            assert opened.fake is None
            assert opened.namespace.startswith("pointsman-test-")
            path = opened.path("inferencepools", group=GROUP)
            assert (await opened.call("GET", path)).body["items"] == []
            name = opened.namespace
        assert api.store.find(api.resource("namespaces"), ("", name)) is None


CONFIGS = next(resource for resource in BUILT_IN if resource.plural == "configmaps")
WHOLE_WINDOW = 20


def config(name: str, app: str = "x", **data: str) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "default", "labels": {"app": app}}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


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
        body = pool("p", targetPortNumber=8000)
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
        cluster.fake.write(pool("p", targetPorts=ten))
        one = cluster.path("inferencepools", "p", group=GROUP)
        moved = await cluster.call("PATCH", one, {"spec": {"appProtocol": "kubernetes.io/h2c"}})
        assert (moved.code, moved.body["metadata"]["generation"]) == (200, 2)
        worse = await cluster.call("PATCH", one, {"spec": {"targetPorts": ten[:9]}})
        assert worse.short == (422, "Invalid")
        better = await cluster.call("PATCH", one, {"spec": {"targetPorts": ten[:8]}})
        assert better.code == 200
