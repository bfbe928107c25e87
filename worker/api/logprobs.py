"""Log probabilities as the OpenAI API and vLLM write them. Pure.

They follow the tokens, never the text: a token whose text is held back (half a character, the
beginning of a stop string) or dropped (the stop token) has its entry all the same, exactly once.
What JSON cannot write, minus infinity, is -9999.0, as in vLLM.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence, Set
from typing import Any, Protocol

from worker.types import TokenLogprobs

LEAST = -9999.0
_UTF8 = codecs.getincrementaldecoder("utf-8")

TokenBytes = Callable[[int], bytes]
Json = dict[str, Any]


class LogprobsWriter(Protocol):
    """Writes the log probabilities of one choice, piece by piece."""

    def start(
        self, prompt_ids: Sequence[int], prompt_text: str, entries: Sequence[TokenLogprobs]
    ) -> Json:
        """The echoed prompt's part; `entries` has one for each token but the first. Before `take`,
        if at all.
        """
        ...

    def take(self, entries: Sequence[TokenLogprobs]) -> Json:
        """The `logprobs` object of the next tokens."""
        ...


def clamped(logprob: float) -> float:
    """A log probability that JSON can write."""
    return max(logprob, LEAST)


def joined(first: Json, second: Json) -> Json:
    """One `logprobs` object that says what two consecutive ones say."""
    return {name: first[name] + second[name] for name in first}


class _Naming:
    """What a token is called in an answer."""

    def __init__(self, token_bytes: TokenBytes, *, as_ids: bool) -> None:
        self._bytes = token_bytes
        self._as_ids = as_ids

    def raw(self, token_id: int) -> bytes:
        return self._bytes(token_id)

    def name(self, token_id: int) -> str:
        """Its text, U+FFFD for a piece of a character; or `token_id:N`."""
        if self._as_ids:
            return f"token_id:{token_id}"
        return self._bytes(token_id).decode("utf-8", "replace")


class ChatLogprobs:
    """`choices[].logprobs` of a chat: {"content": [{token, logprob, bytes, top_logprobs}]}."""

    def __init__(self, token_bytes: TokenBytes, *, as_ids: bool) -> None:
        self._naming = _Naming(token_bytes, as_ids=as_ids)

    def start(
        self, prompt_ids: Sequence[int], prompt_text: str, entries: Sequence[TokenLogprobs]
    ) -> Json:
        """Chats do not show the log probabilities of their prompt here."""
        return {"content": []}

    def take(self, entries: Sequence[TokenLogprobs]) -> Json:
        """See `LogprobsWriter.take`."""
        return {"content": [self._content(entry) for entry in entries]}

    def _content(self, entry: TokenLogprobs) -> Json:
        likeliest = [self._token(i, lp) for i, lp in _distinct(entry)]
        return {
            **self._token(entry.token_ids[0], entry.logprobs[0]),
            "top_logprobs": likeliest,
        }

    def _token(self, token_id: int, logprob: float) -> Json:
        return {
            "token": self._naming.name(token_id),
            "logprob": clamped(logprob),
            "bytes": list(self._naming.raw(token_id)),
        }


class CompletionLogprobs:
    """`choices[].logprobs` of a text completion: {tokens, token_logprobs, top_logprobs,
    text_offset}. Owns how much of the text its tokens have passed.

    `text_offset` counts the characters of the text before a token, so every piece of one character
    has the same. Tokens in `skip_ids` have no text.
    """

    def __init__(
        self, token_bytes: TokenBytes, *, as_ids: bool, skip_ids: Set[int] = frozenset()
    ) -> None:
        self._naming = _Naming(token_bytes, as_ids=as_ids)
        self._skip_ids = skip_ids
        self._decoder = _UTF8("replace")
        self._offset = 0

    def start(
        self, prompt_ids: Sequence[int], prompt_text: str, entries: Sequence[TokenLogprobs]
    ) -> Json:
        """See `LogprobsWriter.start`. The first token has nothing to be likely after: null."""
        decoder, ends = _UTF8("replace"), [0]
        for token_id in prompt_ids:
            ends.append(ends[-1] + len(decoder.decode(self._naming.raw(token_id))))
        # The model's own prefix is a token of the prompt but not part of its text.
        surplus = max(0, ends[-1] - len(prompt_text))
        self._offset = len(prompt_text)
        return {
            "text_offset": [max(0, end - surplus) for end in ends[:-1]],
            "token_logprobs": [None, *(clamped(e.logprobs[0]) for e in entries)],
            "tokens": [self._naming.name(i) for i in prompt_ids],
            "top_logprobs": [None, *(self._top(e) for e in entries)],
        }

    def take(self, entries: Sequence[TokenLogprobs]) -> Json:
        """See `LogprobsWriter.take`."""
        return {
            "text_offset": [self._pass(e.token_ids[0]) for e in entries],
            "token_logprobs": [clamped(e.logprobs[0]) for e in entries],
            "tokens": [self._naming.name(e.token_ids[0]) for e in entries],
            "top_logprobs": [self._top(e) for e in entries],
        }

    def _pass(self, token_id: int) -> int:
        offset = self._offset
        if token_id not in self._skip_ids:
            self._offset += len(self._decoder.decode(self._naming.raw(token_id)))
        return offset

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """By text; of tokens with the same text, the first one counts."""
        by_text: dict[str, float] = {}
        for token_id, logprob in zip(entry.token_ids, entry.logprobs, strict=True):
            by_text.setdefault(self._naming.name(token_id), clamped(logprob))
        return by_text


def _distinct(entry: TokenLogprobs) -> list[tuple[int, float]]:
    """The likeliest tokens, then the fixed ones that are not among them."""
    found: dict[int, float] = {}
    for token_id, logprob in zip(entry.token_ids[1:], entry.logprobs[1:], strict=True):
        found.setdefault(token_id, logprob)
    return list(found.items())


def prompt_logprobs(
    entries: Sequence[TokenLogprobs], num_likeliest: int, token_bytes: TokenBytes
) -> list[Json | None]:
    """vLLM's `prompt_logprobs`: for each prompt token {id: {logprob, rank, decoded_token}}, null
    for the first one. `num_likeliest` is how many were asked for, -1 all; tokens beyond those have
    no rank.
    """
    return [None, *(_ranked(entry, num_likeliest, token_bytes) for entry in entries)]


def _ranked(entry: TokenLogprobs, num_likeliest: int, token_bytes: TokenBytes) -> Json:
    shown: Json = {}
    pairs = zip(entry.token_ids, entry.logprobs, strict=True)
    for place, (token_id, logprob) in enumerate(pairs):
        ranked = num_likeliest < 0 or place <= num_likeliest
        shown.setdefault(
            str(token_id),
            {
                "logprob": clamped(logprob),
                "rank": (entry.rank if place == 0 else place) if ranked else None,
                "decoded_token": token_bytes(token_id).decode("utf-8", "replace"),
            },
        )
    return shown
