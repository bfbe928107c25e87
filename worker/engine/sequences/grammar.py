"""Grammars that outputs must match: written for llguidance, compiled and followed token by token.

A `Matcher` is a function of its sequence's outputs and catches up when it is used, so preemption,
prefix hits and rejected drafts need nothing here. In a mask, bit t % 8 of byte t // 8 is that of
token t. Once the grammar may end, end tokens and stop tokens are allowed too; when it cannot
continue, they alone are. Where it forces a text, only the tokens of one spelling are allowed: the
longest that fits, then the longest again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, overload

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from worker.engine.messages import Vocabulary
from worker.types import SamplingParams

NUM_THREADS = 2
_CACHED_GRAMMARS = 256
_MESSAGE_CHARS = 500


class Grammars(Protocol):
    def compile(self, grammar: str) -> Future[Matcher]:
        """Return the state before the first token, to be forked. A grammar that fails gives a
        matcher that allows no token, so that its sequence fails at the first draw.
        """


class GrammarCompiler:
    """Compiles on `num_threads` threads and keeps the latest grammars. To be called from one
    thread, like all of the engine's bookkeeping; its futures may be used from any.
    """

    def __init__(self, vocabulary: Vocabulary, num_threads: int = NUM_THREADS) -> None:
        self._vocabulary: Vocabulary | None = vocabulary
        self._pool = ThreadPoolExecutor(num_threads, "grammar")
        self._tokenizer: Future[LLTokenizer] | None = None
        self._compiled_grammars: OrderedDict[str, Future[Matcher]] = OrderedDict()

    def compile(self, grammar: str) -> Future[Matcher]:
        found = self._compiled_grammars.get(grammar)
        if found is None:
            found = self._compiled_grammars[grammar] = self._pool.submit(
                self._compiled, self._words(), grammar
            )
            if len(self._compiled_grammars) > _CACHED_GRAMMARS:
                self._compiled_grammars.popitem(last=False)
        self._compiled_grammars.move_to_end(grammar)
        return found

    def shutdown(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _words(self) -> Future[LLTokenizer]:
        """Build the library's tokenizer on a thread: 152k tokens take a third of a second."""
        if self._tokenizer is None:
            vocabulary, self._vocabulary = self._vocabulary, None
            assert vocabulary is not None  # noqa: S101 (given up only here)
            self._tokenizer = self._pool.submit(_tokenizer, vocabulary)
        return self._tokenizer

    @staticmethod
    def _compiled(tokenizer: Future[LLTokenizer], grammar: str) -> Matcher:
        # Its limits are of work, not of time: a grammar too large is so on every machine.
        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(tokenizer.result(), grammar, log_level=0, limits=limits)
        warnings = matcher.get_grammar_warnings()
        if warnings:  # parts that the library would ignore
            return Matcher(matcher, "; ".join(warnings)[:_MESSAGE_CHARS])
        if not matcher.is_error():
            matcher.compute_bitmask()  # also finds grammars that nothing matches
        return Matcher(matcher, _cut(matcher.get_error()) if matcher.is_error() else None)


def _cut(message: str) -> str:
    if message.startswith("NoExtension"):
        return "nothing can match it"
    return " ".join(message.split())[:_MESSAGE_CHARS]


@dataclass(slots=True)
class _Words:
    tokens: list[bytes]
    special_token_ids: list[int]
    eos_token_id: int
    encode: Callable[[str], list[int]] = lambda _: []
    bos_token_id: int | None = None

    def __call__(self, text: bytes) -> list[int]:
        return self.encode(text.decode())


def _tokenizer(vocabulary: Vocabulary) -> LLTokenizer:
    ends = vocabulary.eos_token_ids
    words = _Words(vocabulary.token_bytes, vocabulary.special_ids, ends[0])
    tokenizer = LLTokenizer(TokenizerWrapper(words), eos_token=list(ends))
    words.encode = tokenizer.greedy_tokenize
    return tokenizer


class Matcher:
    """The state of one sequence in its grammar. `error`: why the grammar is invalid."""

    def __init__(self, matcher: LLMatcher, error: str | None = None, num_taken: int = 0) -> None:
        self.error = error
        self._matcher = matcher
        self._num_taken = num_taken

    def fork(self) -> Matcher:
        return Matcher(self._matcher.deep_copy(), self.error, self._num_taken)

    def num_allowed(self, outputs: Sequence[int], drafts: Sequence[int]) -> int:
        """Return how many of `drafts` may follow `outputs` one after the other."""
        self._follow(outputs)
        return 0 if self._matcher.is_error() else self._matcher.validate_tokens(list(drafts))

    def forced(self, outputs: Sequence[int]) -> list[int]:
        """Return the tokens that must follow `outputs`, the end of the output excepted."""
        self._follow(outputs)
        return [] if self._matcher.is_error() else self._matcher.compute_ff_tokens()

    def masks(
        self,
        outputs: Sequence[int],
        drafts: Sequence[int],
        params: SamplingParams,
        end_ids: Sequence[int] = (),
    ) -> Masks:
        """Return the masks of the token after `outputs` and after each draft, up to the first draft
        that the grammar forbids. Computed when first read, which must be before any other call.

        `end_ids`, which would end the sequence, are left out until `params.min_tokens` outputs are
        there, unless nothing else is allowed.
        """
        return Masks(lambda: self._filled(outputs, drafts, params, end_ids))

    def _filled(
        self,
        outputs: Sequence[int],
        drafts: Sequence[int],
        params: SamplingParams,
        end_ids: Sequence[int],
    ) -> tuple[bytes, ...]:
        self._follow(outputs)
        masks: list[bytes] = []
        num_tried = 0
        for draft in (*drafts, None):
            few = len(outputs) + len(masks) < params.min_tokens
            masks.append(self._mask(params.stop_token_ids, end_ids if few else ()))
            if draft is None or not allows(masks[-1], draft):
                break
            if self._matcher.try_consume_tokens([draft]) == 0:  # it ends the output
                break
            num_tried += 1
        if num_tried:
            self._matcher.rollback(num_tried)
        return tuple(masks)

    def _follow(self, outputs: Sequence[int]) -> None:
        new = list(outputs[self._num_taken :])
        if new:
            self._num_taken += len(new)
            self._matcher.consume_tokens(new)

    def _mask(self, stop_ids: Sequence[int], banned_ids: Sequence[int]) -> bytes:
        matcher = self._matcher
        if self.error is not None or matcher.is_error():
            return b"\0"
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            return b"\0"
        if not banned_ids:
            if not stop_ids or not matcher.is_accepting():
                return mask
            return _with_bits(mask, stop_ids, True)
        rest = _with_bits(mask, banned_ids, False)
        return rest if rest.count(0) < len(rest) else mask


class Masks(Sequence[bytes]):
    """Masks, at least one, computed when the first is read, while the device runs the model."""

    def __init__(self, fill: Callable[[], tuple[bytes, ...]]) -> None:
        self._fill = fill

    @cached_property
    def _all(self) -> tuple[bytes, ...]:
        return self._fill()

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        return len(self._all)

    @overload
    def __getitem__(self, place: int) -> bytes: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[bytes, ...]: ...
    def __getitem__(self, place: int | slice) -> bytes | tuple[bytes, ...]:
        return self._all[place]


def allows(mask: bytes, token: int) -> bool:
    return token >> 3 < len(mask) and bool(mask[token >> 3] >> (token & 7) & 1)


def _with_bits(mask: bytes, ids: Sequence[int], value: bool) -> bytes:
    bits = bytearray(mask)
    for token in ids:
        place, bit = token >> 3, 1 << (token & 7)
        if place < len(bits):
            bits[place] = bits[place] | bit if value else bits[place] & ~bit
    return bytes(bits)
