"""Log probabilities as the OpenAI API and vLLM write them. Pure.

Every token has an entry, even if its text is held back or dropped. Long lists are encoded in slices
(`Columns`), because Python objects would take ten times the memory.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator, Sequence, Set
from itertools import chain, repeat
from typing import Any

import msgspec

from worker.types import TokenLogprobs

LEAST = -9999.0  # as vLLM; JSON cannot write minus infinity
SLICE_TOKENS = 4096  # encoded at once, the drawn ones and their rivals
_UTF8 = codecs.getincrementaldecoder("utf-8")
_encode = msgspec.json.Encoder().encode

TokenBytes = Callable[[int], bytes]
Json = dict[str, Any]


# One writer for each choice: text offsets run over all pieces of an answer.
class LogprobsWriter:
    def prompt(
        self, prompt_ids: Sequence[int], prompt_text: str, entries: Sequence[TokenLogprobs]
    ) -> Iterator[Json]:
        """Return the echoed prompt's part in slices; missing `entries`, and the first, are null."""
        return iter(())

    def follow(self, prompt_text: str) -> None:
        """Prepare for `take` when the answer follows an echoed prompt."""

    def take(self, entries: Sequence[TokenLogprobs]) -> Json:
        raise NotImplementedError


def clamped(logprob: float) -> float:
    return max(logprob, LEAST)


class Columns:
    """A `logprobs` object under construction: the encoded elements of each of its lists."""

    def __init__(self) -> None:
        self._parts: dict[str, list[bytes]] = {}

    def add(self, part: Json) -> None:
        for name, elements in part.items():
            parts = self._parts.setdefault(name, [])
            if elements:
                parts.append(_encode(elements)[1:-1])

    def followed_by(self, parts: Iterator[Json]) -> Columns:
        """Return a copy with more elements; both share those already encoded."""
        columns = Columns()
        columns._parts = {name: list(own) for name, own in self._parts.items()}
        for part in parts:
            columns.add(part)
        return columns

    def raw(self) -> msgspec.Raw:
        lists = (
            _encode(name) + b":[" + b",".join(parts) + b"]" for name, parts in self._parts.items()
        )
        return msgspec.Raw(b"{" + b",".join(lists) + b"}")


def written(
    writer: LogprobsWriter, entries: Sequence[TokenLogprobs], echoed: Columns | None = None
) -> Json | msgspec.Raw:
    if echoed is None and num_tokens_shown(entries) <= SLICE_TOKENS:
        return writer.take(entries)
    parts = map(writer.take, slices(entries) or [()])
    return (echoed or Columns()).followed_by(parts).raw()


def num_tokens_shown(entries: Sequence[TokenLogprobs]) -> int:
    return sum(len(entry.token_ids) for entry in entries)


def slices(entries: Sequence[TokenLogprobs]) -> list[Sequence[TokenLogprobs]]:
    each = max((len(entry.token_ids) for entry in entries), default=1)
    size = max(1, SLICE_TOKENS // each)
    return [entries[start : start + size] for start in range(0, len(entries), size)]


class _NamedTokens(LogprobsWriter):
    def __init__(self, token_bytes: TokenBytes, *, as_ids: bool) -> None:
        self._bytes = token_bytes
        self._as_ids = as_ids

    def _name(self, token_id: int) -> str:
        """Return the token's text, with U+FFFD for part of a character, or `token_id:N`."""
        if self._as_ids:
            return f"token_id:{token_id}"
        return self._bytes(token_id).decode("utf-8", "replace")


class ChatLogprobs(_NamedTokens):
    """`choices[].logprobs` of a chat: {"content": [{token, logprob, bytes, top_logprobs}]}."""

    def take(self, entries: Sequence[TokenLogprobs]) -> Json:
        return {"content": [self._content(entry) for entry in entries]}

    def _content(self, entry: TokenLogprobs) -> Json:
        likeliest = [self._token(i, lp) for i, lp in _distinct(entry)]
        return {**self._token(entry.token_ids[0], entry.logprobs[0]), "top_logprobs": likeliest}

    def _token(self, token_id: int, logprob: float) -> Json:
        return {
            "token": self._name(token_id),
            "logprob": clamped(logprob),
            "bytes": list(self._bytes(token_id)),
        }


class CompletionLogprobs(_NamedTokens):
    """`choices[].logprobs` of a text completion; tokens in `skip_ids` have no text."""

    def __init__(
        self, token_bytes: TokenBytes, *, as_ids: bool, skip_ids: Set[int] = frozenset()
    ) -> None:
        super().__init__(token_bytes, as_ids=as_ids)
        self._skip_ids = skip_ids
        self._decoder = _UTF8("replace")
        self._offset = 0

    def prompt(
        self, prompt_ids: Sequence[int], prompt_text: str, entries: Sequence[TokenLogprobs]
    ) -> Iterator[Json]:
        """Yield the prompt's part in slices; its first token has null, as nothing precedes it."""
        decoder, offset, offsets = _UTF8("replace"), 0, []
        for token_id in prompt_ids:
            offsets.append(offset)
            offset += len(decoder.decode(self._bytes(token_id)))
        # The model's own prefix is a token of the prompt but not part of its text.
        surplus = max(0, offset - len(prompt_text))
        start = 0
        for known in chain([[None]], slices(entries), repeat([None])):
            part = range(start, min(start + len(known), len(prompt_ids)))
            if not part:
                return
            yield {
                "text_offset": [max(0, offsets[n] - surplus) for n in part],
                "token_logprobs": [None if e is None else clamped(e.logprobs[0]) for e in known],
                "tokens": [self._name(prompt_ids[n]) for n in part],
                "top_logprobs": [None if e is None else self._top(e) for e in known],
            }
            start = part.stop

    def follow(self, prompt_text: str) -> None:
        self._offset = len(prompt_text)

    def take(self, entries: Sequence[TokenLogprobs]) -> Json:
        return {
            "text_offset": [self._pass(e.token_ids[0]) for e in entries],
            "token_logprobs": [clamped(e.logprobs[0]) for e in entries],
            "tokens": [self._name(e.token_ids[0]) for e in entries],
            "top_logprobs": [self._top(e) for e in entries],
        }

    def _pass(self, token_id: int) -> int:
        offset = self._offset
        if token_id not in self._skip_ids:
            self._offset += len(self._decoder.decode(self._bytes(token_id)))
        return offset

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """Return log probabilities by text; of tokens with the same text, the first one counts."""
        by_text: dict[str, float] = {}
        for token_id, logprob in zip(entry.token_ids, entry.logprobs, strict=True):
            by_text.setdefault(self._name(token_id), clamped(logprob))
        return by_text


def _distinct(entry: TokenLogprobs) -> list[tuple[int, float]]:
    found: dict[int, float] = {}
    for token_id, logprob in zip(entry.token_ids[1:], entry.logprobs[1:], strict=True):
        found.setdefault(token_id, logprob)
    return list(found.items())


def prompt_logprobs(
    entries: Sequence[TokenLogprobs], num_tokens: int, num_likeliest: int, token_bytes: TokenBytes
) -> msgspec.Raw:
    """Return vLLM's `prompt_logprobs`: {id: {logprob, rank, decoded_token}} for each prompt token,
    null for the first one and those that `entries` do not reach. Tokens beyond `num_likeliest` (-1:
    all) have no rank.
    """
    parts = [b"null"]
    parts += (_encode(_ranked(entry, num_likeliest, token_bytes)) for entry in entries)
    parts += repeat(b"null", num_tokens - len(parts))
    return msgspec.Raw(b"[" + b",".join(parts) + b"]")


def _ranked(entry: TokenLogprobs, num_likeliest: int, token_bytes: TokenBytes) -> Json:
    return {
        str(token_id): {
            "logprob": logprob,
            "rank": rank,
            "decoded_token": token_bytes(token_id).decode("utf-8", "replace"),
        }
        for token_id, logprob, rank in ranked(entry, num_likeliest)
    }


def ranked(entry: TokenLogprobs, num_likeliest: int) -> Iterator[tuple[int, float, int | None]]:
    """Return each token once, with its log probability and rank; the drawn one comes first. Tokens
    beyond `num_likeliest` (-1: all) have no rank.
    """
    seen: set[int] = set()
    for place, (token_id, logprob) in enumerate(zip(entry.token_ids, entry.logprobs, strict=True)):
        if token_id in seen:
            continue
        seen.add(token_id)
        has_rank = num_likeliest < 0 or place <= num_likeliest
        rank = entry.rank if place == 0 else place
        yield token_id, clamped(logprob), rank if has_rank else None
