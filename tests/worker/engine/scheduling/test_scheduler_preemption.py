"""Preemption: the plan, the line, and the number of times."""

from collections import Counter
from collections.abc import Callable
from random import Random

import pytest

from tests.support.worker.step_driver import advance, plan, result_of, scheduler
from worker.engine import policies
from worker.engine.messages import AddRequest
from worker.engine.policies import VICTIM_POLICIES
from worker.engine.scheduling.scheduler import Scheduler

Make = Callable[..., AddRequest]


def test_a_victim_that_was_planned_gives_its_budget_back(make_request: Make) -> None:
    """It leaves the step, and the next in line has its tokens."""
    engine = scheduler(num_blocks=8, block_size=1, max_num_batched_tokens=6, victim="largest")
    for name, prompt in (("a", [1]), ("b", [2] * 3), ("c", [3]), ("d", [4])):
        engine.add(make_request(name, prompt, max_tokens=4))
    assert advance(engine)[0] == {0: 1, 1: 3, 2: 1, 3: 1}
    assert plan(engine.schedule(0.0)) == {0: 1, 2: 1, 3: 1}
    engine.check_integrity()


def test_the_one_that_asks_may_be_the_victim(make_request: Make) -> None:
    engine = scheduler(num_blocks=7, block_size=1, victim="largest")
    for name, prompt in (("a", [1]), ("b", [2] * 4), ("c", [3])):
        engine.add(make_request(name, prompt, max_tokens=4))
    advance(engine)
    assert plan(engine.schedule(0.0)) == {0: 1, 2: 1}


def test_no_sequence_is_admitted_in_a_step_that_preempts(make_request: Make) -> None:
    """The room that was made is for those that run."""
    engine = scheduler(num_blocks=6, block_size=1)
    engine.add(make_request("a", [1, 2]))
    engine.add(make_request("b", [3, 4]))
    advance(engine)
    advance(engine)
    engine.add(make_request("new", [5], max_tokens=1))
    assert advance(engine)[0] == {0: 1}
    assert set(advance(engine)[0]) == {0, 2}


def test_a_shared_prefix_makes_a_cheap_victim(make_request: Make) -> None:
    """Its blocks survive with the sequence it shares them with, so little is computed again."""
    engine = scheduler(num_blocks=9, in_batch_prefix_tokens=None)
    engine.add(make_request("a", [1] * 9, max_tokens=9, ignore_eos=True))
    advance(engine)
    engine.add(make_request("shares", [*[1] * 8, 2], max_tokens=9, ignore_eos=True))
    engine.add(make_request("own", [3] * 9, max_tokens=9, ignore_eos=True))
    while not engine.stats().scheduler.num_preemptions:
        planned, _ = advance(engine)
    assert set(planned) == {0, 2}


@pytest.mark.parametrize("victim", sorted(VICTIM_POLICIES))
@pytest.mark.parametrize("overlap", [False, True])
def test_three_preemptions_are_the_most_whatever_the_policy(
    make_request: Make, victim: str, overlap: bool
) -> None:
    rng = Random(3)
    engine = scheduler(num_blocks=24, block_size=1, victim=victim, policy="fcfs")
    for index in range(120):
        prompt = [rng.randrange(1, 9) for _ in range(rng.randrange(1, 5))]
        engine.add(
            make_request(str(index), prompt, max_tokens=rng.randrange(1, 20), ignore_eos=True)
        )
    seen: Counter[int] = Counter()
    ahead = engine.schedule(0.0) if overlap else None
    while engine.has_unfinished:
        step = engine.schedule(0.0)
        step, ahead = (ahead, step) if overlap else (step, None)
        if step is None:
            continue
        for output in engine.update(step, result_of(step, {}), 0.0):
            if output.finish_reason is not None:
                seen[output.num_preemptions] += 1
    engine.check_integrity()
    assert sum(seen.values()) == 120
    assert max(seen) <= policies.MAX_PREEMPTIONS
    assert sum(seen[n] for n in (1, 2, 3)) > 0
    assert engine.blocks.num_free == 24


def preempted_often(make_request: Make) -> Scheduler:
    """Preempt two sequences as often as is allowed. They are short, but each may come to need 26 of
    the 40 blocks.
    """
    engine = scheduler(num_blocks=40, block_size=16, in_batch_prefix_tokens=None)
    for name, token in (("a", 1), ("b", 2)):
        engine.add(make_request(name, [token] * 16, max_tokens=400, ignore_eos=True))
    for _ in range(policies.MAX_PREEMPTIONS):
        assert len(advance(engine)[0]) == 2
        engine.preempt_all()
        engine.check_integrity()
    return engine


def test_guarantees_that_do_not_fit_together_come_one_after_the_other(make_request: Make) -> None:
    """There is room for both now, but not for all that both may need: the second waits."""
    engine = preempted_often(make_request)
    ends = []
    while engine.has_unfinished:
        planned, outputs = advance(engine)
        assert len(planned) == 1
        ends += [(o.request_id, o.num_preemptions) for o in outputs if o.finish_reason]
    assert ends == [("a", 3), ("b", 3)]


def test_others_use_the_room_and_give_way_to_the_guaranteed(make_request: Make) -> None:
    """Nothing is reserved: new ones run beside it until the room is needed."""
    engine = preempted_often(make_request)
    engine.abort("a")
    for name, token in (("new", 3), ("newer", 4)):
        engine.add(make_request(name, [token] * 100, max_tokens=300, ignore_eos=True))
    preempted = {}
    while engine.has_unfinished:
        _, outputs = advance(engine)
        preempted.update({o.request_id: o.num_preemptions for o in outputs if o.finish_reason})
    assert preempted["b"] == policies.MAX_PREEMPTIONS
    assert preempted["new"] + preempted["newer"] > 0


def test_a_better_class_does_not_wait_for_the_guarantees_of_a_lower_one(make_request: Make) -> None:
    """Blocks that it may take when it asks need not be free beforehand."""
    engine = scheduler(num_blocks=40, block_size=4, max_model_len=160)
    engine.add(make_request("low", [1] * 8, max_tokens=120, ignore_eos=True, priority=5))
    for _ in range(policies.MAX_PREEMPTIONS):
        advance(engine)
        engine.preempt_all()
    advance(engine)
    engine.add(make_request("high", [2] * 8, max_tokens=60, ignore_eos=True))
    high = engine._live.find("high")
    assert high is not None
    high.num_preemptions = policies.MAX_PREEMPTIONS  # as others of its class would have made it
    planned, _ = advance(engine)
    assert high.seq_id in planned
