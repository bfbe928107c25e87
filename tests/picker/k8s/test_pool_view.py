"""The endpoints of a pool, derived from its Pods, case by case and in random walks."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from picker.k8s.pods import ACTIVE_PORTS, Phase, PodRecord
from picker.k8s.pool_view import GATHER_SECONDS, HOLD_SECONDS, Contest, PoolShape, PoolView, View
from picker.pool.datastore import Datastore
from picker.types import Endpoint
from tests.depth import examples
from tests.support.kube.pod_records import LABELS, record


def selects(labels: Mapping[str, str]) -> bool:
    return labels.get("app") == "vllm"


class Scene:
    def __init__(self, *ports: int, pods: str = "") -> None:
        self.now = 100.0
        self.view = PoolView(PoolShape("", selects, ports or (8000,)))
        for name in pods:
            self.put(name)

    def put(self, name: str, ip: str = "", **how: Any) -> None:
        self.view.put(record(name, ip or f"10.0.0.{ord(name[0])}", **how), self.now)

    @property
    def names(self) -> set[str]:
        return {endpoint.name for endpoint in self.endpoints}

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        self.view.look(self.now)
        return self.view.endpoints

    @property
    def pods(self) -> set[str]:
        return {name[0] for name in self.names}

    def wait(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_every_port_of_a_pod_is_an_endpoint_of_its_own() -> None:
    scene = Scene(8000, 8001)
    scene.put("a", "10.0.0.1", namespace="default")
    first, second = scene.endpoints
    assert first.key == "default/a-rank-0"
    assert first.host_port == "10.0.0.1:8000"
    assert first.rank_index == 0
    assert second.key == "default/a-rank-1"
    assert second.host_port == "10.0.0.1:8001"
    assert second.rank_index == 1
    assert first.labels == LABELS
    assert first.node_address == "192.168.0.1"


def test_a_pod_may_restrict_itself_to_some_ports() -> None:
    scene = Scene(8000, 8001, 8002)
    scene.put("a", annotations={ACTIVE_PORTS: "8002,8000,9999"})
    assert scene.names == {"a-rank-0", "a-rank-2"}
    scene.put("a", annotations={ACTIVE_PORTS: "none"})
    assert scene.names == set()


@pytest.mark.parametrize(
    "how",
    [
        {"deleting": True},
        {"phase": "Failed"},
        {"phase": "Pending"},
        {"labels": {"app": "other"}},
        {"deleting": True, "ready": False},
        {"ready": False, "containers": {"server": {"state": {"terminated": {}}}}},
        {"ready": False, "containers": {"server": {"state": {"waiting": {}}}}},
        {"ready": False, "containers": {"server": {"restarts": 1}}},
        {"ready": False, "uid": "another"},
        {"ready": False, "ip": "10.0.0.99"},
    ],
)
def test_a_change_beyond_lost_readiness_takes_effect_at_once(how: dict[str, Any]) -> None:
    scene = Scene(pods="a")
    assert scene.pods == {"a"}
    scene.put("a", **how)
    assert scene.pods == set()
    assert scene.view.look(scene.now).next_due is None
    assert not scene.view._on_node


def test_an_unready_pod_alone_on_its_node_is_removed_at_once(scene: Scene) -> None:
    scene.put("a", node="n1")
    scene.put("b", node="n2")
    scene.put("a", node="n1", ready=False)
    assert scene.pods == {"b"}


def test_one_unready_pod_of_a_node_is_removed_when_the_others_stay_ready() -> None:
    scene = Scene(pods="abc")
    scene.put("a", ready=False)
    assert scene.pods == {"a", "b", "c"}
    assert scene.view.look(scene.now).next_due == scene.now + GATHER_SECONDS
    scene.wait(GATHER_SECONDS)
    assert scene.pods == {"b", "c"}
    assert scene.view.look(scene.now).next_due is None


def test_pods_of_a_node_that_flicker_together_stay() -> None:
    scene = Scene(pods="abc")
    scene.put("z", node="n2")
    for name in "abc":
        scene.put(name, ready=False)
        scene.wait(0.14)
        assert scene.pods == {"a", "b", "c", "z"}
    for name in "bca":
        scene.put(name)
        scene.wait(0.1)
        assert scene.pods == {"a", "b", "c", "z"}
    assert scene.view.look(scene.now).next_due is None


def test_pods_of_a_node_that_stay_unready_are_removed_after_a_second() -> None:
    scene = Scene(pods="ab")
    scene.put("z", node="n2")
    scene.put("a", ready=False)
    scene.wait(0.2)
    scene.put("b", ready=False)
    assert scene.pods == {"a", "b", "z"}
    scene.wait(HOLD_SECONDS - 0.2)
    assert scene.pods == {"b", "z"}
    scene.wait(0.2)
    assert scene.pods == {"z"}


def test_the_last_pods_of_a_pool_remain_for_a_second(scene: Scene) -> None:
    scene.put("a", node="n1")
    scene.put("b", node="n2")
    scene.put("a", node="n1", ready=False)
    scene.put("b", node="n2", ready=False)
    assert scene.pods == {"a", "b"}
    scene.wait(HOLD_SECONDS)
    assert scene.pods == set()


def test_a_removed_pod_returns_when_it_is_ready() -> None:
    scene = Scene(pods="a")
    scene.put("a", ready=False)
    scene.wait(2)
    assert scene.pods == set()
    scene.put("a", ready=False, annotations={"x": "y"})
    assert scene.pods == set()
    scene.put("a")
    scene.put("a", ready=False)
    assert scene.pods == {"a"}


def test_the_newer_of_two_pods_with_one_ip_has_it(scene: Scene) -> None:
    """This holds even if it is not ready: requests to the older Pod would reach it."""
    scene.put("a", "10.0.0.1", created="2026-01-01T00:00:00Z")
    scene.put("b", "10.0.0.1", created="2026-01-01T00:00:05Z", ready=False)
    assert scene.pods == set()
    scene.put("b", "10.0.0.1", created="2026-01-01T00:00:05Z")
    assert scene.pods == {"b"}
    scene.view.remove(("default", "b"))
    assert scene.pods == {"a"}


def test_on_a_hosts_network_an_ip_is_shared_and_a_port_is_not() -> None:
    scene = Scene(8000, 8001)
    host = {"host_network": True}
    scene.put("a", "10.0.0.1", annotations={ACTIVE_PORTS: "8000"}, **host)
    scene.put("b", "10.0.0.1", annotations={ACTIVE_PORTS: "8001"}, **host)
    assert scene.names == {"a-rank-0", "b-rank-1"}
    scene.put("a", "10.0.0.1", **host)
    scene.put("b", "10.0.0.1", created="2027-01-01T00:00:00Z", **host)
    assert scene.names == {"b-rank-0", "b-rank-1"}


def at(*ports: int) -> dict[str, Any]:
    return {"host_network": True, "containers": {"server": {"ports": (9400, *ports)}}}


@pytest.mark.parametrize(
    ("first", "second", "names"),
    [
        (at(8000), at(8001, 8002), {"a-rank-0", "b-rank-1", "b-rank-2"}),
        (at(8001), at(8002, 8000), {"a-rank-1", "b-rank-0", "b-rank-2"}),
        # One that declares none of the pool's ports has what is left.
        (at(8000), at(), {"a-rank-0", "b-rank-1", "b-rank-2"}),
        (at(8001, 8000, 9999), at(), {"a-rank-0", "a-rank-1", "b-rank-2"}),
        # An annotation counts as a declaration, and replaces those of containers.
        (
            at(8001) | {"annotations": {ACTIVE_PORTS: "8002"}},
            at(8000, 8001),
            {"a-rank-2", "b-rank-0", "b-rank-1"},
        ),
    ],
)
@pytest.mark.parametrize("newer", ["a", "b"])
def test_on_a_hosts_network_a_port_is_that_of_the_pod_that_declares_it(
    first: dict[str, Any], second: dict[str, Any], names: set[str], newer: str
) -> None:
    """Age does not matter; a Pod alone there has all ports, since declarations are optional."""
    scene = Scene(8000, 8001, 8002)
    for name, how in (("a", first), ("b", second)):
        scene.put(name, "10.0.0.1", created=f"202{5 + (name == newer)}-01-01T00:00:00Z", **how)
    look = scene.view.look(scene.now)
    assert (scene.names, look.contests) == (names, ())
    scene.view.remove(("default", "a"))
    assert scene.names == {"b-rank-0", "b-rank-1", "b-rank-2"}


def test_a_pod_without_a_free_port_is_reported() -> None:
    scene = Scene(8000, 8001)
    scene.put("a", "10.0.0.1", **at(8000))
    scene.put("b", "10.0.0.1", **at(8001))
    scene.put("c", "10.0.0.1", created="2027-01-01T00:00:00Z", **at())
    contests = scene.view.look(scene.now).contests
    assert scene.names == {"a-rank-0", "b-rank-1"}
    assert {(one.ports, one.winner[1], one.loser[1]) for one in contests} == {
        ((8000,), "a", "c"),
        ((8001,), "b", "c"),
    }


@pytest.mark.parametrize("how", [at(), at(8000), {"host_network": True}, {}])
def test_two_pods_with_equal_claims_to_a_port_are_reported_once(
    scene: Scene, how: dict[str, Any]
) -> None:
    scene.put("a", "10.0.0.1", created="2026-01-01T00:00:00Z", **how)
    scene.put("b", "10.0.0.1", created="2026-01-01T00:00:05Z", **how)
    contest = Contest("10.0.0.1", (8000,), winner=("default", "b"), loser=("default", "a"))
    assert scene.view.look(scene.now).contests == (contest,)
    assert scene.pods == {"b"}
    scene.put("a", "10.0.0.1", created="2026-01-01T00:00:00Z", labels=LABELS | {"x": "y"}, **how)
    assert scene.view.look(scene.now).contests == ()


def test_pods_missing_from_a_complete_list_are_removed() -> None:
    scene = Scene(pods="ab")
    scene.view.replace({("default", "b"): record("b", "10.0.0.98")}, scene.now)
    assert scene.pods == {"b"}


def test_an_irrelevant_change_gives_the_same_endpoints() -> None:
    scene = Scene(pods="a")
    (before,) = scene.endpoints
    assert not scene.view.put(record("a", "10.0.0.97"), scene.now)
    scene.put("a", created="2027-01-01T00:00:00Z")
    (after,) = scene.endpoints
    assert after is before


def test_no_hold_expires_during_an_outage() -> None:
    scene = Scene(pods="ab")
    for name in "ab":
        scene.put(name, ready=False)
    scene.wait(0.5)
    for _ in range(600):
        view = scene.view.look(scene.now, is_current=False)
        assert len(scene.view.endpoints) == 2
        assert view.next_due == scene.now + HOLD_SECONDS
        scene.wait(1.0)
    scene.put("a")
    assert scene.pods == {"a"}


NAMES = st.sampled_from("abcdef")
IPS = st.sampled_from(["10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4", "10.0.0.5", None])
PORTS = st.sampled_from([(8000,), (8001,), (8000, 8001)])
APPS = st.sampled_from(["x", "y"])


class WholePoolView(PoolView):
    def look(self, now: float, *, is_current: bool = True) -> View:
        for one in self.records.values():
            self._touch(one)
        return super().look(now, is_current=is_current)


@dataclass
class PodHistory:
    states: list[tuple[float, PodRecord]] = field(default_factory=list)

    @property
    def last(self) -> PodRecord:
        return self.states[-1][1]


class PoolWalk(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.born = 0
        self.app, self.ports = "x", (8000,)
        self.view, self.whole = PoolView(self.shape()), WholePoolView(self.shape())
        self.datastore = Datastore()
        self.pods: dict[str, PodHistory] = {}
        self.how: dict[str, dict[str, Any]] = {}

    def shape(self) -> PoolShape:
        app = self.app
        return PoolShape("", lambda labels: labels.get("app") == app, self.ports)

    def look(self, now: float) -> float | None:
        view, whole = self.view.look(now), self.whole.look(now)
        self.datastore.change_endpoints(view.changed, view.gone)
        assert view.next_due == whole.next_due
        expected = {one.key: one for one in self.whole.endpoints}
        assert {one.key: one for one in self.view.endpoints} == expected
        assert self.endpoints == expected
        return view.next_due

    @property
    def endpoints(self) -> dict[str, Endpoint]:
        return {one.key: one.endpoint for one in self.datastore.snapshot().candidates}

    def report(self, name: str, **changes: Any) -> None:
        how = self.how[name] = self.how[name] | changes
        said = record(name, **how)
        assert self.view.put(said, self.now) == self.whole.put(said, self.now)
        self.pods[name].states.append((self.now, said))

    @initialize(nodes=st.lists(st.sampled_from(["n1", "n2"]), min_size=4, max_size=4))
    def begin(self, nodes: list[str]) -> None:
        for number, (name, node) in enumerate(zip("abcd", nodes, strict=True), 1):
            self.arrive(name, f"10.0.0.{number}", node, ready=True, app="x")

    @rule(name=NAMES, ip=IPS, node=st.sampled_from(["n1", "n2"]), ready=st.booleans(), app=APPS)
    def arrive(self, name: str, ip: str | None, node: str, ready: bool, app: str) -> None:
        self.born += 1
        self.how[name] = {"created": f"2026-01-01T00:00:00.{self.born:06}Z"}
        self.pods[name] = PodHistory()
        uid = f"{name}{self.born}"
        labels = {"app": app}
        phase = "Running" if ip else "Pending"
        self.report(name, ip=ip, node=node, ready=ready, uid=uid, labels=labels, phase=phase)

    @rule(name=NAMES, ready=st.booleans())
    def turn(self, name: str, ready: bool) -> None:
        if name in self.how:
            self.report(name, ready=ready)

    @rule(node=st.sampled_from(["n1", "n2"]), ready=st.booleans())
    def node_turns(self, node: str, ready: bool) -> None:
        for name, how in list(self.how.items()):
            if how["node"] == node:
                self.report(name, ready=ready)

    @rule(name=NAMES, ip=IPS.filter(bool))
    def move(self, name: str, ip: str) -> None:
        if name in self.how:
            self.report(name, ip=ip)

    @rule(name=NAMES)
    def restart(self, name: str) -> None:
        if name in self.how:
            restarts = self.how[name].get("containers", {"server": {}})["server"].get("restarts", 0)
            self.report(name, containers={"server": {"restarts": restarts + 1}})

    @rule(name=NAMES, app=APPS)
    def relabel(self, name: str, app: str) -> None:
        if name in self.how:
            self.report(name, labels={"app": app})

    @rule(name=NAMES)
    def delete(self, name: str) -> None:
        if name in self.how:
            self.report(name, deleting=True)

    @rule(name=NAMES)
    def end(self, name: str) -> None:
        if name in self.how:
            self.report(name, phase="Succeeded")

    @rule(name=NAMES)
    def vanish(self, name: str) -> None:
        if self.pods.pop(name, None):
            self.how.pop(name)
            assert self.view.remove(("default", name))
            assert self.whole.remove(("default", name))

    @rule(app=APPS, ports=PORTS)
    def reshape(self, app: str, ports: tuple[int, ...]) -> None:
        self.app, self.ports = app, ports
        self.view.use(self.shape(), self.now)
        self.whole.use(self.shape(), self.now)

    @rule()
    def list_again(self) -> None:
        due, before = self.look(self.now), self.datastore.snapshot()
        self.view.replace({one.last.key: one.last for one in self.pods.values()}, self.now)
        assert self.look(self.now) == due
        assert self.datastore.snapshot().candidates == before.candidates

    @rule(seconds=st.sampled_from([0.01, 0.1, 0.25, 0.5, 1.0, 2.0]))
    def wait(self, seconds: float) -> None:
        end = self.now + seconds
        while True:
            due, before = self.look(self.now), self.endpoints
            if due is None or due > end:
                break
            assert due > self.now
            self.look((self.now + due) / 2)
            assert self.endpoints == before
            self.now = due
        self.look(end)
        assert self.endpoints == before
        self.now = end

    @invariant()
    def serves_what_says_so(self) -> None:
        self.look(self.now)
        shown = {one.name: one for one in self.endpoints.values()}
        for name, pod in self.pods.items():
            should = self.is_eligible(pod.last) and pod.last.is_ready and self.owns_ip(pod.last)
            for rank, port in enumerate(self.ports):
                endpoint = shown.pop(f"{name}-rank-{rank}", None)
                if should:
                    assert endpoint.host_port == f"{pod.last.address}:{port}"
                    assert endpoint.incarnation == pod.last.incarnation(port)
                elif endpoint is not None:
                    self.check_held(pod)
        assert shown == {}

    @invariant()
    def one_server_has_one_name(self) -> None:
        places = [one.host_port for one in self.endpoints.values()]
        assert len(places) == len(set(places))

    def is_eligible(self, said: PodRecord) -> bool:
        runs = said.phase is Phase.RUNNING and said.address is not None
        return runs and not said.is_deleting and said.labels["app"] == self.app

    def owns_ip(self, said: PodRecord) -> bool:
        living = (one.last for one in self.pods.values())
        living = (one for one in living if one.phase is not Phase.SUCCEEDED)
        same = [one for one in living if one.address == said.address]
        return said.created == max(one.created for one in same)

    def check_held(self, pod: PodHistory) -> None:
        last = pod.last
        assert self.is_eligible(last)
        assert self.owns_ip(last)
        assert not last.is_ready
        since, before = self.now, None
        for at, said in reversed(pod.states):
            if said.is_ready:
                before = said
                break
            assert self.is_eligible(said)
            since = at
        assert before is not None
        assert self.now - since < HOLD_SECONDS
        assert (before.uid, before.address) == (last.uid, last.address)
        assert before.containers == last.containers


PoolWalk.TestCase.settings = examples(60, stateful_step_count=40)
TestPoolWalk = PoolWalk.TestCase


ALL_PORTS: dict[str, str] = {}
STATES = st.tuples(
    st.sampled_from("abcd"),
    st.sampled_from(["10.0.0.1", "10.0.0.2"]),
    st.booleans(),  # on the network of its host
    st.booleans(),  # ready
    st.sampled_from([ALL_PORTS, ALL_PORTS, {ACTIVE_PORTS: "8001"}]),
    st.sampled_from(["gone", "same", "same", "another"]),
)


@examples(300)
@given(st.lists(STATES, max_size=25), st.sets(st.integers(0, 25)))
def test_pods_that_share_an_ip_resolve_as_in_a_full_scan(
    states: list[tuple[str, str, bool, bool, dict[str, str], str]], looks: set[int]
) -> None:
    shape = PoolShape("", lambda _: True, (8000, 8001))
    view, whole, shown = PoolView(shape), WholePoolView(shape), dict[str, Endpoint]()
    for number, (name, ip, is_on_host, ready, notes, how) in enumerate(states):
        if how == "gone":
            assert view.remove(("default", name)) == whole.remove(("default", name))
        else:
            before = whole.records.get(("default", name)) if how == "same" else None
            said = record(
                name,
                ip,
                ready=ready,
                created=before.created if before else f"2026-01-01T00:00:{number:02}Z",
                uid=before.uid if before else f"{name}{number}",
                host_network=is_on_host,
                annotations=notes,
            )
            assert view.put(said, number) == whole.put(said, number)
        if number in looks or number == len(states) - 1:
            seen, all_seen = view.look(number), whole.look(number)
            shown |= {one.key: one for one in seen.changed}
            for key in seen.gone:
                del shown[key]
            assert shown == {one.key: one for one in whole.endpoints}
            assert seen.next_due == all_seen.next_due
