"""Tokens of simulated draws: words or the prompt's own, and their log probabilities.

Draws are functions of the simulator's seed, the request's seed (greedy requests have none), the
position and the token before it, so an answer depends neither on the batch nor on chunking.
"""

from collections.abc import Sequence
from hashlib import shake_128
from math import log

from worker.sim.config import SimConfig
from worker.sim.random import bits, normal, stream
from worker.sim.tokenizer import HIDDEN_SIZE
from worker.types import SampleSpec, SamplingParams, TokenLogprobs

OUTPUT_LENGTHS = ("geometric", "fixed", "gaussian", "buckets")
FULL_BIAS = 100.0  # a logit bias of this size decides alone

_WORDS, _LENGTHS, _PROMPT = 2, 3, 4  # purposes of streams; 1 is latencies
_LOG_HALF = log(0.5)
# Every n-th constrained draw ends a string, an array or an object where the mask allows it. Bytes
# are their own tokens.
_CLOSE_EVERY, _CLOSERS = 3, frozenset(b'"]}')
# The llm-d inference simulator's probabilities of the buckets of answer lengths.
_BUCKETS = (0.2, 0.3, 0.2, 0.05, 0.1, 0.15)
_BUCKET_TOKENS, _FLEXIBLE_BUCKET = 20, 3


class TokenSource:
    def __init__(self, config: SimConfig) -> None:
        self._config = config
        # A share of 2**32, to compare with the upper half of the random bits.
        self._end_below = int((1 << 32) / max(1.0, config.mean_output_tokens))

    def draw(
        self, last_token: int, sample: SampleSpec, echo: Sequence[int] | None = None
    ) -> int | None:
        """Draw the token at `sample.position`, after `last_token`; None if no token is allowed.

        With `echo` the answer is the echo and the end token; with `ignore_eos` the echo repeats.
        """
        config, params = self._config, sample.params
        base = stream(config.seed, params.seed if params.temperature > 0 else 0, _WORDS)
        random_bits = bits(base, sample.position, last_token)
        is_free = not sample.banned_ids and not sample.masks and not _is_constrained(params)
        end = None if params.ignore_eos else config.end_token_id
        if end is not None and (is_free or _may_draw(end, sample)):
            if echo is not None:
                ends = sample.position - sample.num_prompt >= len(echo)
            else:
                ends = self._ends(sample, random_bits)
            if ends:
                return end
        # Even an echo obeys the constraints: a forbidden token is replaced by an allowed one.
        if echo:
            token = echo[(sample.position - sample.num_prompt) % len(echo)]
            if is_free or _may_draw(token, sample):
                return token
        if is_free:
            return config.first_word_id + random_bits % config.num_words
        return self._choose(sample, random_bits)

    def _choose(self, sample: SampleSpec, random_bits: int) -> int | None:
        config, params = self._config, sample.params
        candidates: Sequence[int] = [t for t, bias in params.logit_bias if bias >= FULL_BIAS]
        if not candidates and sample.masks:
            candidates = [t for t in range(config.vocab_size) if _may_draw(t, sample)]
            closers = [t for t in candidates if t in _CLOSERS]
            if (random_bits >> 16) % _CLOSE_EVERY == 0:
                candidates = closers or candidates
        if not candidates:
            candidates = params.allowed_token_ids or range(
                config.first_word_id, config.first_word_id + config.num_words
            )
        # Probe from a random start: the draw is deterministic and ends after one round.
        for offset in range(len(candidates)):
            token = candidates[(random_bits + offset) % len(candidates)]
            if _may_draw(token, sample):
                return token
        return None

    def _ends(self, sample: SampleSpec, random_bits: int) -> bool:
        if self._config.output_length == "geometric":
            return random_bits >> 32 < self._end_below
        return sample.position - sample.num_prompt + 1 >= self._length(sample)

    def _length(self, sample: SampleSpec) -> int:
        """Return the drawn length of the answer, its end token included."""
        config, params = self._config, sample.params
        if config.output_length == "fixed":
            return round(config.mean_output_tokens)
        # Equal greedy requests must get equal answers, but different prompts different lengths.
        is_greedy = params.temperature <= 0
        base = stream(config.seed, 0 if is_greedy else params.seed, _LENGTHS)
        random_bits = bits(base, sample.num_prompt if is_greedy else 0)
        if config.output_length == "gaussian":
            drawn = config.mean_output_tokens + config.output_tokens_std * normal(random_bits)
            return max(1, round(drawn))
        return bucket_length(params.max_tokens, random_bits)

    def logprobs(self, last_token: int, token: int, sample: SampleSpec) -> TokenLogprobs | None:
        """Return the log probabilities at a drawn token; None unless the request asks for them."""
        params = sample.params
        if params.logprobs is None:
            return None
        base = stream(self._config.seed, params.seed if params.temperature > 0 else 0, _WORDS)
        random_bits = bits(base, sample.position, last_token)
        rank = 0 if params.temperature <= 0 else _geometric(random_bits)
        return self._distribution(
            token, rank, random_bits, params.logprobs, params.logprob_token_ids
        )

    def prompt_logprobs(
        self, last_token: int, token: int, position: int, num_likeliest: int
    ) -> TokenLogprobs:
        """Return log probabilities at the prompt's `token` at `position`, after `last_token`."""
        base = stream(self._config.seed, 0, _PROMPT)
        random_bits = bits(base, position, last_token)
        return self._distribution(token, _geometric(random_bits), random_bits, num_likeliest, ())

    def _distribution(
        self, token: int, rank: int, random_bits: int, num_likeliest: int, asked: Sequence[int]
    ) -> TokenLogprobs:
        """Return log probabilities of a made-up distribution: the n-th likeliest token of the
        vocabulary has 0.5 ** n. `token` has place `rank` (from 0); the random bits order the other
        tokens, words first.
        """
        order = _Order(self._config, token, rank, random_bits)
        count = self._config.vocab_size if num_likeliest < 0 else num_likeliest
        ranks = [rank, *range(min(count, self._config.vocab_size))]
        ids = [order.token_at(r) for r in ranks]
        ids += asked
        ranks += [order.rank_of(t) for t in asked]
        return TokenLogprobs(tuple(ids), tuple((r + 1) * _LOG_HALF for r in ranks), rank + 1)


class _Order:
    """An order of the whole vocabulary with one token in a given place; O(1) in both directions."""

    def __init__(self, config: SimConfig, token: int, rank: int, random_bits: int) -> None:
        self._first, self._num_words = config.first_word_id, config.num_words
        self._shift = (random_bits >> 16) % config.num_words
        self._token, self._rank = token, min(rank, config.vocab_size - 1)
        self._place = self._place_of(token)

    def token_at(self, rank: int) -> int:
        if rank == self._rank:
            return self._token
        place = rank - (rank > self._rank)
        place += place >= self._place
        if place < self._num_words:
            return self._first + (place + self._shift) % self._num_words
        rest = place - self._num_words
        return rest if rest < self._first else rest + self._num_words

    def rank_of(self, token: int) -> int:
        if token == self._token:
            return self._rank
        place = self._place_of(token)
        place -= place > self._place
        return place + (place >= self._rank)

    def _place_of(self, token: int) -> int:
        """Return the place of a token before the chosen token moved to its rank."""
        word = token - self._first
        if 0 <= word < self._num_words:
            return (word - self._shift) % self._num_words
        return self._num_words + (token if word < 0 else token - self._num_words)


def bucket_length(max_tokens: int, random_bits: int) -> int:
    """Draw a length of 1 to `max_tokens` from the llm-d inference simulator's distribution: six
    buckets of fixed probabilities. Up to 120 tokens they are of equal size; above that, five are of
    20 tokens, and the fourth takes the rest.
    """
    share = (random_bits >> 32) / (1 << 32)
    bucket = 0
    while bucket < len(_BUCKETS) - 1 and share >= _BUCKETS[bucket]:
        share -= _BUCKETS[bucket]
        bucket += 1
    count = len(_BUCKETS)
    if max_tokens <= count * _BUCKET_TOKENS:
        low, high = max_tokens * bucket // count, max_tokens * (bucket + 1) // count
    else:
        rest = max_tokens - count * _BUCKET_TOKENS
        low = bucket * _BUCKET_TOKENS + (rest if bucket > _FLEXIBLE_BUCKET else 0)
        high = low + _BUCKET_TOKENS + (rest if bucket == _FLEXIBLE_BUCKET else 0)
    return max(1, low + 1 + (random_bits & 0xFFFFFFFF) % max(1, high - low))


def _geometric(random_bits: int) -> int:
    """Return n with probability 0.5 ** (n + 1)."""
    low = random_bits & 0xFFFF_FFFF
    return (low & -low).bit_length() - 1 if low else 32


def _is_constrained(params: SamplingParams) -> bool:
    return params.allowed_token_ids is not None or bool(params.logit_bias or params.bad_words)


def _may_draw(token: int, sample: SampleSpec) -> bool:
    params = sample.params
    if token in sample.banned_ids or (sample.masks and not _is_in(sample.masks[0], token)):
        return False
    if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
        return False
    if (token, True) in ((t, bias <= -FULL_BIAS) for t, bias in params.logit_bias):
        return False
    return not any(_completes(token, word, sample.history) for word in params.bad_words)


def _is_in(mask: bytes, token: int) -> bool:
    return token >> 3 < len(mask) and bool(mask[token >> 3] >> (token & 7) & 1)


def _completes(token: int, word: tuple[int, ...], history: Sequence[int]) -> bool:
    if word[-1] != token:
        return False
    head = word[:-1]
    return len(head) <= len(history) and tuple(history[len(history) - len(head) :]) == head


def pooled_states(token_ids: Sequence[int]) -> list[float]:
    """Return the sum [HIDDEN_SIZE] of one vector per token; the token alone decides its numbers."""
    rows = [shake_128(b"%d" % token).digest(HIDDEN_SIZE) for token in token_ids]
    return [sum(column) / 127.5 - len(rows) for column in zip(*rows, strict=True)]
