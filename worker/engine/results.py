"""What a step gave, taken in: tokens, log probabilities, branches, ends."""

from __future__ import annotations

from worker.engine import policies
from worker.engine.counters import Counters
from worker.engine.live_sequences import LiveSequences
from worker.engine.messages import RequestOutput
from worker.engine.planning import Share, StepInFlight
from worker.engine.sequence import Sequence, SequenceState
from worker.engine.sequence_kv import SequenceKv
from worker.types import Draw, FinishReason, ModelOutput, TokenLogprobs


class Results:
    """Applies results to the sequences of a step, whatever happened to these since it was planned.

    - One that has ended meanwhile gets nothing: its token is discarded, and what the step wrote for
      it lies in blocks that only later steps use.
    - One that was preempted meanwhile gets its token all the same; it has lost the KV.
    """

    def __init__(self, live: LiveSequences, kv: SequenceKv, counters: Counters) -> None:
        self._live = live
        self._kv = kv
        self._counters = counters

    def apply(self, step: StepInFlight, result: ModelOutput, now: float) -> list[RequestOutput]:
        """Take in one step; what there is to tell."""
        outputs: list[RequestOutput] = []
        for share in step.shares:
            sequence = share.sequence
            if sequence.state is SequenceState.FINISHED:
                continue
            seq_id = sequence.seq_id
            error = result.failed.get(seq_id)
            if error is not None:
                outputs += self._fail(sequence, error)
                continue
            if sequence.num_preemptions == share.num_preemptions:
                self._kv.written(sequence, share.end)
            told = self._new_prompt_logprobs(share, result.prompt_logprobs.get(seq_id, ()))
            if share.answers:
                outputs += self._take_draws(share, result.sampled[seq_id], told, now)
            elif told:
                outputs.append(sequence.output(prompt_logprobs=told))
        return outputs

    def end(self, sequence: Sequence, forget: bool = False) -> None:
        """Free the blocks and forget the sequence, with its branches."""
        self._kv.release(sequence, forget)
        self._live.remove(sequence)

    def _fail(self, sequence: Sequence, error: str) -> list[RequestOutput]:
        names = (sequence.request_id, *(branch.request_id for branch in sequence.branches))
        self._counters.num_corrupted_requests += len(names)
        self.end(sequence, forget=True)
        return [
            sequence.output(finish_reason=FinishReason.ERROR, error=error, request_id=name)
            for name in names
        ]

    @staticmethod
    def _new_prompt_logprobs(
        share: Share, logprobs: tuple[TokenLogprobs, ...]
    ) -> tuple[TokenLogprobs, ...]:
        """Those not told before: after a preemption the same positions may be run again."""
        sequence = share.sequence
        new = logprobs[max(0, sequence.num_prompt_logprobs - share.start) :]
        sequence.num_prompt_logprobs += len(new)
        return new

    def _take_draws(
        self,
        share: Share,
        draws: tuple[Draw, ...],
        told: tuple[TokenLogprobs, ...],
        now: float,
    ) -> list[RequestOutput]:
        """One token for each answer that is still wanted; branches become sequences first, while
        the first answer still has the blocks.
        """
        parent = share.sequence
        parent.num_pending -= 1
        parent.is_branching = False
        if parent.num_outputs == 0:
            self._counters.prompt_tokens += parent.num_prompt
            self._counters.prompt_tokens_cached += parent.num_cached
        members = {parent.index: parent}
        if parent.branches:
            for child in self._live.branch(parent):
                members[child.index] = child
                if child.state is SequenceState.RUNNING:
                    self._kv.fork(parent, child)
        outputs = []
        for index, draw in zip(share.answers, draws, strict=True):
            member = members.get(index)  # None: aborted since
            if member is not None:
                outputs.append(
                    self._take_token(member, draw, told if member is parent else (), now)
                )
        return outputs

    def _take_token(
        self, sequence: Sequence, draw: Draw, told: tuple[TokenLogprobs, ...], now: float
    ) -> RequestOutput:
        self._counters.generation_tokens += 1
        sequence.append(draw.token_id, now)
        reason, stop_token = policies.check_stop(
            sequence.params,
            sequence.eos_token_ids,
            sequence.token_ids,
            sequence.num_prompt,
            sequence.max_tokens_total,
        )
        if reason is not None:
            self.end(sequence)
        return sequence.output((draw,), reason, stop_token, told)
