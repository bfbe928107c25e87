"""One sequence of a response, from the engine's outputs to text. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from worker.api.generate.frames import Ending
from worker.api.schema.answers import TOOL_CALLS_ENDED
from worker.api.schema.params import TextParams
from worker.api.tools.answer import AnswerForm
from worker.api.tools.writer import CallDelta
from worker.engine.messages import AddRequest, RequestOutput, SpeculationFigures
from worker.errors import RequestError
from worker.metrics.page import RequestRecord
from worker.tokenizer.detokenize import Detokenizer
from worker.tokenizer.tokenizer import Tokenizer
from worker.types import FinishReason, TokenLogprobs

REPETITION_DETECTED = "repetition_detected"


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of a choice that one output adds; tokens without text of their own count too."""

    text: str
    token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs] = ()
    reasoning: str = ""
    calls: Sequence[CallDelta] = ()


def joined(pieces: Sequence[Piece]) -> Piece:
    if len(pieces) == 1:
        return pieces[0]
    return Piece(
        "".join(piece.text for piece in pieces),
        [token_id for piece in pieces for token_id in piece.token_ids],
        [entry for piece in pieces for entry in piece.logprobs],
        "".join(piece.reasoning for piece in pieces),
        [call for piece in pieces for call in piece.calls],
    )


class Choice:
    """Owns one sequence's text and counts. `reason` is what to record if the sequence ended now."""

    def __init__(
        self,
        index: int,
        request: AddRequest,
        text: TextParams,
        tokenizer: Tokenizer,
        form: AnswerForm | None = None,
    ) -> None:
        self.index = index
        self.request = request
        self.ending: Ending | None = None
        # The client may leave at any time, and then no output says so.
        self.reason = FinishReason.ABORT
        self.num_generated = 0
        self.num_cached = 0
        self.last: RequestOutput | None = None
        self.speculation: SpeculationFigures | None = None
        self._text = text
        self._parser = None if form is None else form.parser()
        skipped = tokenizer.special_ids if text.skip_special_tokens else frozenset()
        # The parsers look for these marks in the text.
        skipped -= text.shown_ids
        # SentencePiece writes a space before each word; only the first of a text has none.
        starts_text = all(i in skipped for i in request.prompt_token_ids)
        self._detokenizer = Detokenizer(
            tokenizer.token_bytes,
            skip_ids=skipped,
            strip_space=tokenizer.strips_leading_space and starts_text,
            stop=text.stop,
            min_tokens=text.min_tokens,
            include_stop=text.include_stop,
        )

    def replay(self, token_ids: Sequence[int]) -> None:
        """Begin with tokens that the client has. Raises `RequestError` if they end the answer."""
        self._shown(RequestOutput(self.request.request_id, list(token_ids)))
        if self.ending is not None:
            reason = "`resume.token_ids` has a stop string: the answer is over"
            raise RequestError(reason, param="resume.token_ids")

    def take(self, output: RequestOutput) -> Piece:
        """Add an output. Raises the `RequestError` of a sequence that failed."""
        self.last = output
        self.num_cached = output.num_cached_tokens
        if output.speculation is not None:
            self.speculation = output.speculation
        failure = given_up(output)
        piece = self._echoed(output) if self._text.echo_only else self._shown(output)
        # With a match the answer was complete before the engine failed.
        if failure is not None and self._detokenizer.matched is None:
            self.reason = output.finish_reason or self.reason
            raise failure
        return piece

    def _echoed(self, output: RequestOutput) -> Piece:
        """Return no text: the one token drawn after a prompt that is only echoed does not count."""
        if output.finish_reason is FinishReason.ABORT:
            self._end(FinishReason.ABORT, None)
        elif output.finish_reason is not None:
            self._end(FinishReason.LENGTH, None)
        return Piece("")

    def _shown(self, output: RequestOutput) -> Piece:
        tokens: Sequence[int] = output.token_ids
        # A stop token is not text unless the client wants its stops shown.
        drops_last = output.stop_token_id is not None and not self._text.include_stop
        before = self._detokenizer.num_consumed
        text = self._detokenizer.feed(tokens[:-1] if drops_last else tokens)
        # Tokens after a stop string do not count; a stop token has no text but counts.
        counted = self._detokenizer.num_consumed - before
        if self._detokenizer.matched is None:
            counted = len(tokens)
        self.num_generated += counted
        if output.finish_reason is not None:
            # Half a character that nothing completes is shown as U+FFFD.
            text += self._detokenizer.finish()
            self._end(output.finish_reason, self._stop_reason(output))
        if self._detokenizer.matched is not None:
            self._end(FinishReason.STOP, self._detokenizer.matched)
        return self._parsed(Piece(text, tokens[:counted], output.logprobs[:counted]))

    def _parsed(self, piece: Piece) -> Piece:
        if self._parser is None:
            return piece
        said = self._parser.feed(piece.text)
        text, reasoning, calls = said.content, said.reasoning, said.calls
        if self.ending is not None:
            stopped = self.reason is FinishReason.STOP
            # A stop string is not the model's own end: a call that it cuts is not complete.
            complete = stopped and self._detokenizer.matched is None
            said = self._parser.finish(complete=complete, truncated=not stopped)
            text, reasoning = text + said.content, reasoning + said.reasoning
            calls = calls + said.calls
            if stopped and self._parser.num_calls:
                self.ending = replace(self.ending, finish_reason=TOOL_CALLS_ENDED)
        return replace(piece, text=text, reasoning=reasoning, calls=calls)

    def _stop_reason(self, output: RequestOutput) -> str | int | None:
        """Return the client's stop that was met; None for the model's own end, even if named."""
        if output.finish_reason is FinishReason.REPETITION:
            return REPETITION_DETECTED
        token_id = output.stop_token_id
        if token_id == self._text.eos_id or output.finish_reason is FinishReason.ABORT:
            return None
        asked = self.request.params.stop_token_ids
        return token_id if token_id in asked or token_id in self._text.extra_eos_ids else None

    def _end(self, reason: FinishReason, stop_reason: str | int | None) -> None:
        self.reason = reason
        self.ending = Ending(reason.value, stop_reason)

    def record(self, now: float) -> RequestRecord:
        last = self.last or RequestOutput(self.request.request_id, [])
        return RequestRecord(
            reason=self.reason,
            num_prompt_tokens=len(self.request.prompt_token_ids),
            num_generation_tokens=self.num_generated,
            max_tokens=self.request.params.max_tokens,
            num_preemptions=last.num_preemptions,
            arrival_seconds=self.request.arrival_seconds,
            scheduled_seconds=last.scheduled_seconds,
            first_token_seconds=last.first_token_seconds,
            last_token_seconds=last.last_token_seconds,
            finished_seconds=now,
            num_cached_tokens=last.num_cached_tokens,
            kv_arrived_seconds=last.kv_arrived_seconds,
        )


def given_up(output: RequestOutput) -> RequestError | None:
    """Return the error of a sequence that gave no answer; an intended abort is not an error."""
    if output.finish_reason is FinishReason.ERROR:
        return RequestError(
            output.error or "Internal server error", status=500, type="InternalServerError"
        )
    if output.finish_reason is FinishReason.ABORT and output.error is not None:
        return RequestError(output.error, status=503, type="ServiceUnavailableError")
    return None
