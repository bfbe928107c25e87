"""The last slots of the pool are reserved for flows that use little."""

import asyncio
from itertools import count

import pytest

from picker.flowcontrol.shell.controller import FlowController
from picker.metrics.picker_metrics import PickerMetrics
from picker.plugins.fairness_policies.deficit_round_robin_fairness_policy import (
    DeficitRoundRobinFairnessPolicy,
    DeficitRoundRobinFairnessPolicyParameters,
)
from picker.types import Usage
from tests.support.picker.flow_scene import (
    Ceilings,
    Client,
    Pool,
    Scene,
    Slots,
    band,
    settle,
    with_settings,
)

pytestmark = pytest.mark.looptime
SLOTS, RESERVED = 10, 3


def turns(headroom: float = RESERVED / SLOTS, **values: object) -> object:
    values = {"min_headroom": headroom, "max_headroom": headroom, **values}
    parameters = DeficitRoundRobinFairnessPolicyParameters(**values)  # type: ignore[arg-type]
    return band(fairness=DeficitRoundRobinFairnessPolicy(parameters), max_requests=20)


def scene(headroom: float = RESERVED / SLOTS, **values: object) -> Scene:
    return Scene(Pool(1), detector=Slots(SLOTS), default_band=turns(headroom), **values)


async def arrive(one: Scene, flow: str, number: int, **values: object) -> list[Client]:
    return [await one.arrive(fairness_id=flow, **values) for _ in range(number)]


def let_in(clients: list[Client]) -> int:
    return sum(client.ticket is not None for client in clients)


async def test_a_lone_flow_fills_the_pool() -> None:
    pool = scene()
    assert let_in(await arrive(pool, "flood", 15)) == SLOTS


async def test_slots_are_reserved_for_a_flow_that_uses_little() -> None:
    pool = scene()
    await pool.done((await arrive(pool, "calm", 1))[0])
    flood = await arrive(pool, "flood", 15)
    assert let_in(flood) == SLOTS - RESERVED
    calm = await arrive(pool, "calm", RESERVED)
    assert let_in(calm) == RESERVED
    await pool.done(flood[0])
    assert let_in(flood) == SLOTS - RESERVED
    for client in calm:
        await pool.done(client)
    assert let_in(flood) == SLOTS - RESERVED + 1
    pool.gate.check_integrity()


async def test_no_slots_are_reserved_for_an_idle_flow() -> None:
    pool = scene()
    calm = (await arrive(pool, "calm", 1))[0]
    flood = await arrive(pool, "flood", 15)
    await asyncio.sleep(9.0)
    assert let_in(flood) == SLOTS - RESERVED - 1
    await asyncio.sleep(1.5)
    assert let_in(flood) == SLOTS - 1
    await pool.done(calm)
    await asyncio.sleep(9.0)
    assert let_in(flood) == SLOTS - 1
    await asyncio.sleep(1.5)
    assert let_in(flood) == SLOTS


async def test_an_open_gate_is_open_to_all_flows() -> None:
    pool = scene()
    calm = (await arrive(pool, "calm", 1))[0]
    await arrive(pool, "flood", SLOTS - RESERVED - 2)
    assert pool.gate.is_open
    assert let_in(await arrive(pool, "flood", 1)) == 1
    assert not pool.gate.is_open
    await pool.done(calm)
    assert pool.gate.is_open
    assert let_in(await arrive(pool, "flood", 1)) == 1


async def test_flows_that_all_wait_fill_the_pool() -> None:
    pool = scene()
    clients = [
        client for _ in range(20) for name in "abc" for client in await arrive(pool, name, 1)
    ]
    usage = Usage(50, 103)
    while waiting := [client for client in clients if client.waits]:
        assert pool.gate.num_under_way == SLOTS, len(waiting)
        oldest = next(one for one in pool.order if not one.is_over)
        await pool.done(oldest, usage)
        if len({one.request.fairness_id for one in waiting}) < 3:
            break
    shares = [sum(one.request.fairness_id == name for one in pool.order) for name in "abc"]
    assert max(shares) - min(shares) <= 4


async def test_a_band_with_reserved_slots_blocks_lower_bands() -> None:
    """Otherwise a lower priority would take the reserve of a higher one."""
    pool = scene(bands={5: turns()})
    await pool.done((await arrive(pool, "calm", 1, priority=5))[0])
    high = await arrive(pool, "flood", SLOTS, priority=5)
    low = await arrive(pool, "other", 2)
    assert let_in(high) == SLOTS - RESERVED
    assert let_in(low) == 0
    for client in high:
        if client.waits and client.task is not None:
            client.task.cancel()
    await settle()
    assert let_in(low) == 2


async def test_the_reserve_is_a_share_of_the_bands_ceiling() -> None:
    pool = Scene(
        Pool(1), detector=Slots(20), default_band=turns(), usage_limits=Ceilings(default=0.5)
    )
    await pool.done((await arrive(pool, "calm", 1))[0])
    assert let_in(await arrive(pool, "flood", 15)) == SLOTS - RESERVED
    assert let_in(await arrive(pool, "calm", 5)) == RESERVED


async def test_a_policy_without_headroom_reserves_no_slots() -> None:
    pool = scene(headroom=0.0)
    await pool.done((await arrive(pool, "calm", 1))[0])
    flood = await arrive(pool, "flood", 12)
    assert let_in(flood) == SLOTS
    assert let_in(await arrive(pool, "calm", 1)) == 0
    pool.gate.use(with_settings(pool.settings, default_band=turns()))
    for client in flood[:RESERVED]:
        await pool.done(client)
    assert pool.gate.num_under_way == SLOTS - RESERVED + 1  # no usage was recorded


async def test_an_unknown_tenant_waits_for_its_turn() -> None:
    """Otherwise invented names would delay others; known tenants enter out of turn."""
    pool = scene()
    await pool.done((await arrive(pool, "known", 1))[0])
    flood = await arrive(pool, "flood", 15)
    new = await arrive(pool, "new", 1)
    assert let_in(new) == 0
    assert let_in(await arrive(pool, "known", 1)) == 1
    while not let_in(new):
        await pool.done(next(one for one in flood if one.ticket and not one.is_over))
    assert let_in(flood) < 15


def follows(slots: int, **values: object) -> Scene:
    fairness = DeficitRoundRobinFairnessPolicy(
        DeficitRoundRobinFairnessPolicyParameters(**values)  # type: ignore[arg-type]
    )
    shared = band(fairness=fairness, max_requests=50)
    return Scene(Pool(1), detector=Slots(slots), default_band=shared)


async def test_one_slot_is_reserved_for_an_occasional_tenant() -> None:
    pool = follows(40)
    await pool.done((await arrive(pool, "calm", 1))[0])
    flood = await arrive(pool, "flood", 45)
    assert let_in(flood) == 39
    for _ in range(5):
        (calm,) = await arrive(pool, "calm", 1)
        assert calm.ticket is not None
        assert let_in(flood) == 39
        await pool.done(calm)


async def test_the_reserve_is_within_its_bounds() -> None:
    pool = follows(20, max_headroom=0.1)
    await arrive(pool, "calm", 9)
    assert let_in(await arrive(pool, "flood", 30)) == 20 - 9 - 2
    pool = follows(20, min_headroom=0.25)
    await pool.done((await arrive(pool, "calm", 1))[0])
    assert let_in(await arrive(pool, "flood", 30)) == 20 - 5


async def test_an_average_load_counts_if_a_detector_cannot_see_new_requests() -> None:

    class Unmoved(Slots):
        """Counts requests only after they left for an endpoint."""

        def saturation(self, candidates: object, attributes: object, now_seconds: float) -> float:
            return sum(pool.pool.under_way.values()) / self.slots

    pool = follows(20)
    pool.gate.use(with_settings(pool.settings, detector=Unmoved(20)))
    await pool.done((await arrive(pool, "calm", 1))[0])
    assert let_in(await arrive(pool, "flood", 30)) == 19


async def test_a_request_admitted_on_arrival_has_a_queue_time_of_0() -> None:
    pool = follows(20)
    clock = (place / 1000 for place in count())
    pool.gate = FlowController(pool.settings, pool.pool, lambda: next(clock), PickerMetrics())
    await pool.done((await arrive(pool, "calm", 1))[0])
    flood = await arrive(pool, "flood", 30)
    assert any(client.waits for client in flood)
    (calm,) = await arrive(pool, "calm", 1)
    assert calm.ticket.queue_seconds == 0
