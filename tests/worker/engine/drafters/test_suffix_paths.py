"""The likeliest path: counted word by word, and against the rule tried out in full."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.engine.drafters.finished_outputs import OutputText
from worker.engine.drafters.suffix_paths import (
    ANCHORS,
    MAX_PLACES,
    Corpus,
    Path,
    PathLimits,
    SequenceCorpus,
    best_path,
    likeliest_path,
)
from worker.engine.drafters.texts import END, spell

LIMITS = PathLimits(max_match_tokens=24, max_spec_factor=1.0, min_probability=0.1)
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
    """For each length of a match its likeliest path, as the rule has it, from every place in the
    texts, in the sequence's `own` all but its end; of equally likely tokens the one seen last.
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
    """It is one of those counted, and none has a better score."""
    best = max((other.score for other in found), default=0.0)
    assert path.score == pytest.approx(best)
    if best:
        same = [(other.text, other.shares) for other in found]
        assert (path.text, path.shares) in same
        assert any(path.match_tokens == other.match_tokens for other in found)


@settings(max_examples=200, deadline=None)
@given(TEXTS, DRAWN_LIMITS, st.integers(1, 9))
def test_a_sequence_is_looked_up_as_if_every_match_was_counted(
    text: str, limits: PathLimits, num_tokens: int
) -> None:
    """Over few tokens, where matches overlap."""
    path = best_path(SequenceCorpus(text), text, limits, num_tokens)
    check(path, paths_by_counting([text], text, limits, num_tokens, own=True))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.text("abc", min_size=1, max_size=MAX_PLACES // 4), max_size=4),
    TEXTS,
    DRAWN_LIMITS,
    st.integers(1, 9),
)
def test_outputs_are_looked_up_as_if_every_match_was_counted(
    outputs: list[str], context: str, limits: PathLimits, num_tokens: int
) -> None:
    """No match and no path goes from one output into another."""
    corpus = OutputText()
    for output in outputs:
        corpus.append(output)
    corpus.index(1000)
    path = best_path(corpus, context, limits, num_tokens)
    check(path, paths_by_counting(outputs, context, limits, num_tokens, own=False))
    assert END not in path.text


@pytest.mark.parametrize("length", ANCHORS)
def test_only_the_latest_places_are_looked_at(length: int) -> None:
    """What is seen more often than that is believed as it was lately."""
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


def test_what_was_seen_once_is_believed_by_half() -> None:
    """Something new may follow here as well as what did there; after that nothing branches."""
    text = spell([1, 2, 3, 4, 5, 1, 2, 3])
    path = best_path(SequenceCorpus(text), text, LIMITS, 9)
    assert path == Path(spell([4, 5, 1]), (1.0, 1.0, 1.0), 1.5, 3)
    output = OutputText()
    output.append(spell([1, 2, 3, 4, 5, 1]))
    output.index(10)
    assert best_path(output, spell([1, 2, 3]), LIMITS, 9) == path


def test_a_path_follows_the_many_and_ends_where_it_gets_unlikely() -> None:
    """2 of 3 go on with 5, of these 1 of 2 with each of two tokens: the later one is taken."""
    text = spell([4, 5, 6]) + END + spell([4, 5, 7]) + END + spell([4, 8]) + END
    places = [9, 5, 1]  # behind each 4
    path = likeliest_path(text, places, 5, 0.0)
    assert path.text == spell([5, 7])
    assert path.shares == pytest.approx((2 / 3, 1 / 2))
    assert path.score == pytest.approx(3 / 4 * (2 / 3 + 1 / 3))
    path = likeliest_path(text, places, 5, 0.26)
    assert path.text == spell([5])


def test_a_sure_short_match_beats_a_doubtful_long_one() -> None:
    """The long match was followed by two tokens once each, the short one often by a third. Where
    three tokens may be drafted the long one is worth more again: a third of three to come.
    """
    text = spell([1, 2, 3, 4]) + spell([1, 2, 3, 5]) + spell([7, 3, 9, 9]) * 20 + spell([1, 2, 3])
    short = best_path(SequenceCorpus(text), text, LIMITS, 1)
    assert short == Path(spell([9]), (20 / 22,), pytest.approx(20 / 23), 1)
    long = best_path(SequenceCorpus(text), text, LIMITS, 3)
    assert long == Path(spell([5, 7, 3]), (1 / 2, 1.0, 1.0), pytest.approx(1.0), 3)


def test_of_equal_scores_the_longer_match_is_taken() -> None:
    """Three tokens went on with 5 once; the last of them with 9 twice of three times."""
    text = spell([1, 2, 3, 5, 3, 9, 7, 3, 9, 1, 2, 3])
    path = best_path(SequenceCorpus(text), text, LIMITS, 1)
    assert path == Path(spell([5]), (1.0,), 0.5, 3)


@pytest.mark.parametrize(("factor", "expected"), [(0.2, 0), (0.5, 2), (1.0, 4), (3.0, 9)])
def test_a_path_is_as_long_as_its_match_allows(factor: float, expected: int) -> None:
    """A match of four tokens; nine are asked for."""
    text = spell([1, 2, 3, 4, *range(10, 30), 1, 2, 3, 4])
    path = best_path(SequenceCorpus(text), text, PathLimits(24, factor, 0.1), 9)
    assert len(path.text) == expected


def test_no_more_tokens_are_matched_than_the_depth() -> None:
    """Two tokens of four; the latest place of these two is followed."""
    text = spell([1, 2, 3, 4, 50, 51, 52, 9, 9, 3, 4, 60, 61, 62, 1, 2, 3, 4])
    deep = best_path(SequenceCorpus(text), text, PathLimits(4, 1.0, 0.1), 9)
    assert deep.text == spell([50, 51, 52, 9])
    shallow = best_path(SequenceCorpus(text), text, PathLimits(2, 1.0, 0.1), 9)
    assert shallow.text == spell([60, 61])
