"""The picker's own in-flight counters."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.pool.inflight import InflightLoad
from tests.depth import examples


@pytest.fixture
def load() -> InflightLoad:
    return InflightLoad()


def test_counts_rise_and_fall_per_endpoint(load: InflightLoad) -> None:
    for key in ("ns/a", "ns/a", "ns/b"):
        load.acquire(key)
    assert (load.requests("ns/a"), load.requests("ns/b"), load.requests("ns/c")) == (2, 1, 0)
    assert load.total == 3
    load.release("ns/b")
    assert dict(load.counts) == {"ns/a": 2}


def test_a_release_without_an_acquire_is_an_error(load: InflightLoad) -> None:
    load.acquire("ns/a")
    load.release("ns/a")
    with pytest.raises(LookupError, match="ns/a"):
        load.release("ns/a")


@examples(100)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=40))
def test_counters_stay_consistent_and_return_to_nothing(steps: list[tuple[str, bool]]) -> None:
    load, held = InflightLoad(), []
    for key, acquire in steps:
        if acquire:
            load.acquire(key)
            held.append(key)
        elif key in held:
            load.release(key)
            held.remove(key)
        load.check_integrity()
        assert load.total == len(held)
    for key in held:
        load.release(key)
    load.check_integrity()
    assert dict(load.counts) == {}


def test_check_integrity_notices_a_wrong_count(load: InflightLoad) -> None:
    """The check itself can fail."""
    load.acquire("ns/a")
    load._counts["ns/a"] = 0
    with pytest.raises(AssertionError):
        load.check_integrity()


def test_parts_of_requests_count_where_they_are_and_nowhere_else(load: InflightLoad) -> None:
    """A prefill is not answered by its endpoint: totals and signals of load leave it out."""
    load.acquire("decode")
    load.acquire_legs(("prefill", "encode"))
    load.acquire_legs(("prefill",))
    assert [load.requests(key) for key in ("decode", "prefill", "encode")] == [1, 2, 1]
    assert (load.total, dict(load.counts)) == (1, {"decode": 1})
    load.release_legs(("prefill", "encode"))
    load.release_legs(("prefill",))
    assert [load.requests(key) for key in ("prefill", "encode")] == [0, 0]
    with pytest.raises(LookupError, match="no part of a request is under way at prefill"):
        load.release_legs(("prefill",))
