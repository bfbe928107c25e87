"""The subset hint and the in-flight counts turn the pool into candidates."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from picker.requestcontrol.candidates import LoadedCandidates, candidates_for
from picker.types import Candidate, Endpoint, EndpointMetrics

METRICS = EndpointMetrics(waiting_requests=3)
POOL = (
    Candidate(Endpoint("a", "10.0.0.1", 8000), METRICS),
    Candidate(Endpoint("a-rank-1", "10.0.0.1", 8001)),
    Candidate(Endpoint("b", "10.0.0.2", 8000)),
    Candidate(Endpoint("six", "2001:db8::1", 8000)),
    Candidate(Endpoint("named", "llm.example", 443)),
)


@pytest.mark.parametrize(
    ("hint", "names"),
    [
        (None, ["a", "a-rank-1", "b", "six", "named"]),
        (("LLM.Example:443",), ["named"]),
        ((), []),
        (("10.0.0.1",), ["a", "a-rank-1"]),
        (("10.0.0.1:8001",), ["a-rank-1"]),
        (("10.0.0.2:8000", "10.0.0.1:8000"), ["a", "b"]),
        ((" 10.0.0.2 ",), ["b"]),
        (("10.0.0.9:8000",), []),
        (("10.0.0.1:9999",), []),
        (("[2001:db8::1]:8000",), ["six"]),
        (("[2001:db8::1]",), ["six"]),
        (("2001:db8::1",), ["six"]),
        (("2001:DB8:0:0:0:0:0:1",), ["six"]),
        (("[2001:db8::1]:8001",), []),
        (("2001:db8::1]:8000", "[2001:db8::1", "[10.0.0.1]:8000", "[10.0.0.1]"), []),
        (("localhost", "localhost:8000", "::1]]", "10.0.0.1:8000:8001"), []),
        (("unknown", "10.0.0.2:8000"), ["b"]),
        (("10.0.0.1:", "10.0.0.1:http", ":8000", "", "10.0.0.1:99999999"), []),
    ],
)
def test_the_subset_hint_compares_ports_only_where_it_names_one(
    hint: tuple[str, ...] | None, names: list[str]
) -> None:
    found = candidates_for(POOL, hint, {}, LoadedCandidates())
    assert [candidate.endpoint.name for candidate in found] == names


def test_the_pickers_own_load_is_filled_in() -> None:
    found = candidates_for(
        POOL, ("10.0.0.1",), {"default/a": 2, "default/b": 7}, LoadedCandidates()
    )
    assert list(found) == [Candidate(POOL[0].endpoint, METRICS, 2), POOL[1]]


def test_an_idle_pool_is_passed_through_untouched() -> None:
    assert candidates_for(POOL, None, {}, LoadedCandidates()) is POOL


def test_attributes_and_last_metrics_come_along() -> None:
    known = Candidate(POOL[0].endpoint, None, 0, METRICS, {"x/y": 1})
    (found,) = candidates_for([known], None, {"default/a": 1}, LoadedCandidates())
    assert found == Candidate(POOL[0].endpoint, None, 1, METRICS, {"x/y": 1})


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.booleans()), max_size=30))
def test_cached_candidates_equal_new_ones(
    changes: list[tuple[int, int, bool]],
) -> None:
    loaded, pool, counts = LoadedCandidates(), list(POOL), {}
    for index, count, is_scraped in changes:
        candidate = pool[index % len(pool)]
        if is_scraped:
            metrics = EndpointMetrics(waiting_requests=count)
            pool[index % len(pool)] = replace(candidate, metrics=metrics)
        elif count:
            counts[candidate.key] = count
        else:
            counts.pop(candidate.key, None)
        expected = [replace(one, inflight_requests=counts.get(one.key, 0)) for one in pool]
        assert loaded.of(pool, counts) == expected
        assert loaded.of(pool, counts) == expected


def test_endpoints_that_are_gone_are_forgotten() -> None:
    loaded = LoadedCandidates()
    for number in range(500):
        candidate = Candidate(Endpoint(f"w{number}", "10.0.0.1", 8000))
        loaded.of([candidate], {candidate.key: 1})
    assert len(loaded._made) < 100
