"""Which tokens run in the next step: continuous batching under a token budget.

Theory of operation
-------------------
There is no prefill or decode phase. Every sequence has tokens and a count of those already run; a
step raises that count for as many sequences as `max_num_batched_tokens` allows. A sequence that
reaches its last token has the next one drawn. Running sequences come first, then waiting ones are
admitted, both in order of *rank*: priority value, then arrival (so equal priorities are first
come, first served). A prompt longer than what is left of the budget runs in chunks.

Admission reserves blocks for everything a sequence knows at that moment, so that two half-run
prompts cannot starve each other; only outputs need blocks later. When there is none, the running
sequence of the last rank is preempted: its blocks are freed, it waits again in its old place in
line, and re-runs its tokens when it is back (its sealed blocks keep their contents until they are
re-used, which makes that cheap). Nobody is admitted in a step that preempted.

Nothing dead-locks: a sequence never has more tokens than the pool (its limit is clamped at `add`,
and a prompt that leaves no room for an output is refused), so the first-ranked running sequence
can always go on once the others have made room, and the first waiting one is always admitted when
none runs.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from operator import attrgetter

from worker.config import CacheConfig, SchedulerConfig
from worker.engine.block_hash import BlockHasher
from worker.engine.block_manager import BlockManager
from worker.engine.messages import AddRequest, EngineStats, RequestOutput
from worker.engine.sequence import Sequence, SequenceState
from worker.types import FinishReason, ModelOutput, ScheduledSequence, SchedulerOutput

_by_rank = attrgetter("rank")


@dataclass(slots=True)
class _Counters:
    """Totals since start; the scheduler's part of `EngineStats`."""

    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    num_steps: int = 0


class Scheduler:
    """Sole owner of the sequences and, through its block manager, of the KV blocks. Pure: no clock.

    The order of calls is `schedule`, run the step, `update`; `add` and `abort` come between steps.
    """

    def __init__(
        self,
        cache: CacheConfig,
        limits: SchedulerConfig,
        eos_token_ids: Seq[int] = (),
        hash_seed: bytes = b"",
    ) -> None:
        self.blocks = BlockManager(cache)
        self._hasher = BlockHasher(cache.block_size, hash_seed)
        self._block_size = cache.block_size
        self._caching = cache.enable_prefix_caching
        self._num_watermark_blocks = int(cache.watermark * cache.num_blocks)
        self._limits = limits
        self._eos_token_ids = frozenset(eos_token_ids)
        self.max_model_len = min(limits.max_model_len, cache.num_blocks * cache.block_size)
        self._next_seq_id = 0
        self._waiting: list[Sequence] = []  # both lists in order of rank
        self._running: list[Sequence] = []
        self._by_seq_id: dict[int, Sequence] = {}
        self._by_request_id: dict[str, Sequence] = {}
        self._counters = _Counters()

    @property
    def has_unfinished(self) -> bool:
        """Whether a step is worth scheduling."""
        return bool(self._by_seq_id)

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks and take part in steps."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for admission, preempted ones among them."""
        return len(self._waiting)

    def stats(self) -> EngineStats:
        """Gauges and counters of this moment."""
        counters = self._counters
        return EngineStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            kv_cache_usage=self.blocks.usage,
            prefix_cache_queries=counters.prefix_cache_queries,
            prefix_cache_hits=counters.prefix_cache_hits,
            num_preemptions=counters.num_preemptions,
            prompt_tokens=counters.prompt_tokens,
            generation_tokens=counters.generation_tokens,
            num_steps=counters.num_steps,
        )

    def add(self, request: AddRequest) -> RequestOutput | None:
        """Queue a request; or refuse it, with the output that tells its client so.

        Refused are an empty prompt, a prompt with no room for an output, and an id in use. The
        output is cut at `max_model_len` tokens (of the whole sequence) if that comes first.
        """
        num_prompt = len(request.prompt_token_ids)
        sequence = Sequence(
            self._next_seq_id,
            request,
            min(num_prompt + request.params.max_tokens, self.max_model_len),
            self._eos_token_ids,
        )
        error = self._refusal(request)
        if error is not None:
            return sequence.output([], FinishReason.ERROR, error=error)
        self._next_seq_id += 1
        self._by_seq_id[sequence.seq_id] = sequence
        self._by_request_id[request.request_id] = sequence
        insort(self._waiting, sequence, key=_by_rank)
        return None

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now and free its blocks. None when it is unknown or has ended."""
        sequence = self._by_request_id.get(request_id)
        if sequence is None:
            return None
        line = self._running if sequence.state is SequenceState.RUNNING else self._waiting
        del line[bisect_left(line, sequence.rank, key=_by_rank)]
        self._forget(sequence)
        return sequence.output([], FinishReason.ABORT)

    def schedule(self, now: float) -> SchedulerOutput | None:
        """The next step, or None when no sequence is unfinished.

        Token budget, `max_num_seqs` and the pool are never exceeded. The block tables in the
        result are views: valid until the next call of any method here.
        """
        limits = self._limits
        planned: list[ScheduledSequence] = []
        cap = budget = limits.max_num_batched_tokens
        if limits.long_prefill_token_threshold and len(self._by_seq_id) > 1:
            cap = min(cap, limits.long_prefill_token_threshold)
        budget, preempted = self._plan_running(planned, budget, cap)
        if not preempted:
            self._plan_waiting(planned, budget, cap, now)
        if not planned:
            return None
        self._counters.num_steps += 1
        return SchedulerOutput(self._counters.num_steps, tuple(planned), self.blocks.take_copies())

    def update(self, step: SchedulerOutput, result: ModelOutput, now: float) -> list[RequestOutput]:
        """Take in what a step produced: new tokens, newly full blocks, ended sequences.

        `step` is the one `schedule` returned last. Returns one output for each token drawn.
        """
        outputs: list[RequestOutput] = []
        for scheduled in step.sequences:
            sequence = self._by_seq_id[scheduled.seq_id]
            sequence.num_computed += len(scheduled.token_ids)
            self._seal(sequence)
            if scheduled.samples:
                (draw,) = result.sampled[scheduled.seq_id]
                outputs.append(self._take_token(sequence, draw.token_id, now))
        return outputs

    def check_integrity(self) -> None:
        """Raise IntegrityError when the blocks contradict themselves. For tests; O(n)."""
        self.blocks.check_integrity()

    # ---- planning ---------------------------------------------------------------------------

    def _plan_running(
        self, planned: list[ScheduledSequence], budget: int, cap: int
    ) -> tuple[int, bool]:
        """Give every running sequence its share; returns the budget left and if one lost its
        blocks.

        Victims come off the end of the list, so whatever is planned already keeps its blocks.
        """
        preempted = False
        index = 0
        while index < len(self._running) and budget > 0:
            sequence = self._running[index]
            start = sequence.num_computed
            num_tokens = min(len(sequence.token_ids) - start, cap, budget)
            while not self.blocks.allocate(sequence.seq_id, start, start + num_tokens):
                preempted = True
                if self._preempt_last() is sequence:
                    return budget, preempted
            self._plan(planned, sequence, num_tokens)
            budget -= num_tokens
            index += 1
        return budget, preempted

    def _plan_waiting(
        self, planned: list[ScheduledSequence], budget: int, cap: int, now: float
    ) -> None:
        """Admit waiting sequences in order, until the first that does not fit."""
        while self._waiting and budget > 0 and len(self._running) < self._limits.max_num_seqs:
            sequence = self._waiting[0]
            if not self._admit(sequence, now):
                return
            del self._waiting[0]
            insort(self._running, sequence, key=_by_rank)
            num_tokens = min(len(sequence.token_ids) - sequence.num_computed, cap, budget)
            self._plan(planned, sequence, num_tokens)
            budget -= num_tokens

    def _admit(self, sequence: Sequence, now: float) -> bool:
        num_tokens = len(sequence.token_ids)
        hits: list[int] = []
        if self._caching:
            self._hash(sequence, (num_tokens - 1) // self._block_size)
            hits = self.blocks.match(sequence.block_hashes, num_tokens)
        reserve = self._num_watermark_blocks if self._running else 0
        if not self.blocks.admit(sequence.seq_id, num_tokens, hits, reserve):
            return False
        sequence.state = SequenceState.RUNNING
        sequence.num_computed = len(hits) * self._block_size
        if sequence.scheduled_seconds is None:
            sequence.scheduled_seconds = now
            sequence.num_cached = sequence.num_computed
            if self._caching:
                self._counters.prefix_cache_queries += num_tokens
                self._counters.prefix_cache_hits += sequence.num_cached
        return True

    def _plan(self, planned: list[ScheduledSequence], sequence: Sequence, num_tokens: int) -> None:
        start = sequence.num_computed
        end = start + num_tokens
        tokens = sequence.token_ids
        planned.append(
            ScheduledSequence(
                sequence.seq_id,
                tokens[start:end],
                start,
                self.blocks.table(sequence.seq_id),
                (sequence.sample_spec(),) if end == len(tokens) else (),
            )
        )

    def _preempt_last(self) -> Sequence:
        sequence = self._running.pop()
        self.blocks.free(sequence.seq_id)
        sequence.num_computed = 0
        sequence.num_preemptions += 1
        sequence.state = SequenceState.WAITING
        insort(self._waiting, sequence, key=_by_rank)
        self._counters.num_preemptions += 1
        return sequence

    # ---- results ----------------------------------------------------------------------------

    def _take_token(self, sequence: Sequence, token: int, now: float) -> RequestOutput:
        if sequence.num_outputs == 0:
            self._counters.prompt_tokens += sequence.num_prompt
        self._counters.generation_tokens += 1
        sequence.append(token, now)
        reason, stop_token = sequence.stop_reason()
        if reason is not None:
            del self._running[bisect_left(self._running, sequence.rank, key=_by_rank)]
            self._forget(sequence)
        return sequence.output([token], reason, stop_token)

    def _seal(self, sequence: Sequence) -> None:
        if not self._caching:
            return
        num_full = sequence.num_computed // self._block_size
        if num_full > len(sequence.block_hashes):
            self._hash(sequence, num_full)
        self.blocks.seal(sequence.seq_id, sequence.block_hashes, num_full)

    def _hash(self, sequence: Sequence, num_blocks: int) -> None:
        salt = sequence.request.cache_salt
        self._hasher.extend(sequence.block_hashes, sequence.token_ids, num_blocks, salt)

    def _forget(self, sequence: Sequence) -> None:
        self.blocks.free(sequence.seq_id)
        sequence.state = SequenceState.FINISHED
        del self._by_seq_id[sequence.seq_id]
        del self._by_request_id[sequence.request.request_id]

    def _refusal(self, request: AddRequest) -> str | None:
        num_prompt = len(request.prompt_token_ids)
        if request.request_id in self._by_request_id:
            return f"request id {request.request_id!r} is in use"
        if num_prompt == 0:
            return "the prompt is empty"
        if num_prompt >= self.max_model_len:
            return (
                f"the prompt has {num_prompt} tokens; with at least one output token the limit is "
                f"{self.max_model_len} (the model's length or the KV cache, whichever is smaller)"
            )
        return None
