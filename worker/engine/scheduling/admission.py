"""Admission: which of the waiting sequences join the next step.

They are considered in order until the step's budget or the seats are used up. A sequence that does
not fit is overtaken `max_bypasses` times in its life; then no later one of its priority is admitted
until it fits. A step passes over at most `max_bypasses` sequences, since each costs a look-up of
its prompt. A sequence that waits for a feature is passed over and holds up no other.

A sequence that shares a long beginning with one whose prompt is being run is deferred: it will find
the other's blocks in the cache. The decision is taken anew in every step, so the end of the other
sets it free. One that was preempted comes back only when some room for growth is left, and after
`policies.MAX_PREEMPTIONS` times only when it can be guaranteed.
"""

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import Enum, auto

from worker.engine import policies
from worker.engine.cache.block_manager import PrefixHit
from worker.engine.features.interface import EngineState, Feature
from worker.engine.sequences.planning import StepPlan
from worker.engine.sequences.sequence import Sequence

# Sequences that a step looks at and defers before it gives up on the rest of the line.
MAX_DEFERRED = 16


class PauseState(Enum):
    """vLLM's pause states: all may be scheduled, only what has begun, or nothing."""

    UNPAUSED = auto()
    PAUSED_NEW = auto()
    PAUSED_ALL = auto()


class _Outcome(Enum):
    ADMITTED = auto()
    DEFERRED = auto()
    BLOCKED = auto()
    READING = auto()


@dataclass(slots=True)
class _Walk:
    now: float
    prefilling: list[Sequence]
    blocked: list[Sequence] = field(default_factory=list)
    num_deferred: int = 0


class Admitter:
    """Moves waiting sequences to the running ones. `num_deferred` is that of the last pass."""

    def __init__(
        self, state: EngineState, features: Seq[Feature], num_watermark_blocks: int
    ) -> None:
        self._limits = state.limits
        self._live = state.live
        self._kv = state.kv
        self._counters = state.counters
        self._features = features
        self._num_watermark_blocks = num_watermark_blocks
        self.num_deferred = 0

    def admit(self, plan: StepPlan, now: float, only_begun: bool) -> None:
        """Admit the sequences that can join; with `only_begun` only those that ran before."""
        live, limits = self._live, self._limits
        self.num_deferred = 0
        for feature in self._features:
            feature.begin_admission()
        if plan.budget <= 0 or live.num_running >= plan.max_num_seqs:
            return  # no sequence can join, so the order of the line does not matter
        prefilling = [s for s in live.running if s.num_written < s.num_prompt]
        walk = _Walk(now, prefilling)
        for sequence in self._in_order():
            if plan.budget <= 0 or live.num_running >= plan.max_num_seqs:
                break
            if only_begun and sequence.scheduled_seconds is None:
                continue
            if sequence.is_held or not all(f.may_join(sequence) for f in self._features):
                continue
            if not self._may_go_on(walk, sequence):
                break
            outcome = self._try(plan, sequence, walk)
            if outcome is _Outcome.ADMITTED:
                self._count_overtaken(sequence, walk)
                walk.prefilling.append(sequence)
            elif outcome is _Outcome.DEFERRED:
                walk.num_deferred += sequence.num_answers
            elif outcome is _Outcome.BLOCKED:
                walk.blocked.append(sequence)
            if walk.num_deferred > MAX_DEFERRED or len(walk.blocked) > limits.max_bypasses:
                break
        self.num_deferred = walk.num_deferred

    def _may_go_on(self, walk: _Walk, sequence: Sequence) -> bool:
        held = ((s.priority, s.num_bypassed) for s in walk.blocked)
        return policies.may_pass(held, sequence.priority, self._limits.max_bypasses)

    def _in_order(self) -> Iterable[Sequence]:
        waiting = self._live.waiting
        if self._limits.waiting_order == "fcfs" or not self._kv.caching:
            return _as_of_now(waiting)
        if len(waiting) > policies.MAX_ORDERED_BY_PREFIX:
            return _as_of_now(waiting)

        def key(sequence: Sequence) -> tuple[int, bool, int, int]:
            num_cached = self._kv.lookup(sequence).num_tokens
            return policies.lpm_key(sequence.rank, num_cached, sequence.num_overtaken)

        return sorted(waiting, key=key)

    def _try(self, plan: StepPlan, sequence: Sequence, walk: _Walk) -> _Outcome:
        live, kv = self._live, self._kv
        has_no_seat = live.num_running + sequence.num_answers > plan.max_num_seqs
        # Preempted in this step, its token is still to come.
        if sequence.num_pending or (live.num_running and has_no_seat):
            return _Outcome.BLOCKED
        hit = kv.lookup(sequence)
        if self._is_deferred(sequence, hit, walk.prefilling):
            return _Outcome.DEFERRED
        num_known = len(sequence.token_ids)
        num_tokens = plan.affordable(num_known - hit.num_tokens)
        if not num_tokens or not self._may_return(sequence):
            return _Outcome.BLOCKED
        # Only now: a disk is read for a sequence that could be admitted.
        if kv.read(sequence, hit):
            return _Outcome.READING
        end = num_known if self._limits.reserve_full_prompt else hit.num_tokens + num_tokens
        if not kv.admit(sequence, end, hit, self._reserve(sequence)):
            return _Outcome.BLOCKED
        self._begin(sequence, hit, walk.now)
        plan.add(sequence, num_tokens)
        return _Outcome.ADMITTED

    def _begin(self, sequence: Sequence, hit: PrefixHit, now: float) -> None:
        sequence.guaranteed = self._needs_guarantee(sequence)
        sequence.drop_pull()
        for feature in self._features:
            feature.admitted(sequence)
        self._live.start(sequence)
        if sequence.scheduled_seconds is not None:
            return
        sequence.scheduled_seconds = now
        # Prompt tokens only: an answer that is resumed here may have more in the cache.
        num_local = min(hit.num_tokens - hit.num_loaded, sequence.num_prompt)
        sequence.num_cached = min(hit.num_tokens, sequence.num_prompt)
        sequence.num_external = sequence.num_cached - num_local
        sequence.num_from_host = min(len(hit.slots) * self._kv.block_size, sequence.num_external)
        self._counters.external_cache_hits += sequence.num_external
        if self._kv.tiers is not None and sequence.request.kv_source is None:
            self._counters.external_cache_queries += sequence.num_prompt - num_local
            if not sequence.asks_peer:
                sequence.num_from_disk = sequence.num_external - sequence.num_from_host
        if self._kv.caching and sequence.num_readable >= sequence.num_prompt:
            self._counters.prefix_cache_queries += sequence.num_prompt
            self._counters.prefix_cache_hits += num_local

    def _is_deferred(
        self, sequence: Sequence, hit: PrefixHit, prefilling: Iterable[Sequence]
    ) -> bool:
        threshold = self._limits.in_batch_prefix_tokens
        if threshold is None or not self._kv.caching:
            return False
        chain = sequence.block_hashes[: (sequence.num_readable - 1) // self._kv.block_size]
        return any(
            policies.should_defer(
                hit.num_tokens,
                policies.common_blocks(chain, other.block_hashes) * self._kv.block_size,
                threshold,
            )
            for other in prefilling
        )

    def _may_return(self, sequence: Sequence) -> bool:
        if not self._needs_guarantee(sequence):
            return True
        kv = self._kv
        # A lower class holds nothing against a better one, which takes its blocks when it asks.
        rivals = (s for s in self._live.running if s.priority <= sequence.priority)
        needs = (kv.blocks_for(s.max_tokens_total) for s in rivals if s.guaranteed)
        return policies.may_guarantee(
            kv.blocks_for(sequence.max_tokens_total), needs, kv.num_blocks
        )

    @staticmethod
    def _needs_guarantee(sequence: Sequence) -> bool:
        return sequence.num_preemptions >= policies.MAX_PREEMPTIONS

    def _reserve(self, sequence: Sequence) -> int:
        """Return how many blocks must stay free when the sequence is admitted."""
        running = self._live.running
        # A sequence alone always fits; a reserve could exclude it for ever.
        if not running:
            return 0
        reserve = self._num_watermark_blocks
        if sequence.num_preemptions:
            rivals = [s for s in running if s.priority <= sequence.priority]
            remaining = (s.max_tokens_total - s.num_tokens for s in (*rivals, sequence))
            growth = policies.readmission_reserve(
                sequence.num_preemptions, remaining, self._kv.block_size
            )
            reserve = max(reserve, growth)
        return reserve

    def _count_overtaken(self, sequence: Sequence, walk: _Walk) -> None:
        for other in walk.blocked:
            other.num_bypassed += 1
        if self._limits.waiting_order == "lpm":
            for other in self._live.waiting:
                other.num_overtaken += other.rank < sequence.rank


def _as_of_now(waiting: list[Sequence]) -> Iterator[Sequence]:
    """Yield the members one by one; one that is admitted when yielded is removed from the list, and
    the iteration continues at its place. The list may be long, but few members are usually visited,
    so it is not copied.
    """
    index = 0
    while index < len(waiting):
        sequence = waiting[index]
        yield sequence
        if index < len(waiting) and waiting[index] is sequence:
            index += 1
