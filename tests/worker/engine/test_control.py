"""Commands reach their state before they are answered, with steps in flight or not."""

from typing import Any

import pytest

from tests.support.worker.paged_executor import PagedExecutor, next_token
from tests.support.worker.step_driver import make_request
from worker.config import CacheConfig, SchedulerConfig
from worker.engine.core import EngineCore
from worker.engine.messages import (
    Command,
    Configure,
    DumpCache,
    Pause,
    RequestOutput,
    ResetPrefixCache,
    Resume,
    Sleep,
    StepOutputs,
    WakeUp,
)
from worker.engine.pipeline import InlinePipeline
from worker.engine.scheduling.scheduler import Scheduler
from worker.errors import ConfigError
from worker.types import FinishReason

PROMPTS = {name: [ord(name) % 7 + 1] * 6 for name in "abc"}


class Engine:
    def __init__(self, executor: Any, depth: int) -> None:
        self.executor = executor
        self.scheduler = Scheduler(CacheConfig(16, 4), SchedulerConfig(max_num_seqs=2), (0,))
        pipeline = InlinePipeline(executor, depth)
        self.core = EngineCore(self.scheduler, executor, lambda: 0.0, pipeline=pipeline)
        self.outputs: list[RequestOutput] = []
        self.replies: dict[int, tuple[bool, str | None]] = {}
        self.reported: StepOutputs | None = None
        self.blocks: list[list[int]] = []

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            reported = self.core.step()
            self.scheduler.check_integrity()
            if reported is not None:
                self.reported = reported
                self.outputs += reported.outputs
            for reply in self.core.take_replies():
                assert reply.command_id not in self.replies
                self.replies[reply.command_id] = (reply.ok, reply.error)
                self.blocks += [block.token_ids for block in reply.blocks]

    def drain(self) -> None:
        for _ in range(200):
            if not self.core.has_work:
                return
            self.step()
        raise AssertionError("it never comes to rest")

    def command(self, message: Command, steps: int = 3) -> None:
        self.core.command(message)
        self.step(steps)

    def answer(self, request_id: str) -> tuple[list[int], FinishReason | None]:
        mine = [o for o in self.outputs if o.request_id == request_id]
        return [t for o in mine for t in o.token_ids], mine[-1].finish_reason if mine else None

    @property
    def sleep_level(self) -> int | None:
        return self.reported.stats.sleep_level


@pytest.fixture(params=[1, 2], ids=["inline", "overlapped"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return Engine(PagedExecutor(4), request.param)


def expected(prompt: list[int], count: int) -> list[int]:
    context = list(prompt)
    for _ in range(count):
        context.append(next_token(context, 0))
    return context[len(prompt) :]


@pytest.fixture
def load(engine: Engine) -> Engine:
    for name, prompt in PROMPTS.items():
        engine.core.add(make_request(name, prompt, max_tokens=8, ignore_eos=True))
    engine.step(3)
    return engine


def assert_all_answered(engine: Engine) -> None:
    for name, prompt in PROMPTS.items():
        assert engine.answer(name) == (expected(prompt, 8), FinishReason.LENGTH)


def test_keep_freezes_what_runs_and_resume_goes_on(load: Engine) -> None:
    load.command(Pause(1, "keep"))
    assert load.replies == {1: (True, None)}
    assert not load.core.has_work
    reported = len(load.outputs)
    load.step(5)
    assert len(load.outputs) == reported
    assert load.reported.stats.is_paused
    assert load.reported.stats.num_deferred == load.reported.stats.num_waiting == 1
    load.core.command(Resume(2))
    load.drain()
    assert load.replies[2] == (True, None)
    assert_all_answered(load)


def test_wait_lets_what_has_begun_finish_and_answers_then(load: Engine) -> None:
    load.command(Pause(1, "wait"))
    assert load.replies == {}
    load.core.add(make_request("d", [1, 2], max_tokens=1))
    load.drain()
    assert load.replies == {1: (True, None)}
    reasons = [load.answer(name)[1] for name in "abcd"]
    assert reasons == [FinishReason.LENGTH, FinishReason.LENGTH, None, None]
    assert load.reported.stats.num_deferred == 2
    load.core.command(Resume(2))
    load.drain()
    assert [load.answer(name)[1] for name in "cd"] == [FinishReason.LENGTH] * 2


def test_a_wait_that_is_undone_is_answered_with_an_error(load: Engine) -> None:
    load.command(Pause(1, "wait"), steps=2)
    load.command(Resume(2), steps=2)
    assert load.replies[2] == (True, None)
    assert load.replies[1][0] is False
    load.drain()
    assert_all_answered(load)


def test_a_wait_that_is_overtaken_by_abort_is_reached(load: Engine) -> None:
    load.command(Pause(1, "wait"), steps=2)
    load.command(Pause(2, "abort"))
    assert load.replies == {1: (True, None), 2: (True, None)}


def test_abort_ends_everything_in_flight_and_holds_newcomers(load: Engine) -> None:
    load.command(Pause(1, "abort"))
    assert load.replies == {1: (True, None)}
    assert [load.answer(name)[1] for name in "abc"] == [FinishReason.ABORT] * 3
    load.core.add(make_request("d", [1, 2], max_tokens=1, ignore_eos=True))
    load.step(3)
    assert load.answer("d") == ([], None)
    assert not load.core.has_work
    load.core.command(Resume(2))
    load.drain()
    assert load.answer("d")[1] is FinishReason.LENGTH
    assert load.scheduler.blocks.num_free == 16


def test_reset_is_refused_while_blocks_are_in_use(load: Engine) -> None:
    load.command(ResetPrefixCache(1))
    assert load.replies[1][0] is False
    load.drain()
    load.command(ResetPrefixCache(2))
    assert load.replies[2] == (True, None)
    load.core.add(make_request("d", PROMPTS["a"], max_tokens=1))
    load.drain()
    assert load.outputs[-1].num_cached_tokens == 0


def test_reset_of_running_requests_preempts_them(load: Engine) -> None:
    load.command(ResetPrefixCache(1, reset_running=True), steps=1)
    load.drain()
    assert load.replies == {1: (True, None)}
    assert_all_answered(load)
    assert {o.num_preemptions for o in load.outputs if o.finish_reason is not None} == {0, 1}


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_sleep_gives_memory_back_and_wake_takes_it(load: Engine, level: int, mode: str) -> None:
    load.command(Sleep(1, level, mode))
    for _ in range(60 if mode == "wait" else 0):
        load.step()
    assert load.replies == {1: (True, None)}
    assert (load.executor.asleep, load.sleep_level) == (2, level)
    assert load.scheduler.blocks.num_free == 16
    assert not load.core.has_work
    load.command(WakeUp(2, ["weights"]))
    assert (load.replies[2], load.sleep_level) == ((True, None), level)
    load.command(WakeUp(3, ["kv_cache"]))
    assert (load.replies[3], load.sleep_level) == ((True, None), None)
    load.drain()
    if mode == "abort":
        assert [load.answer(name)[1] for name in "abc"] == [FinishReason.ABORT] * 3
    else:
        assert_all_answered(load)


def test_level_0_only_stops_scheduling(load: Engine) -> None:
    load.command(Sleep(1, 0, "keep"))
    assert (load.sleep_level, load.executor.asleep) == (0, 0)
    assert load.scheduler.num_running == 2
    load.command(WakeUp(2))
    load.drain()
    assert_all_answered(load)
    assert {o.num_preemptions for o in load.outputs} == {0}


def test_sleep_can_deepen_and_a_pause_outlives_it(load: Engine) -> None:
    load.command(Pause(1, "keep"))
    load.command(Sleep(2, 0, "keep"))
    load.command(Sleep(3, 2, "keep"))
    assert (load.sleep_level, load.executor.asleep) == (2, 2)
    load.command(WakeUp(4))
    assert load.sleep_level is None
    assert not load.core.has_work
    load.core.command(Resume(5))
    load.drain()
    assert set(load.replies) == {1, 2, 3, 4, 5}
    assert_all_answered(load)


def test_the_dump_lists_blocks_parents_first(engine: Engine) -> None:
    engine.core.add(make_request("a", range(1, 10), max_tokens=1))
    engine.drain()
    engine.command(DumpCache(1))
    assert engine.replies == {1: (True, None)}
    assert engine.blocks == [[1, 2, 3, 4], [5, 6, 7, 8]]


@pytest.mark.parametrize(
    "command", [Pause(1, "never"), Sleep(1, 1, "never"), Sleep(1, 7), WakeUp(1, ["lora"])]
)
def test_unknown_modes_levels_and_tags_are_refused(load: Engine, command: Command) -> None:
    load.command(command)
    assert load.replies[1][0] is False
    assert load.replies[1][1]
    load.drain()
    assert_all_answered(load)


def test_settings_go_to_an_executor_that_takes_them(engine: Engine) -> None:
    class Configurable:
        def configure(self, settings: dict[str, object]) -> None:
            if "wrong" in settings:
                raise ConfigError("wrong is not a setting")

    engine.command(Configure(1, {}))
    assert engine.replies[1][0] is False
    scheduler = Scheduler(CacheConfig(16, 4), SchedulerConfig())
    core = EngineCore(scheduler, Configurable(), lambda: 0.0)  # type: ignore[arg-type]
    for command_id, settings in ((2, {"right": 1}), (3, {"wrong": 1})):
        core.command(Configure(command_id, settings))
    replies = [(reply.command_id, reply.ok, reply.error) for reply in core.take_replies()]
    assert replies == [(2, True, None), (3, False, "wrong is not a setting")]
