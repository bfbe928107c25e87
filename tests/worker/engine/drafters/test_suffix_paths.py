"""The likeliest path: counted word by word, and against the rule tried out in full."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.depth import examples
from worker.engine.drafters.finished_outputs import OutputText
from worker.engine.drafters.suffix_paths import (
    ANCHORS,
    MAX_PLACES,
    Corpus,
    Path,
    PathLimits,
    SequenceCorpus,
    best_path,
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
    """Something new may follow here as well; after that nothing branches."""
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
