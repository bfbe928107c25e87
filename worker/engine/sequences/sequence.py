"""A request inside the engine: its tokens, how far they have been run, and the next draw."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from operator import add

from worker.engine.cache.block_hash import BlockHash
from worker.engine.lengths.acceptance import DraftTally
from worker.engine.messages import AddRequest, RequestOutput, SpeculationFigures
from worker.engine.sequences.beams import Beam, BeamSearch
from worker.engine.sequences.grammar import Matcher
from worker.kv.pull import Pull
from worker.types import (
    Draw,
    FinishReason,
    KvOffer,
    Pooling,
    SampleSpec,
    SamplingParams,
    TokenLogprobs,
)


class SequenceState(Enum):
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(frozen=True, slots=True)
class Branch:
    """A further answer to the same prompt, not a sequence of its own yet; `index` is at least 1."""

    request_id: str
    index: int


@dataclass(slots=True, eq=False)
class Sequence:
    """The mutable record of one answer. The scheduler is its only owner.

    `token_ids` is the prompt and the outputs, `max_tokens_total` at most. The first `num_computed`
    were given to steps, the KV of the first `num_written` is there, and `num_pending` more tokens
    are being drawn by steps in flight. `block_hashes` names the leading full blocks, as far as they
    were needed. Times are on the engine's clock.

    `branches` are the request's other answers until the prompt has been run: the step that ends it
    draws for all of them, then each becomes a sequence. Whichever answer leads (the first, until it
    is aborted) runs the prompt; it is `index` and `request_id`.

    `grammar` is being compiled while the sequence waits; `matcher` follows its outputs from then
    on. `kv_pull` brings KV while the sequence waits, without blocks: the step that admits it loads
    them. The sequences of one beam `search` hold its live beams, and trade contents with every step
    of it. `pooled` sums the hidden states that count for the embedding of the prompt; those of
    positions below `num_pooled` do not count, or are summed by it and by steps in flight.
    """

    seq_id: int
    request: AddRequest
    priority: int
    max_tokens_total: int
    eos_token_ids: frozenset[int]
    request_id: str = ""
    params: SamplingParams = field(init=False)
    index: int = 0
    branches: list[Branch] = field(default_factory=list)
    token_ids: list[int] = field(init=False)
    num_prompt: int = field(init=False)
    state: SequenceState = SequenceState.WAITING
    num_computed: int = 0
    num_written: int = 0
    num_pending: int = 0
    # The step in flight draws the first tokens of several answers, or the search that the sequence
    # takes part in has not taken its next step: nothing of it may be scheduled.
    is_branching: bool = False
    num_cached: int = 0
    num_preemptions: int = 0
    guaranteed: bool = False  # never a victim within its class, see `engine.policies`
    num_bypassed: int = 0
    num_overtaken: int = 0
    num_prompt_logprobs: int = 0  # prompt tokens whose log probabilities were reported
    num_pooled: int = field(init=False, default=0)
    pooled: list[float] = field(init=False, default_factory=list)
    draft_tally: DraftTally | None = None  # None: no draft of it was verified
    block_hashes: list[BlockHash] = field(default_factory=list)
    adapter_slot: int | None = None  # that of its adapter, while it runs
    grammar: Future[Matcher] | None = None
    matcher: Matcher | None = None
    search: BeamSearch | None = None
    kv_pull: Pull | None = None
    asks_peer: bool = False  # its external KV comes from another engine's caches
    num_external: int = 0  # of `num_cached`, those whose KV was not on the device
    num_from_host: int = 0  # of those, what came from the host tier
    num_from_disk: int = 0
    kv_arrived_seconds: float | None = None
    scheduled_seconds: float | None = None
    first_token_seconds: float | None = None
    last_token_seconds: float | None = None

    def __post_init__(self) -> None:
        self.token_ids = [*self.request.prompt_token_ids, *self.request.output_token_ids]
        self.num_prompt = len(self.request.prompt_token_ids)
        if self.request.pooling is Pooling.LAST:
            self.num_pooled = self.num_prompt - 1
        self.lead(Branch(self.request.request_id, 0))

    # ---- identity ---------------------------------------------------------------------------

    @property
    def rank(self) -> tuple[int, int]:
        """The order of service: the lower priority value, then the earlier arrival. Unique."""
        return (self.priority, self.seq_id)

    @property
    def num_answers(self) -> int:
        """The number of answers that this sequence runs for: its own, and its branches'."""
        return 1 + len(self.branches)

    @property
    def answers(self) -> tuple[int, ...]:
        """The indices of the answers that a step draws for; a search has one draw for all."""
        if self.search is not None:
            return (self.index,)
        return (self.index, *(branch.index for branch in self.branches))

    def lead(self, branch: Branch) -> None:
        """Become the answer `branch` (which is in `branches` no more)."""
        self.request_id = branch.request_id
        self.index = branch.index
        self.params = self.params_of(branch.index)

    def params_of(self, index: int) -> SamplingParams:
        """Return the sampling parameters of answer `index`: each has a seed of its own."""
        params = self.request.params
        return replace(params, seed=params.seed + index) if index else params

    def child(self, branch: Branch, seq_id: int) -> Sequence:
        """Make the sequence of a branch, now that the prompt has been run; it has no blocks yet."""
        child = Sequence(
            seq_id, self.request, self.priority, self.max_tokens_total, self.eos_token_ids
        )
        child.lead(branch)
        child.num_cached = self.num_cached
        child.num_prompt_logprobs = self.num_prompt_logprobs
        child.block_hashes = self.block_hashes[:]
        child.adapter_slot = self.adapter_slot
        child.matcher = None if self.matcher is None else self.matcher.fork()
        child.scheduled_seconds = self.scheduled_seconds
        if self.search is not None:
            child.search, child.params = self.search, self.params
            child.first_token_seconds = self.first_token_seconds
        return child

    def hold(self, beam: Beam, chain: Seq[BlockHash]) -> None:
        """Take over a live beam, whose leading full blocks `chain` names."""
        self.token_ids = [*self.request.prompt_token_ids, *beam.token_ids]
        self.block_hashes = list(chain)
        self.is_branching = False

    # ---- progress ---------------------------------------------------------------------------

    @property
    def num_outputs(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def num_tokens(self) -> int:
        """The number of tokens that are known or that steps in flight are drawing."""
        return len(self.token_ids) + self.num_pending

    @property
    def num_unscheduled(self) -> int:
        """The number of tokens that the next step could run.

        0 while the step in flight is drawing the last token that fits, or those that make branches:
        nothing may be written into the shared blocks before that. 0 for a beam until its search has
        taken its next step.
        """
        if self.is_branching or (self.num_pending and self.num_tokens >= self.max_tokens_total):
            return 0
        return self.num_tokens - self.num_computed

    @property
    def num_readable(self) -> int:
        """The number of leading tokens that may come from the prefix cache, if it has them.

        Tokens whose successors' log probabilities are still to be reported are run, and so are
        those whose hidden states are still to be summed.
        """
        if self.request.pooling is not None:
            return self.num_pooled + 1
        if self.request.params.prompt_logprobs is None:
            return len(self.token_ids)
        if self.num_prompt_logprobs >= self.num_prompt - 1:
            return len(self.token_ids)
        return self.num_prompt_logprobs + 1

    @property
    def is_awaiting_kv(self) -> bool:
        return self.kv_pull is not None and not self.kv_pull.done

    @property
    def is_held(self) -> bool:
        """True if it waits for other sequences of its search."""
        return self.search is not None and self.search.holds(self.seq_id)

    @property
    def waits_for_draw(self) -> bool:
        """True if the step after its next token cannot be scheduled before that token is known."""
        return self.matcher is not None or self.search is not None

    def drop_pull(self) -> None:
        if self.kv_pull is not None:
            if self.kv_pull.part is not None:
                self.kv_arrived_seconds = self.kv_pull.part.arrived_seconds
            self.kv_pull.close()
            self.kv_pull = None

    def preempt(self) -> None:
        """Start over without blocks; the token that a step in flight draws still counts."""
        self.state = SequenceState.WAITING
        self.num_computed = self.num_written = 0
        self.num_preemptions += 1
        self.guaranteed = False

    # ---- drawing ----------------------------------------------------------------------------

    def sample_specs(self, position: int, drafts: Seq[int] = ()) -> tuple[SampleSpec, ...]:
        """Return the specs of the token at `position` and after each draft, for each answer."""
        masks: Seq[bytes] = ()
        if self.matcher is not None:
            outputs, ends = self.token_ids[self.num_prompt :], self._end_ids(self.params)
            masks = self.matcher.masks(outputs, drafts, self.params, ends)
        if self.search is not None or not self.branches:
            return (self._sample_spec(self.params, position, masks),)
        return tuple(self._sample_spec(self.params_of(i), position, masks) for i in self.answers)

    def _sample_spec(self, params: SamplingParams, position: int, masks: Seq[bytes]) -> SampleSpec:
        """Return the specs of one draw. Until `min_tokens` outputs are there, no token that could
        end the sequence is drawn; masks see to that themselves.
        """
        banned: tuple[int, ...] = ()
        if not masks and position - self.num_prompt < params.min_tokens:
            banned = self._end_ids(params)
        history = self.token_ids[:position] if params.needs_history else ()
        return SampleSpec(params, position, banned, history, self.num_prompt, masks)

    def _end_ids(self, params: SamplingParams) -> tuple[int, ...]:
        ends = () if params.ignore_eos else tuple(self.eos_token_ids)
        return (*ends, *params.stop_token_ids)

    def prompt_targets(self, start: int, end: int) -> list[int]:
        """Return the prompt tokens that follow positions `start` … `end`−1, if their log
        probabilities are wanted and one of them was not reported yet.
        """
        if self.params.prompt_logprobs is None:
            return []
        if min(end, self.num_prompt - 1) <= self.num_prompt_logprobs:
            return []
        return self.token_ids[start + 1 : min(end + 1, self.num_prompt)]

    def pool_rows(self, start: int, end: int) -> int:
        """Return how many of the last positions of `start` … `end`−1 the step has to sum. A
        position counts once, however often it is run after preemptions.
        """
        if self.request.pooling is None:
            return 0
        count = max(0, end - max(start, self.num_pooled))
        self.num_pooled += count
        return count

    def pool(self, sums: list[float]) -> None:
        self.pooled = list(map(add, self.pooled, sums)) if self.pooled else sums

    def embedding(self) -> list[float]:
        """Return the mean of the hidden states that count."""
        count = self.num_prompt if self.request.pooling is Pooling.MEAN else 1
        return [value / count for value in self.pooled]

    def append(self, token: int, now: float) -> None:
        self.token_ids.append(token)
        if self.first_token_seconds is None:
            self.first_token_seconds = now
        self.last_token_seconds = now

    # ---- output -----------------------------------------------------------------------------

    def output(
        self,
        draws: tuple[Draw, ...] = (),
        finish_reason: FinishReason | None = None,
        stop_token_id: int | None = None,
        prompt_logprobs: tuple[TokenLogprobs, ...] = (),
        *,
        error: str | None = None,
        request_id: str | None = None,
        pooled: Seq[float] = (),
        kv_offer: KvOffer | None = None,
    ) -> RequestOutput:
        """Return the output of new `draws`; `request_id` names a branch, else it is its own."""
        return RequestOutput(
            self.request_id if request_id is None else request_id,
            [draw.token_id for draw in draws],
            finish_reason,
            stop_token_id,
            self.num_cached,
            self.scheduled_seconds,
            self.first_token_seconds,
            self.last_token_seconds,
            self.num_preemptions,
            error,
            [draw.logprobs for draw in draws if draw.logprobs is not None],
            list(prompt_logprobs),
            self._speculation_figures(request_id),
            pooled=list(pooled),
            kv_offer=kv_offer,
            kv_arrived_seconds=self.kv_arrived_seconds,
        )

    def _speculation_figures(self, request_id: str | None) -> SpeculationFigures | None:
        """Return the figures so far; None for a branch that is not a sequence of its own yet."""
        if self.draft_tally is None or request_id not in (None, self.request_id):
            return None
        return self.draft_tally.figures()
