"""Admission: bounded bypass, longest prefix first, waiting for a sibling, coming back."""

import pytest

from tests.support.worker.step_driver import advance, make_request, plan, scheduler
from worker.engine.scheduling.admission import PauseState


def test_smaller_ones_pass_a_head_that_does_not_fit_so_often_and_no_more() -> None:
    engine = scheduler(num_blocks=4, max_bypasses=2)
    engine.add(make_request("runs", [9] * 5, max_tokens=6, ignore_eos=True))
    engine.add(make_request("head", [8] * 15, max_tokens=1))
    for index in range(4):
        engine.add(make_request(f"small {index}", [index + 1], max_tokens=1))
    joined = [set(advance(engine)[0]) - {0} for _ in range(7)]
    assert joined[:6] == [{2, 3}, set(), set(), set(), set(), set()]
    assert joined[6] == {1}
    assert {4, 5} <= set(advance(engine)[0])


def test_a_request_for_many_seats_can_be_passed_too() -> None:
    engine = scheduler(max_num_seqs=2, max_bypasses=1)
    engine.add(make_request("runs", [9], max_tokens=3))
    engine.add(make_request("two", [8], branches=["other"]))
    engine.add(make_request("one", [1], max_tokens=1))
    engine.add(make_request("last", [2], max_tokens=1))
    assert [set(advance(engine)[0]) for _ in range(4)] == [{0, 3}, {0}, {0}, {1}]


def test_longest_cached_prefix_first() -> None:
    order = {}
    for waiting_order in ("lpm", "fcfs"):
        engine = scheduler(max_num_seqs=1, waiting_order=waiting_order)
        engine.add(make_request("warm", [1] * 12, max_tokens=1))
        advance(engine)
        engine.add(make_request("none", [2] * 12, max_tokens=1))
        engine.add(make_request("some", [1] * 4 + [3] * 8, max_tokens=1))
        engine.add(make_request("most", [1] * 8 + [3] * 4, max_tokens=1))
        order[waiting_order] = [advance(engine)[1][0].request_id for _ in range(3)]
    assert order == {"lpm": ["most", "some", "none"], "fcfs": ["none", "some", "most"]}


def test_a_long_line_goes_by_arrival() -> None:
    engine = scheduler(max_num_seqs=1, waiting_order="lpm")
    engine.add(make_request("warm", [1] * 12, max_tokens=1))
    advance(engine)
    for index in range(129):
        engine.add(make_request(f"{index}", [2 + index % 3] * 5, max_tokens=1))
    engine.add(make_request("hit", [1] * 12, max_tokens=1))
    first = [advance(engine)[1][0].request_id for _ in range(3)]
    assert first == ["0", "1", "hit"]


def test_a_sibling_waits_for_the_prefix_that_is_being_computed() -> None:
    engine = scheduler(max_num_batched_tokens=16, in_batch_prefix_tokens=8)
    stem = [5] * 20
    engine.add(make_request("first", [*stem, 1]))
    engine.add(make_request("sibling", [*stem, 2]))
    engine.add(make_request("stranger", [7] * 4))
    assert advance(engine)[0] == {0: 16}
    assert advance(engine)[0] == {0: 5, 1: 5, 2: 4}


def test_sequences_that_share_a_prefix_are_deferred_and_counted() -> None:
    engine = scheduler(in_batch_prefix_tokens=8)
    stem = [5] * 20
    engine.add(make_request("first", [*stem, 1]))
    engine.add(make_request("sibling", [*stem, 2], branches=["and one more"]))
    engine.add(make_request("stranger", [7] * 4))
    assert advance(engine)[0] == {0: 21, 3: 4}
    assert engine.stats().num_deferred == 2
    assert advance(engine)[0] == {0: 1, 1: 1, 3: 1}
    assert engine.stats().num_deferred == 0


@pytest.mark.parametrize("sibling", [{"cache_salt": "x"}, {"prompt_logprobs": 0}])
def test_a_sequence_that_cannot_use_a_prefix_does_not_wait(sibling: dict[str, object]) -> None:
    engine = scheduler(in_batch_prefix_tokens=8)
    engine.add(make_request("first", [5] * 20))
    engine.add(make_request("second", [5] * 20, **sibling))
    assert advance(engine)[0] == {0: 20, 1: 20}


def test_a_sibling_is_free_when_the_one_it_waits_for_is_gone() -> None:
    engine = scheduler(max_num_batched_tokens=16, in_batch_prefix_tokens=8)
    engine.add(make_request("first", [5] * 40))
    assert advance(engine)[0] == {0: 16}
    engine.add(make_request("sibling", [*[5] * 39, 1]))
    engine.abort("first")
    assert advance(engine)[0] == {1: 16}


def test_coming_back_needs_room_to_grow() -> None:
    """It would be preempted again too soon, so a new request starts first."""
    engine = scheduler(num_blocks=12, max_bypasses=8)
    engine.add(make_request("a", [1] * 19, max_tokens=24, ignore_eos=True))
    engine.add(make_request("b", [2] * 19, max_tokens=24, ignore_eos=True))
    while not engine.stats().scheduler.num_preemptions:
        advance(engine)
    assert (engine.num_running, engine.num_waiting) == (1, 1)
    num_free = engine.blocks.num_free
    assert num_free >= -(-24 // 4) - 1  # what b knows would fit about now
    engine.add(make_request("new", [3], max_tokens=1))
    assert set(advance(engine)[0]) == {0, 2}
    while engine.num_running:
        advance(engine)
    assert set(advance(engine)[0]) == {1}


def test_by_the_chunk_admission_takes_only_what_the_chunk_needs() -> None:
    """With `reserve_full_prompt` off two long prompts share a pool that holds one."""
    engine = scheduler(num_blocks=5, max_num_batched_tokens=8, reserve_full_prompt=False)
    engine.add(make_request("a", [1] * 9, max_tokens=1))
    engine.add(make_request("b", [2] * 9, max_tokens=1))
    assert advance(engine)[0] == {0: 8}
    assert engine.blocks.num_free == 3
    assert advance(engine)[0] == {0: 1, 1: 7}
    whole = scheduler(num_blocks=5, max_num_batched_tokens=8, max_bypasses=0)
    whole.add(make_request("a", [1] * 9, max_tokens=1))
    whole.add(make_request("b", [2] * 9, max_tokens=1))
    assert [advance(whole)[0] for _ in range(2)] == [{0: 8}, {0: 1}]


def test_a_pause_for_new_ones_lets_the_preempted_back() -> None:
    """The preempted had begun; a request that had not is held and counted as deferred."""
    engine = scheduler(num_blocks=6, block_size=1)
    engine.add(make_request("a", [1, 2]))
    engine.add(make_request("b", [3, 4]))
    for _ in range(3):
        advance(engine)
    assert engine.num_waiting == 1
    engine.add(make_request("new", [5]))
    engine.pause_state = PauseState.PAUSED_NEW
    assert engine.stats().num_deferred == 1
    ran: set[int] = set()
    while engine.is_runnable:
        ran |= set(advance(engine)[0])
    assert ran == {0, 1}
    assert engine.schedule(0.0) is None
    engine.pause_state = PauseState.PAUSED_ALL
    assert not engine.is_runnable
    engine.pause_state = PauseState.UNPAUSED
    assert plan(engine.schedule(0.0)) == {2: 1}
