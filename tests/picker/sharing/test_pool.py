"""A datastore that mirrors another through shared memory shows what that shows."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from picker.framework.findings import Topology
from picker.pool.datastore import Datastore, EndpointChanges
from picker.sharing.block import BlockReader, BlockWriter, create_block
from picker.sharing.pool import Lives, PoolReader, PoolWriter
from picker.types import Endpoint, EndpointMetrics


@dataclass
class Forgetful:
    """An observer that remembers what it was told to forget."""

    told: list[str] = field(default_factory=list)

    def endpoint_removed(self, key: str) -> None:
        self.told.append(key)


class Shared:
    """A pool, and another one that reads what is published of the first."""

    def __init__(self, capacity_bytes: int = 100_000) -> None:
        self.fd = create_block("test", capacity_bytes)
        self.lives, self.seen, self.forgotten = Lives(), Forgetful(), Forgetful()
        self.source = Datastore((self.seen, self.lives))
        self.mirror = Datastore((self.forgotten,))
        self.changes: list[EndpointChanges] = []
        self.mirror.subscribe(self.changes.append)
        self.writer = PoolWriter(BlockWriter(self.fd), self.lives)
        self.reader = PoolReader(BlockReader(self.fd), self.mirror)

    def publish(self) -> bool:
        self.writer.publish(self.source.snapshot())
        return self.reader.poll()


@contextmanager
def sharing(capacity_bytes: int = 100_000) -> Iterator[Shared]:
    shared = Shared(capacity_bytes)
    yield shared
    os.close(shared.fd)


def endpoint(name: str, port: int = 8000, **labels: str) -> Endpoint:
    return Endpoint(name, "10.0.0.1", port, labels=MappingProxyType(labels))


def test_a_pool_is_mirrored_with_all_that_is_known() -> None:
    """Identity, load, what was known last, findings."""
    with sharing() as shared:
        assert not shared.mirror.synced
        shared.source.set_endpoints([endpoint("a", zone="z"), endpoint("b"), endpoint("c")])
        loras = EndpointMetrics(3, 2, 0.5, active_models=frozenset({"x"}), max_active_models=4)
        shared.source.update_metrics("default/a", loras, {"Place/t": Topology("h", "r")})
        shared.source.update_metrics("default/b", EndpointMetrics(updated_at_seconds=1.5))
        shared.source.mark_stale("default/b")
        assert shared.publish()
        assert shared.mirror.synced
        assert shared.mirror.snapshot().candidates == shared.source.snapshot().candidates
        assert [one.key for one in shared.changes[0].added] == [
            "default/a",
            "default/b",
            "default/c",
        ]
        assert not shared.publish()


def test_what_has_not_changed_is_the_same_object() -> None:
    """Only changes are decoded."""
    with sharing() as shared:
        shared.source.set_endpoints([endpoint("a"), endpoint("b")])
        shared.publish()
        a, b = shared.mirror.snapshot().candidates
        shared.source.update_metrics("default/a", EndpointMetrics(1))
        shared.publish()
        fresh, same = shared.mirror.snapshot().candidates
        assert same is b
        assert fresh is not a
        assert fresh.endpoint is a.endpoint


def test_restarts_and_returns_are_noticed_however_much_was_missed() -> None:
    """An endpoint that restarted, and one that left and came back, between two looks."""
    with sharing() as shared:
        shared.source.set_endpoints([endpoint("a"), endpoint("b"), endpoint("c")])
        shared.source.update_metrics("default/a", EndpointMetrics(process_start_time_seconds=1))
        shared.publish()
        assert shared.forgotten.told == []
        for start in (2, 3):
            again = EndpointMetrics(process_start_time_seconds=start)
            shared.source.update_metrics("default/a", again)
        shared.source.set_endpoints([endpoint("a"), endpoint("c")])
        shared.writer.publish(shared.source.snapshot())
        shared.source.set_endpoints([endpoint("a"), endpoint("b"), endpoint("c", port=1)])
        shared.publish()
        assert sorted(shared.forgotten.told) == ["default/a", "default/b", "default/c"]


def test_what_cannot_be_shared_is_left_out_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """A finding of an unknown type, a number beyond all bounds, an endpoint of unspeakable name."""
    with sharing() as shared:
        shared.source.set_endpoints([endpoint("a"), endpoint("\ud800")])
        for count in range(2):
            findings = {"Odd/x": 1j, "Huge/x": 2**70, "Fine/x": count}
            shared.source.update_metrics("default/a", EndpointMetrics(), findings)
            shared.publish()
        (one,) = shared.mirror.snapshot().candidates
        assert dict(one.attributes) == {"Fine/x": 1}
        assert len(caplog.records) == 3


def test_a_pool_beyond_all_bounds_leaves_what_was_known(caplog: pytest.LogCaptureFixture) -> None:
    """And says so."""
    with sharing(1000) as shared:
        shared.source.set_endpoints([endpoint("a")])
        assert shared.publish()
        shared.source.set_endpoints([endpoint(f"e{n}") for n in range(100)])
        assert not shared.publish()
        assert [one.endpoint.name for one in shared.mirror.snapshot().candidates] == ["a"]
        assert "the pool cannot be shared" in caplog.text
        shared.source.set_endpoints([endpoint("b")])
        assert shared.publish()


METRICS = st.builds(
    EndpointMetrics,
    waiting_requests=st.integers(0, 9),
    kv_cache_usage=st.floats(0, 1),
    block_size_tokens=st.none() | st.integers(1, 64),
    process_start_time_seconds=st.none() | st.integers(1, 3).map(float),
    active_models=st.frozensets(st.sampled_from("xyz")),
    updated_at_seconds=st.floats(0, 1e9),
)
SMALL = st.integers(-(2**63), 2**63 - 1)
KEYS = st.sampled_from(["default/a", "default/b", "default/c"])
FINDINGS: st.SearchStrategy[dict[str, Any]] = st.dictionaries(
    st.sampled_from(["One/x", "Two/x"]), SMALL | st.builds(Topology, st.text(max_size=3))
)


class Mirroring(RuleBasedStateMachine):
    """Random updates; the mirror is equal after each look, and observers hear as much."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = Shared()
        self.pending: set[str] = set()

    def teardown(self) -> None:
        os.close(self.shared.fd)

    @rule(
        names=st.lists(st.sampled_from("abc"), unique=True),
        port=st.integers(1, 2),
        labels=st.dictionaries(st.sampled_from("lm"), st.text(max_size=3), max_size=2),
    )
    def set_endpoints(self, names: list[str], port: int, labels: dict[str, str]) -> None:
        self.shared.source.set_endpoints([endpoint(name, port, **labels) for name in names])

    @rule(key=KEYS, metrics=METRICS, findings=FINDINGS)
    def update_metrics(self, key: str, metrics: EndpointMetrics, findings: dict[str, Any]) -> None:
        self.shared.source.update_metrics(key, metrics, findings)

    @rule(key=KEYS)
    def mark_stale(self, key: str) -> None:
        self.shared.source.mark_stale(key)

    @rule(key=KEYS)
    def drop(self, key: str) -> None:
        self.shared.source.drop_attributes(key, ["One/x"])

    @rule()
    def look(self) -> None:
        shared = self.shared
        known = {one.key for one in shared.mirror.snapshot().candidates}
        shared.publish()
        there = {one.key for one in shared.source.snapshot().candidates}
        assert shared.mirror.snapshot().candidates == shared.source.snapshot().candidates
        # Of what the mirror had not seen there is nothing to forget.
        assert set(shared.forgotten.told) == {key for key in shared.seen.told if key in known}
        assert {one.key for one in shared.mirror.snapshot().candidates} == there
        shared.forgotten.told.clear()
        shared.seen.told.clear()

    @invariant()
    def nothing_is_forgotten_without_a_look(self) -> None:
        assert shared_forgot_nothing(self.shared)


def shared_forgot_nothing(shared: Shared) -> bool:
    return shared.forgotten.told == []


Mirroring.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
test_random_updates_are_mirrored = Mirroring.TestCase
