"""The load of a large pool is estimated between scans."""

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.flowcontrol.load_estimate import LARGE_POOL, LoadEstimate
from picker.framework.attributes import Attributes
from picker.framework.disaggregation import ROLE_LABEL
from picker.types import Candidate
from tests.depth import examples
from tests.support.picker.flow_scene import Pool, Slots


class Steps(Slots):
    """Counts only requests beyond two per endpoint, like a detector that reads queues."""

    def saturation(
        self, candidates: Sequence[Candidate], attributes: Attributes, now_seconds: float
    ) -> float:
        self.asked += 1
        waiting = sum(max(0, one.inflight_requests - 2) for one in candidates)
        return waiting / 4 / len(candidates)


@examples(30)
@given(
    st.integers(0, 9),
    st.sampled_from([1, 5, LARGE_POOL, 200]),
    st.booleans(),
    st.sampled_from([Slots, Steps]),
)
def test_an_estimate_agrees_with_a_scan(
    seed: int, size: int, has_roles: bool, kind: type[Slots]
) -> None:
    rng, pool = Random(seed), Pool(size, {ROLE_LABEL: "both"} if has_roles else None)
    estimate, exact = LoadEstimate(pool), LoadEstimate(pool)
    detector = kind(4)
    estimate.use(detector)
    pool.under_way.update({one.key: rng.randrange(4) for one in pool.endpoints})
    let_in, under_way = 0, list(pool.under_way.elements())
    for _ in range(400):
        step = rng.random()
        if step < 0.5:
            let_in += 1
            estimate.entered(5)
        elif step < 0.75 and let_in:
            let_in -= 1
            key = min(pool.endpoints, key=lambda one: pool.under_way[one.key]).key
            under_way.append(key)
            pool.under_way[key] += 1
            estimate.left(5)
        elif under_way:
            pool.under_way[under_way.pop(rng.randrange(len(under_way)))] -= 1
            estimate.ended(5, has_left=True)
        exact.use(kind(4))
        exact.let_in = estimate.let_in
        exact.pool_changed()
        found, expected = estimate.at(0.0), exact.at(0.0)
        weight = 1 / 4 / size
        is_exact = size < LARGE_POOL or kind is Slots  # which grows evenly
        allowed = 0.0 if is_exact else (size / 16 + 1) * weight
        assert found.effective == pytest.approx(expected.effective, abs=allowed + 1e-9)
        assert found.stages.keys() == expected.stages.keys()
    assert estimate.let_in.requests == let_in
    estimate.check_integrity()
    if size >= LARGE_POOL:
        looks = 400 / (size / 16) + 2
        assert detector.asked <= 2 * looks * (2 if has_roles else 1)


def test_an_unchanged_pool_is_not_scanned_again() -> None:
    detector, estimate = Slots(), LoadEstimate(Pool(3))
    estimate.use(detector)
    for _ in range(5):
        estimate.at(10.0)
    assert detector.asked == 1
    estimate.at(10.1)
    assert detector.asked == 2


def test_changes_of_a_large_pool_are_batched() -> None:
    for size, at_once in ((3, True), (1000, False)):
        pool, detector = Pool(size), Slots()
        estimate = LoadEstimate(pool)
        estimate.use(detector)
        estimate.at(1.0)
        pool.under_way.update(one.key for one in pool.endpoints)
        estimate.pool_changed()
        assert (estimate.at(1.001).effective == 1.0) is at_once
        assert estimate.at(1.021).effective == 1.0
