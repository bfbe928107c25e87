"""Evicted blocks in the host's memory and on disk: whatever happens there, answers are the same."""

import dataclasses
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.depth import examples
from tests.support.worker import engine_walk as walks
from tests.support.worker.made_up_disk import MadeUpDisk
from tests.support.worker.paged_executor import TOKEN_BYTES
from tests.support.worker.step_driver import outputs as outputs_of
from tests.support.worker.tier_house import SIZE, House, prompt
from worker.config import OFFLOADING_POLICIES, SpeculativeConfig
from worker.engine.cache.block_hash import BlockHash
from worker.engine.cache.block_manager import Evicted
from worker.engine.cache.tiers import Tiers
from worker.engine.messages import AddRequest, ResetPrefixCache, Sleep, WakeUp
from worker.kv.disk import Left
from worker.types import FinishReason, SamplingParams

NGRAM = SpeculativeConfig("ngram", 3, prompt_lookup_min=1, prompt_lookup_max=3)


def house_on(disk: MadeUpDisk) -> tuple[House, MadeUpDisk]:
    """Return an engine with more blocks than memory, so that `disk` has some of them."""
    house = House(num_slots=16, disk=disk)
    for number in range(8):
        house.ask(prompt(number))
    return house, disk


def waiting_in(house: House) -> AddRequest:
    params = SamplingParams(max_tokens=2, ignore_eos=True, seed=3)
    waiting = AddRequest("waits", prompt(0), params, 0.0)
    house.core.add(waiting)
    house.core.step()
    return waiting


def test_evicted_blocks_are_loaded_again() -> None:
    house = House()
    assert [house.ask(prompt(n)) for n in (0, 1, 0, 1)] == [0, 0, 16, 16]
    saved = house.scheduler.stats().tiers.host_bytes_saved
    assert [house.ask(prompt(n)) for n in (0, 1, 0, 1)] == [16] * 4
    stats = house.scheduler.stats()
    assert stats.tiers.host_bytes_saved - saved <= 2 * SIZE * TOKEN_BYTES  # ends of answers
    assert stats.scheduler.external_cache_hits == stats.tiers.host_bytes_loaded // TOKEN_BYTES
    assert stats.scheduler.external_cache_queries >= stats.scheduler.external_cache_hits > 0


def test_events_report_the_tier_of_each_block() -> None:
    disk = MadeUpDisk()
    house = House(num_slots=16, disk=disk)
    for turn in range(3):
        for number in range(8):
            house.ask(prompt(number), f"{turn}-{number}")
    held = house.mirror()
    assert house.num_orphans == 0
    assert held["STORAGE"] == disk.files.keys()
    assert all(held.values())
    house.events = [*house.core.announce()]
    assert house.mirror() == held
    house.command(ResetPrefixCache(0, True))
    assert (house.mirror(), disk.files) == ({"GPU": set(), "CPU": set(), "STORAGE": set()}, {})


@pytest.mark.parametrize(("level", "num_had"), [(1, 16), (2, 0)])
def test_tiers_outlast_light_sleep(level: int, num_had: int) -> None:
    """Level 2 gives up the weights, and those that come back may differ, so the disk is left."""
    disk = MadeUpDisk()
    house = House(num_slots=16, disk=disk)
    for number in range(4):
        house.ask(prompt(number))
    files = dict(disk.files)
    house.command(Sleep(0, level))
    house.command(WakeUp(0))
    held = house.mirror()
    assert (held["GPU"], bool(held["CPU"])) == (set(), level == 1)
    assert [house.ask(prompt(n)) for n in (0, 1)] == [num_had] * 2
    assert files.keys() <= disk.files.keys()


def test_a_restart_finds_what_is_on_disk() -> None:
    _, disk = house_on(MadeUpDisk())
    assert len(disk.files) > 12
    again = House(num_slots=16, disk=MadeUpDisk(dict(disk.files)))
    assert again.ask(prompt(0)) == 16
    assert again.ask(prompt(9)) == 0
    last = [*disk.files][-8:]
    small = MadeUpDisk(dict(disk.files))
    House(num_slots=16, disk=small, num_on_disk=8).ask(prompt(9))
    assert {*last} == small.files.keys()


def test_a_disk_that_fails_costs_a_recompute() -> None:
    full = MadeUpDisk(writes=(False,))
    house = House(num_slots=16, disk=full)
    assert [house.ask(prompt(n)) for n in (*range(8), 0)] == [0] * 9
    assert full.num_writes
    assert not full.files
    damaged = MadeUpDisk(reads=(False,))
    house = House(num_slots=16, disk=damaged)
    for turn in range(2):
        assert [house.ask(prompt(n), f"{turn}") for n in range(8)] == [0] * 8
    assert damaged.pulls
    assert len(damaged.pulls) == damaged.num_failures


def test_blocks_deleted_by_others_are_forgotten(caplog: pytest.LogCaptureFixture) -> None:
    house, disk = house_on(MadeUpDisk())
    gone = [*disk.files][2:]
    disk.delete(gone)
    left = Left(frozenset({"lock", *(digest.hex() for digest in disk.files)}))
    disk.reports += [left, left]
    house.ask(prompt(9))
    assert house.mirror()["STORAGE"] == disk.files.keys()
    reported = [record.getMessage() for record in caplog.records]
    assert reported == [f"{len(gone)} blocks of KV were deleted from disk, not by this worker"]


def test_a_stuck_disk_is_not_asked() -> None:
    """Other requests would only wait for it too."""
    house, disk = house_on(MadeUpDisk())
    disk.is_stuck = True
    assert house.ask(prompt(0)) == 0
    assert not disk.pulls


def test_others_run_while_a_disk_is_read() -> None:
    house, disk = house_on(MadeUpDisk(looks=10**9))
    waiting_in(house)
    assert house.core.is_compiling
    assert (house.scheduler.stats().pulls.num_fetching, house.scheduler.blocks.usage) == (1, 0.0)
    assert house.ask(prompt(9), "other") == 0
    house.core.abort(["waits"])
    reported = house.core.step()
    assert [output.finish_reason for output in reported.outputs] == [FinishReason.ABORT]
    assert disk.pulls[0].is_closed


def test_blocks_computed_meanwhile_shorten_a_load() -> None:
    house, disk = house_on(MadeUpDisk(looks=10**9))
    waiting = waiting_in(house)
    disk.looks = 0
    assert house.ask([*prompt(0)[:9], 2, 2, 2], "shares two blocks") == 8
    disk.pulls[0].looks = 0
    outputs = outputs_of(house.core)
    assert [t for o in outputs for t in o.token_ids] == walks.alone(waiting, 0, 64)[0]
    assert outputs[-1].num_cached_tokens == 16
    assert house.scheduler.stats().scheduler.external_cache_hits == 8 + 8


def test_a_step_does_not_save_over_what_it_loads() -> None:
    memory = bytearray(4)
    disk = MadeUpDisk(delay=1)
    tiers = Tiers(memoryview(memory), 1, b"", "lru", lambda event: None, disk, 8)
    contents = [BlockHash(bytes([n]), b"", (n,)) for n in range(13)]
    evicted = [Evicted(n, content, "") for n, content in enumerate(contents)]
    tiers.save(evicted[:2], 1)
    loaded = places(memory, tiers.load(tiers.find(contents[:2])))
    tiers.check_integrity()
    (save,) = tiers.save(evicted[2:6], 2)
    assert sorted(loaded + places(memory, save.into)) == [0, 1, 2, 3]
    tiers.ended(3)
    tiers.save((), 4)
    written = places(memory, [data for _, _, _, data, _, _ in disk.queue])
    assert len(written) == 2
    tiers.reset()
    for number in range(6, 9):
        (save,) = tiers.save(evicted[number : number + 1], number)
        assert not {*places(memory, save.into)} & {*written}
        tiers.check_integrity()
    tiers.look()
    tiers.look()
    (save,) = tiers.save(evicted[9:13], 9)
    assert (len(save.into), disk.files) == (4, {})


def places(memory: bytearray, views: Sequence[memoryview]) -> list[int]:
    found = []
    for view in views:
        before = bytes(memory)
        view[0] ^= 1
        found += [place for place, byte in enumerate(memory) if byte != before[place]]
        view[0] ^= 1
    return found


def test_salts_share_no_blocks() -> None:
    disk = MadeUpDisk()
    house = House(num_slots=16, disk=disk)
    house.ask(prompt(0), cache_salt="x")
    for number in range(1, 9):
        house.ask(prompt(number))
    assert [house.ask(prompt(0), cache_salt=salt) for salt in ("y", None, "x")] == [0, 0, 16]


def test_kv_of_adapters_stays_off_the_disk() -> None:
    disk = MadeUpDisk()
    tiers = Tiers(memoryview(bytearray(4)), 1, b"", "lru", lambda event: None, disk, 8)
    for n in range(8):
        extra = (("lora", "ada", "/a"),) if n % 2 else None
        tiers.save([Evicted(n, BlockHash(bytes([n]), b"", (n,), extra), "")], n)
        tiers.ended(n)
        tiers.look()
    assert [*disk.files] == [bytes([n]) for n in (0, 2, 4)]


@pytest.mark.parametrize(
    ("policy", "outlasts"), [("lru", 0), ("lfu", 4), ("slru", 4), ("tenant", 4)]
)
def test_a_hit_block_outlasts_a_flood(policy: str, outlasts: int) -> None:
    tiers = Tiers(memoryview(bytearray(16)), 1, b"", policy, lambda event: None)
    known = [BlockHash(bytes([0, n]), b"", (n,)) for n in range(4)]
    tiers.save([Evicted(n, content, "small") for n, content in enumerate(known)], 1)
    assert len(tiers.find(known)) == 4
    tiers.load(tiers.find(known))
    for n in range(40):
        tiers.save([Evicted(n, BlockHash(bytes([1, n]), b"", (n,)), "large")], 2 + n)
        tiers.check_integrity()
    assert len(tiers.find(known)) == outlasts


disks = st.builds(
    MadeUpDisk,
    writes=st.lists(st.booleans(), min_size=1, max_size=3),
    reads=st.sampled_from([(True,), (True, True, False), (False,)]),
    looks=st.sampled_from([0, 0, 3, 20]),
    delay=st.sampled_from([0, 1, 5]),
)


@pytest.mark.parametrize("pipe", walks.PIPES)
@examples(60)
@given(
    scene=walks.scenes.filter(lambda scene: scene.cache.enable_prefix_caching),
    num_slots=st.integers(1, 24),
    num_on_disk=st.integers(1, 24),
    disk=st.sampled_from([None, 1]).flatmap(lambda some: disks if some else st.none()),
    policy=st.sampled_from(OFFLOADING_POLICIES),
    speculative=st.sampled_from([None, NGRAM]),
)
def test_tiers_change_no_answer(
    pipe: str,
    scene: walks.Scene,
    num_slots: int,
    num_on_disk: int,
    disk: MadeUpDisk | None,
    policy: str,
    speculative: SpeculativeConfig | None,
) -> None:
    for _ in range(2):
        house = House(
            scene.cache,
            scene.limits,
            num_slots=num_slots,
            disk=disk,
            policy=policy,
            pipe=pipe,
            speculative=speculative,
            num_on_disk=num_on_disk,
        )
        scene.walk(house.core, house.scheduler)
        if disk is not None:
            assert all(pull.is_closed for pull in disk.pulls)
            disk = dataclasses.replace(disk, pulls=[], reports=[], queue=[])
