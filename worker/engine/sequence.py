"""A request inside the engine: its tokens and how far they have been run."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from worker.engine.block_hash import BlockHash
from worker.engine.messages import AddRequest, RequestOutput
from worker.types import FinishReason, SampleSpec


class SequenceState(Enum):
    """Where a sequence is. A preempted one waits again."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """The mutable record of one request. The scheduler is its only owner.

    `token_ids` is the prompt and, appended, the outputs, `max_tokens_total` of them at most. The KV
    of the first `num_computed` is written. `block_hashes` names the leading full blocks of
    `token_ids`, as far as anybody has asked. Times are on the engine's clock.
    """

    seq_id: int
    request: AddRequest
    max_tokens_total: int
    eos_token_ids: frozenset[int]
    token_ids: list[int] = field(init=False)
    num_prompt: int = field(init=False)
    state: SequenceState = SequenceState.WAITING
    num_computed: int = 0
    num_cached: int = 0
    num_preemptions: int = 0
    block_hashes: list[BlockHash] = field(default_factory=list)
    scheduled_seconds: float | None = None
    first_token_seconds: float | None = None
    last_token_seconds: float | None = None

    def __post_init__(self) -> None:
        self.token_ids = list(self.request.prompt_token_ids)
        self.num_prompt = len(self.token_ids)

    @property
    def rank(self) -> tuple[int, int]:
        """Who goes first: the lower priority value, then the earlier arrival. Unique."""
        return (self.request.priority, self.seq_id)

    @property
    def num_outputs(self) -> int:
        """Tokens drawn so far."""
        return len(self.token_ids) - self.num_prompt

    def sample_spec(self) -> SampleSpec:
        """How to draw the token that comes after all of `token_ids`.

        Until `min_tokens` outputs are there, no token that could end the sequence can be drawn.
        """
        params = self.request.params
        banned: tuple[int, ...] = ()
        if self.num_outputs < params.min_tokens:
            banned = (*self.eos_token_ids, *params.stop_token_ids)
        return SampleSpec(params, len(self.token_ids), banned, num_prompt=self.num_prompt)

    def append(self, token: int, now: float) -> None:
        """Take a token that was drawn."""
        self.token_ids.append(token)
        if self.first_token_seconds is None:
            self.first_token_seconds = now
        self.last_token_seconds = now

    def stop_reason(self) -> tuple[FinishReason | None, int | None]:
        """Whether the last token ends the sequence, and which stop token did.

        Before `min_tokens` outputs a stop token is a token like any other.
        """
        params = self.request.params
        token = self.token_ids[-1]
        if self.num_outputs >= params.min_tokens and (
            (token in self.eos_token_ids and not params.ignore_eos)
            or token in params.stop_token_ids
        ):
            return FinishReason.STOP, token
        if len(self.token_ids) >= self.max_tokens_total:
            return FinishReason.LENGTH, None
        return None, None

    def output(
        self,
        token_ids: list[int],
        finish_reason: FinishReason | None = None,
        stop_token_id: int | None = None,
        error: str | None = None,
    ) -> RequestOutput:
        """What to tell the client about `token_ids`, with everything else as it is now."""
        return RequestOutput(
            self.request.request_id,
            token_ids,
            finish_reason,
            stop_token_id,
            self.num_cached,
            self.scheduled_seconds,
            self.first_token_seconds,
            self.last_token_seconds,
            self.num_preemptions,
            error,
        )
