"""Matchers follow outputs; sequences wait for grammars without holding anything up."""

from concurrent.futures import Future
from typing import Any

import pytest

from tests.support.worker.grammar_bench import END, MARK, OTHER_END, PIECES, SIZE, VOCABULARY
from tests.support.worker.guesses import Says, by
from tests.support.worker.step_driver import advance, plan, result_of, scheduler
from worker.engine.features.grammars import ConstrainedOutputs
from worker.engine.features.speculation import JUMP_FORWARD, Speculation
from worker.engine.messages import AddRequest
from worker.engine.scheduling.scheduler import Scheduler
from worker.engine.sequences.grammar import GrammarCompiler, Matcher, allows
from worker.types import Drafts, SamplingParams

PLAIN = SamplingParams(max_tokens=9)


def regex(text: str) -> str:
    return "start: /" + text + "/"


def allowed(mask: bytes) -> set[int]:
    return {token for token in range(SIZE) if allows(mask, token)}


def piece(text: str) -> int:
    return 256 + PIECES.index(text)


@pytest.fixture
def matcher(compiler: GrammarCompiler) -> Matcher:
    return compiler.compile(regex("[abc]x*")).result().fork()


# ---- matchers -----------------------------------------------------------------------------------


def test_a_mask_has_the_tokens_that_may_follow(matcher: Matcher) -> None:
    """No control token, no embedding without a token, no end before there may be one."""
    [first] = matcher.masks([], (), PLAIN)
    assert allowed(first) == {*b"abc"}
    [second] = matcher.masks([ord("b")], (), PLAIN)
    assert allowed(second) == {ord("x"), END, OTHER_END}


def test_there_is_a_mask_for_each_draft_and_the_state_stays(matcher: Matcher) -> None:
    drafts = [*b"axx"]
    masks = matcher.masks([], drafts, PLAIN)
    assert len(masks) == 4
    plain = [matcher.masks(drafts[:count], (), PLAIN)[0] for count in range(4)]
    assert [*masks] == plain


def test_masks_are_filled_when_they_are_looked_at(matcher: Matcher) -> None:
    """The device has begun the step, but masks are of the outputs as they were."""
    outputs = [ord("a")]
    masks = matcher.masks(outputs[:], [*b"xx"], PLAIN)
    assert masks
    assert matcher.forced([]) == []  # it is still before the first output
    assert len(masks) == 3
    assert masks[2] == masks[0]


def test_masks_end_at_the_first_draft_that_is_forbidden(matcher: Matcher) -> None:
    """A control token and an embedding without a token are drafts too."""
    for wrong in (ord("b"), MARK, SIZE - 1):
        masks = matcher.masks([ord("a")], [ord("x"), wrong, ord("x")], PLAIN)
        assert [allowed(mask) for mask in masks] == [{ord("x"), END, OTHER_END}] * 2
        assert matcher.num_allowed([ord("a")], [ord("x"), wrong]) == 1


def test_a_draft_may_end_the_output(matcher: Matcher) -> None:
    masks = matcher.masks([ord("a")], [ord("x"), END, ord("x")], PLAIN)
    assert [allowed(mask) for mask in masks[:2]] == [{ord("x"), END, OTHER_END}] * 2
    [again] = matcher.masks([ord("a")], (), PLAIN)
    assert again == masks[0]
    assert [*matcher.masks([*b"axx"], [ord("x")], PLAIN)] == [again, again]


def test_forks_go_their_own_ways(matcher: Matcher) -> None:
    matcher.masks([ord("a")], (), PLAIN)
    fork = matcher.fork()
    assert [*matcher.masks([*b"axxx"], (), PLAIN)] == [*fork.masks([*b"ax"], (), PLAIN)]
    assert [*fork.masks([*b"axx"], (), PLAIN)] == [*matcher.masks([*b"axxxx"], (), PLAIN)]


def test_stop_tokens_may_be_drawn_where_the_output_may_end(matcher: Matcher) -> None:
    stopping = SamplingParams(max_tokens=9, stop_token_ids=(MARK,))
    [first] = matcher.masks([], (), stopping)
    [second] = matcher.masks([ord("a")], (), stopping)
    assert (MARK in allowed(first), MARK in allowed(second)) == (False, True)


def test_end_tokens_wait_for_the_minimum_length(matcher: Matcher) -> None:
    params = SamplingParams(max_tokens=9, min_tokens=3)
    masks = matcher.masks([ord("a")], [*b"xx"], params, (END, OTHER_END))
    assert [END in allowed(mask) for mask in masks] == [False, False, True]


def test_an_output_that_cannot_go_on_may_end(compiler: GrammarCompiler) -> None:
    matcher = compiler.compile(regex("a")).result().fork()
    params = SamplingParams(max_tokens=9, min_tokens=3)
    [mask] = matcher.masks([ord("a")], (), params, (END, OTHER_END))
    assert allowed(mask) == {END, OTHER_END}


def test_forced_text_has_one_spelling(compiler: GrammarCompiler) -> None:
    matcher = compiler.compile('start: "true" | "tru" "e" "true" | "truex"').result().fork()
    assert matcher.forced([]) == [piece("true")]
    [mask] = matcher.masks([], (), PLAIN)
    assert allowed(mask) == {piece("true")}
    assert matcher.forced([piece("true")]) == []


def test_a_grammar_that_is_none_allows_nothing(compiler: GrammarCompiler) -> None:
    broken = compiler.compile("start: nothing").result().fork()
    assert "nothing" in (broken.error or "")
    [mask] = broken.masks([], (), PLAIN)
    assert allowed(mask) == set()
    assert broken.num_allowed([], [97]) == 0


def test_a_grammar_is_compiled_once(compiler: GrammarCompiler) -> None:
    first = compiler.compile(regex("k"))
    assert compiler.compile(regex("k")) is first
    for number in range(300):
        compiler.compile(regex(f"k{number}"))
        if number == 200:
            assert compiler.compile(regex("k")) is first
    for number in range(300):
        compiler.compile(regex(f"l{number}"))
    assert compiler.compile(regex("k")) is not first


# ---- sequences that wait ------------------------------------------------------------------------


class HeldGrammars:
    def __init__(self) -> None:
        self.futures: dict[str, Future[Matcher]] = {}

    def compile(self, grammar: str) -> Future[Matcher]:
        return self.futures.setdefault(grammar, Future())

    def attached(self, engine: Scheduler) -> Scheduler:
        engine.attach(ConstrainedOutputs(self))
        return engine


@pytest.fixture
def grammars() -> HeldGrammars:
    return HeldGrammars()


def constrained(name: str, **params: Any) -> AddRequest:
    return AddRequest(name, [1, 2, 3], SamplingParams(9, grammar="g", **params), 0.0)


def free(name: str, **params: Any) -> AddRequest:
    return AddRequest(name, [1, 2, 3], SamplingParams(9, **params), 0.0)


def test_a_wait_for_a_grammar_holds_up_no_other(grammars: HeldGrammars, matcher: Matcher) -> None:
    engine = grammars.attached(scheduler(max_bypasses=0))
    for index in range(40):
        engine.add(constrained(f"c{index}"))
    assert engine.is_compiling
    assert engine.schedule(0.0) is None
    assert engine.blocks.num_free == 64
    engine.add(free("free"))
    assert not engine.is_compiling
    planned, _ = advance(engine)
    assert planned == {40: 3}
    grammars.futures["g"].set_result(matcher)
    planned, _ = advance(engine)
    assert planned.keys() == {*range(15), 40} or planned.keys() > {0, 40}


def test_a_sequence_that_waits_for_its_grammar_can_be_aborted(grammars: HeldGrammars) -> None:
    engine = grammars.attached(scheduler())
    engine.add(constrained("c"))
    assert engine.abort("c") is not None
    assert not engine.has_unfinished
    assert not engine.is_compiling


def test_nothing_is_scheduled_while_a_constrained_token_is_drawn(
    grammars: HeldGrammars, matcher: Matcher
) -> None:
    """Its neighbours would otherwise run without it in every other step."""
    engine = grammars.attached(scheduler())
    engine.add(free("free"))
    first = engine.schedule(0.0)
    assert engine.schedule(0.0) is not None  # ahead
    engine = grammars.attached(scheduler())
    engine.add(free("free"))
    engine.add(constrained("c"))
    grammars.futures["g"].set_result(matcher)
    first = engine.schedule(0.0)
    assert plan(first) == {0: 3, 1: 3}
    assert engine.schedule(0.0) is None
    engine.update(first, result_of(first, {1: ord("a")}), 0.0)
    second = engine.schedule(0.0)
    assert plan(second) == {0: 1, 1: 1}
    [spec] = second.sequences[1].samples
    assert allowed(spec.masks[0]) == {ord("x"), END, OTHER_END}


def test_drafts_are_cut_at_the_first_forbidden(grammars: HeldGrammars, matcher: Matcher) -> None:
    engine = grammars.attached(scheduler(speculation=by(Says(*b"xxax"))))
    engine.add(constrained("c"))
    grammars.futures["g"].set_result(matcher)
    advance(engine, {0: ord("a")})
    step = engine.schedule(0.0)
    [share] = step.sequences
    assert [*share.drafts] == [*b"xx"]
    assert len(share.samples[0].masks) == 3
    assert share.samples[0].after(share.drafts).masks == share.samples[0].masks[2:]


def test_without_a_drafter_what_is_forced_is_verified_for_constrained_sequences_alone(
    grammars: HeldGrammars, compiler: GrammarCompiler
) -> None:
    engine = grammars.attached(scheduler(speculation=Speculation(JUMP_FORWARD, None, False, SIZE)))
    engine.add(constrained("c"))
    engine.add(AddRequest("p", [1, 2, 3], SamplingParams(max_tokens=9, ignore_eos=True), 0.0))
    grammars.futures["g"].set_result(compiler.compile(regex("[ab]name")).result().fork())
    advance(engine, {0: ord("a"), 1: 7})
    step = engine.schedule(0.0)
    first, second = step.sequences
    assert b"".join(VOCABULARY.token_bytes[token] for token in first.drafts) == b"name"
    assert second.num_drafts == 0
    assert engine.schedule(0.0) is None
    engine.update(step, result_of(step, {0: END, 1: 7}), 0.0)
    engine.abort("c")
    assert engine.schedule(0.0) is not None
    assert engine.schedule(0.0) is not None
    engine.check_integrity()


def test_drafts_of_a_device_are_not_cut(grammars: HeldGrammars, matcher: Matcher) -> None:
    """Verification must not depend on the token; masks end after the forbidden one."""
    engine = grammars.attached(scheduler(speculation=by(None)))
    engine.add(constrained("c"))
    grammars.futures["g"].set_result(matcher)
    step = engine.schedule(0.0)
    result = result_of(step, {0: ord("a")})
    result.drafts[0] = Drafts(4, (*b"xax",), (0.9,) * 3)
    engine.update(step, result, 0.0)
    step = engine.schedule(0.0)
    [share] = step.sequences
    [spec] = share.samples
    assert [*share.drafts] == [*b"xax"]
    assert len(spec.masks) == 2
    assert spec.after(share.drafts).masks == ()
