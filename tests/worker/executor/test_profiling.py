"""Profiles of step times, taken from an executor whose times are known."""

import pytest

from worker.engine.lengths.costs import StepCosts
from worker.executor.interface import HostExecutor
from worker.executor.profiling import ProfiledCache, StepProfile, profile
from worker.types import Drafts, Draw, ModelOutput, SchedulerOutput

CACHE = ProfiledCache(num_blocks=1000, block_size=16, max_model_len=8192)


class KnownTimes(HostExecutor):
    """A step takes 40 ms, 1 ms a token, and 30 ms more the first time; a draft 3 ms and 2 ms at
    once.
    """

    def __init__(self, token_seconds: float = 0.001, max_model_len: int = 8192) -> None:
        self.now = 0.0
        self.max_model_len = max_model_len
        self.token_seconds = token_seconds
        self.sizes: list[int] = []

    def execute(self, step: SchedulerOutput) -> ModelOutput:
        size = len(step.sequences)
        blocks = [block for s in step.sequences for block in s.block_table]
        assert len(set(blocks)) == len(blocks)
        assert max(blocks) < CACHE.num_blocks
        for s in step.sequences:  # its tokens, a draw, and drafts
            end = s.start + s.num_tokens + 1 + s.num_to_draft
            assert s.start >= 1
            assert end <= min(self.max_model_len, 16 * len(s.block_table))
        self.now += 0.04 + self.token_seconds * size + 0.03 * (size not in self.sizes)
        self.sizes.append(size)
        drafts = {
            s.seq_id: Drafts(s.start + 2, (1,) * s.num_to_draft, (1.0,) * s.num_to_draft)
            for s in step.sequences
            if s.num_to_draft
        }
        longest = max(s.num_to_draft for s in step.sequences)
        seconds = 0.002 + 0.003 * longest if drafts else 0.0
        self.now += seconds
        sampled = {s.seq_id: (Draw(1),) for s in step.sequences}
        return ModelOutput(sampled, drafts=drafts, drafting_seconds=seconds)


def taken(executor: KnownTimes, most: tuple[int, int], on_device: bool = False) -> StepProfile:
    found = profile(executor, CACHE, most, lambda: executor.now, on_device)
    assert found is not None
    return found


def test_steps_are_timed_without_what_the_first_of_a_size_takes() -> None:
    steps = dict(taken(KnownTimes(), (16, 3)).steps)
    assert sorted(steps) == [1, 2, 4, 8, 16, 32, 64]
    for size, seconds in steps.items():
        assert seconds == pytest.approx(0.04 + 0.001 * size)


def test_no_size_is_timed_that_takes_long() -> None:
    """The profile ends at the first size that takes longer than a fifth of a second."""
    executor = KnownTimes(token_seconds=0.05)
    assert [size for size, _ in taken(executor, (256, 5)).steps] == [1, 2, 4]
    assert executor.now < 4.0


def test_drafts_of_the_device_are_timed_by_sequences() -> None:
    found = taken(KnownTimes(), (16, 5), on_device=True)
    assert found.first_draft == [(n, pytest.approx(0.005)) for n in (1, 8)]
    assert found.next_draft == [(n, pytest.approx(0.003)) for n in (1, 8)]


@pytest.mark.parametrize("num_drafts", [1, 16, 100])
def test_long_runs_of_drafts_have_room(num_drafts: int) -> None:
    found = taken(KnownTimes(), (16, num_drafts), on_device=True)
    assert found.next_draft == [(n, pytest.approx(0.003)) for n in (1, 8)]


@pytest.mark.parametrize("max_model_len", [1, 2, 3, 11, 12, 20, 25])
def test_no_position_exceeds_the_maximal_length(max_model_len: int) -> None:
    executor = KnownTimes(max_model_len=max_model_len)
    cache = ProfiledCache(1000, 16, max_model_len)
    found = profile(executor, cache, (16, 5), lambda: executor.now, True)
    assert (found is None) == (max_model_len < 3)
    assert found is None or bool(found.first_draft) == (max_model_len >= 12)


def test_a_worker_of_one_sequence_has_a_profile_of_its_drafter() -> None:
    found = taken(KnownTimes(), (1, 5), on_device=True)
    assert [seconds for _, seconds in found.first_draft] == [pytest.approx(0.005)] * 2


class MakesNoDrafts(KnownTimes):
    def execute(self, step: SchedulerOutput) -> ModelOutput:
        return ModelOutput(super().execute(step).sampled)


def test_a_drafter_that_makes_no_drafts_does_not_look_free() -> None:
    """The engine then assumes a duration of drafting."""
    found = taken(MakesNoDrafts(), (16, 5), on_device=True)
    assert not found.first_draft
    assert StepCosts(found).drafting(1, 1) == pytest.approx(0.0041)


@pytest.mark.parametrize("num_blocks", [0, 1, 3])
def test_a_cache_without_room_for_two_sequences_has_no_profile(num_blocks: int) -> None:
    executor = KnownTimes()
    cache = ProfiledCache(num_blocks, 16, 8192)
    assert profile(executor, cache, (16, 5), lambda: executor.now, False) is None
    assert not executor.sizes
