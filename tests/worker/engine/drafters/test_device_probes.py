"""How often a drafter on the device is asked where its drafts do not pay, and what follows."""

from __future__ import annotations

import pytest

from worker.config import SpeculativeConfig
from worker.engine.drafters.lengths import DraftLengths
from worker.engine.drafters.track_records import DrafterRecord, SequenceRecord
from worker.engine.drafters.trials import Offer

STEP, ROUND = 0.02, 0.001  # seconds of a step, and of a draft for each of any number of sequences


class Decoding:
    """Sequences of which a device drafts, step after step; owns what was made and not used yet."""

    def __init__(self, num_sequences: int, token_seconds: float) -> None:
        self.lengths = DraftLengths(
            SpeculativeConfig(method="eagle", model="head", num_speculative_tokens=4)
        )
        self._ids = list(range(num_sequences))
        self._token_seconds = token_seconds
        self._made = [0] * num_sequences
        self._slowness = 1.0  # of drafting
        self._read(100 * num_sequences)

    def _read(self, num_tokens: int) -> None:
        """The prompts' steps, of 2,048 tokens at most."""
        for left in range(num_tokens, 0, -2048):
            number = min(left, 2048)
            seconds = STEP + self._token_seconds * number
            self.lengths.observe_step(number, seconds, 0.0, 0, 0, number)

    def slow_down(self, factor: float) -> None:
        """Make drafting take so many times as long from now on."""
        self._slowness = factor

    def step(self, stands: bool, most_standing: int = 8) -> tuple[int, int]:
        """One step, whose drafts stand up to a position, or none; how many were verified, and how
        many are made now.
        """
        given = [
            Offer(i, "eagle", (0.9,) * made) for i, made in zip(self._ids, self._made, strict=True)
        ]
        idle = [0] * len(given)
        counts = self.lengths.to_verify(given, 0) if self.lengths.may_pay(self._ids) else idle
        may_draft = self.lengths.may_pay(self._ids)
        self._made = self.lengths.to_draft(self._ids, "eagle", 0) if may_draft else idle
        for offer, count in zip(given, counts, strict=True):
            self.lengths.observe(offer, count, min(count, most_standing) if stands else 0)
        num_tokens, drafted = len(given) + sum(counts), sum(self._made)
        drafting = ROUND * max(self._made) * self._slowness
        seconds = STEP + self._token_seconds * num_tokens + drafting
        num_drafting = sum(made > 0 for made in self._made)
        self.lengths.observe_step(num_tokens, seconds, drafting, drafted, num_drafting)
        return sum(counts), drafted


def test_with_many_sequences_what_does_not_pay_is_asked_for_less_often() -> None:
    """Each probe has two steps wait for results, and wins one of many tokens."""
    asked = {}
    for num in (1, 16):
        decoding = Decoding(num, token_seconds=0.02)
        asked[num] = sum(decoding.step(stands=False)[1] > 0 for _ in range(1000))
    assert 4 <= asked[16] <= asked[1] / 2


@pytest.mark.parametrize("num", [4, 16, 64])
def test_drafts_that_come_to_stand_are_found_out_where_a_step_has_room(num: int) -> None:
    """However long none did: probes are of many sequences there, and those that pay go on."""
    decoding = Decoding(num, token_seconds=0.00001)
    for _ in range(1000):
        decoding.step(stands=False)
    verified = [decoding.step(stands=True)[0] for _ in range(800)]
    assert sum(verified[600:]) >= 200 * 3 * num


@pytest.mark.parametrize("num", [4, 16, 64, 256])
def test_good_drafts_of_a_device_with_room_are_used_at_once(num: int) -> None:
    """Nothing was measured but the prompts."""
    decoding = Decoding(num, token_seconds=0.00001)
    verified = [decoding.step(stands=True)[0] for _ in range(20)]
    assert max(verified) >= 3 * num


def test_a_probe_is_one_sequence_where_each_costs() -> None:
    """More of them would cost as much more."""
    decoding = Decoding(16, token_seconds=0.01)
    made = [decoding.step(stands=False)[1] for _ in range(1000)]
    assert 0 < max(made[100:]) <= 2


@pytest.mark.parametrize("num", [1, 4])
def test_longer_drafts_are_made_again_once_they_stand(num: int) -> None:
    """However long only first ones did."""
    decoding = Decoding(num, token_seconds=0.001)
    made = [decoding.step(stands=True, most_standing=1)[1] for _ in range(400)]
    assert sum(count > num for count in made[200:]) < 120
    made = [decoding.step(stands=True)[1] for _ in range(100)]
    assert sum(made[50:]) >= 50 * 3 * num


def test_where_drafting_cannot_be_paid_nobody_is_asked() -> None:
    """A step that is asked in vain waits for its results all the same."""
    decoding = Decoding(1, token_seconds=0.00001)
    in_vain = 0
    for _ in range(1000):
        was_asked = decoding.lengths.may_pay([0])
        verified, made = decoding.step(stands=False)
        in_vain += was_asked and not verified and not made
    assert in_vain < 150


@pytest.mark.parametrize("num", [1, 16])
def test_a_drafter_that_was_slow_once_comes_back(num: int) -> None:
    """Its first round took as long as four steps, as when something is compiled."""
    decoding = Decoding(num, token_seconds=0.00001)
    decoding.slow_down(100.0)
    while not decoding.step(stands=True)[1]:
        pass
    decoding.slow_down(1.0)
    verified = [decoding.step(stands=True)[0] for _ in range(1500)]
    assert sum(verified[1200:]) >= 300 * 3 * num


def test_a_longer_run_that_stands_is_followed_by_another_at_once() -> None:
    """Drafts made in one step are judged in the next, after more were made there."""
    record = SequenceRecord(DrafterRecord(0), 0)
    record.longer.tried(0)
    record.longer.tried(1)
    record.lengthen(2, 3)
    record.observe((0.9,), 1, 1, 3, is_trial=False)
    assert not record.longer.is_due(4)
    record.observe((0.9, 0.9), 2, 2, 4, is_trial=False)
    assert record.longer.is_due(5)
    record.lengthen(3, 5)
    record.lengthen(3, 6)
    record.observe((0.9, 0.9, 0.9), 3, 2, 6, is_trial=False)
    assert not record.longer.is_due(7)
