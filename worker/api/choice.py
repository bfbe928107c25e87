"""One sequence of a response, from the engine's outputs to text. Pure."""

from __future__ import annotations

from collections.abc import Callable, Set

from worker.api.params import TextParams
from worker.api.sse import Ending
from worker.engine.messages import AddRequest, RequestOutput
from worker.errors import RequestError
from worker.metrics import RequestRecord
from worker.tokenizer.detokenize import Detokenizer
from worker.types import FinishReason


class Choice:
    """Owns one sequence's text and counts. `ending` is set once the sequence has its end; until
    then `reason` is what it would be recorded as if nothing more came (the client left).
    """

    def __init__(
        self,
        index: int,
        request: AddRequest,
        text: TextParams,
        token_bytes: Callable[[int], bytes],
        special_ids: Set[int],
    ) -> None:
        self.index = index
        self.request = request
        self.ending: Ending | None = None
        self.reason = FinishReason.ABORT
        self.num_generated = 0
        self.num_cached = 0
        self._include_stop = text.include_stop
        self._detokenizer = Detokenizer(
            token_bytes,
            skip_ids=special_ids if text.skip_special_tokens else frozenset(),
            stop=text.stop,
            min_tokens=text.min_tokens,
            include_stop=text.include_stop,
        )
        self._last: RequestOutput | None = None

    def take(self, output: RequestOutput) -> str:
        """The text an output adds. Raises `RequestError` when the engine gave the request up."""
        self._last = output
        self.num_cached = output.num_cached_tokens
        if output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
            self.reason = output.finish_reason
            self.num_generated += len(output.token_ids)
            raise _given_up(output)
        tokens = output.token_ids
        if output.stop_token_id is not None and not self._include_stop:
            tokens = tokens[:-1]
        text = self._detokenizer.feed(tokens)
        # What came after a stop string was drawn in vain; a stop token has no text but counts.
        self.num_generated = self._detokenizer.num_consumed
        if self._detokenizer.matched is None:
            self.num_generated += len(output.token_ids) - len(tokens)
        if output.finish_reason is not None:
            text += self._detokenizer.finish()
            self._end(output.finish_reason, self._stop_token(output))
        if self._detokenizer.matched is not None:
            self._end(FinishReason.STOP, self._detokenizer.matched)
        return text

    def _stop_token(self, output: RequestOutput) -> int | None:
        """The stop token to report: one the client asked for, not the model's own end."""
        asked = self.request.params.stop_token_ids
        return output.stop_token_id if output.stop_token_id in asked else None

    def _end(self, reason: FinishReason, stop_reason: str | int | None) -> None:
        self.reason = reason
        self.ending = Ending(reason.value, stop_reason)

    def record(self, now: float) -> RequestRecord:
        """The sequence as the metrics see it."""
        last = self._last
        return RequestRecord(
            reason=self.reason,
            num_prompt_tokens=len(self.request.prompt_token_ids),
            num_generation_tokens=self.num_generated,
            max_tokens=self.request.params.max_tokens,
            num_preemptions=0 if last is None else last.num_preemptions,
            arrival_seconds=self.request.arrival_seconds,
            scheduled_seconds=None if last is None else last.scheduled_seconds,
            first_token_seconds=None if last is None else last.first_token_seconds,
            last_token_seconds=None if last is None else last.last_token_seconds,
            finished_seconds=now,
        )


def _given_up(output: RequestOutput) -> RequestError:
    if output.finish_reason is FinishReason.ABORT:
        return RequestError(
            "The request was aborted because the server is shutting down",
            status=503,
            type="ServiceUnavailableError",
        )
    return RequestError(
        output.error or "Internal server error", status=500, type="InternalServerError"
    )
