"""Suffix decoding: from the sequence itself and its own group's finished outputs, nothing else."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.depth import examples
from worker.engine.drafters.finished_outputs import FinishedOutputs
from worker.engine.drafters.interface import DraftContext
from worker.engine.drafters.suffix import SuffixDrafter
from worker.engine.drafters.suffix_paths import PathLimits
from worker.types import Drafts

MINE, YOURS, SALTED = ("me", ""), ("you", ""), ("me", "salt")
LIMITS = PathLimits(max_match_tokens=24, max_spec_factor=1.0, min_probability=0.1)


def suffix_drafter(max_outputs: int = 100, max_tokens: int = 1000) -> SuffixDrafter:
    return SuffixDrafter(LIMITS, FinishedOutputs(max_outputs, max_tokens))


def finish(
    drafter: SuffixDrafter, output: list[int], group: tuple[str, str], prompt: list[int]
) -> None:
    drafter.end(DraftContext(99, [*prompt, *output], len(prompt), group), learns=True)
    drafter.learn(1000)


def ask(drafter: SuffixDrafter, token_ids: list[int], group: tuple[str, str]) -> Drafts | None:
    return drafter.propose(DraftContext(1, token_ids, len(token_ids), group), 8)


def test_a_sequence_drafts_from_its_own_prompt_and_output() -> None:
    drafter = suffix_drafter()
    token_ids = [1, 2, 3, 4, 5, 6, 2, 3]
    context = DraftContext(1, token_ids, 6)
    assert drafter.propose(context, 8) == Drafts(8, (4, 5), (2 / 3, 3 / 4))
    token_ids += [70, 71, 72, 3, 70]
    drafts = drafter.propose(context, 8)
    assert drafts == Drafts(13, (71, 72), (2 / 3, 3 / 4))
    assert drafter.propose(context, 1) == Drafts(13, (71,), (2 / 3,))


def test_finished_outputs_are_learnt_from_and_prompts_are_not() -> None:
    drafter = suffix_drafter()
    finish(drafter, [4, 5, 6], MINE, prompt=[1, 2, 3])
    assert ask(drafter, [9, 4], MINE) == Drafts(2, (5,), (1 / 2,))
    drafter.end(DraftContext(1, [9, 4], 2, MINE), learns=True)
    assert ask(drafter, [9, 1], MINE) is None


def test_the_better_score_of_sequence_and_outputs_is_taken() -> None:
    """On a tie the sequence's own draft is taken."""
    drafter = suffix_drafter()
    finish(drafter, [1, 2, 30, 31], MINE, [])
    drafts = ask(drafter, [1, 2, 40, 41, 1, 2], MINE)
    assert drafts == Drafts(6, (40, 41), (2 / 3, 3 / 4))
    finish(drafter, [1, 2, 30, 31], MINE, [])
    drafts = ask(drafter, [1, 2, 40, 41, 1, 2], MINE)
    assert drafts == Drafts(6, (30, 31), (2 / 3, 3 / 4))
    finish(drafter, [1, 2, 50, 51], MINE, [])
    drafts = ask(drafter, [1, 2, 40, 41, 1, 2], MINE)
    assert drafts == Drafts(6, (40, 41), (2 / 3, 3 / 4))


def test_a_longer_match_and_more_agreement_are_surer() -> None:
    three = ask(suffix_drafter(), [1, 2, 3, 4, 9, 1, 2, 3], MINE)
    two = ask(suffix_drafter(), [1, 2, 3, 4, 8, 2, 3], MINE)
    mixed = ask(suffix_drafter(), [2, 3, 5, 7, 2, 3, 4, 8, 2, 3, 4, 9, 2, 3], MINE)
    assert three == Drafts(8, (4, 9, 1), (3 / 4, 4 / 5, 5 / 6))
    assert two == Drafts(7, (4, 8), (2 / 3, 3 / 4))
    assert mixed == Drafts(14, (4, 9), (2 / 3 * 2 / 3, 1 / 2 * 3 / 4))


Turn = tuple[int, list[int], int]  # which sequence, its new tokens, whether it ends then


@examples(100)
@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.lists(st.integers(0, 3), max_size=8), st.integers(0, 3)),
        max_size=40,
    )
)
def test_nothing_is_drafted_that_the_group_has_not_put_out_itself(turns: list[Turn]) -> None:
    """Six sequences of three groups, whose prompts and outputs have different successors of their
    common tokens, grow, are drafted for and end in turns.
    """
    groups = [MINE, YOURS, SALTED]
    drafter = suffix_drafter(max_outputs=5, max_tokens=60)
    finished: list[tuple[tuple[str, str], list[int]]] = []
    live: dict[int, DraftContext] = {}
    tokens: dict[int, list[int]] = {}
    for number, (which, new, end) in enumerate(turns):
        group = groups[which % 3]
        if which not in live:
            # Of its prompt only the tokens below 4 are shared with others.
            tokens[which] = [1, 2, 1000 + number, 1, 3, 1000 + number]
            live[which] = DraftContext(number, tokens[which], 6, group)
        for token in new:
            # 0 to 2 are words of all; the last is one of the group's own.
            tokens[which].append(token if token < 3 else 100 + which % 3)
        drafts = drafter.propose(live[which], 6)
        assert drafts == drafter.propose(live[which], 6)
        alone = SuffixDrafter(LIMITS, FinishedOutputs(5, 60))
        for other, output in finished:
            finish(alone, output, other, [])
        assert alone.propose(live[which], 6) == drafts
        if drafts is not None:
            seen = {t for g, output in finished for t in output if g == group}
            assert set(drafts.token_ids) <= seen | set(tokens[which])
            assert drafts.position == len(tokens[which])
            assert len(drafts.confidences) == len(drafts.token_ids) in range(1, 7)
            assert all(0 < c <= 1 for c in drafts.confidences)
        if end == 0:
            drafter.end(live[which], learns=True)
            drafter.learn(1000)
            finished.append((group, tokens[which][6:]))
            del live[which]
    assert drafter.num_sequences == len(live)
    for context in live.values():
        drafter.end(context, learns=True)
    assert drafter.num_sequences == 0


def test_no_outputs_are_stored_when_the_limit_is_zero() -> None:
    drafter = suffix_drafter(max_outputs=0)
    finish(drafter, [1, 2, 3], MINE, [])
    assert ask(drafter, [1, 2], MINE) is None
    assert ask(drafter, [1, 2, 5, 1, 2], MINE) is not None


@pytest.mark.parametrize("num_tokens", [1, 3, 8])
def test_no_more_is_drafted_than_asked_for(num_tokens: int) -> None:
    drafter = suffix_drafter()
    token_ids = [*range(20), *range(10)]
    drafts = drafter.propose(DraftContext(1, token_ids, 20), num_tokens)
    assert drafts is not None
    assert drafts.token_ids == tuple(range(10, 10 + num_tokens))


def test_outputs_of_unsound_sequences_are_forgotten() -> None:
    drafter = suffix_drafter()
    context = DraftContext(1, [1, 2, 3, 1], 1, MINE)
    drafter.propose(context, 4)
    drafter.end(context, learns=False)
    drafter.learn(1000)
    assert drafter.num_sequences == 0
    assert ask(drafter, [9, 2], MINE) is None
