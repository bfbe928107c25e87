"""Requests of one burst are distributed together: alike ones to one endpoint, all evenly."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from picker.contrib.burst import BurstRequest, BurstRules, assign
from tests.depth import examples

POOL = (("a", 0), ("b", 0), ("c", 0))


def requests(*prompts: str, pool: tuple[tuple[str, int], ...] = POOL) -> list[BurstRequest]:
    """A prompt's letters are its blocks, chained."""
    return [
        BurstRequest(tuple(hash(prompt[: i + 1]) for i in range(len(prompt))), pool)
        for prompt in prompts
    ]


def test_requests_that_begin_alike_go_together() -> None:
    found = assign(requests("xab", "yab", "xcd", "zab", "yef"), BurstRules())
    assert found[0] == found[2]
    assert found[1] == found[4]
    assert len(set(found)) == 3


def test_so_much_has_to_be_alike_as_is_asked_for() -> None:
    """One block is not enough for two; prompts that are shorter stand alone."""
    found = assign(requests("xa", "xb", "xa", "x"), BurstRules(colocate_blocks=2))
    assert found[0] == found[2]
    assert len({found[0], found[1], found[3]}) == 3


def test_the_heaviest_group_is_placed_first() -> None:
    """Three requests at one endpoint, two and one and one at the others."""
    found = assign(requests("p", "q", "x1", "x2", "x3", "y1", "y2"), BurstRules())
    assert sorted(Counter(found).values()) == [2, 2, 3]


def test_blocks_can_weigh_instead() -> None:
    """What has to be computed once for all counts once."""
    prompts = ("x1", "x2", "x3", "abcdefgh", "y")
    found = assign(requests(*prompts, pool=POOL[:2]), BurstRules(weigh_blocks=True))
    assert found[:3] == [found[0]] * 3
    assert found[3] != found[0] == found[4]


def test_an_endpoint_takes_no_more_than_it_may() -> None:
    """The rest of a group goes on together; once all are full, everybody is served all the same."""
    rules = BurstRules(max_per_endpoint=2)
    found = assign(requests("x1", "x2", "x3", "x4"), rules)
    assert Counter(found) == {"a": 2, "b": 2}
    assert Counter(assign(requests(*["x"] * 9), rules)) == {"a": 3, "b": 3, "c": 3}


def test_of_equal_endpoints_the_idle_one_is_next() -> None:
    """Then the first one."""
    pool = (("a", 5), ("b", 1), ("c", 1))
    assert assign(requests("x", pool=pool), BurstRules()) == ["b"]


def test_requests_with_other_candidates_are_no_group() -> None:
    alike = [*requests("x", pool=POOL[:1]), *requests("x", pool=POOL[1:2])]
    assert assign(alike, BurstRules()) == ["a", "b"]


@examples(100)
@given(
    st.lists(
        st.tuples(
            st.text("xy", max_size=3),
            st.lists(st.sampled_from("abcd"), min_size=1, max_size=3, unique=True),
        ),
        max_size=12,
    ),
    st.builds(BurstRules, st.integers(1, 3), st.none() | st.integers(1, 4), st.booleans()),
)
def test_everybody_goes_to_a_candidate(
    burst: list[tuple[str, list[str]]], rules: BurstRules
) -> None:
    """One of its own, whatever the others may."""
    asked = [requests(prompt, pool=tuple((k, 0) for k in pool))[0] for prompt, pool in burst]
    found = assign(asked, rules)
    for request, endpoint in zip(asked, found, strict=True):
        assert endpoint in dict(request.endpoints)


@examples(100)
@given(st.lists(st.text("xy", max_size=3), max_size=12), st.integers(1, 5), st.booleans())
def test_nobody_gets_too_many_while_others_have_room(
    prompts: list[str], limit: int, weigh_blocks: bool
) -> None:
    """Of endpoints that may all serve."""
    counts = Counter(assign(requests(*prompts), BurstRules(1, limit, weigh_blocks)))
    if len(prompts) <= limit * len(POOL):
        assert max(counts.values(), default=0) <= limit
    else:
        assert min(counts[key] for key, _ in POOL) >= limit
