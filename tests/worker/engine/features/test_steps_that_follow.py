"""Steps that are scheduled before the drafts of the step in flight are verified."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.depth import examples
from tests.support.worker import engine_walk as walks
from tests.worker.engine.features.test_speculation import (
    Bench,
    Manner,
    caches,
    limits_of_a_step,
    speculative,
)
from worker.config import CacheConfig, SchedulerConfig, SpeculativeConfig
from worker.engine.messages import AddRequest
from worker.engine.scheduling.scheduler import Scheduler
from worker.types import SamplingParams, SchedulerOutput


class Counting(Scheduler):
    """A scheduler that counts the steps that follow."""

    num_following = 0

    def schedule(self, now: float) -> SchedulerOutput | None:
        step = super().schedule(now)
        if step is not None and step.follows:
            self.num_following += 1
            assert self.num_in_flight == 2
            assert all(s.limit and s.takes_pending and not s.token_ids for s in step.sequences)
        return step


# Some draws depend on earlier tokens, so that steps wait now and then.
free_answers = st.builds(
    SamplingParams,
    max_tokens=st.integers(3, 40),
    seed=st.sampled_from([0, 1, 2, 3, walks.CORRUPT + 9]),
    min_tokens=st.sampled_from([0, 0, 4]),
    ignore_eos=st.sampled_from([True, True, False]),
    stop_token_ids=st.sampled_from([(), (), (6,)]),
    frequency_penalty=st.sampled_from([0.0] * 7 + [0.5]),
    logprobs=st.sampled_from([None] * 7 + [1]),
)
loads = st.lists(
    walks.arrivals(free_answers), min_size=1, max_size=5, unique_by=lambda a: a.request.request_id
)
scenes = st.builds(walks.Scene, caches, limits_of_a_step, loads, walks.commands)
manners = st.builds(
    Manner, st.sampled_from(("right", "mixed", "wrong", "silent")), st.integers(0, 9)
)


@pytest.mark.parametrize("pipe", ["eager", "lazy"])
@examples(300)
@given(scene=scenes, config=speculative(), manner=manners, seconds=st.sampled_from([0.0, 0.01]))
def test_steps_that_follow_change_no_answer(
    pipe: str, scene: walks.Scene, config: SpeculativeConfig, manner: Manner, seconds: float
) -> None:
    bench = Bench(scene, replace(config, method="eagle"), manner, Counting, True)
    ticks = itertools.count()
    scene.run(bench.scheduler, bench.executor, pipe, lambda: next(ticks) * seconds)
    figures = bench.scheduler.stats().speculation
    assert figures.num_accepted_tokens == sum(figures.num_accepted_by_position)
    assert figures.num_drafter_failures == 0


def scene_of(count: int, **limits: int) -> walks.Scene:
    """Return `count` requests of 40 tokens that arrive together."""
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    load = [
        walks.Arrival(AddRequest(str(i), [1, 2, 3 + i], params, 0.0), 0, (None,))
        for i in range(count)
    ]
    batch = SchedulerConfig(**{"max_num_batched_tokens": 64, "max_num_seqs": 4, **limits})
    return walks.Scene(CacheConfig(60, 4), batch, load, [])


@pytest.mark.parametrize(
    ("count", "limits", "least"),
    [
        (3, {}, 0.6),
        (1, {}, 0.6),
        # Those that wait cannot be admitted before another one ends.
        (6, {"max_num_seqs": 2}, 0.6),
    ],
)
@pytest.mark.parametrize("manner", ["right", "mixed"])
def test_most_steps_of_a_device_drafter_follow(
    manner: str, count: int, limits: dict[str, int], least: float
) -> None:
    scene = scene_of(count, **limits)
    config = SpeculativeConfig("eagle", 3, enable_adaptive_verification=False)
    bench = Bench(scene, config, Manner(manner, 1), Counting, True)
    walk = scene.run(bench.scheduler, bench.executor, "eager")
    assert isinstance(bench.scheduler, Counting)
    assert bench.scheduler.num_following > least * len(bench.executor.steps)
    assert bench.scheduler.stats().speculation.num_accepted_tokens > 40 * count // 4
    assert all(len(received.tokens) == 40 for received in walk.received.values())


def test_a_step_waits_where_a_draw_depends_on_earlier_tokens() -> None:
    scene = scene_of(2)
    params = replace(scene.load[1].request.params, frequency_penalty=0.5)
    request = replace_params(scene.load[1].request, params)
    scene.load[1] = replace(scene.load[1], request=request)
    config = SpeculativeConfig("eagle", 3, enable_adaptive_verification=False)
    bench = Bench(scene, config, Manner("right", 1), Counting, True)
    scene.run(bench.scheduler, bench.executor, "eager")
    assert isinstance(bench.scheduler, Counting)
    assert bench.scheduler.num_following == 0
    assert bench.scheduler.stats().speculation.num_accepted_tokens > 20


def replace_params(request: AddRequest, params: SamplingParams) -> AddRequest:
    return AddRequest(request.request_id, request.prompt_token_ids, params, 0.0)
