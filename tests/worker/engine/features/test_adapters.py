"""Adapters move between files, the host and slots; sequences wait for them without blocks."""

import dataclasses
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.worker.step_driver import advance, result_of
from worker.config import CacheConfig, SchedulerConfig
from worker.engine.features.adapters import Access, Adapters, AdapterSlots
from worker.engine.messages import AddRequest
from worker.engine.scheduling.scheduler import Scheduler
from worker.types import Adapter, SamplingParams

A, B, C, D = (Adapter(name, f"/{name}", number) for number, name in enumerate("abcd", 1))


@dataclass
class Files:
    is_slow: bool = False
    read: list[str] = field(default_factory=list)
    pending: list[tuple[Adapter, Future[Any]]] = field(default_factory=list)

    def __call__(self, adapter: Adapter) -> Future[Any]:
        future: Future[Any] = Future()
        self.read.append(adapter.name)
        self.pending.append((adapter, future))
        if not self.is_slow:
            self.finish()
        return future

    def finish(self) -> None:
        for adapter, future in self.pending:
            future.set_result(adapter.name)
        self.pending.clear()


def scheduler(adapters: AdapterSlots, **limits: Any) -> Scheduler:
    return Scheduler(CacheConfig(64, 4), SchedulerConfig(**limits), (), [Adapters(adapters)])


def add(
    engine: Scheduler, name: str, adapter: Adapter | None, tokens: int = 2, priority: int = 0
) -> None:
    params = SamplingParams(max_tokens=tokens)
    assert not engine.add(AddRequest(name, [7], params, 0.0, priority, adapter=adapter))


def running(engine: Scheduler) -> list[str]:
    return [sequence.request_id for sequence in engine._live.running]


def test_the_least_recently_used_slot_is_taken_but_never_a_users() -> None:
    slots = AdapterSlots(2, 4, Files())
    assert [slots.take(a, ()) for a in (A, B) if slots.place(a, ()) is Access.READY] == [0, 1]
    assert slots.take_puts() == ((0, "a"), (1, "b"))
    assert slots.take(A, ()) == 0
    assert slots.place(C, {A.number}) is Access.READY
    assert slots.take(C, {A.number}) == 1
    assert slots.take_puts() == ((1, "c"),)
    assert slots.loaded == ("a", "c")
    assert slots.place(B, {A.number, C.number}) is Access.NO_SLOT


def test_an_adapter_in_a_slot_is_known_by_its_files() -> None:
    """Other engines may call it otherwise. Without files it has no lasting name."""
    slots, filed = AdapterSlots(2, 4, Files()), dataclasses.replace(B, digest="f")
    for adapter in (A, filed):
        assert slots.place(adapter, ()) is Access.READY
        slots.take(adapter, ())
    assert [slots.find(digest) for digest in ("f", "g", "")] == [filed, None, None]


def test_the_host_keeps_what_was_used_last() -> None:
    files = Files()
    slots = AdapterSlots(1, 2, files)
    for adapter in (A, B, C, B, A):
        slots.load(adapter)
    assert files.read == ["a", "b", "c", "a"]


def test_only_as_many_are_read_as_could_have_a_slot() -> None:
    files = Files(is_slow=True)
    slots = AdapterSlots(2, 4, files)
    places = [slots.place(a, ()) for a in (A, B, C)]
    assert places == [Access.READING, Access.READING, Access.NO_SLOT]
    files.finish()
    assert [slots.place(a, ()) for a in (A, B)] == [Access.READY, Access.READY]


def test_an_adapter_that_was_given_up_goes_with_its_last_request() -> None:
    files = Files()
    slots = AdapterSlots(1, 2, files)
    assert slots.place(A, ()) is Access.READY
    slots.take(A, ())
    slots.take_puts()
    slots.give_up(A)
    slots.prune({A.number})
    assert slots.loaded == ("a",)
    slots.prune(())
    assert slots.loaded == ()
    assert slots.take_puts() == ((0, None),)
    assert slots.place(A, ()) is Access.READY
    assert files.read == ["a", "a"]


def test_a_sequence_without_a_slot_waits_without_blocks_and_is_passed() -> None:
    engine = scheduler(AdapterSlots(1, 1, Files()))
    add(engine, "a1", A, tokens=4)
    add(engine, "b1", B)
    add(engine, "a2", A)
    add(engine, "base", None)
    advance(engine)
    assert running(engine) == ["a1", "a2", "base"]
    stats = engine.stats()
    assert (stats.adapters.loaded, stats.adapters.awaited) == (("a",), ("b",))
    for _ in range(4):
        advance(engine)
    assert running(engine) == ["b1"]


def test_a_loaded_adapter_does_not_keep_its_slot_by_new_requests_for_ever() -> None:
    """After `max_bypasses` only requests without an adapter may pass."""
    engine = scheduler(AdapterSlots(1, 1, Files()), max_bypasses=2)
    add(engine, "a0", A, tokens=3)
    add(engine, "b", B, tokens=5)
    order: list[str] = []
    for number in range(1, 8):
        add(engine, f"a{number}", A, tokens=3)
        add(engine, f"base{number}", None, tokens=1)
        advance(engine)
        order += [name for name in running(engine) if name not in order]
    assert order.index("b") == 3
    assert set(order[:3]) == {"a0", "a1", "a2"}
    assert engine.num_waiting == 5  # the later ones of a


def test_a_better_class_waits_for_no_slot_that_a_worse_one_would_prolong() -> None:
    engine = scheduler(AdapterSlots(1, 1, Files()))
    add(engine, "a1", A, tokens=3, priority=1)
    advance(engine)
    add(engine, "b", B, priority=0)
    add(engine, "a2", A, priority=1)
    advance(engine)
    assert running(engine) == ["a1"]


def test_nothing_is_runnable_while_the_only_adapter_is_read() -> None:
    files = Files(is_slow=True)
    engine = scheduler(AdapterSlots(1, 1, files))
    add(engine, "a", A)
    assert engine.schedule(0.0) is None
    assert engine.is_compiling
    files.finish()
    assert not engine.is_compiling
    advance(engine)
    assert running(engine) == ["a"]


def test_a_failed_read_ends_its_request_and_is_tried_again() -> None:
    failing: Future[Any] = Future()
    failing.set_exception(ValueError("torn file"))
    answers: list[Future[Any]] = [failing, Files()(A)]
    engine = scheduler(AdapterSlots(1, 1, lambda _: answers.pop(0)))
    add(engine, "one", A)
    assert engine.schedule(0.0) is None
    (output,) = engine.take_failed()
    assert (output.request_id, output.error) == ("one", "torn file")
    add(engine, "two", A)
    advance(engine)
    assert running(engine) == ["two"]


def test_a_step_says_which_slot_a_sequence_runs_with() -> None:
    engine = scheduler(AdapterSlots(1, 2, Files()))
    add(engine, "a", A, tokens=8)
    step = engine.schedule(0.0)
    assert step.adapters == ((0, "a"),)
    assert [s.adapter_slot for s in step.sequences] == [0]


def test_adapters_are_refused_where_there_are_none() -> None:
    engine = Scheduler(CacheConfig(8, 4), SchedulerConfig())
    (output,) = engine.add(AddRequest("x", [7], SamplingParams(1), 0.0, adapter=A))
    assert "--enable-lora" in (output.error or "")


@given(
    moves=st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.integers(-1, 3)),
            st.tuples(st.just("abort"), st.integers(0, 20)),
            st.tuples(st.just("give up"), st.integers(0, 3)),
            st.tuples(st.sampled_from(["step", "read", "preempt"]), st.just(0)),
        ),
        max_size=60,
    ),
    num_slots=st.integers(1, 3),
)
def test_every_adapter_answers_its_requests(moves: list[tuple[str, int]], num_slots: int) -> None:
    adapters, files = (A, B, C, D), Files(is_slow=True)
    slots = AdapterSlots(num_slots, num_slots, files)
    engine = scheduler(slots, max_bypasses=2)
    wanted: dict[int, str | None] = {}
    contents: dict[int, str | None] = {}

    def step() -> None:
        planned = engine.schedule(0.0)
        engine.check_integrity()
        if planned is None:
            return
        contents.update(planned.adapters)
        for sequence in planned.sequences:
            slot = sequence.adapter_slot
            assert (None if slot is None else contents[slot]) == wanted[sequence.seq_id]
        engine.update(planned, result_of(planned, {}), 0.0)
        engine.check_integrity()

    for number, (move, value) in enumerate(moves):
        if move == "add":
            adapter = None if value < 0 else adapters[value]
            wanted[len(wanted)] = None if adapter is None else adapter.name
            add(engine, str(number), adapter, tokens=3)
        elif move == "abort":
            engine.abort(str(value))
        elif move == "give up":
            slots.give_up(adapters[value])
        elif move == "read":
            files.finish()
        elif move == "preempt":
            engine.preempt_all()
        else:
            step()
    for _ in range(10 * len(moves) + 10):
        files.finish()
        step()
    assert not engine.has_unfinished


@pytest.mark.parametrize("adapter", [None, Adapter("n", "/p", 3, 1)])
def test_a_request_with_an_adapter_survives_the_wire(adapter: Adapter | None) -> None:
    request = AddRequest("x", [7], SamplingParams(1), 0.0, adapter=adapter)
    encoded = msgspec.msgpack.encode(request)
    assert msgspec.msgpack.decode(encoded, type=AddRequest) == request
