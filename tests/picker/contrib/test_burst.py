"""burst-prefix-cache-producer: requests wait for each other, and go together."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from picker.app.in_use import LoopClock
from picker.contrib.burst import BurstPrefixCacheProducer
from picker.framework.attributes import Attributes
from picker.framework.interfaces import AsyncDataProducer
from picker.framework.services import NoHttp, Services
from picker.prefix.match import PrefixCacheMatchInfo, match_info_key
from tests.support.picker.plugin_scenes import candidate, configured, request_for

NAME = "burst-prefix-cache-producer"
BLOCK = 64 * 4  # bytes


def producer(**parameters: Any) -> BurstPrefixCacheProducer:
    """One on the loop's time."""
    made = configured(NAME, parameters, services=Services(NoHttp(), clock=LoopClock()))
    assert isinstance(made, BurstPrefixCacheProducer)
    assert isinstance(made, AsyncDataProducer)
    return made


async def ask(
    one: BurstPrefixCacheProducer, prompt: str, after: float = 0.0, endpoints: str = "abc"
) -> PrefixCacheMatchInfo | None:
    """`await ask(producer, "xy", after=…)`: the match of a prompt whose blocks are letters."""
    await asyncio.sleep(after)
    attributes = Attributes()
    tokens = b"".join(letter.encode() * BLOCK for letter in prompt)
    request = request_for(prompts=(tokens,) if prompt else ())
    pool = [candidate(name) for name in endpoints]
    assert await one.look_up(request, pool, attributes) is request
    return attributes.get(match_info_key(NAME))


def where(info: PrefixCacheMatchInfo | None) -> str:
    """The endpoint that everything is said to be at."""
    assert list(info.match_blocks.values()) == [info.total_blocks]
    return next(iter(info.match_blocks))


@pytest.mark.looptime
async def test_requests_of_one_window_go_together() -> None:
    """Alike ones to one endpoint, when the window of the first one ends."""
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
    """It waits its own time, and nothing is remembered."""
    one, loop = producer(windowDurationMs=50), asyncio.get_running_loop()
    began = loop.time()
    await asyncio.gather(ask(one, "x"), ask(one, "x", 0.06))
    assert loop.time() - began == pytest.approx(0.11)


@pytest.mark.looptime
async def test_a_full_window_takes_no_more() -> None:
    """Six alike requests in windows of three: each window is distributed by itself."""
    one = producer(maxBatchSize=3, maxPerReplica=2)
    found = await asyncio.gather(*(ask(one, "x") for _ in range(6)))
    assert Counter(map(where, found)) == {"default/a": 4, "default/b": 2}


@pytest.mark.looptime
async def test_who_leaves_is_not_counted() -> None:
    """A client that is gone takes nobody's place."""
    one = producer(maxPerReplica=1)
    gone = asyncio.create_task(ask(one, "x"))
    staying = asyncio.create_task(ask(one, "x", 0.01))
    await asyncio.sleep(0.05)
    gone.cancel()
    assert where(await staying) == "default/a"
    with pytest.raises(asyncio.CancelledError):
        await gone


@pytest.mark.looptime
async def test_who_has_no_choice_does_not_wait() -> None:
    """One candidate, or nothing to compare."""
    one, loop = producer(), asyncio.get_running_loop()
    began = loop.time()
    assert where(await ask(one, "x", endpoints="b")) == "default/b"
    assert await ask(one, "") is None
    assert loop.time() == began


@pytest.mark.looptime
async def test_salts_and_models_are_not_alike() -> None:
    """As in the other prefix caches."""
    one, pool = producer(), [candidate("a"), candidate("b"), candidate("c")]
    every = [Attributes() for _ in range(3)]
    differing: list[dict[str, Any]] = [{}, {"salt": "s"}, {"model": "other"}]
    requests = [request_for(prompts=(b"x" * BLOCK,), **one) for one in differing]
    await asyncio.gather(*(one.look_up(r, pool, a) for r, a in zip(requests, every, strict=True)))
    assert len({where(a.get(match_info_key(NAME))) for a in every}) == 3


def test_the_director_waits_longer_than_the_window() -> None:
    """Else the window would never end in time."""
    assert producer(windowDurationMs=10_000).timeout_seconds > 10
