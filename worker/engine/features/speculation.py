"""Speculation: where drafts come from, how many are verified, and counts of both.

A *drafter* that guesses from tokens alone is asked when a step is planned. The executor's own
drafter returns drafts with a step's result; they are used only if the sequence's last token is
still the same. What a grammar forces takes precedence over a drafter's proposals; without a drafter
nothing else is drafted (`JUMP_FORWARD`). The executor verifies every draft against what it would
have drawn anyway, so no drafter changes an answer. Drafts that were drawn from a distribution are
verified against it, which is exact only if whether one is verified does not depend on which token
it is: their confidences must be constant (see `ops.draft`).

Drafting never delays a running or admissible sequence. Drafts get the rest of the token budget, and
a block only while one stays free for each running sequence. Beyond a sequence's next block they use
only blocks that cache nothing; the next block itself may evict a cached one, since stopping at
each block's end costs a tenth to a third of the tokens a step (measured, blocks of 16). Nothing is
scheduled ahead of a step in which drafts may pay, nor before the results of a step with drafts,
unless it *follows* that step: then it verifies all drafts that the step makes, at positions that
only the executor knows, has the same sequences, and reserves room as if all drafts were accepted.
Executors run such steps at any time, but gain by them only if results say `may_be_followed`.
"""

import logging
import math
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from typing import Any

from worker.config import SpeculativeConfig
from worker.engine.drafters.interface import DraftContext, Drafter
from worker.engine.features.interface import EngineState, Feature
from worker.engine.lengths.acceptance import DraftTally, Offer
from worker.engine.lengths.costs import StepCosts
from worker.engine.lengths.goodput import DraftLengths
from worker.engine.sequences.planning import Guess, StepInFlight, StepPlan, StepShare
from worker.engine.sequences.sequence import Sequence, SequenceState
from worker.errors import IntegrityError
from worker.types import Drafts, ModelOutput, SpeculationStats

logger = logging.getLogger(__name__)

_NO_DRAFTS = Drafts(0, (), ())

# No step waits until all outputs that ended are learnt: these are the tokens that a drafter learns
# after one. Where more sequences decode, more end and steps are longer, so it learns more.
_LEARNT_TOKENS = 128
_LEARNT_TOKENS_PER_SEQUENCE = 2


# Where no drafter is configured.
JUMP_FORWARD = SpeculativeConfig("grammar", 16, enable_adaptive_verification=False)


class Speculation(Feature):
    """Sole owner of the drafter, of unused drafts, and of the counts of all drafts.

    Without `drafter` the executor makes the drafts (`has_device_drafter`), or grammars force them.
    Drafts with ids not below `vocab_size` are refused (None: all ids are tokens). `costs` are step
    times measured at start; None: they are learned.
    """

    name = "speculation"

    def __init__(
        self,
        config: SpeculativeConfig,
        drafter: Drafter | None,
        has_device_drafter: bool,
        vocab_size: int | None = None,
        costs: StepCosts | None = None,
    ) -> None:
        self._most = config.num_speculative_tokens
        self._drafter = drafter
        self._has_device_drafter = has_device_drafter
        self._vocab_size = math.inf if vocab_size is None else vocab_size
        self._lengths = DraftLengths(config, costs, has_device_drafter)
        self._unused: dict[int, Drafts] = {}  # from the device, not used yet
        self._given_up: set[int] = set()  # sequences for which the drafter raised
        self._faulted: set[int] = set()  # sequences of whose drafter something was logged
        self._failed_tasks: set[str] = set()  # what the drafter raised at, sequences aside
        self._tally = DraftTally.up_to(self._most)
        self._num_failures = 0
        self._num_per_sequence = 0.0
        self._last_ended_seconds = -math.inf
        self._may_be_followed = False  # the step after the last one that ended
        self._followed = 0  # the last step that another one follows

    def attach(self, state: EngineState) -> None:
        self._live, self._kv = state.live, state.kv
        self._limits = state.limits
        self._max_tokens = state.limits.max_num_batched_tokens  # of a step

    # ---- planning ---------------------------------------------------------------------------

    def must_wait(self, step: StepInFlight) -> bool:
        if step.looks_ahead:
            return not self._may_follow(step)
        decoding = [s for s in self._live.running if _will_decode(s)]
        return len(decoding) < self._max_tokens and self.may_draft(decoding)

    def plan(self, plan: StepPlan) -> None:
        if plan.followed is not None:
            self._plan_following(plan, plan.followed)
            return
        ends = [(s, n) for s, n in plan.planned if s.num_computed + n == len(s.token_ids)]
        ends = [(s, n) for s, n in ends if s.search is None]
        drawing = [s for s, _ in ends if not s.branches]
        decoding = [s for s, n in ends if n == 1 and s.num_outputs]
        num_other = sum(n for _, n in plan.planned) - len(decoding)
        room = self._room_ahead(plan)
        is_crowded = bool(self._live.waiting)
        guesses = self.choose(decoding, num_other, plan.budget, self._reach, is_crowded)
        for sequence in decoding:
            if sequence.seq_id in guesses:
                self._verify(plan, sequence, guesses[sequence.seq_id])
        wanted = self.to_draft(drawing, num_other, room)
        for sequence in drawing:
            if sequence.seq_id in wanted:
                end = len(sequence.token_ids) + plan.num_drafts(sequence) + 1
                self._draft(plan, sequence, wanted[sequence.seq_id], end)

    def _may_follow(self, step: StepInFlight) -> bool:
        """True if the next step can be scheduled before `step` has verified its drafts: it has the
        same sequences, no draw depends on what is verified, and all of them get drafts, up to their
        last tokens.
        """
        if not self._may_be_followed or not any(share.num_to_draft for share in step.shares):
            return False
        if self._live.waiting and self._live.num_running < self._limits.max_num_seqs:
            return False
        ready = sum(_can_be_followed(share) for share in step.shares)
        return ready == len(step.shares) and {s.seq_id for s in self._live.running} <= {
            share.sequence.seq_id for share in step.shares
        }

    def _plan_following(self, plan: StepPlan, step: StepInFlight) -> None:
        self._followed = step.step
        shares = {share.sequence.seq_id: share for share in step.shares}
        sequences = [sequence for sequence, _ in plan.planned]
        wanted = self.to_draft(sequences, 0, self._room_ahead(plan))
        for sequence in sequences:
            share = shares[sequence.seq_id]
            # As if all drafts were accepted.
            known = share.end + share.num_drafts + 1
            if not self._kv.grow(sequence, known):
                plan.drop(sequence)
                continue
            room = min(plan.budget, self._reach(sequence) - known)
            num_drafts = max(0, min(share.num_to_draft, room))
            if not self._kv.grow(sequence, known + num_drafts):
                num_drafts = 0
            limit = min(known + num_drafts, sequence.max_tokens_total - 1)
            plan.follow(sequence, limit, num_drafts)
            if sequence.seq_id in wanted and share.num_to_draft:
                self._draft(plan, sequence, wanted[sequence.seq_id], known + num_drafts + 1)

    def may_draft(self, decoding: Seq[Sequence]) -> bool:
        """True if drafts may be verified or made in a step in which these sequences decode."""
        if not any(self._has_drafter(s) and self._room(s) > 0 for s in decoding):
            return False
        return self._lengths.may_pay([sequence.seq_id for sequence in decoding])

    def choose(
        self,
        decoding: Seq[Sequence],
        num_other_tokens: int,
        room: int | None = None,
        reach: Callable[[Sequence], float] = lambda _: math.inf,
        is_crowded: bool = False,
    ) -> dict[int, Guess]:
        """Return the drafts to verify, by sequence id, in a step that runs the last token of each
        of these sequences and `num_other_tokens` of prompts.

        The step has room for `room` drafts (None: for all), and for each sequence up to the
        position that `reach` returns. `is_crowded`: other sequences wait for admission.
        """
        if room == 0 or not self.may_draft(decoding):
            return {}
        found = [self._drafts_of(s, reach(s)) for s in decoding]
        offers = [
            Offer(sequence.seq_id, drafts.confidences)
            for sequence, drafts in zip(decoding, found, strict=True)
        ]
        guesses: dict[int, Guess] = {}
        lengths = self._lengths.to_verify(offers, num_other_tokens, room, is_crowded)
        for drafts, offer, length in zip(found, offers, lengths, strict=True):
            guess = Guess(drafts.token_ids, offer).cut(min(length, len(drafts.token_ids)))
            if guess is not None:
                guesses[offer.seq_id] = guess
        return guesses

    def to_draft(
        self, drawing: Seq[Sequence], num_other_tokens: int, room: int | None = None
    ) -> dict[int, int]:
        """Return the numbers of drafts that the executor should make after a step that draws a
        token for each of these sequences, by sequence id. The next step has room for `room` drafts.
        """
        if room == 0 or not self._has_device_drafter or not self.may_draft(drawing):
            return {}
        ids = [sequence.seq_id for sequence in drawing]
        lengths = self._lengths.to_draft(ids, num_other_tokens, room)
        return {seq_id: min(n, self._most) for seq_id, n in zip(ids, lengths, strict=True)}

    # ---- results ----------------------------------------------------------------------------

    def verified(self, sequence: Sequence, guess: Guess, num_accepted: int) -> None:
        num_drafts = len(guess.token_ids)
        if sequence.draft_tally is None:
            sequence.draft_tally = DraftTally.up_to(self._most)
        for tally in (self._tally, sequence.draft_tally):
            tally.count(num_drafts, num_accepted)
        self._lengths.observe(guess.offer, num_drafts, num_accepted)

    def after_step(self, step: StepInFlight, result: ModelOutput, now: float) -> None:
        if result.drafts:
            for share in step.shares:
                sequence = share.sequence
                drafts = result.drafts.get(sequence.seq_id)
                if drafts is None or sequence.state is SequenceState.FINISHED:
                    continue
                if drafts.position == len(sequence.token_ids):
                    self._unused[sequence.seq_id] = self._checked(sequence, drafts, self._most)
        self._may_be_followed = result.may_be_followed
        if step.step == self._followed:  # all of these drafts are being verified
            alive = self._live.of(share.sequence.seq_id for share in step.shares)
            made = [Offer(s.seq_id, self._drafts_of(s, math.inf).confidences) for s in alive]
            self._lengths.to_verify(made, 0)
        seconds = now - max(step.scheduled_seconds, self._last_ended_seconds)
        self._last_ended_seconds = now
        num_decoding = sum(share.is_decode for share in step.shares)
        num_known = sum(share.end - share.start for share in step.shares)
        num_drafts = sum(share.num_drafts for share in step.shares)
        self.observe_step((num_decoding, num_known - num_decoding), num_drafts, seconds, result)

    def observe_step(
        self, known: tuple[int, int], num_drafts: int, seconds: float, result: ModelOutput
    ) -> None:
        """Learn the `seconds` of a step of `known` (last, other) tokens and `num_drafts` drafts."""
        num_decoding, num_other = known
        self._num_per_sequence = num_drafts / num_decoding if num_decoding else 0.0
        self._lengths.observe_catch_up(result.catch_up_seconds, result.drafts.keys())
        self._lengths.observe_step(
            num_decoding + num_other + num_drafts,
            seconds - result.catch_up_seconds - result.drafting_seconds,
            num_other,
        )
        self._learn(_LEARNT_TOKENS + num_decoding * _LEARNT_TOKENS_PER_SEQUENCE)

    def ended(self, sequence: Sequence, is_sound: bool) -> None:
        seq_id = sequence.seq_id
        self._lengths.forget(seq_id)
        self._unused.pop(seq_id, None)
        self._notify("the end of a sequence", lambda d: d.end(_context(sequence), is_sound))
        self._given_up.discard(seq_id)
        self._faulted.discard(seq_id)

    def stats(self) -> dict[str, Any]:
        tally = self._tally
        stats = SpeculationStats(
            tally.num_runs,
            tally.num_draft_tokens,
            tally.num_accepted_tokens,
            tally.num_accepted_by_position,
            self._num_failures,
            self._num_per_sequence if self._live.num_running else 0.0,
        )
        return {"speculation": stats}

    def check_integrity(self, in_flight: Iterable[StepInFlight]) -> None:
        remembered = {*self._unused, *self._given_up, *self._faulted}
        if remembered - {sequence.seq_id for sequence in self._live}:
            raise IntegrityError("drafts are remembered for a sequence that has ended")
        steps = [*in_flight]
        if any(step.looks_ahead for step in steps):
            if not all(step.follows for step in steps[1:]):
                raise IntegrityError("a step was scheduled before its drafts were verified")
            return
        for sequence in self._live.running:
            table = self._kv.blocks.table(sequence.seq_id)
            if len(table) > self._kv.blocks_for(sequence.num_tokens):
                raise IntegrityError(f"sequence {sequence.seq_id} holds room for drafts")

    def _room_ahead(self, plan: StepPlan) -> int:
        """Return how many drafts the step after `plan` has room for beside its other, known tokens.
        Waiting sequences take part in it only if this step's budget was too small for them.
        """
        planned = {sequence.seq_id: num_tokens for sequence, num_tokens in plan.planned}
        known = 0
        for sequence in self._live.running:
            left = sequence.num_unscheduled - planned.get(sequence.seq_id, 0)
            known += left or sequence.num_answers
        if plan.budget <= 0:
            known += sum(sequence.num_unscheduled for sequence in self._live.waiting)
        return max(0, self._max_tokens - known)

    def _verify(self, plan: StepPlan, sequence: Sequence, guess: Guess) -> None:
        known = len(sequence.token_ids)
        most = min(len(guess.token_ids), plan.budget, self._reach(sequence) - known)
        fitting = guess.cut(most)
        if fitting is not None and self._kv.grow(sequence, known + most):
            plan.verify(sequence, fitting)

    def _draft(self, plan: StepPlan, sequence: Sequence, num_tokens: int, end: int) -> None:
        """Reserve room for new drafts from `end` on, which is behind the token that is drawn after
        all verified drafts; one more token would follow the new drafts.
        """
        most = min(num_tokens, sequence.max_tokens_total - end - 1, self._reach(sequence) - end)
        if most > 0 and self._kv.grow(sequence, end + most):
            plan.draft(sequence, most)

    def _reach(self, sequence: Sequence) -> int:
        return self._kv.reach(sequence, self._live.num_running)

    def _has_drafter(self, sequence: Sequence) -> bool:
        if self._has_device_drafter:
            return True
        if self._drafter is None:
            return sequence.matcher is not None
        return sequence.seq_id not in self._given_up

    def _room(self, sequence: Sequence) -> int:
        """Return how many drafts can be accepted at most: one more token always follows them."""
        return min(self._most, sequence.max_tokens_total - sequence.num_tokens - 1)

    def _drafts_of(self, sequence: Sequence, reach: float) -> Drafts:
        limit = int(min(self._room(sequence), reach - len(sequence.token_ids)))
        if limit <= 0 or not self._has_drafter(sequence):
            return _NO_DRAFTS
        if not self._has_device_drafter:
            forced = _forced(sequence, limit)
            if forced is not None or self._drafter is None:
                return forced or _NO_DRAFTS
            return _allowed(sequence, self._ask(self._drafter, sequence, limit))
        drafts = self._unused.get(sequence.seq_id)
        if drafts is None or drafts.position != len(sequence.token_ids):
            self._unused.pop(sequence.seq_id, None)
            return _NO_DRAFTS
        return Drafts(drafts.position, drafts.token_ids[:limit], drafts.confidences[:limit])

    def _ask(self, drafter: Drafter, sequence: Sequence, limit: int) -> Drafts:
        try:
            drafts = drafter.propose(_context(sequence), limit)
            if drafts is None:
                return _NO_DRAFTS
            if drafts.position != len(sequence.token_ids):
                self._fault(sequence, f"position {drafts.position}")
                return _NO_DRAFTS
            return self._checked(sequence, drafts, limit)
        except Exception:
            self._num_failures += 1
            self._given_up.add(sequence.seq_id)
            logger.exception("sequence %d continues without its drafter", sequence.seq_id)
            return _NO_DRAFTS

    def _learn(self, num_tokens: int) -> None:
        if "learning" not in self._failed_tasks:
            self._notify("learning", lambda drafter: drafter.learn(num_tokens))

    def _notify(self, task: str, call: Callable[[Drafter], None]) -> None:
        """Call the drafter. All failures are counted; the first of each task is logged."""
        if self._drafter is None:
            return
        try:
            call(self._drafter)
        except Exception:
            self._num_failures += 1
            if task not in self._failed_tasks:
                self._failed_tasks.add(task)
                logger.exception("the drafter failed at %s; from now on that only counts", task)

    def _checked(self, sequence: Sequence, drafts: Drafts, limit: int) -> Drafts:
        """Return the drafts before the first invalid one, at most `limit`."""
        num_sound = 0
        for token, confidence in zip(drafts.token_ids, drafts.confidences, strict=False):
            if type(token) is not int or not 0 <= token < self._vocab_size:
                self._fault(sequence, f"token {token!r}")
                break
            if not 0.0 < confidence <= 1.0:
                self._fault(sequence, f"confidence {confidence!r}")
                break
            num_sound += 1
        length = min(num_sound, limit)
        token_ids, confidences = drafts.token_ids[:length], drafts.confidences[:length]
        return Drafts(drafts.position, tuple(token_ids), tuple(confidences))

    def _fault(self, sequence: Sequence, what: str) -> None:
        self._num_failures += 1
        if sequence.seq_id not in self._faulted:
            self._faulted.add(sequence.seq_id)
            logger.warning("drafts of sequence %d are cut at %s", sequence.seq_id, what)


def _context(sequence: Sequence) -> DraftContext:
    group = (sequence.request.tenant, sequence.request.cache_salt or "")
    return DraftContext(sequence.seq_id, sequence.token_ids, sequence.num_prompt, group)


def _forced(sequence: Sequence, limit: int) -> Drafts | None:
    """Return the tokens that the grammar forces, if any; they are always accepted."""
    if sequence.matcher is None:
        return None
    tokens = tuple(sequence.matcher.forced(sequence.token_ids[sequence.num_prompt :])[:limit])
    return Drafts(len(sequence.token_ids), tokens, (1.0,) * len(tokens)) if tokens else None


def _allowed(sequence: Sequence, drafts: Drafts) -> Drafts:
    """Return the drafts before the first that the grammar forbids. Not for drafts that were drawn
    from a distribution: whether one is verified must not depend on which token it is.
    """
    if sequence.matcher is None or not drafts.token_ids:
        return drafts
    outputs = sequence.token_ids[sequence.num_prompt :]
    length = sequence.matcher.num_allowed(outputs, drafts.token_ids)
    return Drafts(drafts.position, drafts.token_ids[:length], drafts.confidences[:length])


def _can_be_followed(share: StepShare) -> bool:
    """True if the sequence's next draw depends on its earlier tokens through the model alone, and
    its drafts are where the executor can verify them: all that were asked for have been made.
    """
    sequence, params = share.sequence, share.sequence.params
    has_drafts = share.num_to_draft > 0 and (share.guess is not None or not share.limit)
    ends = sequence.max_tokens_total <= share.end + share.num_drafts + 2
    if not share.is_decode or not (has_drafts or ends):
        return False
    adjusts = params.needs_history or params.logit_bias or params.allowed_token_ids is not None
    return (
        not (sequence.waits_for_draw or adjusts or params.logprob_token_ids)
        and params.logprobs is None
        and sequence.num_outputs >= params.min_tokens
    )


def _will_decode(sequence: Sequence) -> bool:
    """True if a running sequence's next share, once the step in flight has ended, is one token."""
    begun = sequence.num_outputs or sequence.num_pending
    return bool(begun) and sequence.num_unscheduled == 1
