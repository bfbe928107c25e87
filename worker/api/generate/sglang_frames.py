"""Answers of `/generate`, as SGLang and forge-infer write them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from worker.api.generate.frames import DONE, Answer, Delta, Ending, TokenCounts, WholeFrames
from worker.api.generate.logprobs import TokenBytes, clamped
from worker.api.schema.sglang import ForgeAnswer, MetaInfo, SglangAnswer
from worker.types import FinishReason, TokenLogprobs

Json = dict[str, Any]
_encode = msgspec.json.Encoder().encode


class SglangLogprobs:
    """Log probabilities as `[logprob, id, text]`, where the text is null unless `token_bytes` is
    given: of the drawn tokens, of the `num_top` likeliest, and of fixed ones. Implements
    `LogprobsWriter`.
    """

    def __init__(self, num_top: int, token_bytes: TokenBytes | None) -> None:
        self._num_top = num_top
        self._bytes = token_bytes

    def prompt(
        self, prompt_ids: Sequence[int], prompt_text: str, entries: Sequence[TokenLogprobs]
    ) -> Iterator[Json]:
        """Prompts are not echoed here."""
        return iter(())

    def follow(self, prompt_text: str) -> None:
        """See `LogprobsWriter.follow`: nothing counts characters here."""

    def take(self, entries: Sequence[TokenLogprobs]) -> Json:
        drawn, top = [], []
        for entry in entries:
            pairs = zip(entry.token_ids, entry.logprobs, strict=True)
            told = [self._told(token_id, logprob) for token_id, logprob in pairs]
            drawn.append(told[0])
            top.append(told[1 : 1 + self._num_top])
        if not self._num_top:
            return {"output_token_logprobs": drawn}
        return {"output_token_logprobs": drawn, "output_top_logprobs": top}

    def _told(self, token_id: int, logprob: float) -> list[Any]:
        text = None if self._bytes is None else self._bytes(token_id).decode("utf-8", "replace")
        return [clamped(logprob), token_id, text]


@dataclass(slots=True)
class _SoFar:
    """What one answer has come to."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: dict[str, list[Any]] = field(default_factory=dict)


class SglangFrames:
    """Implements `Frames`: every event repeats all that its answer has come to. Owns that."""

    done = DONE

    def __init__(self, response_id: str, *, single: bool) -> None:
        """`single`: there is one answer, and it is not in a list."""
        self._id = response_id
        self._single = single
        self._so_far: dict[int, _SoFar] = {}

    def opening(self, index: int, usage: TokenCounts | None) -> bytes:
        """Nothing comes before the first tokens."""
        return b""

    def delta(self, delta: Delta) -> bytes:
        """The answer so far, with its number where there are several."""
        answer = self._answer(delta.index, delta, delta.usage)
        numbered: Json = msgspec.to_builtins(answer)
        if not self._single:
            numbered["index"] = delta.index
        return b"data: " + _encode(numbered) + b"\n\n"

    def usage(self, usage: TokenCounts, metrics: Json | None) -> bytes:
        """Every event has its own."""
        return b""

    def body(self, answers: Sequence[Answer], usage: TokenCounts, metrics: Json | None) -> bytes:
        whole = [self._answer(n, answer, answer.usage) for n, answer in enumerate(answers)]
        return _encode(whole[0] if self._single else whole)

    def _answer(self, index: int, part: Delta | Answer, usage: TokenCounts | None) -> SglangAnswer:
        so_far = self._so_far.setdefault(index, _SoFar())
        so_far.text.append(part.text)
        so_far.token_ids += part.token_ids or ()
        logprobs = part.logprobs
        if isinstance(logprobs, msgspec.Raw):
            logprobs = msgspec.json.decode(logprobs)
        for name, entries in (logprobs or {}).items():
            so_far.logprobs.setdefault(name, []).extend(entries)
        counts = usage or TokenCounts(0, 0, None)
        info = MetaInfo(
            id=self._id,
            finish_reason=_reason(part.ending, so_far.token_ids),
            prompt_tokens=counts.prompt_tokens,
            completion_tokens=counts.completion_tokens,
            cached_tokens=-1 if counts.cached_tokens is None else counts.cached_tokens,
            **so_far.logprobs,
        )
        return SglangAnswer(
            text="".join(so_far.text), output_ids=list(so_far.token_ids), meta_info=info
        )


def _reason(ending: Ending | None, token_ids: Sequence[int]) -> Json | None:
    if ending is None:
        return None
    if ending.finish_reason == FinishReason.LENGTH.value:
        return {"type": "length", "length": len(token_ids)}
    if ending.finish_reason != FinishReason.STOP.value:
        return {"type": ending.finish_reason}
    # The model's own end has no name: it is the last token.
    matched = ending.stop_reason
    return {"type": "stop", "matched": token_ids[-1] if matched is None else matched}


class ForgeFrames(WholeFrames):
    """The one form of forge-infer's answers."""

    def body(self, answers: Sequence[Answer], usage: TokenCounts, metrics: Json | None) -> bytes:
        [answer] = answers
        return _encode(ForgeAnswer(answer.text, usage.prompt_tokens, usage.completion_tokens))
