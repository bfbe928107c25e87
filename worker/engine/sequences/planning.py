"""The step under construction, and its record while it is in flight."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from worker.config import SchedulerConfig
from worker.engine import policies
from worker.engine.lengths.acceptance import Offer
from worker.engine.sequences.sequence import Sequence
from worker.types import ModelOutput, ScheduledSequence


@dataclass(frozen=True, slots=True)
class Guess:
    """The drafts of one sequence that a step verifies: the first ones of the `offer`."""

    token_ids: tuple[int, ...]
    offer: Offer

    def cut(self, num_tokens: int) -> Guess | None:
        """Return a guess with only the first `num_tokens` drafts; None if that leaves nothing."""
        return Guess(self.token_ids[:num_tokens], self.offer) if num_tokens > 0 else None


@dataclass(slots=True)
class StepShare:
    """The share of one sequence in a step.

    `end` is the position after its last token. `answers` are the indices of the request's answers
    that get a token, in the order of the draws. `num_preemptions` is the sequence's count at
    planning: it is higher once the sequence has lost the blocks that the step writes. `guess` are
    drafts verified after `end`. For `num_to_draft`, `num_pooled` and `limit` see
    `ScheduledSequence`.
    """

    sequence: Sequence
    start: int
    end: int
    answers: tuple[int, ...]
    num_preemptions: int
    guess: Guess | None = None
    num_to_draft: int = 0
    num_pooled: int = 0
    limit: int = 0

    @property
    def num_drafts(self) -> int:
        return 0 if self.guess is None else len(self.guess.token_ids)

    @property
    def is_decode(self) -> bool:
        """True if it runs the last token alone, drafts aside."""
        return len(self.answers) == 1 and self.end - self.start == 1

    @property
    def looks_ahead(self) -> bool:
        """True if it has room for drafts: only a step that follows can be scheduled before its
        results.
        """
        return self.guess is not None or self.num_to_draft > 0 or self.limit > 0

    def settle(self, result: ModelOutput) -> None:
        """Move to its positions, with its drafts, by the result of the step before."""
        seq_id = self.sequence.seq_id
        drawn, drafts = result.sampled.get(seq_id), result.drafts.get(seq_id)
        if self.limit and drawn:
            self.start += len(drawn) - 1
            self.end += len(drawn) - 1
            if drafts is not None:
                offer = Offer(seq_id, drafts.confidences)
                self.guess = Guess(drafts.token_ids, offer).cut(self.limit - self.end)


@dataclass(slots=True)
class StepInFlight:
    """`follows` until it is known how many drafts the step before has accepted."""

    step: int
    shares: tuple[StepShare, ...]
    scheduled_seconds: float
    follows: bool = False

    @property
    def looks_ahead(self) -> bool:
        return any(share.looks_ahead for share in self.shares)

    def settle(self, result: ModelOutput) -> None:
        if self.follows:
            self.follows = False
            for share in self.shares:
                share.settle(result)


NO_MEMORY = (
    "the device has too little memory for this request, even alone: shorten it, or lower"
    " --gpu-memory-utilization or --kv-cache-memory-bytes, which leaves steps more"
)
# After this number of steps that the device had memory for, they may be twice as large.
_STEPS_TO_GROWTH = 32


class StepCeiling:
    """The largest step after one lacked memory: `num_tokens`, and `num_seqs` running answers."""

    def __init__(self, limits: SchedulerConfig) -> None:
        self._limits = limits
        self.lift()

    def lift(self) -> None:
        self.num_tokens = self._limits.max_num_batched_tokens
        self.num_seqs = self._limits.max_num_seqs
        self._num_passed = 0
        self._num_stuck = 0  # steps in a row that failed and cannot be smaller

    def lower(self, num_tokens: int, num_seqs: int) -> bool:
        """Allow only smaller steps, as one failed; return False if the smallest fails again."""
        self._num_passed = 0
        is_least = num_seqs == 1 and (num_tokens == 1 or not self._limits.enable_chunked_prefill)
        self._num_stuck = self._num_stuck + 1 if is_least else 0
        self.num_seqs = max(1, num_seqs // 2)
        if self._limits.enable_chunked_prefill:
            self.num_tokens = max(1, num_tokens // 2)
        return self._num_stuck < 2

    def passed(self) -> None:
        self._num_stuck = 0
        self._num_passed += 1
        if self._num_passed % _STEPS_TO_GROWTH == 0:
            limits = self._limits
            self.num_tokens = min(2 * self.num_tokens, limits.max_num_batched_tokens)
            self.num_seqs = min(2 * self.num_seqs, limits.max_num_seqs)


class StepPlan:
    """The sequences of the next step and the number of tokens of each, under one budget.

    No sequence changes until `commit`, so that one that is preempted can be dropped again.
    `followed` is the step in flight if drafts of it are not verified yet, and none waits for that.
    """

    def __init__(
        self,
        limits: SchedulerConfig,
        num_eligible: int,
        ceiling: StepCeiling,
        followed: StepInFlight | None = None,
    ) -> None:
        self.followed = followed
        self.budget = ceiling.num_tokens
        self.max_num_seqs = ceiling.num_seqs
        self.preempted = False
        self._chunked = limits.enable_chunked_prefill
        self._cap = policies.chunk_limit(
            self.budget, limits.long_prefill_token_threshold if self._chunked else 0, num_eligible
        )
        self._num_tokens: dict[int, int] = {}
        self._sequences: list[Sequence] = []
        self._guesses: dict[int, Guess] = {}
        self._num_to_draft: dict[int, int] = {}
        self._limits: dict[int, int] = {}

    @property
    def planned(self) -> list[tuple[Sequence, int]]:
        return [(sequence, self._num_tokens[sequence.seq_id]) for sequence in self._sequences]

    def affordable(self, num_tokens: int) -> int:
        """Return how many of a sequence's `num_tokens` tokens can run in this step."""
        most = min(num_tokens, self._cap, self.budget)
        return most if self._chunked or most == num_tokens else 0

    def add(self, sequence: Sequence, num_tokens: int) -> None:
        self._num_tokens[sequence.seq_id] = num_tokens
        self._sequences.append(sequence)
        self.budget -= num_tokens

    def drop(self, sequence: Sequence) -> None:
        """Drop a sequence that has lost its blocks: its part of the budget is free again."""
        self.preempted = True
        num_tokens = self._num_tokens.pop(sequence.seq_id, None)
        if num_tokens is not None:
            self._sequences.remove(sequence)
            self.budget += num_tokens

    def num_drafts(self, sequence: Sequence) -> int:
        guess = self._guesses.get(sequence.seq_id)
        return 0 if guess is None else len(guess.token_ids)

    def verify(self, sequence: Sequence, guess: Guess) -> None:
        """Verify drafts after a share that ends with the sequence's last token; it has the blocks
        for it. No sequence may be dropped after this.
        """
        self._guesses[sequence.seq_id] = guess
        self.budget -= len(guess.token_ids)

    def follow(self, sequence: Sequence, limit: int, num_drafts: int) -> None:
        """Verify the up to `num_drafts` drafts that the step in flight makes, below `limit`."""
        self._limits[sequence.seq_id] = limit
        self.budget -= num_drafts

    def draft(self, sequence: Sequence, num_tokens: int) -> None:
        self._num_to_draft[sequence.seq_id] = num_tokens

    def commit(
        self, table_of: Callable[[int], tuple[int, ...]]
    ) -> tuple[tuple[ScheduledSequence, ...], tuple[StepShare, ...]]:
        """Return the step for the executor and for the scheduler; from now on it counts as
        computed. Everything mutable is copied: the step may run while sequences and tables change.
        """
        scheduled: list[ScheduledSequence] = []
        shares: list[StepShare] = []
        for sequence in self._sequences:
            start = sequence.num_computed
            end = start + self._num_tokens[sequence.seq_id]
            share = StepShare(
                sequence,
                start,
                end,
                sequence.answers if end == sequence.num_tokens else (),
                sequence.num_preemptions,
                self._guesses.get(sequence.seq_id),
                self._num_to_draft.get(sequence.seq_id, 0),
                sequence.pool_rows(start, end),
                self._limits.get(sequence.seq_id, 0),
            )
            shares.append(share)
            scheduled.append(_scheduled(share, table_of(sequence.seq_id)))
            sequence.num_computed = end
            sequence.num_pending += bool(share.answers)
            sequence.is_branching = len(share.answers) > 1 or (
                sequence.search is not None and bool(share.answers)
            )
        return tuple(scheduled), tuple(shares)


def _scheduled(share: StepShare, block_table: Seq[int]) -> ScheduledSequence:
    sequence, end = share.sequence, share.end
    targets = sequence.prompt_targets(share.start, end)
    draws = bool(share.answers) and sequence.request.pooling is None
    known = sequence.token_ids[share.start : end]
    drafts = () if share.guess is None else share.guess.token_ids
    return ScheduledSequence(
        sequence.seq_id,
        [*known, *drafts] if drafts else known,
        share.start,
        block_table,
        sequence.sample_specs(end, drafts) if draws else (),
        takes_pending=end > len(sequence.token_ids),
        prompt_targets=targets,
        num_prompt_logprobs=(sequence.params.prompt_logprobs or 0) if targets else 0,
        num_drafts=share.num_drafts,
        num_to_draft=share.num_to_draft,
        adapter_slot=sequence.adapter_slot,
        num_pooled=share.num_pooled,
        limit=share.limit,
    )
