"""Simultaneous requests wait for each other and are placed together."""

import asyncio
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.app.in_use import LoopClock
from picker.contrib.burst import BurstPrefixCacheProducer, BurstRequest, BurstRules, assign
from picker.framework.attributes import Attributes
from picker.framework.interfaces import AsyncDataProducer
from picker.framework.services import NoHttp, Services
from picker.prefix.match import PrefixCacheMatchInfo, match_info_key
from tests.depth import examples
from tests.support.picker.plugin_scenes import candidate, configured, request_for

NAME = "burst-prefix-cache-producer"
BLOCK = 64 * 4  # bytes


def producer(**parameters: Any) -> BurstPrefixCacheProducer:
    made = configured(NAME, parameters, services=Services(NoHttp(), clock=LoopClock()))
    assert isinstance(made, BurstPrefixCacheProducer)
    assert isinstance(made, AsyncDataProducer)
    return made


async def ask(
    one: BurstPrefixCacheProducer, prompt: str, after: float = 0.0, endpoints: str = "abc"
) -> PrefixCacheMatchInfo | None:
    await asyncio.sleep(after)
    attributes = Attributes()
    tokens = b"".join(letter.encode() * BLOCK for letter in prompt)
    request = request_for(prompts=(tokens,) if prompt else ())
    pool = [candidate(name) for name in endpoints]
    assert await one.look_up(request, pool, attributes) is request
    return attributes.get(match_info_key(NAME))


def where(info: PrefixCacheMatchInfo | None) -> str:
    assert list(info.match_blocks.values()) == [info.total_blocks]
    return next(iter(info.match_blocks))


@pytest.mark.looptime
async def test_requests_of_one_window_are_placed_together() -> None:
    one, loop = producer(), asyncio.get_running_loop()
    began = loop.time()
    found = await asyncio.gather(
        ask(one, "xa"), ask(one, "xb", 0.03), ask(one, "ya", 0.06), ask(one, "yb", 0.09)
    )
    assert loop.time() - began == pytest.approx(0.1)
    places = list(map(where, found))
    assert places[0] == places[1] != places[2] == places[3]
    assert found[0] == PrefixCacheMatchInfo(2, 64, {places[0]: 2})


@pytest.mark.looptime
async def test_a_later_request_opens_the_next_window() -> None:
    one, loop = producer(windowDurationMs=50), asyncio.get_running_loop()
    began = loop.time()
    await asyncio.gather(ask(one, "x"), ask(one, "x", 0.06))
    assert loop.time() - began == pytest.approx(0.11)


@pytest.mark.looptime
async def test_a_full_window_takes_no_more_requests() -> None:
    one = producer(maxBatchSize=3, maxPerReplica=2)
    found = await asyncio.gather(*(ask(one, "x") for _ in range(6)))
    assert Counter(map(where, found)) == {"default/a": 4, "default/b": 2}


@pytest.mark.looptime
async def test_a_disconnected_client_is_not_counted() -> None:
    one = producer(maxPerReplica=1)
    gone = asyncio.create_task(ask(one, "x"))
    staying = asyncio.create_task(ask(one, "x", 0.01))
    await asyncio.sleep(0.05)
    gone.cancel()
    assert where(await staying) == "default/a"
    with pytest.raises(asyncio.CancelledError):
        await gone


@pytest.mark.looptime
async def test_a_request_without_a_choice_does_not_wait() -> None:
    one, loop = producer(), asyncio.get_running_loop()
    began = loop.time()
    assert where(await ask(one, "x", endpoints="b")) == "default/b"
    assert await ask(one, "") is None
    assert loop.time() == began


@pytest.mark.looptime
async def test_salts_and_models_share_no_blocks() -> None:
    one, pool = producer(), [candidate("a"), candidate("b"), candidate("c")]
    every = [Attributes() for _ in range(3)]
    differing: list[dict[str, Any]] = [{}, {"salt": "s"}, {"model": "other"}]
    requests = [request_for(prompts=(b"x" * BLOCK,), **one) for one in differing]
    await asyncio.gather(*(one.look_up(r, pool, a) for r, a in zip(requests, every, strict=True)))
    assert len({where(a.get(match_info_key(NAME))) for a in every}) == 3


def test_the_time_limit_is_longer_than_the_window() -> None:
    """Otherwise the window would never end in time."""
    assert producer(windowDurationMs=10_000).timeout_seconds > 10


POOL = (("a", 0), ("b", 0), ("c", 0))


def requests(*prompts: str, pool: tuple[tuple[str, int], ...] = POOL) -> list[BurstRequest]:
    return [
        BurstRequest(tuple(hash(prompt[: i + 1]) for i in range(len(prompt))), pool)
        for prompt in prompts
    ]


def test_requests_with_a_common_prefix_form_a_group() -> None:
    found = assign(requests("xab", "yab", "xcd", "zab", "yef"), BurstRules())
    assert found[0] == found[2]
    assert found[1] == found[4]
    assert len(set(found)) == 3


def test_a_group_needs_the_configured_number_of_common_blocks() -> None:
    found = assign(requests("xa", "xb", "xa", "x"), BurstRules(colocate_blocks=2))
    assert found[0] == found[2]
    assert len({found[0], found[1], found[3]}) == 3


def test_the_largest_group_is_placed_first() -> None:
    found = assign(requests("p", "q", "x1", "x2", "x3", "y1", "y2"), BurstRules())
    assert sorted(Counter(found).values()) == [2, 2, 3]


def test_blocks_can_be_the_weight() -> None:
    prompts = ("x1", "x2", "x3", "abcdefgh", "y")
    found = assign(requests(*prompts, pool=POOL[:2]), BurstRules(weigh_blocks=True))
    assert found[:3] == [found[0]] * 3
    assert found[3] != found[0] == found[4]


def test_an_endpoint_takes_no_more_than_its_limit() -> None:
    rules = BurstRules(max_per_endpoint=2)
    found = assign(requests("x1", "x2", "x3", "x4"), rules)
    assert Counter(found) == {"a": 2, "b": 2}
    assert Counter(assign(requests(*["x"] * 9), rules)) == {"a": 3, "b": 3, "c": 3}


def test_the_idle_endpoint_is_next_among_equal_ones() -> None:
    pool = (("a", 5), ("b", 1), ("c", 1))
    assert assign(requests("x", pool=pool), BurstRules()) == ["b"]


def test_requests_with_other_candidates_form_no_group() -> None:
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
def test_every_request_gets_one_of_its_candidates(
    burst: list[tuple[str, list[str]]], rules: BurstRules
) -> None:
    asked = [requests(prompt, pool=tuple((k, 0) for k in pool))[0] for prompt, pool in burst]
    found = assign(asked, rules)
    for request, endpoint in zip(asked, found, strict=True):
        assert endpoint in dict(request.endpoints)


@examples(100)
@given(st.lists(st.text("xy", max_size=3), max_size=12), st.integers(1, 5), st.booleans())
def test_no_endpoint_exceeds_the_limit_while_others_have_room(
    prompts: list[str], limit: int, weigh_blocks: bool
) -> None:
    counts = Counter(assign(requests(*prompts), BurstRules(1, limit, weigh_blocks)))
    if len(prompts) <= limit * len(POOL):
        assert max(counts.values(), default=0) <= limit
    else:
        assert min(counts[key] for key, _ in POOL) >= limit
