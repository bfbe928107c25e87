"""The part of a step that goes beyond what sequences know: drafts to verify, drafts to make.

Theory of operation
-------------------
Drafts take nothing from anybody who runs or can be admitted. They come after everybody's share, out
of what is left of the token budget. They take a block only while one block stays free for each
sequence that runs; else they are cut to what fits in the blocks that are there. Nobody is preempted
for them. What room they took and did not need is given back when the step's results are there, so
between steps nobody holds more than without drafts. No drafts are made that the step after has no
room to verify.

From the prefix cache they take next to nothing. Beyond the block that a sequence comes to next they
use only blocks that cache nothing. That one block they may take from the cache's far end, a few
tokens before the sequence would: a cache in use has no empty blocks, and drafts that stop at each
block's end are a tenth to a third fewer tokens a step (measured, blocks of 16). It comes back empty
and is taken first by whoever needs one next. So drafts have never emptied more blocks than one for
each sequence that can run at a time, and a sequence that goes on takes its own anyway.

How many tokens a sequence has after a step with drafts is known only with its results; so is what a
device drafter made. Nothing is scheduled before that. While drafts may be worth it in the next
step, nothing is scheduled ahead at all: a sequence whose last token is unknown has no drafts.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from worker.engine.live_sequences import LiveSequences
from worker.engine.planning import StepInFlight, StepPlan
from worker.engine.sequence import Sequence
from worker.engine.sequence_kv import SequenceKv
from worker.engine.speculation import Guess, Speculation
from worker.errors import IntegrityError
from worker.types import ModelOutput


class Lookahead:
    """Adds drafts to steps; keeps no state but when the last step ended."""

    def __init__(
        self, speculation: Speculation, live: LiveSequences, kv: SequenceKv, max_tokens: int
    ) -> None:
        self._speculation = speculation
        self._live = live
        self._kv = kv
        self._max_tokens = max_tokens  # of a step
        self._last_ended_seconds = -math.inf

    def must_wait(self, step: StepInFlight) -> bool:
        """Whether the results of the step in flight are needed to schedule the next one."""
        if step.looks_ahead:
            return True
        decoding = [s for s in self._live.running if _will_decode(s)]
        return len(decoding) < self._max_tokens and self._speculation.may_draft(decoding)

    def plan(self, plan: StepPlan) -> None:
        """Add drafts to what is planned already; no step is in flight."""
        ends = [(s, n) for s, n in plan.planned if s.num_computed + n == len(s.token_ids)]
        drawing = [s for s, _ in ends if not s.branches]
        decoding = [s for s, n in ends if n == 1 and s.num_outputs]
        num_other = sum(n for _, n in plan.planned) - len(decoding)
        room = self._room_ahead(plan)
        is_crowded = bool(self._live.waiting)
        guesses = self._speculation.choose(
            decoding, num_other, plan.budget, self._reach, is_crowded
        )
        for sequence in decoding:
            if sequence.seq_id in guesses:
                self._verify(plan, sequence, guesses[sequence.seq_id])
        wanted = self._speculation.to_draft(drawing, num_other, room)
        for sequence in drawing:
            if sequence.seq_id in wanted:
                self._draft(plan, sequence, wanted[sequence.seq_id])

    def observe(self, step: StepInFlight, result: ModelOutput, now: float) -> None:
        """A step has ended: what it ran, and how long that took."""
        seconds = now - max(step.scheduled_seconds, self._last_ended_seconds)
        self._last_ended_seconds = now
        num_decoding = sum(share.is_decode for share in step.shares)
        num_known = sum(share.end - share.start for share in step.shares)
        num_drafts = sum(share.num_drafts for share in step.shares)
        known = (num_decoding, num_known - num_decoding)
        self._speculation.observe_step(known, num_drafts, seconds, result)

    def check_integrity(self, in_flight: Collection[StepInFlight]) -> None:
        """Raise IntegrityError when drafts hold blocks that they should not, or are remembered for
        a sequence that has ended.
        """
        self._speculation.check_integrity(sequence.seq_id for sequence in self._live)
        if any(step.looks_ahead for step in in_flight):
            if len(in_flight) > 1:
                raise IntegrityError("a step was scheduled before it was known what drafts became")
            return
        for sequence in self._live.running:
            table = self._kv.blocks.table(sequence.seq_id)
            if len(table) > self._kv.blocks_for(sequence.num_tokens):
                raise IntegrityError(f"sequence {sequence.seq_id} holds room for drafts")

    # ---- below: private ---------------------------------------------------------------------

    def _room_ahead(self, plan: StepPlan) -> int:
        """For how many drafts the step after `plan` has room: what it runs besides is known. Who
        waits takes part in it if only this step's budget kept them waiting.
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

    def _draft(self, plan: StepPlan, sequence: Sequence, num_tokens: int) -> None:
        """Room is for the case that all that is verified stands; one token is drawn behind it, and
        one more would follow the new drafts.
        """
        end = len(sequence.token_ids) + plan.num_drafts(sequence) + 1
        most = min(num_tokens, sequence.max_tokens_total - end - 1, self._reach(sequence) - end)
        if most > 0 and self._kv.grow(sequence, end + most):
            plan.draft(sequence, most)

    def _reach(self, sequence: Sequence) -> int:
        return self._kv.reach(sequence, self._live.num_running)


def _will_decode(sequence: Sequence) -> bool:
    """Whether a running sequence's next share, once the step in flight has ended, is one token."""
    begun = sequence.num_outputs or sequence.num_pending
    return bool(begun) and sequence.num_unscheduled == 1
