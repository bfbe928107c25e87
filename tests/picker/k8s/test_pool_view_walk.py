"""A random walk of a pool's Pods in time, compared with a view that examines all Pods each time."""

from dataclasses import dataclass, field
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from picker.k8s.pods import ACTIVE_PORTS, Phase, PodRecord
from picker.k8s.pool_view import HOLD_SECONDS, PoolShape, PoolView, View
from picker.pool.datastore import Datastore
from picker.types import Endpoint
from tests.depth import examples
from tests.support.kube.pod_records import record

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
