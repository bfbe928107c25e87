"""deficit-round-robin-fairness-policy: shares of tokens, however many requests they come in."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.plugins.fairness_policies.deficit_round_robin_fairness_policy import (
    DeficitRoundRobinBand,
    DeficitRoundRobinFairnessPolicy,
    DeficitRoundRobinFairnessPolicyParameters,
)
from picker.types import Usage
from tests.depth import examples
from tests.support.picker.band_queue import Queue

QUANTUM = 512


def _band(**parameters: Any) -> DeficitRoundRobinBand:
    chosen = DeficitRoundRobinFairnessPolicyParameters(**parameters)
    return DeficitRoundRobinFairnessPolicy(chosen).for_band(0)


def _jain(shares: list[float]) -> float:
    return sum(shares) ** 2 / (len(shares) * sum(share * share for share in shares))


@dataclass(frozen=True)
class Tenant:
    size: int
    estimate: float = 1.0
    spread: float = 0.0

    def draw(self, rng: Random) -> tuple[int, int]:
        real = max(1, round(self.size * (1 + self.spread * rng.uniform(-1, 1))))
        noise = 2 ** (self.spread * rng.uniform(-2, 2))
        return real, max(1, round(self.size * self.estimate * noise))


def served_by(
    band: Any, tenants: Mapping[str, Tenant], slots: int, num_tokens: int, seed: int = 0
) -> Counter[str]:
    """Return the tokens of completed requests of tenants who always have more to ask for.

    A request takes time by its tokens in one of `slots` places.
    """
    rng, served, ends = Random(seed), Counter[str](), list[tuple[float, int]]()
    real: dict[int, int] = {}

    def push(name: str) -> None:
        tokens, estimate = tenants[name].draw(rng)
        real[band.push(name, estimate).sequence] = tokens

    for name in tenants:
        for _ in range(slots):
            push(name)
    while served.total() < num_tokens:
        while len(ends) < slots:
            item = band.dispatch()
            push(item.flow)
            heappush(ends, (band.now + real[item.sequence], item.sequence))
        band.now, sequence = heappop(ends)
        item = next(one for one in band.under_way if one.sequence == sequence)
        prompt = real[sequence] // 2
        band.complete(item, Usage(prompt, real[sequence] - prompt))
        served[item.flow] += real[sequence]
    return served


@examples(25)
@given(
    tenants=st.lists(
        st.builds(
            Tenant, st.integers(100, 1000), st.floats(0.1, 10.0), st.sampled_from([0.0, 0.5, 0.9])
        ),
        min_size=2,
        max_size=5,
    ),
    slots=st.integers(1, 24),
    seed=st.integers(0, 99),
)
def test_equal_tenants_are_served_equally(tenants: list[Tenant], slots: int, seed: int) -> None:
    named = {f"t{index}": tenant for index, tenant in enumerate(tenants)}
    served = served_by(Queue(_band()), named, slots, 60_000 * len(tenants), seed)
    assert _jain([served[name] for name in named]) >= 0.95


def test_a_constant_error_of_estimates_is_learned() -> None:
    tenants = {"low": Tenant(1000, 0.1), "right": Tenant(1000), "high": Tenant(1000, 10.0)}
    served = served_by(Queue(_band()), tenants, 16, 600_000)
    assert _jain([served[name] for name in tenants]) >= 0.99


@examples(20)
@given(
    weights=st.lists(st.sampled_from([0.5, 1.0, 2.0, 5.0]), min_size=2, max_size=4),
    sizes=st.lists(st.integers(50, 800), min_size=4, max_size=4),
    slots=st.integers(1, 8),
)
def test_shares_follow_the_weights(weights: list[float], sizes: list[int], slots: int) -> None:
    chosen = {f"t{index}": weight for index, weight in enumerate(weights)}
    tenants = {name: Tenant(size) for name, size in zip(chosen, sizes, strict=False)}
    band = Queue(_band(weights=chosen))
    served = served_by(band, tenants, slots, 100_000)
    per_weight = [served[name] / weight for name, weight in chosen.items()]
    bound = max((slots * max(sizes)) / weight for weight in weights) + 2 * QUANTUM
    assert max(per_weight) - min(per_weight) <= bound


@examples(40)
@given(
    costs=st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(1, 3000)), min_size=3, max_size=200
    )
)
def test_waiting_tenants_differ_by_at_most_a_turn_and_a_request(
    costs: list[tuple[str, int]],
) -> None:
    weights = {"a": 1.0, "b": 2.0, "c": 0.5}
    band, served = Queue(_band(weights=weights)), Counter[str]()
    greatest = dict.fromkeys(weights, 0)
    for flow, cost in costs:
        band.push(flow, cost)
        greatest[flow] = max(greatest[flow], cost)
    backlogged = {flow for flow, items in band.flows.items() if items}
    while len(backlogged) > 1:
        item = band.dispatch()
        served[item.flow] += item.tokens
        for one in backlogged:
            for other in backlogged:
                distance = served[one] / weights[one] - served[other] / weights[other]
                assert distance <= 2 * QUANTUM + greatest[one] / weights[one]
        backlogged = {flow for flow in backlogged if band.flows[flow]}


def test_a_turn_is_worth_a_quantum() -> None:
    band = Queue(_band(quantum_tokens=100, weights={"b": 2.0}))
    for _ in range(6):
        band.push("a", 50)
        band.push("b", 50)
        band.push("c", 250)
    assert band.drain() == "aabbbbcaabbcaacccc"


def test_a_debt_does_not_hold_back_a_tenant_that_is_alone() -> None:
    band = Queue(_band(quantum_tokens=100))
    band.push_all("a" * 5, 1_000_000)
    for _ in range(4):
        assert band.dispatch().flow == "a"
    band.push_all("bb", 100)
    assert band.drain() == "bba"


def test_an_absent_tenant_earns_no_credit() -> None:
    band = Queue(_band(quantum_tokens=100))
    band.push("a", 1)
    band.dispatch()
    for _ in range(50):
        band.push("b", 100)
        band.dispatch()
    band.push_all("ab" * 3, 100)
    assert band.drain() in ("ababab", "babaab", "aababb", "abbaab", "abaabb")


def test_an_occasional_tenant_waits_for_one_request() -> None:
    band = Queue(_band())
    band.push("calm", 10)
    band.dispatch()
    for _ in range(200):
        band.push("flood", 100)
        band.push("other", 100)
    for _ in range(7):
        for _ in range(10):
            assert band.dispatch().flow != "calm"
        band.push("calm", 10)
        assert band.dispatch().flow == "calm"


def test_invented_ids_deprive_no_tenant_of_its_turn() -> None:
    band = Queue(_band(quantum_tokens=100))
    band.push("zoe", 100)
    served: list[str] = []
    for made_up in range(12):
        band.push("zoe", 100)
        for name in range(3):
            band.push(f"a{made_up}.{name}", 1000)
        served.append(band.dispatch().flow)
    assert served.count("zoe") >= 2


def test_a_debt_has_a_limit() -> None:
    band = Queue(_band(quantum_tokens=100, max_debt_tokens=1000))
    band.push("a", 1)
    item = band.dispatch()
    band.complete(item, Usage(10**9, 10**9))
    band.push("a", 100)
    band.push_all("b" * 30, 100)
    before = band.drain().index("a")
    assert 9 <= before <= 11


def test_one_cheap_request_does_not_make_the_next_ones_free() -> None:
    """The learned factor has limits, so that pretending does not pay."""
    band = Queue(_band(quantum_tokens=100))
    band.push("a", 100_000)
    band.complete(band.dispatch(), Usage(1, 0))
    band.push_all("ab" * 40, 100)
    assert band.drain()[:40].count("a") <= 36


def test_absurd_token_counts_of_clients_are_limited() -> None:
    band = Queue(_band())
    band.push("a", 10**400)
    band.push("a", 10**400)
    band.complete(band.dispatch(), Usage(2**63 - 1, 2**63 - 1))
    band.push("b", 1)
    assert band.drain() == "ba"


@pytest.mark.parametrize(
    ("parameters", "usage", "expected"),
    [
        ({}, Usage(300, 200), 500),
        ({}, Usage(300, 200, 500, 100), 500),
        ({}, Usage(total_tokens=700), 700),
        ({"completion_token_weight": 2.0}, Usage(300, 200), 700),
        ({"cached_token_weight": 0.1}, Usage(300, 200, cached_tokens=100), 410),
        ({"cached_token_weight": 0.0}, Usage(300, 0, cached_tokens=900), 100),
        ({}, Usage(), 100),
        ({}, None, 100),
    ],
)
def test_the_usage_of_the_response_counts(
    parameters: dict[str, Any], usage: Usage | None, expected: int
) -> None:
    band = Queue(_band(quantum_tokens=1, **parameters))
    band.push("a", 100)
    band.complete(band.dispatch(), usage)
    band.push("a", 1)
    band.push_all("b" * 1000, 1)
    if expected:
        assert band.drain().index("a") == pytest.approx(expected, abs=2)


def test_a_refund_for_requests_before_an_absence_does_not_count() -> None:
    band = Queue(_band(quantum_tokens=10))
    band.push("a", 5000)
    item = band.dispatch()
    for _ in range(60):
        band.push("b", 100)
        band.dispatch()
    band.push("a", 100)
    band.complete(item, Usage(1250, 1250))
    band.push_all("ab" * 9, 100)
    assert "aaa" not in band.drain()[:12]


def test_a_forgotten_flow_has_no_debt_and_no_credit() -> None:
    band = Queue(_band(quantum_tokens=100))
    band.push("a", 10_000)
    item = band.dispatch()
    band.forget("a")
    band.complete(item, Usage(50_000, 50_000))
    band.push_all("ab", 100)
    assert band.drain() == "ab"
