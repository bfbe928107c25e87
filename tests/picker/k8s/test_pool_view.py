"""The endpoints of a pool, derived from the states of Pods, time, and shared addresses."""

from collections.abc import Mapping
from typing import Any

import pytest

from picker.k8s.pods import ACTIVE_PORTS
from picker.k8s.pool_view import GATHER_SECONDS, HOLD_SECONDS, Contest, PoolShape, PoolView
from picker.types import Endpoint
from tests.support.kube.pod_records import LABELS, record


def selects(labels: Mapping[str, str]) -> bool:
    return labels.get("app") == "vllm"


class Scene:
    def __init__(self, *ports: int) -> None:
        self.now = 100.0
        self.view = PoolView(PoolShape("", selects, ports or (8000,)))

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
    scene = Scene()
    scene.put("a")
    assert scene.pods == {"a"}
    scene.put("a", **how)
    assert scene.pods == set()
    assert scene.view.look(scene.now).next_due is None
    assert not scene.view._on_node


def test_an_unready_pod_alone_on_its_node_is_removed_at_once() -> None:
    scene = Scene()
    scene.put("a", node="n1")
    scene.put("b", node="n2")
    scene.put("a", node="n1", ready=False)
    assert scene.pods == {"b"}


def test_one_unready_pod_of_a_node_is_removed_when_the_others_stay_ready() -> None:
    scene = Scene()
    for name in "abc":
        scene.put(name)
    scene.put("a", ready=False)
    assert scene.pods == {"a", "b", "c"}
    assert scene.view.look(scene.now).next_due == scene.now + GATHER_SECONDS
    scene.wait(GATHER_SECONDS)
    assert scene.pods == {"b", "c"}
    assert scene.view.look(scene.now).next_due is None


def test_pods_of_a_node_that_flicker_together_stay() -> None:
    scene = Scene()
    for name in "abc":
        scene.put(name)
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
    scene = Scene()
    for name in "ab":
        scene.put(name)
    scene.put("z", node="n2")
    scene.put("a", ready=False)
    scene.wait(0.2)
    scene.put("b", ready=False)
    assert scene.pods == {"a", "b", "z"}
    scene.wait(HOLD_SECONDS - 0.2)
    assert scene.pods == {"b", "z"}
    scene.wait(0.2)
    assert scene.pods == {"z"}


def test_the_last_pods_of_a_pool_remain_for_a_second() -> None:
    scene = Scene()
    scene.put("a", node="n1")
    scene.put("b", node="n2")
    scene.put("a", node="n1", ready=False)
    scene.put("b", node="n2", ready=False)
    assert scene.pods == {"a", "b"}
    scene.wait(HOLD_SECONDS)
    assert scene.pods == set()


def test_a_removed_pod_returns_when_it_is_ready() -> None:
    scene = Scene()
    scene.put("a")
    scene.put("a", ready=False)
    scene.wait(2)
    assert scene.pods == set()
    scene.put("a", ready=False, annotations={"x": "y"})
    assert scene.pods == set()
    scene.put("a")
    scene.put("a", ready=False)
    assert scene.pods == {"a"}


def test_the_newer_of_two_pods_with_one_ip_has_it() -> None:
    """This holds even if it is not ready: requests to the older Pod would reach it."""
    scene = Scene()
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
def test_two_pods_with_equal_claims_to_a_port_are_reported_once(how: dict[str, Any]) -> None:
    scene = Scene()
    scene.put("a", "10.0.0.1", created="2026-01-01T00:00:00Z", **how)
    scene.put("b", "10.0.0.1", created="2026-01-01T00:00:05Z", **how)
    contest = Contest("10.0.0.1", (8000,), winner=("default", "b"), loser=("default", "a"))
    assert scene.view.look(scene.now).contests == (contest,)
    assert scene.pods == {"b"}
    scene.put("a", "10.0.0.1", created="2026-01-01T00:00:00Z", labels=LABELS | {"x": "y"}, **how)
    assert scene.view.look(scene.now).contests == ()


def test_pods_missing_from_a_complete_list_are_removed() -> None:
    scene = Scene()
    scene.put("a")
    scene.put("b")
    scene.view.replace({("default", "b"): record("b", "10.0.0.98")}, scene.now)
    assert scene.pods == {"b"}


def test_an_irrelevant_change_gives_the_same_endpoints() -> None:
    scene = Scene()
    scene.put("a")
    (before,) = scene.endpoints
    assert not scene.view.put(record("a", "10.0.0.97"), scene.now)
    scene.put("a", created="2027-01-01T00:00:00Z")
    (after,) = scene.endpoints
    assert after is before


def test_no_hold_expires_during_an_outage() -> None:
    scene = Scene()
    for name in "ab":
        scene.put(name)
        scene.put(name, ready=False)
    scene.wait(0.5)
    for _ in range(600):
        view = scene.view.look(scene.now, is_current=False)
        assert len(scene.view.endpoints) == 2
        assert view.next_due == scene.now + HOLD_SECONDS
        scene.wait(1.0)
    scene.put("a")
    assert scene.pods == {"a"}
