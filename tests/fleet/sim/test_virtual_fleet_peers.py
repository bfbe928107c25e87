"""Several pickers over one pool in virtual time, compared with a single one."""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

import pytest

from fleet.sim.living_worker import WorkerSettings
from fleet.sim.virtual_fleet import ServedPrompt, Simulation
from fleet.sim.virtual_time import run_in_virtual_time
from tests.depth import by_depth
from tests.support.fleet.peer_fleet import PeerFleet, Peers
from worker.config import CacheConfig, SchedulerConfig

# A worker's cache holds a third of the beginnings, so that the destination matters.
WORKER = WorkerSettings(limits=SchedulerConfig(max_num_seqs=16), cache=CacheConfig(1024, 16))
VOCABULARY = range(256, 1280)


@dataclass(frozen=True)
class SharedPrefixes:
    """`rate` requests a second for `seconds`: one of `prefixes` and then `num_own` tokens."""

    prefixes: int = 48
    num_prefix: int = 512
    num_own: int = 64
    num_output: int = 8
    rate: float = 20.0
    seconds: float = 30.0
    seed: int = 7


Event = Callable[[PeerFleet], None]
QUIET_SECONDS = 10.0  # after the last request, until replicas have received its end


@dataclass(frozen=True)
class Seen:
    """The answers, and the requests that each replica still counts as in flight long after."""

    served: Sequence[ServedPrompt]
    left: Sequence[Mapping[str, int]]

    def hit_rate(self, since: float = 0.0, until: float = math.inf) -> float:
        counted = [one for one in self.served if since <= one.arrived_seconds < until]
        return sum(one.num_cached for one in counted) / sum(one.num_prompt for one in counted)


def run(peers: Peers, load: SharedPrefixes, events: Mapping[float, Event] | None = None) -> Seen:
    """Each request arrives at a random replica, and does not depend on the replicas."""
    return run_in_virtual_time(_run(peers, load, events or {}))


async def _run(peers: Peers, load: SharedPrefixes, events: Mapping[float, Event]) -> Seen:
    rng, lots, loop = Random(load.seed), Random(load.seed + 1), asyncio.get_running_loop()
    beginnings = [_tokens(rng, load.num_prefix) for _ in range(load.prefixes)]
    tasks: list[asyncio.Task[ServedPrompt]] = []
    async with PeerFleet(Simulation(worker=WORKER), peers) as fleet:
        for second, event in events.items():
            loop.call_at(second, event, fleet)
        while True:
            await asyncio.sleep(rng.expovariate(load.rate))
            if loop.time() > load.seconds:
                break
            prompt = rng.choice(beginnings) + _tokens(rng, load.num_own)
            replica = int(lots.random() * peers.count)
            tasks.append(asyncio.ensure_future(fleet.ask(prompt, load.num_output, picker=replica)))
        served = [await task for task in tasks]
        await asyncio.sleep(QUIET_SECONDS)
        left = [dict(one.inflight.counts) for one in fleet.pickers]
        return Seen(served, left)


def _tokens(rng: Random, count: int) -> list[int]:
    return rng.choices(VOCABULARY, k=count)


LOAD = by_depth(SharedPrefixes(rate=12.0, seconds=16.0), SharedPrefixes())
ONE, TWO = Peers(1), Peers(2)
POINTS = 0.05


@pytest.fixture(scope="module")
def one() -> Seen:
    return run(ONE, LOAD)


def cut(fleet: PeerFleet) -> None:
    fleet.is_cut = True


def mend(fleet: PeerFleet) -> None:
    fleet.is_cut = False


def restart_one(fleet: PeerFleet) -> None:
    fleet.restart(1)


@pytest.mark.full
def test_two_replicas_find_as_much_cached_as_one(one: Seen) -> None:
    """One message in twenty is lost; replicas without an exchange find less."""
    lossy = run(replace(TWO, loss=0.05), LOAD)
    silent = run(replace(TWO, shares=False), LOAD)
    assert lossy.hit_rate() == pytest.approx(one.hit_rate(), abs=POINTS)
    assert silent.hit_rate() < one.hit_rate() - POINTS
    assert lossy.left == [{}, {}]


def test_a_restarted_replica_soon_knows_what_the_other_one_does(one: Seen) -> None:
    """It receives recent placements; requests of the killed replica are not counted for ever."""
    after = LOAD.seconds / 2
    seen = run(TWO, LOAD, {after: restart_one})
    assert seen.hit_rate(after) == pytest.approx(one.hit_rate(after), abs=POINTS)
    assert seen.left == [{}, {}]


@pytest.mark.full
def test_replicas_catch_up_after_half_a_minute_without_messages() -> None:
    load = replace(LOAD, seconds=60.0, rate=10.0)
    seen = run(TWO, load, {10.0: cut, 40.0: mend})
    alone = run(ONE, load)
    assert seen.hit_rate(40.0) == pytest.approx(alone.hit_rate(40.0), abs=POINTS)
    assert seen.left == [{}, {}]


def test_the_same_seed_gives_the_same_outcome() -> None:
    load = replace(LOAD, seconds=4.0)
    lossy = Peers(2, loss=0.05)
    assert run(lossy, load) == run(lossy, load)
