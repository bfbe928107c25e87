"""The scheduler: which tokens run in the next step, by continuous batching under a token budget.

Theory of operation
-------------------
There is no prefill or decode phase. Every sequence has tokens and a count of those given to steps
already; a step raises that count for as many sequences as `max_num_batched_tokens` allows. A
sequence that reaches its last token has the next one drawn. Running sequences come first, in order
of *rank*: priority value, then arrival; then waiting ones are admitted (`admission`). A prompt
longer than what is left of the budget runs in chunks.

Admitter reserves blocks for everything a sequence knows at that moment, so that two half-run
prompts cannot starve each other; only outputs need blocks later. When there is none, a running
sequence is preempted (`policies` says which, and why that ends): its blocks are freed, it waits
again in its old place in line, and re-runs its tokens when it is back (its contents stay hits until
they are re-used, which makes that cheap). None is admitted in a step that preempted.

A request with n answers is one sequence until its prompt has been run. That step draws n first
tokens; then the sequence forks, sharing the prompt's blocks.

*Overlap.* A step may be scheduled while the one before it still runs (not more than one):
`schedule`, `schedule`, `update`, `schedule`, `update`, … Tokens count as computed when they are
scheduled, as written when the step's results are there. A sequence whose token is being drawn by
the step in flight goes on all the same: its next step `takes_pending`, that is, the
pipeline puts the token in. Steps run strictly one after the other, and from that it follows that:

- A sequence that turns out to have ended in step N may stand in step N+1. Its token from there is
  discarded. What N+1 writes for it lands after its last written token, in a block that is free by
  then; its next owner writes to it in step N+2 at the earliest, which runs after N+1, and
  a slot is only ever read after its new owner has written it. Sealed blocks are full, and a partial
  block is a hit only as far as it was written, so the stray write is never looked at.
- The same holds for an abort, and for a preemption at the time when N+1 is scheduled: blocks that
  step N still writes may be given away in N+1, which runs later.
- What step N writes is sealed when its results are there, not before. A sequence that was preempted
  in between has lost those blocks: it only takes the token.

*Grammars.* What a constrained sequence may draw depends on its last token, so nothing is scheduled
while a step in flight draws one: if its neighbours went on without it, it would run in every other
step only.

*Beam search.* So it is with beams (see `beams`): what they run next depends on all of them. The
sequences of a search take part in steps like others, and may do so in different steps: one whose
next tokens are found is held until they are of all, with its blocks or without (`beam_sequences`).
Those held may hold the blocks that the others wait for: where nothing else can run, they give way.

*Speculation.* A sequence that runs only its last token may have drafts run behind it, to be
verified in the same step; see `lookahead`. They do not count as computed: those that stand are
added with the step's results, the KV of the others is written over. Such a step is not overlapped.

*Memory.* A step that the device has too little memory for is taken back, with those behind it. What
it wrote lies behind `num_written`, and is written again before it is read; block copies are made.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq

import msgspec

from worker.config import CacheConfig, SchedulerConfig
from worker.engine import policies
from worker.engine.cache.block_manager import BlockManager
from worker.engine.cache.cache_events import CacheEvent
from worker.engine.cache.tiers import Tiers
from worker.engine.counters import Counters
from worker.engine.features.adapters import AdapterSlots
from worker.engine.features.remote_kv import RemoteKv
from worker.engine.features.speculation import Lookahead, Speculation
from worker.engine.messages import AddRequest, RequestOutput
from worker.engine.scheduling.admission import Admitter, PauseState
from worker.engine.scheduling.results import Results
from worker.engine.sequences.grammar import Grammars
from worker.engine.sequences.live_sequences import LiveSequences, new_sequence
from worker.engine.sequences.planning import NO_MEMORY, StepCeiling, StepInFlight, StepPlan
from worker.engine.sequences.sequence import Sequence, SequenceState
from worker.engine.sequences.sequence_kv import SequenceKv
from worker.errors import ConfigError, IntegrityError
from worker.types import (
    EngineStats,
    FinishReason,
    ModelOutput,
    SchedulerOutput,
)


class Scheduler:
    """Sole owner of the sequences and, through its block manager, of the KV blocks. Pure: no clock.

    `schedule` and `update` alternate, or one step is ahead (see above); everything else may come
    between any two calls.
    """

    def __init__(
        self,
        cache: CacheConfig,
        limits: SchedulerConfig,
        eos_token_ids: Seq[int] = (),
        speculation: Speculation | None = None,
        adapters: AdapterSlots | None = None,
        remote: RemoteKv | None = None,
    ) -> None:
        _check(limits)
        self._limits = limits
        self._victim_policy = policies.VICTIM_POLICIES[limits.victim]
        self._eos_token_ids = frozenset(eos_token_ids)
        self.max_model_len = min(limits.max_model_len, cache.num_blocks * cache.block_size)
        if not limits.enable_chunked_prefill:  # whatever was preempted must fit in one step again
            self.max_model_len = min(self.max_model_len, limits.max_num_batched_tokens)
        self._counters = Counters()
        self._live = LiveSequences()
        self._kv = SequenceKv(cache)
        watermark = int(cache.watermark * cache.num_blocks)
        self.adapters = adapters  # None: requests with an adapter are refused
        self._admission = Admitter(
            limits, self._live, self._kv, self._counters, watermark, adapters
        )
        self.remote = remote  # None: requests for KV of other engines, or for them, are refused
        self._results = Results(self._live, self._kv, self._counters, speculation, remote)
        self._speculation = speculation
        self._lookahead = (
            None
            if speculation is None
            else Lookahead(speculation, self._live, self._kv, limits.max_num_batched_tokens)
        )
        self._in_flight: deque[StepInFlight] = deque()
        self._ceiling = StepCeiling(limits)
        self.grammars: Grammars | None = None  # None: requests with a grammar are refused
        self.pause_state = PauseState.UNPAUSED

    @property
    def blocks(self) -> BlockManager:
        return self._kv.blocks

    @property
    def tiers(self) -> Tiers | None:
        """Where evicted blocks go; None: they are lost."""
        return self._kv.tiers

    def add_tiers(self, make: Callable[[bytes, Callable[[CacheEvent], None]], Tiers]) -> None:
        """From now on evicted blocks go to the tiers that `make` gives, of the parent of first
        blocks and who takes events. Before the first step; the cache's configuration says
        `record_evictions`.
        """
        self._kv.tiers = make(self._kv.root, self.blocks.record)

    def reset_prefix_cache(self, forget_tiers: bool = True) -> bool:
        """Forget every cached content; see `SequenceKv.reset`. What is on its way to a waiting
        sequence is given up too.
        """
        if not self._kv.reset(forget_tiers):
            return False
        for sequence in self._live.waiting:
            sequence.drop_pull()
        return True

    @property
    def has_unfinished(self) -> bool:
        """Whether any request has not ended."""
        return len(self._live) > 0

    @property
    def has_begun(self) -> bool:
        """Whether any unfinished request has ever run."""
        return any(sequence.scheduled_seconds is not None for sequence in self._live)

    @property
    def has_promised(self) -> bool:
        """Whether another engine will ask for what is in the caches."""
        return self.remote is not None and self.remote.has_promised

    @property
    def is_runnable(self) -> bool:
        """Whether there is anything that may be scheduled, now or when the step in flight ends."""
        if self.pause_state is PauseState.PAUSED_ALL:
            return False
        return self.has_unfinished if self.pause_state is PauseState.UNPAUSED else self.has_begun

    @property
    def is_compiling(self) -> bool:
        """Whether nothing can be scheduled before a grammar is compiled, an adapter is read, or KV
        has arrived.
        """
        waiting = self._live.waiting
        return bool(waiting) and not self.num_running and all(map(self._is_incomplete, waiting))

    def _is_incomplete(self, sequence: Sequence) -> bool:
        adapter, adapters = sequence.request.adapter, self.adapters
        is_read = adapter is None or adapters is None or not adapters.is_missing(adapter)
        return sequence.is_compiling or sequence.is_awaiting_kv or not is_read

    @property
    def num_running(self) -> int:
        """Answers whose sequences hold blocks and take part in steps."""
        return self._live.num_running

    @property
    def num_waiting(self) -> int:
        """Answers that wait for admission, preempted ones among them."""
        return self._live.num_waiting

    @property
    def num_in_flight(self) -> int:
        """Steps handed out whose results have not been taken in."""
        return len(self._in_flight)

    def stats(self) -> EngineStats:
        """Gauges and counters of this moment."""
        counters, blocks = self._counters, self.blocks
        stats = EngineStats(
            **{name: getattr(counters, name) for name in Counters.__slots__},
            num_running=self._live.num_running,
            num_waiting=self._live.num_waiting,
            kv_cache_usage=blocks.usage,
            num_deferred=self._num_deferred(),
            num_evictions=blocks.num_evictions,
            num_hash_collisions=blocks.num_hash_collisions,
            loaded_adapters=() if self.adapters is None else self.adapters.loaded,
            awaited_adapters=self._awaited_adapters(),
        )
        if self.remote is not None or self.tiers is not None:
            pulls = [s.kv_pull.done for s in self._live.waiting if s.kv_pull is not None]
            stats = msgspec.structs.replace(
                stats, num_kv_fetching=pulls.count(False), num_kv_fetched=pulls.count(True)
            )
        if self.remote is not None:
            stats = _with_transfers(stats, self.remote)
        if self.tiers is not None:
            stats = self.tiers.stats(stats)
        return stats if self._speculation is None else self._speculation.stats(stats)

    def _awaited_adapters(self) -> tuple[str, ...]:
        if self.adapters is None:
            return ()
        wanted = (s.request.adapter for s in self._live.waiting)
        loaded = self.adapters.loaded
        return tuple({a.name: None for a in wanted if a is not None and a.name not in loaded})

    # ---- requests come and go ---------------------------------------------------------------

    def add(self, request: AddRequest) -> list[RequestOutput]:
        """Queue a request; or refuse it, with the outputs that tell so, one for each answer.

        Refused are an empty prompt, a prompt with no room for an output, more answers than may run
        together, and ids in use. Outputs are cut at `max_model_len` tokens (of the whole sequence)
        if that comes first.
        """
        sequence = new_sequence(
            request,
            self._live.next_seq_id,
            request.priority if self._limits.policy == "priority" else 0,
            self.max_model_len,
            self._eos_token_ids,
        )
        error = self._refusal(sequence)
        if request.adapter is not None and self.adapters is None:
            error = "there are no adapters here: start the worker with --enable-lora"
        asks = request.kv_source is not None or request.kv_peer is not None
        if self.remote is None and (request.keeps_kv or asks):
            error = "KV stays here: start the worker with --kv-transfer-config"
        if error is None:
            if self.remote is not None and asks:
                self._begin_transfer(self.remote, sequence)
            if self.grammars is not None and request.params.grammar is not None:
                sequence.grammar = self.grammars.compile(request.params.grammar)
            self._live.add(sequence)
            return []
        return [
            sequence.output(finish_reason=FinishReason.ERROR, error=error, request_id=name)
            for name in (request.request_id, *request.branch_ids)
        ]

    def _begin_transfer(self, remote: RemoteKv, sequence: Sequence) -> None:
        hit = self._kv.lookup(sequence)
        asked = remote.begin(sequence, hit.num_tokens, self._kv.is_on_disk(sequence, hit))
        if self.tiers is None or sequence.request.kv_source is not None:  # else when admitted
            self._counters.external_cache_queries += asked

    def abort(self, request_id: str, hands_over: bool = False) -> RequestOutput | None:
        """End an answer now and free its blocks; with `hands_over` another engine will ask for what
        the caches have of it. None when it is unknown or has ended.

        The other answers of its request go on.
        """
        sequence = self._live.find(request_id)
        if sequence is None:
            return None
        if hands_over and self.remote is not None:
            self.remote.promise(request_id)
        if sequence.search is not None:
            return self._results.beams.abort(sequence.search, request_id)
        output = sequence.output(finish_reason=FinishReason.ABORT, request_id=request_id)
        if sequence.branches:
            self._live.drop_branch(sequence, request_id)
        else:
            self._results.end(sequence)
        return output

    def abort_all(self) -> list[RequestOutput]:
        """End everything, in order of rank."""
        names = [
            name
            for sequence in sorted(self._live, key=lambda s: s.rank)
            for name in (sequence.request_id, *(b.request_id for b in sequence.branches))
        ]
        return [output for name in names if (output := self.abort(name)) is not None]

    def preempt_all(self) -> None:
        """Take the blocks of all that run, the last first; they go on later, with the same output.

        Only while no step is in flight.
        """
        for sequence in reversed(self._live.running[:]):
            self._preempt(sequence)

    def leave_model(self) -> None:
        """What was computed elsewhere or is on disk is of no use to what comes. Only while no step
        is in flight.
        """
        for sequence in self._live.waiting:
            sequence.drop_pull()
        if self.tiers is not None:
            self.tiers.leave_disk()
        if self.remote is not None:
            self.remote.leave_model()

    # ---- steps ------------------------------------------------------------------------------

    def schedule(self, now: float) -> SchedulerOutput | None:
        """The next step, or None when nothing can run now: the step in flight may change that, and
        may have to be known first.

        Token budget, `max_num_seqs` and the pool are never exceeded. The result shares nothing
        with the scheduler. At most one step may be in flight already.
        """
        if self.tiers is not None:
            self.tiers.look()
        if self.remote is not None:
            self.remote.look(self._kv, self.adapters)
        if self.pause_state is PauseState.PAUSED_ALL or self._must_wait():
            return None
        plan = StepPlan(self._limits, len(self._live), self._ceiling)
        self._plan_running(plan)
        if not plan.preempted:
            if self.adapters is not None and self.adapters.has_given_up:
                self.prune_adapters(self.adapters)
            self._admission.admit(plan, now, self.pause_state is PauseState.PAUSED_NEW)
        if self._lookahead is not None and not self._in_flight:
            self._lookahead.plan(plan)
        sequences, shares = plan.commit(self.blocks.table_copy)
        if not sequences:
            return self.schedule(now) if self._give_way_held() else None
        self._counters.num_steps += 1
        step = self._counters.num_steps
        self._in_flight.append(StepInFlight(step, shares, now))
        puts = () if self.adapters is None else self.adapters.take_puts()
        copies, loads = self.blocks.take_copies(), self._kv.take_loads()
        return SchedulerOutput(step, sequences, copies, puts, loads, self._kv.take_saves(step))

    def prune_adapters(self, adapters: AdapterSlots) -> None:
        """Free the adapters that were given up and no request wants."""
        wanted = (s.request.adapter for s in self._live)
        adapters.prune({adapter.number for adapter in wanted if adapter is not None})

    def take_broken(self) -> list[RequestOutput]:
        """The ends of requests whose adapters could not be read, since the last call."""
        broken, self._admission.broken = self._admission.broken, []
        return [told for sequence, why in broken for told in self._results.fail(sequence, why)]

    def update(self, step: SchedulerOutput, result: ModelOutput, now: float) -> list[RequestOutput]:
        """Take in what a step produced: new tokens, newly full blocks, branches, ended sequences.

        `step` is the oldest in flight. Raises IntegrityError when it is not.
        """
        if not self._in_flight or self._in_flight[0].step != step.step:
            raise IntegrityError(f"step {step.step} is not the oldest in flight")
        ended = self._in_flight.popleft()
        self._ceiling.passed()
        if self.tiers is not None:
            self.tiers.ended(step.step)
        outputs = self._results.apply(ended, result, now)
        if self._lookahead is not None:
            self._lookahead.observe(ended, result, now)
        return outputs

    def take_back(self) -> list[RequestOutput]:
        """The oldest step in flight failed for lack of memory; those behind it do not count either.
        Some sequences are preempted; one that fails alone, and again, ends. What there is to tell.
        """
        shares = self._in_flight[0].shares
        self._counters.num_out_of_memory += 1
        while self._in_flight:
            self._results.undo(self._in_flight.pop())
        num_tokens = sum(share.end - share.start + share.num_drafts for share in shares)
        if not self._ceiling.lower(num_tokens, len(shares)):
            self._ceiling.lift()
            live = [s.sequence for s in shares if s.sequence.state is not SequenceState.FINISHED]
            return [told for sequence in live for told in self._results.fail(sequence, NO_MEMORY)]
        running = self._live.running
        while len(running) > 1 and self.num_running > self._ceiling.num_seqs:
            self._preempt(running[-1])
        return []

    def check_integrity(self) -> None:
        """Raise IntegrityError when sequences, steps and blocks contradict each other. For tests;
        O(everything).
        """
        self.blocks.check_integrity()
        self._live.check_integrity()
        if self.num_running > self._limits.max_num_seqs:
            raise IntegrityError("more run than may")
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
        if self._lookahead is not None:
            self._lookahead.check_integrity(self._in_flight)
        if self.adapters is not None:
            self.adapters.check_integrity(self._live.running_adapters())
        if self.tiers is not None:
            self.tiers.check_integrity()

    def _must_wait(self) -> bool:
        if not self._in_flight:
            return False
        step = self._in_flight[-1]
        if any(share.answers and share.sequence.waits_for_draw for share in step.shares):
            return True
        return self._lookahead is not None and self._lookahead.must_wait(step)

    def _plan_running(self, plan: StepPlan) -> None:
        """Give every running sequence its share, until the budget is used up."""
        for sequence in self._live.running[:]:
            if plan.budget <= 0:
                return
            if sequence.state is not SequenceState.RUNNING:  # preempted for one before it
                continue
            num_tokens = plan.affordable(sequence.num_unscheduled)
            if num_tokens and self._make_room(plan, sequence, sequence.num_computed + num_tokens):
                plan.add(sequence, num_tokens)

    def _make_room(self, plan: StepPlan, sequence: Sequence, end: int) -> bool:
        """Get a running sequence the blocks up to `end`; False when it had to give way itself."""
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
        """Preempt a held beam where nothing can run before another one of its search has room;
        False if there is none.
        """
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
        if request.params.grammar is not None and self.grammars is None:
            return "outputs cannot be constrained: the engine does not know what its tokens say"
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


def _with_transfers(stats: EngineStats, remote: RemoteKv) -> EngineStats:
    return msgspec.structs.replace(
        stats,
        num_failed_kv_transfers=remote.counts.num_failed,
        num_expired_kv_transfers=remote.num_expired,
        kv_bytes_sent=remote.counts.num_bytes_sent,
        kv_bytes_received=remote.counts.num_bytes_received,
    )


def _check(limits: SchedulerConfig) -> None:
    """Raise ConfigError for a policy that does not exist."""
    for flag, given, known in (
        ("--scheduling-policy", limits.policy, policies.POLICIES),
        ("--waiting-order", limits.waiting_order, policies.WAITING_ORDERS),
        ("--preemption-victim", limits.victim, tuple(policies.VICTIM_POLICIES)),
    ):
        if given not in known:
            raise ConfigError(f"{flag} {given!r} is not one of {', '.join(known)}")
