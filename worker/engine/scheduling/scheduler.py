"""The scheduler: which tokens run in the next step, by continuous batching under a token budget.

There is no prefill or decode phase: a step gives tokens to as many sequences as the budget allows,
running ones first, in order of *rank* (priority value, then arrival); then waiting ones are
admitted (`admission`). Admission reserves blocks for all tokens known so far, so that two half-run
prompts cannot starve each other. When no block is free, a running sequence is preempted
(`policies`): it waits again in its old place in line. No sequence is admitted in a step that
preempted.

*Overlap.* One step may be scheduled while the one before it runs. Tokens count as computed when
they are scheduled, as written when the step's results are there; blocks are sealed only then. Steps
run strictly one after the other, so a step in flight may write to a block that is already given
away: the next owner writes to it one step later at the earliest, and reads only what it wrote.

*Grammars, beams and drafts* depend on the last token, or on all beams of a search. So nothing is
scheduled while a step in flight draws one: if other sequences were scheduled alone, this one would
run in every other step only. A beam whose candidates are known is held until those of all beams
are; where nothing else can run, held sequences give way.

*Memory.* A step that the device has too little memory for is taken back, with those after it. Its
writes are after `num_written`, and are repeated before they are read; block copies are made.
"""

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from copy import copy
from typing import Any, TypeVar

from worker.config import CacheConfig, SchedulerConfig
from worker.engine import policies
from worker.engine.cache.block_manager import BlockManager
from worker.engine.features.interface import EngineState, Feature, needs
from worker.engine.messages import AddRequest, RequestOutput
from worker.engine.scheduling.admission import Admitter, PauseState
from worker.engine.scheduling.results import Results
from worker.engine.sequences.live_sequences import LiveSequences, new_sequence
from worker.engine.sequences.planning import NO_MEMORY, StepCeiling, StepInFlight, StepPlan
from worker.engine.sequences.sequence import Sequence, SequenceState
from worker.engine.sequences.sequence_kv import SequenceKv
from worker.errors import ConfigError, IntegrityError
from worker.types import EngineStats, FinishReason, ModelOutput, SchedulerCounters, SchedulerOutput

F = TypeVar("F", bound=Feature)


class Scheduler:
    """Sole owner of the sequences and, through its block manager, of the KV blocks. Pure: no clock.

    `schedule` and `update` alternate, or one step is ahead; every other method may be called in
    between. `features` attach in this order; None stands for one that is off.
    """

    def __init__(
        self,
        cache: CacheConfig,
        limits: SchedulerConfig,
        eos_token_ids: Seq[int] = (),
        features: Iterable[Feature | None] = (),
    ) -> None:
        _check(limits)
        self._limits = limits
        self._victim_policy = policies.VICTIM_POLICIES[limits.victim]
        self._eos_token_ids = frozenset(eos_token_ids)
        self.max_model_len = min(limits.max_model_len, cache.num_blocks * cache.block_size)
        if not limits.enable_chunked_prefill:  # a preempted sequence must fit in one step again
            self.max_model_len = min(self.max_model_len, limits.max_num_batched_tokens)
        self._counters = SchedulerCounters()
        self._live = LiveSequences()
        self._kv = SequenceKv(cache)
        watermark = int(cache.watermark * cache.num_blocks)
        self._state = EngineState(limits, self._live, self._kv, self._counters)
        self.features: list[Feature] = []
        self._admission = Admitter(self._state, self.features, watermark)
        self._results = Results(self._state, self.features)
        self._in_flight: deque[StepInFlight] = deque()
        self._ceiling = StepCeiling(limits)
        self.pause_state = PauseState.UNPAUSED
        for feature in features:
            if feature is not None:
                self.attach(feature)

    def attach(self, feature: Feature) -> None:
        """Add a feature; requests that need it are accepted from now on."""
        feature.attach(self._state)
        self.features.insert(0, feature)

    def find(self, kind: type[F]) -> F | None:
        return next((f for f in self.features if isinstance(f, kind)), None)

    @property
    def blocks(self) -> BlockManager:
        return self._kv.blocks

    def reset_prefix_cache(self, forget_tiers: bool = True) -> bool:
        """Forget all cached contents (`SequenceKv.reset`), and KV on its way to sequences."""
        if not self._kv.reset(forget_tiers):
            return False
        for sequence in self._live.waiting:
            sequence.drop_pull()
        return True

    @property
    def has_unfinished(self) -> bool:
        return len(self._live) > 0

    @property
    def has_begun(self) -> bool:
        """True if any unfinished request has ever run."""
        return any(sequence.scheduled_seconds is not None for sequence in self._live)

    @property
    def has_promised(self) -> bool:
        return any(feature.has_promised for feature in self.features)

    @property
    def is_runnable(self) -> bool:
        """True if there is anything that may be scheduled, now or when the step in flight ends."""
        if self.pause_state is PauseState.PAUSED_ALL:
            return False
        return self.has_unfinished if self.pause_state is PauseState.UNPAUSED else self.has_begun

    @property
    def is_compiling(self) -> bool:
        """True if every sequence waits for a feature: a grammar, an adapter, KV."""
        waiting = self._live.waiting
        return (
            bool(waiting)
            and not self.num_running
            and all(any(f.waits(sequence) for f in self.features) for sequence in waiting)
        )

    @property
    def num_running(self) -> int:
        """The number of answers whose sequences hold blocks and take part in steps."""
        return self._live.num_running

    @property
    def num_waiting(self) -> int:
        """The number of answers that wait for admission, preempted ones included."""
        return self._live.num_waiting

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def stats(self) -> EngineStats:
        blocks = self.blocks
        of_features: dict[str, Any] = {}
        for feature in self.features:
            of_features |= feature.stats()
        return EngineStats(
            scheduler=copy(self._counters),
            num_running=self._live.num_running,
            num_waiting=self._live.num_waiting,
            kv_cache_usage=blocks.usage,
            num_deferred=self._num_deferred(),
            num_evictions=blocks.num_evictions,
            num_hash_collisions=blocks.num_hash_collisions,
            **of_features,
        )

    # ---- requests come and go ---------------------------------------------------------------

    def add(self, request: AddRequest) -> list[RequestOutput]:
        """Queue a request, or refuse it with one error output for each answer."""
        sequence = new_sequence(
            request,
            self._live.next_seq_id,
            request.priority if self._limits.policy == "priority" else 0,
            self.max_model_len,
            self._eos_token_ids,
        )
        error = self._refusal(sequence)
        if error is None:
            for feature in self.features:
                feature.add(sequence)
            self._live.add(sequence)
            return []
        return [
            sequence.output(finish_reason=FinishReason.ERROR, error=error, request_id=name)
            for name in (request.request_id, *request.branch_ids)
        ]

    def abort(self, request_id: str, hands_over: bool = False) -> RequestOutput | None:
        """End an answer now and free its blocks; others of its request continue. With `hands_over`
        another engine will ask for its cached KV. Return the last output, if the answer was alive.
        """
        sequence = self._live.find(request_id)
        if sequence is None:
            return None
        if hands_over:
            for feature in self.features:
                feature.hand_over(request_id)
        if sequence.search is not None:
            return self._results.beams.abort(sequence.search, request_id)
        output = sequence.output(finish_reason=FinishReason.ABORT, request_id=request_id)
        if sequence.branches:
            self._live.drop_branch(sequence, request_id)
        else:
            self._results.end(sequence)
        return output

    def abort_all(self) -> list[RequestOutput]:
        names = [
            name
            for sequence in sorted(self._live, key=lambda s: s.rank)
            for name in (sequence.request_id, *(b.request_id for b in sequence.branches))
        ]
        return [output for name in names if (output := self.abort(name)) is not None]

    def preempt_all(self) -> None:
        """Preempt all running sequences, the last first. Only while no step is in flight."""
        for sequence in reversed(self._live.running[:]):
            self._preempt(sequence)

    def leave_model(self) -> None:
        """Drop KV of other engines and of disks: the weights may change. No step is in flight."""
        for sequence in self._live.waiting:
            sequence.drop_pull()
        for feature in self.features:
            feature.leave_model()

    # ---- steps ------------------------------------------------------------------------------

    def schedule(self, now: float) -> SchedulerOutput | None:
        """Return the next step, or None when nothing can run before the results of the step in
        flight.

        The token budget, `max_num_seqs` and the pool are never exceeded. The result shares nothing
        with the scheduler. At most one step may be in flight already.
        """
        for feature in self.features:
            feature.before_step()
        if self.pause_state is PauseState.PAUSED_ALL or self._must_wait():
            return None
        followed = self._in_flight[-1] if self._in_flight else None
        if followed is not None and not followed.looks_ahead:
            followed = None
        plan = StepPlan(self._limits, len(self._live), self._ceiling, followed)
        self._plan_running(plan)
        if not plan.preempted and followed is None:
            self._admission.admit(plan, now, self.pause_state is PauseState.PAUSED_NEW)
        # A sequence whose last token is still being drawn has no drafts.
        if not self._in_flight or followed is not None:
            for feature in self.features:
                feature.plan(plan)
        sequences, shares = plan.commit(self.blocks.table_copy)
        if not sequences:
            return self.schedule(now) if self._give_way_held() else None
        self._counters.num_steps += 1
        step = self._counters.num_steps
        self._in_flight.append(StepInFlight(step, shares, now, followed is not None))
        puts = tuple(put for feature in self.features for put in feature.adapter_puts())
        # Saves come last: they must not take the host slots that this step loads.
        copies, loads = self.blocks.take_copies(), self._kv.take_loads()
        return SchedulerOutput(step, sequences, copies, puts, loads, self._kv.take_saves(step))

    def take_failed(self) -> list[RequestOutput]:
        """Return last outputs of requests that features cannot serve, since the last call."""
        failed = [one for feature in self.features for one in feature.take_failed()]
        return [output for sequence, why in failed for output in self._results.fail(sequence, why)]

    def update(self, step: SchedulerOutput, result: ModelOutput, now: float) -> list[RequestOutput]:
        """Apply the results of `step`. Raises IntegrityError unless it is the oldest in flight."""
        if not self._in_flight or self._in_flight[0].step != step.step:
            raise IntegrityError(f"step {step.step} is not the oldest in flight")
        ended = self._in_flight.popleft()
        self._ceiling.passed()
        outputs = self._results.apply(ended, result, now)
        for following in self._in_flight:
            following.settle(result)
        for feature in self.features:
            feature.after_step(ended, result, now)
        return outputs

    def take_back(self) -> list[RequestOutput]:
        """Take back the oldest step in flight, which lacked memory, and those after it. Preempt
        some sequences, end one that fails twice while alone, and return the outputs.
        """
        shares = self._in_flight[0].shares
        self._counters.num_out_of_memory += 1
        while self._in_flight:
            self._results.undo(self._in_flight.pop())
        num_tokens = sum(share.end - share.start + share.num_drafts for share in shares)
        if not self._ceiling.lower(num_tokens, len(shares)):
            self._ceiling.lift()
            live = [s.sequence for s in shares if s.sequence.state is not SequenceState.FINISHED]
            return [end for sequence in live for end in self._results.fail(sequence, NO_MEMORY)]
        running = self._live.running
        while len(running) > 1 and self.num_running > self._ceiling.num_seqs:
            self._preempt(running[-1])
        return []

    def check_integrity(self) -> None:
        self.blocks.check_integrity()
        self._live.check_integrity()
        if self.num_running > self._limits.max_num_seqs:
            raise IntegrityError("more sequences run than are allowed")
        pending: dict[int, int] = {}
        for step in self._in_flight:
            for share in step.shares:
                if share.answers:
                    seq_id = share.sequence.seq_id
                    pending[seq_id] = pending.get(seq_id, 0) + 1
        for sequence in self._live:
            if sequence.num_pending != pending.get(sequence.seq_id, 0):
                raise IntegrityError(f"sequence {sequence.seq_id} miscounts tokens in flight")
            self._kv.check_integrity(sequence)
        self._results.beams.check_integrity()
        self._kv.check_total(self._live.running)
        for feature in self.features:
            feature.check_integrity(self._in_flight)

    def _must_wait(self) -> bool:
        if not self._in_flight:
            return False
        step = self._in_flight[-1]
        if any(share.answers and share.sequence.waits_for_draw for share in step.shares):
            return True
        return any(feature.must_wait(step) for feature in self.features)

    def _plan_running(self, plan: StepPlan) -> None:
        for sequence in self._live.running[:]:
            if plan.budget <= 0:
                return
            if sequence.state is not SequenceState.RUNNING:  # preempted for a sequence before it
                continue
            num_tokens = plan.affordable(sequence.num_unscheduled)
            if num_tokens and self._make_room(plan, sequence, sequence.num_computed + num_tokens):
                plan.add(sequence, num_tokens)

    def _make_room(self, plan: StepPlan, sequence: Sequence, end: int) -> bool:
        """Allocate a running sequence's blocks up to `end`; return False if it is preempted."""
        while not self._kv.grow(sequence, end):
            if len(self._live.running) == 1:
                raise IntegrityError(f"sequence {sequence.seq_id} does not fit in an empty pool")
            victim = self._victim(sequence)
            plan.drop(victim)
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _victim(self, requester: Sequence) -> Sequence:
        running = {sequence.seq_id: sequence for sequence in self._live.running}
        candidates = {seq_id: self._candidate(s) for seq_id, s in running.items()}
        asking = candidates[requester.seq_id]
        chosen = policies.choose_victim(self._victim_policy, asking, list(candidates.values()))
        return running[chosen.seq_id]

    def _candidate(self, sequence: Sequence) -> policies.VictimCandidate:
        blocks = self.blocks
        return policies.VictimCandidate(
            sequence.seq_id,
            sequence.priority,
            sequence.num_prompt,
            sequence.num_outputs,
            sequence.num_computed,
            blocks.num_shared_tokens(sequence.seq_id),
            len(blocks.table(sequence.seq_id)),
            sequence.num_preemptions,
            sequence.guaranteed,
        )

    def _preempt(self, sequence: Sequence) -> None:
        self._kv.release(sequence)
        self._live.preempt(sequence)
        self._counters.num_preemptions += 1

    def _give_way_held(self) -> bool:
        """Preempt a held beam when nothing can run before another beam of its search has room."""
        held = [s for s in self._live.running if s.is_held] if not self._in_flight else []
        if not held or all(s.is_held for s in self._live.waiting):
            return False
        self._preempt(held[-1])
        return True

    def _num_deferred(self) -> int:
        if self.pause_state is PauseState.UNPAUSED:
            return min(self._admission.num_deferred, self.num_waiting)
        if self.pause_state is PauseState.PAUSED_ALL:
            return self.num_waiting
        held = (s for s in self._live.waiting if s.scheduled_seconds is None)
        return sum(sequence.num_answers for sequence in held)

    def _refusal(self, sequence: Sequence) -> str | None:
        request, num_prompt = sequence.request, sequence.num_prompt
        names = (sequence.request_id, *(branch.request_id for branch in sequence.branches))
        taken = self._live.first_in_use(names)
        if taken is not None:
            return f"request id {taken!r} is in use"
        if len(names) > self._limits.max_num_seqs:
            return (
                f"the request asks for {len(names)} "
                f"{'answers' if sequence.search is None else 'beams'}; "
                f"at most {self._limits.max_num_seqs} "
                "can run together (--max-num-seqs)"
            )
        names_here = {feature.name for feature in self.features}
        for feature, error in needs(request):
            if feature not in names_here:
                return error
        if num_prompt == 0:
            return "the prompt is empty"
        least = int(request.pooling is None)
        if num_prompt + len(request.output_token_ids) + least > self.max_model_len:
            return (
                f"the prompt has {num_prompt} tokens; with {least} output tokens the limit is "
                f"{self.max_model_len} (the model's length, the KV cache or, with chunked prefill "
                "off, the tokens of a step, whichever is smallest)"
            )
        return None


def _check(limits: SchedulerConfig) -> None:
    for flag, given, known in (
        ("--scheduling-policy", limits.policy, policies.POLICIES),
        ("--waiting-order", limits.waiting_order, policies.WAITING_ORDERS),
        ("--preemption-victim", limits.victim, tuple(policies.VICTIM_POLICIES)),
    ):
        if given not in known:
            raise ConfigError(f"{flag} {given!r} is not one of {', '.join(known)}")
