"""Draft lengths step by step: limits, schedules, turning off, coming back, forgetting."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.depth import examples
from worker.config import SpeculativeConfig
from worker.engine.lengths.acceptance import Offer
from worker.engine.lengths.costs import StepCosts
from worker.engine.lengths.goodput import DraftLengths
from worker.executor.profiling import StepProfile

SURE = (1.0,) * 8
STEP, TOKEN = 0.05, 0.002  # seconds of a step, and of each token in it


def lengths(
    most: int = 5,
    token_seconds: float = TOKEN,
    draft_seconds: float | None = None,
    **options: object,
) -> DraftLengths:
    steps = tuple((n, STEP + token_seconds * n) for n in (1, 8, 64))
    drafting = ((1, draft_seconds or 0.0), (16, draft_seconds or 0.0))
    config = SpeculativeConfig("ngram", most, **options)  # type: ignore[arg-type]
    costs = StepCosts(StepProfile(steps, drafting, drafting))
    return DraftLengths(config, costs, draft_seconds is not None)


def offers(num: int, confidences: tuple[float, ...] = SURE, first_id: int = 0) -> list[Offer]:
    return [Offer(first_id + index, confidences) for index in range(num)]


def step(
    chosen: DraftLengths, given: list[Offer], stands: bool, token_seconds: float = TOKEN
) -> int:
    counts = [0] * len(given)
    if chosen.may_pay([offer.seq_id for offer in given]):
        counts = chosen.to_verify(given, 0)
    num_tokens = len(given) + sum(counts)
    for offer, count in zip(given, counts, strict=True):
        chosen.observe(offer, count, count if stands else 0)
    chosen.observe_step(num_tokens, STEP + token_seconds * num_tokens)
    return sum(counts)


def device_step(chosen: DraftLengths, drafted: int, stands: bool) -> tuple[int, int]:
    """Step one sequence with `drafted` device drafts; return how many it verified, and makes."""
    given = [Offer(0, (0.9,) * drafted)]
    verified = chosen.to_verify(given, 0)[0] if chosen.may_pay([0]) else 0
    made = chosen.to_draft([0], 0)[0] if chosen.may_pay([0]) else 0
    if verified:
        chosen.observe(given[0], verified, verified if stands else 0)
    chosen.observe_catch_up(0.0, [0] if made else [])
    chosen.observe_step(1 + verified, STEP + TOKEN * (1 + verified))
    return verified, made


def test_good_drafts_are_verified_up_to_the_limit() -> None:
    chosen = lengths(most=5)
    given = offers(1)
    taken = [step(chosen, given, stands=True) for _ in range(60)]
    assert max(taken) == 5
    assert sum(count == 5 for count in taken[20:]) >= 30


def test_a_fresh_drafter_is_tried_at_once() -> None:
    """The prior is in favour of drafts: the first step verifies some, but risks little."""
    assert 1 <= lengths().to_verify(offers(1), 0)[0] <= 5


def test_bad_drafts_are_given_up_for_rare_probes() -> None:
    chosen = lengths()
    given = offers(1)
    taken = [step(chosen, given, stands=False) for _ in range(400)]
    assert sum(taken[:30]) <= 30
    assert max(taken[100:]) <= 2
    assert sum(taken[100:]) <= 300 // 10


@pytest.mark.parametrize("num", [1, 8])
def test_drafts_that_become_good_are_noticed(num: int) -> None:
    """After hundreds of barren steps it takes a bounded number of good ones to be back."""
    chosen = lengths()
    given = offers(num)
    for _ in range(400):
        step(chosen, given, stands=False)
    taken = [step(chosen, given, stands=True) for _ in range(90)]
    assert any(count >= 4 * num for count in taken)


def test_copying_that_ends_is_noticed_within_a_few_steps() -> None:
    chosen = lengths(token_seconds=0.01)
    given = offers(1)
    taken = [step(chosen, given, stands=True, token_seconds=0.01) for _ in range(100)]
    assert min(taken[70:]) >= 3
    taken = [step(chosen, given, stands=False, token_seconds=0.01) for _ in range(60)]
    assert max(taken[35:]) <= 2


def test_one_bad_sequence_does_not_spoil_the_others() -> None:
    chosen = lengths()
    given = offers(4)
    last: list[int] = []
    for _ in range(200):
        if not chosen.may_pay([0, 1, 2, 3]):
            chosen.observe_step(4, STEP + TOKEN * 4)
            continue
        last = chosen.to_verify(given, 0)
        for offer, count in zip(given, last, strict=True):
            chosen.observe(offer, count, count if offer.seq_id else 0)
        num_tokens = 4 + sum(last)
        chosen.observe_step(num_tokens, STEP + TOKEN * num_tokens)
    assert last[0] <= 1
    assert min(last[1:]) >= 4


def test_estimates_of_short_requests_carry_over_to_the_next() -> None:
    chosen = lengths()
    for number in range(60):
        given = offers(1, first_id=number)
        for _ in range(4):
            step(chosen, given, stands=False)
        chosen.forget(number)
    assert chosen._tracks == {}
    taken = [step(chosen, offers(1, first_id=100), stands=False) for _ in range(4)]
    assert sum(taken) <= 1


def test_the_surer_drafts_are_taken_first() -> None:
    chosen = lengths(token_seconds=0.01)
    for number in range(40):
        step(chosen, offers(1, (0.2,) * 5, first_id=2 * number), stands=False, token_seconds=0.01)
        step(chosen, offers(1, SURE, first_id=2 * number + 1), stands=True, token_seconds=0.01)
    low, high = chosen.to_verify([Offer(98, (0.2,) * 5), Offer(99, SURE)], 0)
    assert high == 5 > low


def test_nothing_pays_where_each_token_costs_a_step() -> None:
    chosen = lengths(token_seconds=1000.0)
    given = offers(4)
    taken = []
    for _ in range(300):
        may = chosen.may_pay([0, 1, 2, 3])
        counts = chosen.to_verify(given, 0) if may else [0] * 4
        for offer, count in zip(given, counts, strict=True):
            chosen.observe(offer, count, count * 4 // 5)
        num_tokens = 4 + sum(counts)
        chosen.observe_step(num_tokens, STEP + 1000.0 * num_tokens)
        taken.append(sum(counts))
    assert sum(taken[100:]) <= 200 * 4 // 10


def test_without_gain_steps_are_left_to_be_scheduled_ahead() -> None:
    chosen = lengths()
    given = offers(2)
    asked = []
    for _ in range(500):
        asked.append(chosen.may_pay([0, 1]))
        step(chosen, given, stands=False)
    assert asked[0]
    assert 1 <= sum(asked[-100:]) <= 15
    while chosen.may_pay([0, 1]):
        step(chosen, given, stands=False)
    assert chosen.may_pay([0, 1, 2])


def test_nothing_pays_when_no_sequence_decodes() -> None:
    chosen = lengths()
    assert not chosen.may_pay([])
    assert chosen.to_verify([], 100) == []
    assert chosen.to_draft([], 100) == []


@pytest.mark.parametrize(
    ("num", "most"), [(1, 5), (2, 5), (3, 5), (4, 2), (5, 2), (6, 2), (7, 0), (9, 0), (100, 0)]
)
def test_a_schedule_by_batch_size_is_what_is_verified_and_drafted(num: int, most: int) -> None:
    """Gaps and sizes beyond the last range keep what the range before them says."""
    schedule = ((1, 2, 5), (4, 5, 2), (7, 8, 0))
    chosen = lengths(most=5, num_speculative_tokens_per_batch_size=schedule)
    assert chosen.to_verify(offers(num), 0) == [most] * num
    assert chosen.to_draft(list(range(num)), 0) == [most] * num
    assert chosen.may_pay(list(range(num))) is (most > 0)


def test_without_adaptive_verification_all_drafts_are_verified() -> None:
    chosen = lengths(most=4, enable_adaptive_verification=False)
    given = [*offers(2), Offer(2, (0.1, 0.1)), Offer(3, ())]
    for _ in range(50):
        step(chosen, given, stands=False)
    assert chosen.to_verify(given, 0) == [4, 4, 2, 0]
    assert chosen.to_draft([0, 1], 0) == [4, 4]
    assert chosen.may_pay([0])


def test_a_cheap_and_good_device_drafter_is_asked_for_all_it_may_make() -> None:
    chosen = lengths(most=4, draft_seconds=0.001)
    made = 0
    history = []
    for _ in range(80):
        verified, made = device_step(chosen, made, True)
        history.append((verified, made))
    assert max(history) == (4, 4)
    assert sum(pair == (4, 4) for pair in history[30:]) >= 30


@pytest.mark.parametrize(("stands", "price"), [(False, 0.003), (True, 0.2)])
def test_a_bad_or_dear_device_drafter_is_only_probed(stands: bool, price: float) -> None:
    chosen = lengths(most=4, draft_seconds=price)
    made = 0
    history = []
    for _ in range(500):
        _, made = device_step(chosen, made, stands)
        history.append(made)
    assert sum(history[100:]) * price <= 0.03 * 400 * STEP + price
    assert sum(history) > 0


def test_a_device_drafter_that_becomes_good_is_noticed() -> None:
    chosen = lengths(most=4, draft_seconds=0.001)
    made = 0
    for _ in range(300):
        _, made = device_step(chosen, made, False)
    history = []
    for _ in range(120):
        _, made = device_step(chosen, made, True)
        history.append(made)
    assert max(history) >= 3


@pytest.mark.parametrize("reading", [0.0, 0.2])
def test_a_device_drafter_that_answers_nothing_is_asked_less_and_less(reading: float) -> None:
    chosen = lengths(most=4, draft_seconds=0.04)
    asked = []
    for _ in range(400):
        made = 0
        if chosen.may_pay([0]):
            chosen.to_verify([Offer(0, ())], 0)
            made = chosen.to_draft([0], 0)[0]
        asked.append(made > 0)
        chosen.observe_catch_up(reading if made else 0.0, [])
        chosen.observe_step(1, STEP)
    assert sum(asked) > 0
    assert sum(asked[100:]) <= 300 // 16


def test_reading_a_sequence_pays_off_over_many_steps() -> None:
    made = {}
    for reading in (0.1, 20.0):
        chosen = lengths(most=4, draft_seconds=0.001)
        history = []
        for number in range(12):  # sequences, one after the other
            for position in range(40):
                count = 0
                if chosen.may_pay([number]):
                    (verified,) = chosen.to_verify([Offer(number, (0.9,) * 2)], 0)
                    chosen.observe(Offer(number, (0.9,) * 2), verified, verified)
                    (count,) = chosen.to_draft([number], 0)
                chosen.observe_catch_up(
                    0.0 if position else reading * (count > 0), [number] * (count > 0)
                )
                chosen.observe_step(2, STEP)
                history.append(count)
            chosen.forget(number)
        made[reading] = sum(count > 0 for count in history[-200:])
    assert made[0.1] > 150
    assert made[20.0] < 50


def test_a_prompt_in_the_step_does_not_make_poor_drafts_look_good() -> None:
    chosen = lengths()
    given = offers(1)
    for _ in range(200):
        step(chosen, given, stands=False)
    for _ in range(5):
        chosen.observe_step(513, 1.0, 512)
    taken = []
    for _ in range(50):
        counts = chosen.to_verify(given, 512)
        chosen.observe(given[0], counts[0], 0)
        chosen.observe_step(513 + counts[0], 1.0, 512)
        taken.append(counts[0])
    assert sum(taken) <= 10


@pytest.mark.parametrize("room", [0, 1, 3, 7, 100])
def test_no_more_is_verified_or_drafted_than_there_is_room_for(room: int) -> None:
    for chosen in (lengths(), lengths(enable_adaptive_verification=False)):
        ids = list(range(4))
        assert sum(chosen.to_draft(ids, 0, room)) <= room
        assert max(chosen.to_draft(ids, 0, room)) <= 5
    chosen = lengths()
    for _ in range(40):
        step(chosen, offers(4), stands=True)
    assert sum(chosen.to_verify(offers(4), 0, room)) <= room


def test_forgotten_sequences_leave_nothing_behind() -> None:
    chosen = lengths()
    for number in range(200):
        step(chosen, offers(2, first_id=2 * number), stands=number % 2 == 0)
        chosen.forget(2 * number)
        chosen.forget(2 * number + 1)
        chosen.forget(10_000)
    assert chosen._tracks == {}


CONFIDENCES = st.lists(st.floats(0.001, 1.0), max_size=7).map(tuple)
SECONDS = st.one_of(st.floats(0.0, 10.0), st.sampled_from([0.0, 1e-9, 1e6, float("inf")]))


@examples(60)
@given(
    st.lists(
        st.tuples(
            st.lists(CONFIDENCES, min_size=1, max_size=6),
            st.integers(0, 300),
            SECONDS,
            st.floats(0.0, 1.0),
            st.integers(0, 5),
        ),
        max_size=40,
    )
)
def test_lengths_never_exceed_the_offers_and_the_room(
    history: list[tuple[list[tuple[float, ...]], int, float, float, int]],
) -> None:
    chosen = lengths(most=4)
    for batch, other, seconds, accepted, first_id in history:
        given = [Offer(first_id + i, c) for i, c in enumerate(batch)]
        ids = [offer.seq_id for offer in given]
        assert chosen.may_pay(ids) in (True, False)
        counts = chosen.to_verify(given, other)
        drafts = chosen.to_draft(ids, other)
        assert len(counts) == len(drafts) == len(given)
        assert all(0 <= n <= min(4, len(o.confidences)) for n, o in zip(counts, given, strict=True))
        assert all(0 <= n <= 4 for n in drafts)
        for offer, count in zip(given, counts, strict=True):
            chosen.observe(offer, count, int(count * accepted))
        num_tokens = len(given) + sum(counts) + other
        chosen.observe_catch_up(seconds / 3, ids[:2])
        chosen.observe_step(num_tokens, seconds, other)
