"""The simulator's draws are repeatable, obey constraints, and have log probabilities."""

import math
import statistics
from collections import Counter
from dataclasses import replace

import pytest

from worker.sim.config import SimConfig
from worker.sim.tokens import TokenSource, bucket_length
from worker.types import SampleSpec, SamplingParams, TokenLogprobs

CONFIG = SimConfig(first_word_id=300, num_words=10, vocab_size=400, end_token_id=2)
END = 2


def spec(
    position: int = 5, num_prompt: int = 3, history: tuple[int, ...] = (), **params: object
) -> SampleSpec:
    banned = params.pop("banned", ())
    sampling = SamplingParams(**{"max_tokens": 100, "ignore_eos": True} | params)  # type: ignore[arg-type]
    return SampleSpec(sampling, position, banned, history, num_prompt)  # type: ignore[arg-type]


def test_banned_tokens_are_never_drawn() -> None:
    banned = tuple(range(300, 309))
    source = TokenSource(CONFIG)
    assert {source.draw(1, spec(seed=n, banned=banned)) for n in range(50)} == {309}


def test_only_allowed_tokens_are_drawn() -> None:
    source = TokenSource(CONFIG)
    allowed = (5, 6, 7)
    drawn = {
        source.draw(1, spec(seed=n, allowed_token_ids=allowed, banned=(6,))) for n in range(50)
    }
    assert drawn == {5, 7}


def test_only_tokens_of_the_mask_are_drawn() -> None:
    source = TokenSource(CONFIG)
    mask = sum(1 << token for token in (5, 6, ord("}"), 305)).to_bytes(50, "little")

    def drawn(**params: object) -> Counter[int | None]:
        return Counter(
            source.draw(1, replace(spec(seed=n, **params), masks=(mask, b""))) for n in range(400)
        )

    free = drawn()
    assert free.keys() == {5, 6, ord("}"), 305}
    assert free[ord("}")] > 130
    assert drawn(allowed_token_ids=(6, 7)).keys() == {6}
    assert drawn(allowed_token_ids=(7,)).keys() == {None}


def test_a_full_bias_forces_or_forbids_tokens() -> None:
    source = TokenSource(CONFIG)
    forced = {source.draw(1, spec(seed=n, logit_bias=((8, 100.0), (9, 100.0)))) for n in range(50)}
    assert forced == {8, 9}
    forbidden = {source.draw(1, spec(seed=n, logit_bias=((300, -100.0),))) for n in range(200)}
    assert forbidden == set(range(301, 310))
    mild = [source.draw(1, spec(seed=n, logit_bias=((300, -50.0),))) for n in range(50)]
    assert mild == [source.draw(1, spec(seed=n)) for n in range(50)]


def test_bad_words_are_never_completed() -> None:
    source = TokenSource(CONFIG)
    words = ((300,), (4, 301))
    after = {source.draw(4, spec(seed=n, bad_words=words, history=(1, 2, 4))) for n in range(200)}
    assert after == set(range(302, 310))
    elsewhere = {
        source.draw(4, spec(seed=n, bad_words=words, history=(1, 4, 2))) for n in range(200)
    }
    assert elsewhere == set(range(301, 310))


def test_contradictory_constraints_leave_no_token() -> None:
    assert TokenSource(CONFIG).draw(1, spec(allowed_token_ids=(5,), banned=(5,))) is None


def test_an_ignored_or_banned_end_is_never_drawn() -> None:
    config = replace(CONFIG, output_length="fixed", mean_output_tokens=1.0)
    source = TokenSource(config)
    assert source.draw(1, spec(ignore_eos=False)) == END
    assert source.draw(1, spec(ignore_eos=True)) != END
    assert source.draw(1, spec(ignore_eos=False, banned=(END,))) != END
    assert source.draw(1, spec(ignore_eos=False, allowed_token_ids=(301,))) == 301


def lengths(config: SimConfig, count: int, **params: object) -> list[int]:
    source = TokenSource(config)
    found = []
    for seed in range(count):
        length = 1
        while source.draw(1, spec(2 + length, 3, ignore_eos=False, seed=seed, **params)) != END:
            length += 1
        found.append(length)
    return found


def test_fixed_answers_have_one_length() -> None:
    assert set(lengths(replace(CONFIG, output_length="fixed", mean_output_tokens=7.0), 5)) == {7}


def test_geometric_answers_have_their_mean() -> None:
    found = lengths(replace(CONFIG, mean_output_tokens=20.0), 2000)
    assert statistics.fmean(found) == pytest.approx(20.0, rel=0.06)
    assert statistics.stdev(found) == pytest.approx(19.5, rel=0.1)


def test_gaussian_answers_have_their_mean_and_std() -> None:
    config = replace(
        CONFIG, output_length="gaussian", mean_output_tokens=40.0, output_tokens_std=20.0
    )
    found = lengths(config, 2000)
    assert statistics.fmean(found) == pytest.approx(40.3, rel=0.04)
    assert statistics.stdev(found) == pytest.approx(19.5, rel=0.06)
    assert min(found) == 1
    assert lengths(config, 5) == found[:5]


@pytest.mark.parametrize(("limit", "edges"), [(120, 20), (60, 10), (500, None)])
def test_bucket_lengths_follow_the_published_shares(limit: int, edges: int | None) -> None:
    """Above 120 tokens, five buckets are of 20 and the fourth takes the rest."""
    draws = [bucket_length(limit, (n * 0x9E3779B97F4A7C15) & (1 << 64) - 1) for n in range(20_000)]
    assert min(draws) == 1
    assert max(draws) == limit
    bounds = (
        [edges * n for n in range(1, 7)] if edges else [20, 40, 60, limit - 40, limit - 20, limit]
    )
    shares = Counter(next(i for i, bound in enumerate(bounds) if n <= bound) for n in draws)
    expected = (0.2, 0.3, 0.2, 0.05, 0.1, 0.15)
    for bucket, share in enumerate(expected):
        assert shares[bucket] / len(draws) == pytest.approx(share, abs=0.01)
    assert {bucket_length(1, n << 40) for n in range(100)} == {1}


def test_greedy_answers_do_not_depend_on_the_seed() -> None:
    config = replace(
        CONFIG, output_length="gaussian", mean_output_tokens=40.0, output_tokens_std=12.0
    )
    assert len(set(lengths(config, 6, temperature=0.0))) == 1
    source = TokenSource(config)
    ends = {
        n
        for n in range(1, 90)
        if source.draw(1, spec(2 + n, 3, ignore_eos=False, temperature=0.0)) == END
    }
    other = {
        n
        for n in range(1, 90)
        if source.draw(1, spec(3 + n, 4, ignore_eos=False, temperature=0.0)) == END
    }
    assert ends != other


def test_an_echo_is_the_prompt_and_then_ends_or_repeats() -> None:
    source = TokenSource(CONFIG)

    def says(index: int, **params: object) -> int | None:
        return source.draw(9, spec(3 + index, 3, **params), echo=(11, 12))

    assert [says(i, ignore_eos=False) for i in range(4)] == [11, 12, END, END]
    assert [says(i) for i in range(5)] == [11, 12, 11, 12, 11]
    assert says(2, ignore_eos=False, banned=(END,)) == 11
    assert says(0, banned=(11,)) in range(300, 310)
    assert source.draw(9, spec(3, 3, ignore_eos=False), echo=()) == END


def check(entry: TokenLogprobs, token: int, count: int, vocab_size: int = 400) -> None:
    assert len(entry.token_ids) == len(entry.logprobs) == 1 + count
    assert entry.token_ids[0] == token
    likeliest, values = entry.token_ids[1:], entry.logprobs[1:]
    assert len(set(likeliest)) == count
    assert all(0 <= t < vocab_size for t in likeliest)
    assert list(values) == sorted(values, reverse=True)
    assert sum(map(math.exp, values)) <= 1
    if token in likeliest:
        assert entry.logprobs[0] == values[likeliest.index(token)]
        assert entry.rank == likeliest.index(token) + 1
    else:
        assert entry.rank > count
        assert entry.logprobs[0] < min(values, default=0.0)


@pytest.mark.parametrize("count", [0, 1, 5, 20, -1])
def test_log_probabilities_are_well_formed(count: int) -> None:
    source = TokenSource(CONFIG)
    size = CONFIG.vocab_size if count < 0 else count
    for seed in range(40):
        sample = spec(seed=seed, logprobs=count)
        token = source.draw(1, sample)
        assert token is not None
        entry = source.logprobs(1, token, sample)
        assert entry is not None
        check(entry, token, size)
        assert source.logprobs(1, token, sample) == entry
        check(source.prompt_logprobs(1, token, 4 + seed, count), token, size)
    end = source.logprobs(1, END, spec(logprobs=count))
    assert end is not None
    check(end, END, size)


def test_log_probabilities_are_returned_only_on_request() -> None:
    source = TokenSource(CONFIG)
    assert source.logprobs(1, 305, spec()) is None
    everything = source.logprobs(1, 305, spec(logprobs=-1))
    some = source.logprobs(1, 305, spec(logprobs=2, logprob_token_ids=(7, 305, 399)))
    assert everything is not None
    assert some is not None
    assert some.token_ids[3:] == (7, 305, 399)
    known = dict(zip(everything.token_ids, everything.logprobs, strict=True))
    assert [known[t] for t in some.token_ids] == list(some.logprobs)


def test_ranks_follow_their_probabilities() -> None:
    source = TokenSource(CONFIG)
    ranks = Counter()
    for seed in range(4000):
        entry = source.logprobs(1, 305, spec(seed=seed, logprobs=0))
        assert entry is not None
        ranks[entry.rank] += 1
    assert ranks[1] / 4000 == pytest.approx(0.5, abs=0.03)
    assert ranks[2] / 4000 == pytest.approx(0.25, abs=0.03)
    greedy = source.logprobs(1, 305, spec(temperature=0.0, logprobs=1))
    assert greedy is not None
    assert greedy.rank == 1
