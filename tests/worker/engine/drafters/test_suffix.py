"""Suffix decoding: from the sequence itself and its group's finished outputs, nothing else."""

import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.depth import examples
from worker.engine.drafters.finished_outputs import FinishedOutputs, OutputText
from worker.engine.drafters.interface import DraftContext
from worker.engine.drafters.suffix import SuffixDrafter
from worker.engine.drafters.suffix_paths import (
    ANCHORS,
    MAX_PLACES,
    Corpus,
    Path,
    PathLimits,
    SequenceCorpus,
    best_path,
)
from worker.engine.drafters.texts import END, SequenceTexts, spell, tokens_of
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
    assert len(drafter.texts) == len(live)
    for context in live.values():
        drafter.end(context, learns=True)
    assert len(drafter.texts) == 0


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
    assert len(drafter.texts) == 0
    assert ask(drafter, [9, 2], MINE) is None


# Fewer occurrences than MAX_PLACES, so that the look-up misses none.
TEXTS = st.text("abc", max_size=MAX_PLACES)
DRAWN_LIMITS = st.builds(
    PathLimits,
    st.integers(1, 30),
    st.sampled_from([0.5, 1.0, 2.5]),
    st.sampled_from([0.0, 0.1, 0.4, 1.0]),
)


def paths_by_counting(
    texts: list[str], context: str, limits: PathLimits, num_tokens: int, own: bool
) -> list[Path]:
    """Return the likeliest path for each length of a match, from every place in the texts and in
    `own` but its end; of equally likely tokens, the one seen last.
    """
    found = []
    for length in range(1, min(limits.max_match_tokens, len(context)) + 1):
        pattern = context[-length:]
        rests = [
            text[end:]
            for text in texts
            for end in range(length, len(text) + (not own))
            if text[end - length : end] == pattern
        ]
        if not rests:
            break
        budget = min(num_tokens, int(length * limits.max_spec_factor))
        path, shares, score, probability = "", [], 0.0, len(rests) / (len(rests) + 1)
        while len(path) < budget:
            alive = [rest for rest in rests if rest.startswith(path)]
            counts = Counter(r[len(path)] for r in reversed(alive) if len(r) > len(path))
            if not counts:
                break
            token, count = counts.most_common(1)[0]  # of equals the first counted: seen last
            probability *= count / len(alive)
            if probability < limits.min_probability:
                break
            path += token
            shares.append(count / len(alive))
            score += probability
        found.append(Path(path, tuple(shares), score, length))
    return found


def check(path: Path, found: list[Path]) -> None:
    best = max((other.score for other in found), default=0.0)
    assert path.score == pytest.approx(best)
    if best:
        same = [(other.text, other.shares) for other in found]
        assert (path.text, path.shares) in same
        assert any(path.match_tokens == other.match_tokens for other in found)


@examples(200)
@given(TEXTS, DRAWN_LIMITS, st.integers(1, 9))
def test_a_sequence_is_looked_up_as_if_every_match_was_counted(
    text: str, limits: PathLimits, num_tokens: int
) -> None:
    path = best_path(SequenceCorpus(text), text, limits, num_tokens)
    check(path, paths_by_counting([text], text, limits, num_tokens, own=True))


@examples(200)
@given(
    st.lists(st.text("abc", min_size=1, max_size=MAX_PLACES // 4), max_size=4),
    TEXTS,
    DRAWN_LIMITS,
    st.integers(1, 9),
)
def test_outputs_are_looked_up_as_if_every_match_was_counted(
    outputs: list[str], context: str, limits: PathLimits, num_tokens: int
) -> None:
    corpus = OutputText()
    for output in outputs:
        corpus.append(output)
    corpus.index(1000)
    path = best_path(corpus, context, limits, num_tokens)
    check(path, paths_by_counting(outputs, context, limits, num_tokens, own=False))
    assert END not in path.text


@pytest.mark.parametrize("length", ANCHORS)
def test_only_the_latest_places_are_looked_at(length: int) -> None:
    anchor = "abcdefgh"[-length:]
    text = (anchor + "x") * 99 + (anchor + "y") * MAX_PLACES + anchor
    output = OutputText()
    output.append(text)
    output.index(2000)
    corpora: list[Corpus] = [SequenceCorpus(text), output]
    for corpus in corpora:
        places = corpus.places(anchor)
        assert len(places) == MAX_PLACES
        assert places == sorted(places, reverse=True)
        ends = [place for place in places if corpus.text[place] in ("", END)]
        assert {corpus.text[p] for p in places if p not in ends} == {"y"}


def test_a_token_seen_once_is_believed_by_half() -> None:
    text = spell([1, 2, 3, 4, 5, 1, 2, 3])
    path = best_path(SequenceCorpus(text), text, LIMITS, 9)
    assert path == Path(spell([4, 5, 1]), (1.0, 1.0, 1.0), 1.5, 3)
    output = OutputText()
    output.append(spell([1, 2, 3, 4, 5, 1]))
    output.index(10)
    assert best_path(output, spell([1, 2, 3]), LIMITS, 9) == path


@pytest.mark.parametrize(("factor", "expected"), [(0.2, 0), (0.5, 2), (1.0, 4), (3.0, 9)])
def test_a_path_is_as_long_as_its_match_allows(factor: float, expected: int) -> None:
    text = spell([1, 2, 3, 4, *range(10, 30), 1, 2, 3, 4])
    path = best_path(SequenceCorpus(text), text, PathLimits(24, factor, 0.1), 9)
    assert len(path.text) == expected


SURROGATES = [0xD83D, 0xDE00, 0xDFFF, 0xD800]


@examples(100)
@given(st.lists(st.integers(0, sys.maxunicode - 1), max_size=80))
def test_spelled_tokens_read_back_the_same(token_ids: list[int]) -> None:
    text = spell(token_ids)
    assert len(text) == len(token_ids)
    assert tokens_of(text) == tuple(token_ids)


@pytest.mark.parametrize("times", [1, 40])
def test_ids_among_the_surrogates_are_tokens_like_others(times: int) -> None:
    assert tokens_of(spell(SURROGATES * times)) == tuple(SURROGATES * times)


@pytest.mark.parametrize("token_id", [-1, sys.maxunicode, sys.maxunicode + 1, 1 << 40])
@pytest.mark.parametrize("times", [1, 100])
def test_an_id_that_no_vocabulary_has_is_refused(token_id: int, times: int) -> None:
    with pytest.raises((ValueError, OverflowError)):
        spell([token_id] * times)


def test_texts_grow_with_their_sequences_and_can_be_forgotten() -> None:
    texts = SequenceTexts()
    token_ids = [5, 6]
    assert texts.read(1, token_ids) == spell([5, 6])
    assert texts.read(2, [9]) == spell([9])
    token_ids += [7, 8, 9]
    assert texts.read(1, token_ids) == spell([5, 6, 7, 8, 9])
    assert texts.read(1, token_ids) == spell([5, 6, 7, 8, 9])
    with pytest.raises(ValueError, match="sequence 1 got 4 tokens shorter"):
        texts.read(1, [5])
    assert len(texts) == 2
    texts.forget(1)
    texts.forget(1)
    assert len(texts) == 1
    assert texts.read(1, [5]) == spell([5])
