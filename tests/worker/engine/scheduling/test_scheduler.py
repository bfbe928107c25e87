"""The scheduler's rules one at a time, under pressure, and in any mix."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from tests.depth import examples
from tests.support.worker import engine_walk as walks
from tests.support.worker.paged_executor import PagedExecutor, next_token
from tests.support.worker.step_driver import (
    END,
    advance,
    drawn,
    make_request,
    plan,
    result_of,
    scheduler,
)
from worker.config import CacheConfig, SchedulerConfig
from worker.engine import policies
from worker.engine.messages import AddRequest
from worker.engine.policies import VICTIM_POLICIES
from worker.engine.scheduling.scheduler import Scheduler
from worker.errors import ConfigError, IntegrityError
from worker.types import (
    Draw,
    FinishReason,
    ModelOutput,
    SamplingParams,
    SchedulerOutput,
    TokenLogprobs,
)


def test_a_long_prompt_runs_in_chunks_beside_decodes() -> None:
    engine = scheduler(max_num_batched_tokens=8)
    engine.add(make_request("a", range(1, 5)))
    assert advance(engine)[0] == {0: 4}
    engine.add(make_request("b", range(10, 30)))
    outputs = []
    for expected in ({0: 1, 1: 7}, {0: 1, 1: 7}, {0: 1, 1: 6}):
        planned, outputs = advance(engine)
        assert planned == expected
    assert [o.request_id for o in outputs] == ["a", "b"]


def test_watermark_keeps_blocks_free_while_others_run() -> None:
    """A sequence that runs alone may take everything."""
    engine = Scheduler(CacheConfig(8, 4, watermark=0.5), SchedulerConfig())
    engine.add(make_request("a", [1] * 12))
    engine.add(make_request("b", [2] * 8))
    assert advance(engine)[0] == {0: 12}
    engine.abort("a")
    assert advance(engine)[0] == {1: 8}


def test_a_preempted_sequence_is_ahead_of_later_arrivals() -> None:
    engine = scheduler(num_blocks=4, block_size=1)
    engine.add(make_request("a", [1], max_tokens=3))
    engine.add(make_request("b", [2], max_tokens=3))
    advance(engine)
    advance(engine)
    engine.add(make_request("c", [3], max_tokens=1))
    assert advance(engine)[0] == {0: 1}  # b lost its blocks, a ends
    assert list(advance(engine)[0]) == [1, 2]


def test_lower_priority_values_go_first() -> None:
    engine = scheduler(max_num_seqs=1)
    for name, priority in (("a", 5), ("b", 0), ("c", 0), ("d", -1)):
        engine.add(make_request(name, [1], priority=priority, max_tokens=1))
    order = [advance(engine)[1][0].request_id for _ in range(4)]
    assert order == ["d", "b", "c", "a"]


def test_prefix_hits_skip_work_and_are_counted_once() -> None:
    engine = scheduler()
    engine.add(make_request("a", range(1, 13), max_tokens=2))
    advance(engine, now=1.0)
    engine.add(make_request("b", range(1, 13), max_tokens=2))
    planned, outputs = advance(engine, now=2.0)
    assert planned == {0: 1, 1: 4}
    last = outputs[-1]
    assert (last.num_cached_tokens, last.scheduled_seconds) == (8, 2.0)
    stats = engine.stats()
    assert (stats.scheduler.prefix_cache_queries, stats.scheduler.prefix_cache_hits) == (24, 8)
    assert (stats.scheduler.prompt_tokens, stats.scheduler.generation_tokens) == (24, 3)


def test_outputs_become_part_of_the_prefix_cache() -> None:
    engine = scheduler()
    engine.add(make_request("a", [1, 2, 3], max_tokens=6))
    for _ in range(6):
        advance(engine)
    engine.add(make_request("b", [1, 2, 3, 1, 1, 1, 1, 1, 1, 7], max_tokens=1))
    assert advance(engine)[0] == {1: 2}


def test_nothing_can_end_a_sequence_before_its_minimum() -> None:
    engine = scheduler()
    engine.add(make_request("a", [1, 2], max_tokens=9, min_tokens=2, stop_token_ids=(5,)))
    banned = []
    for token in (3, 4, 5):
        step = engine.schedule(0.0)
        (planned,) = step.sequences
        (sample,) = planned.samples
        banned.append(set(sample.banned_ids))
        engine.update(step, drawn({planned.seq_id: token}), 0.0)
    assert banned == [{0, 5}, {0, 5}, set()]
    assert not engine.has_unfinished


def test_a_sequence_ends_where_the_pool_or_the_model_does() -> None:
    engine = scheduler(num_blocks=2, block_size=4, max_model_len=100)
    assert engine.max_model_len == 8
    engine.add(make_request("a", [1] * 6, max_tokens=50))
    assert advance(engine)[1][0].finish_reason is None
    assert advance(engine)[1][0].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(("prompt", "words"), [([], "empty"), ([1] * 8, "8 tokens")])
def test_prompts_that_can_never_run_are_refused(prompt: list[int], words: str) -> None:
    engine = scheduler(num_blocks=2, block_size=4)
    (output,) = engine.add(make_request("a", prompt))
    assert output.finish_reason is FinishReason.ERROR
    assert words in (output.error or "")
    assert not engine.has_unfinished


def test_an_id_in_use_is_refused_without_harm_to_its_owner() -> None:
    engine = scheduler()
    assert not engine.add(make_request("a", [1], max_tokens=1))
    (second,) = engine.add(make_request("a", [2]))
    assert second.finish_reason is FinishReason.ERROR
    assert advance(engine)[1][0].finish_reason is FinishReason.LENGTH
    assert not engine.add(make_request("a", [2]))


@pytest.mark.parametrize(
    ("limits", "flag"),
    [
        ({"policy": "random"}, "--scheduling-policy"),
        ({"waiting_order": "random"}, "--waiting-order"),
        ({"victim": "random"}, "--preemption-victim"),
    ],
)
def test_unknown_policies_are_refused_by_name(limits: dict[str, str], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        scheduler(**limits)


def test_results_come_in_the_order_of_steps() -> None:
    engine = scheduler()
    engine.add(make_request("a", [1]))
    first = engine.schedule(0.0)
    second = engine.schedule(0.0)
    assert first is not None
    with pytest.raises(IntegrityError, match="oldest"):
        engine.update(second, drawn({0: 1}), 0.0)


def test_fcfs_ignores_priorities() -> None:
    engine = scheduler(max_num_seqs=1, policy="fcfs")
    for name, priority in (("a", 5), ("b", 0), ("c", -1)):
        engine.add(make_request(name, [1], priority=priority, max_tokens=1))
    assert [advance(engine)[1][0].request_id for _ in range(3)] == ["a", "b", "c"]


def test_without_chunks_a_prompt_runs_whole_or_not_at_all() -> None:
    engine = scheduler(max_num_batched_tokens=8, enable_chunked_prefill=False)
    (refused,) = engine.add(make_request("large", [9] * 8))
    assert "8 tokens" in (refused.error or "")
    engine.add(make_request("a", [1] * 5))
    engine.add(make_request("b", [2] * 6))
    assert advance(engine)[0] == {0: 5}
    assert advance(engine)[0] == {0: 1, 1: 6}


def test_a_failed_draw_ends_the_answer_and_forgets_its_blocks() -> None:
    engine = scheduler()
    engine.add(make_request("a", range(1, 10)))
    step = engine.schedule(0.0)
    (output,) = engine.update(step, ModelOutput({}, failed={0: "not a number"}), 0.0)
    assert (output.finish_reason, output.error) == (FinishReason.ERROR, "not a number")
    assert engine.stats().scheduler.num_corrupted_requests == 1
    engine.add(make_request("b", range(1, 10)))
    assert advance(engine)[0] == {1: 9}


def test_prompt_logprobs_are_asked_for_by_the_chunk_and_reported_once() -> None:
    engine = scheduler(max_num_batched_tokens=4)
    for name in ("a", "b"):
        engine.add(make_request(name, range(1, 7), max_tokens=1, prompt_logprobs=2))
        asked = []
        while engine.has_unfinished:
            step = engine.schedule(0.0)
            (chunk,) = step.sequences
            asked.append((chunk.start, list(chunk.prompt_targets), chunk.num_prompt_logprobs))
            rows = tuple(TokenLogprobs((t,), (-1.0,), 1) for t in chunk.prompt_targets)
            result = result_of(step, {})
            result.prompt_logprobs[chunk.seq_id] = rows
            (output,) = engine.update(step, result, 0.0)
            assert [row.token_ids[0] for row in output.prompt_logprobs] == asked[-1][1]
        assert asked == [(0, [2, 3, 4, 5], 2), (4, [6], 2)]
    assert engine.stats().scheduler.prefix_cache_queries == 0
    engine.add(make_request("c", range(1, 7), max_tokens=1))
    assert advance(engine)[0] == {2: 2}


def test_the_next_turn_finds_the_partly_filled_block_too() -> None:
    engine = Scheduler(CacheConfig(16, 4), SchedulerConfig())
    engine.add(make_request("a", range(1, 7), max_tokens=1))
    advance(engine)
    engine.add(make_request("b", [*range(1, 7), 1, 9], max_tokens=1))
    step = engine.schedule(0.0)
    assert (step.sequences[0].start, len(step.block_copies)) == (6, 1)


def test_a_draw_that_looks_back_gets_every_token_before_it() -> None:
    engine = scheduler()
    engine.add(make_request("a", [1, 2], presence_penalty=0.5))
    engine.add(make_request("b", [3]))
    advance(engine)
    step = engine.schedule(0.0)
    seen = [(list(s.samples[0].history), s.samples[0].num_prompt) for s in step.sequences]
    assert seen == [([1, 2, 1], 2), ([], 1)]


def test_the_prompt_runs_once_and_is_drawn_from_for_every_answer() -> None:
    engine = scheduler()
    engine.add(make_request("a", range(1, 7), seed=10, branches=["a1", "a2"]))
    assert (engine.num_waiting, engine.num_running) == (3, 0)
    step = engine.schedule(0.0)
    (parent,) = step.sequences
    assert [sample.params.seed for sample in parent.samples] == [10, 11, 12]
    assert [sample.position for sample in parent.samples] == [6, 6, 6]
    outputs = engine.update(step, drawn({0: (1, 2, 3)}), 0.0)
    assert [(o.request_id, o.token_ids) for o in outputs] == [("a", [1]), ("a1", [2]), ("a2", [3])]
    engine.check_integrity()
    assert (engine.num_waiting, engine.num_running) == (0, 3)
    assert engine.blocks.num_free == 62
    assert engine.stats().scheduler.prompt_tokens == 6


def test_only_the_shared_partial_tail_is_copied() -> None:
    """Two of three write into a copy of it, the last keeps it; a full tail is not copied at all."""
    engine = scheduler()
    engine.add(make_request("a", range(1, 7), branches=["a1", "a2"]))
    advance(engine, {0: (1, 2, 3)})
    step = engine.schedule(0.0)
    assert plan(step) == {0: 1, 1: 1, 2: 1}
    assert len(step.block_copies) == 2
    assert len({source for source, _ in step.block_copies}) == 1
    full = scheduler()
    full.add(make_request("a", range(1, 9), branches=["a1", "a2"]))
    advance(full, {0: (1, 2, 3)})
    step = full.schedule(0.0)
    assert step.block_copies == ()
    tables = [tuple(s.block_table[:2]) for s in step.sequences]
    assert len(set(tables)) == 1


def test_all_answers_count_against_the_seats() -> None:
    engine = scheduler(max_num_seqs=3, max_bypasses=0)
    engine.add(make_request("a", [1], max_tokens=2))
    engine.add(make_request("b", [2], branches=["b1", "b2"]))
    engine.add(make_request("c", [3]))
    assert advance(engine)[0] == {0: 1}
    assert advance(engine)[0] == {0: 1}
    assert advance(engine)[0] == {1: 1}
    assert engine.num_running == 3


def test_more_answers_than_seats_are_refused() -> None:
    engine = scheduler(max_num_seqs=2)
    outputs = engine.add(make_request("a", [1], branches=["a1", "a2"]))
    assert [o.request_id for o in outputs] == ["a", "a1", "a2"]
    assert all("at most 2" in (o.error or "") for o in outputs)
    assert not engine.has_unfinished


@pytest.mark.parametrize("branches", [["b", "b"], ["a"], ["used"]])
def test_ids_of_answers_are_unique(branches: list[str]) -> None:
    engine = scheduler()
    engine.add(make_request("used", [1]))
    outputs = engine.add(make_request("a", [1], branches=branches))
    assert all("is in use" in (o.error or "") for o in outputs)
    assert engine.num_waiting == 1


@pytest.mark.parametrize(
    ("gone", "left"), [("a", {"a1": 11, "a2": 12}), ("a1", {"a": 10, "a2": 12})]
)
def test_an_answer_can_be_aborted_before_its_prompt_ran(gone: str, left: dict[str, int]) -> None:
    engine = scheduler()
    engine.add(make_request("a", range(1, 7), seed=10, branches=["a1", "a2"]))
    output = engine.abort(gone)
    assert (output.request_id, output.finish_reason) == (gone, FinishReason.ABORT)
    engine.check_integrity()
    step = engine.schedule(0.0)
    assert [s.params.seed for s in step.sequences[0].samples] == list(left.values())
    outputs = engine.update(step, drawn({0: (1, 2)}), 0.0)
    assert [o.request_id for o in outputs] == list(left)
    assert engine.num_running == 2


def test_a_victim_that_was_planned_gives_its_budget_back() -> None:
    engine = scheduler(num_blocks=8, block_size=1, max_num_batched_tokens=6, victim="largest")
    for name, prompt in (("a", [1]), ("b", [2] * 3), ("c", [3]), ("d", [4])):
        engine.add(make_request(name, prompt, max_tokens=4))
    assert advance(engine)[0] == {0: 1, 1: 3, 2: 1, 3: 1}
    assert plan(engine.schedule(0.0)) == {0: 1, 2: 1, 3: 1}
    engine.check_integrity()


def test_the_one_that_asks_may_be_the_victim() -> None:
    engine = scheduler(num_blocks=7, block_size=1, victim="largest")
    for name, prompt in (("a", [1]), ("b", [2] * 4), ("c", [3])):
        engine.add(make_request(name, prompt, max_tokens=4))
    advance(engine)
    assert plan(engine.schedule(0.0)) == {0: 1, 2: 1}


def test_no_sequence_is_admitted_in_a_step_that_preempts() -> None:
    engine = scheduler(num_blocks=6, block_size=1)
    engine.add(make_request("a", [1, 2]))
    engine.add(make_request("b", [3, 4]))
    advance(engine)
    advance(engine)
    engine.add(make_request("new", [5], max_tokens=1))
    assert advance(engine)[0] == {0: 1}
    assert set(advance(engine)[0]) == {0, 2}


def test_a_shared_prefix_makes_a_cheap_victim() -> None:
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
def test_three_preemptions_are_the_most_whatever_the_policy(victim: str, overlap: bool) -> None:
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


def preempted_often() -> Scheduler:
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


def test_guarantees_that_do_not_fit_together_come_one_after_the_other() -> None:
    """There is room for both now, but not for all that both may need: the second waits."""
    engine = preempted_often()
    ends = []
    while engine.has_unfinished:
        planned, outputs = advance(engine)
        assert len(planned) == 1
        ends += [(o.request_id, o.num_preemptions) for o in outputs if o.finish_reason]
    assert ends == [("a", 3), ("b", 3)]


def test_others_use_the_room_and_give_way_to_the_guaranteed() -> None:
    """Nothing is reserved: new ones run beside it until the room is needed."""
    engine = preempted_often()
    engine.abort("a")
    for name, token in (("new", 3), ("newer", 4)):
        engine.add(make_request(name, [token] * 100, max_tokens=300, ignore_eos=True))
    preempted = {}
    while engine.has_unfinished:
        _, outputs = advance(engine)
        preempted.update({o.request_id: o.num_preemptions for o in outputs if o.finish_reason})
    assert preempted["b"] == policies.MAX_PREEMPTIONS
    assert preempted["new"] + preempted["newer"] > 0


def test_a_better_class_does_not_wait_for_the_guarantees_of_a_lower_one() -> None:
    """Blocks that it may take when it asks need not be free beforehand."""
    engine = scheduler(num_blocks=40, block_size=4, max_model_len=160)
    engine.add(make_request("low", [1] * 8, max_tokens=120, ignore_eos=True, priority=5))
    for _ in range(policies.MAX_PREEMPTIONS):
        advance(engine)
        engine.preempt_all()
    advance(engine)
    engine.add(make_request("high", [2] * 8, max_tokens=60, ignore_eos=True))
    high = engine._live.find("high")
    high.num_preemptions = policies.MAX_PREEMPTIONS  # as others of its class would have made it
    planned, _ = advance(engine)
    assert high.seq_id in planned


@dataclass
class Client:
    since: int
    length: int
    received: int = 0


class Clients:
    def __init__(self, engine: Scheduler, rng: Random, count: int, total: int) -> None:
        self.engine = engine
        self.rng = rng
        self.count = count
        self.left = total
        self.open: dict[str, Client] = {}
        self.waits: list[int] = []
        self.preemptions: list[int] = []
        self.num_aborted = 0
        self.num_sent = 0
        self.stems = [[rng.randrange(1, 50_000) for _ in range(64)] for _ in range(4)]

    def send(self, now: int) -> None:
        rng = self.rng
        while len(self.open) < self.count and self.left:
            longest = rng.choice([10, 30, 80, 200, 500, 900])
            own = [
                rng.randrange(1, 50_000) for _ in range(rng.randrange(longest // 2, longest + 1))
            ]
            prompt = (rng.choice(self.stems) if rng.random() < 0.5 else []) + own
            name = str(self.num_sent)
            # The engine does not know how long the answer will be.
            params = SamplingParams(max_tokens=3000)
            assert not self.engine.add(AddRequest(name, prompt, params, 0.0))
            self.open[name] = Client(now, min(600, int(rng.expovariate(1 / 80)) + 1))
            self.num_sent += 1
            self.left -= 1

    def give_up(self) -> None:
        if self.open and self.rng.random() < 0.01:
            name = self.rng.choice(sorted(self.open))
            assert self.engine.abort(name) is not None
            del self.open[name]
            self.num_aborted += 1

    def answer(self, step: SchedulerOutput, names: dict[int, str], now: int) -> None:
        sampled = {}
        for sequence in step.sequences:
            if sequence.samples:
                client = self.open.get(names[sequence.seq_id])
                last = client is None or client.received + 1 >= client.length
                sampled[sequence.seq_id] = (Draw(END if last else 1),)
        for output in self.engine.update(step, ModelOutput(sampled), float(now)):
            client = self.open[output.request_id]
            client.received += 1
            if client.received == 1:
                self.waits.append(now - client.since)
            if output.finish_reason is not None:
                self.preemptions.append(output.num_preemptions)
                del self.open[output.request_id]


@pytest.mark.parametrize("victim", ["recompute-cost", "last"])
def test_32_clients_in_200_blocks(victim: str) -> None:
    engine = Scheduler(
        CacheConfig(200, 16),
        SchedulerConfig(max_num_batched_tokens=512, max_model_len=3000, victim=victim),
        (END,),
    )
    clients = Clients(engine, Random(7), count=32, total=400)
    now = 0
    while clients.open or clients.left:
        clients.send(now)
        clients.give_up()
        step = engine.schedule(float(now))
        now += 1
        if step is not None:
            names = {s.seq_id: str(s.seq_id) for s in step.sequences}
            clients.answer(step, names, now)
        if now % 50 == 0:
            engine.check_integrity()
    assert engine.stats().scheduler.num_preemptions > 50
    assert len(clients.preemptions) + clients.num_aborted == 400
    assert max(clients.preemptions) <= policies.MAX_PREEMPTIONS
    # An answer takes 80 steps on average and the pool holds 8 requests: the fair wait is about
    # 32 / 8 × 80 steps.
    assert max(clients.waits) < 4 * 320
    assert engine.blocks.num_free == 200


@examples(60, suppress_health_check=[HealthCheck.too_slow])
@given(
    max_bypasses=st.integers(0, 5),
    waiting_order=st.sampled_from(policies.WAITING_ORDERS),
    victim=st.sampled_from(sorted(policies.VICTIM_POLICIES)),
    size=st.integers(1, 30),
    seed=st.integers(0, 1 << 32),
)
def test_no_request_starves_behind_an_endless_stream(
    max_bypasses: int, waiting_order: str, victim: str, size: int, seed: int
) -> None:
    """However many small or well cached requests keep coming, any one request has its answer after
    a bounded number of steps.
    """
    rng = Random(seed)
    limits = SchedulerConfig(
        max_num_batched_tokens=16,
        max_num_seqs=4,
        max_bypasses=max_bypasses,
        waiting_order=waiting_order,
        victim=victim,
        in_batch_prefix_tokens=4,
    )
    engine = Scheduler(CacheConfig(8, 4), limits, (END,))
    waits_for = None
    for now in range(400):
        if engine.num_waiting < 6:
            prompt = [rng.randrange(1, 3)] * rng.randrange(1, 9)
            engine.add(make_request(f"{now}", prompt, max_tokens=rng.randrange(1, 9)))
        if now == 20:
            waits_for = f"patient {now}"
            engine.add(make_request(waits_for, [9] * size, max_tokens=2))
        step = engine.schedule(0.0)
        draws = {s.seq_id: (Draw(1),) for s in step.sequences if s.samples}
        for output in engine.update(step, ModelOutput(draws), 0.0):
            assert output.num_preemptions <= policies.MAX_PREEMPTIONS
            if output.request_id == waits_for and output.finish_reason is not None:
                return
    raise AssertionError("it waits for ever")


@pytest.mark.parametrize("pipe", walks.PIPES)
@examples(150, suppress_health_check=[HealthCheck.too_slow])
@given(scene=walks.scenes)
def test_any_batch_answers_as_each_request_alone(pipe: str, scene: walks.Scene) -> None:
    scheduler = Scheduler(scene.cache, scene.limits, (walks.END,))
    walk = scene.run(scheduler, PagedExecutor(scene.cache.block_size), pipe)
    if scene.limits.policy == "fcfs":
        most = policies.MAX_PREEMPTIONS + len(scene.orders)
        assert all(one.endings[0].num_preemptions <= most for one in walk.received.values())


def test_the_definition_knows_the_paged_executors_bans() -> None:
    context: Sequence[int] = [1, 2, 3]
    assert next_token(context, 0, (next_token(context, 0),)) != next_token(context, 0)
