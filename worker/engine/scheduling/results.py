"""Apply the results of a step to its sequences."""

from collections.abc import Sequence as Seq

from worker.engine import policies
from worker.engine.features.interface import EngineState, Feature
from worker.engine.messages import RequestOutput
from worker.engine.scheduling.beam_sequences import BeamSequences
from worker.engine.sequences.beams import BeamSearch
from worker.engine.sequences.planning import Guess, StepInFlight, StepShare
from worker.engine.sequences.sequence import Sequence, SequenceState
from worker.errors import IntegrityError
from worker.types import Draw, FinishReason, KvOffer, ModelOutput, TokenLogprobs


class Results:
    """Applies results to the sequences of a step, whatever happened to them since planning.

    A sequence that has ended meanwhile gets nothing, and the step wrote to blocks that only later
    steps use. One that was preempted gets its token; it has lost the KV. A share with drafts has a
    run of draws: the accepted drafts, whose KV is written already, and one token more.
    """

    def __init__(self, state: EngineState, features: Seq[Feature]) -> None:
        self._live = state.live
        self._kv = state.kv
        self._counters = state.counters
        self._features = features
        self.beams = BeamSequences(state.live, state.kv, self.end)

    def apply(self, step: StepInFlight, result: ModelOutput, now: float) -> list[RequestOutput]:
        outputs: list[RequestOutput] = []
        for share in step.shares:
            sequence = share.sequence
            if sequence.state is SequenceState.FINISHED:
                continue
            seq_id = sequence.seq_id
            error = result.failed.get(seq_id)
            if error is not None:
                self._counters.num_corrupted_requests += sequence.num_answers
                outputs += self.fail(sequence, error)
                continue
            outputs += self._take_in(share, result, now)
            # The room of rejected drafts is back before any other sequence is scheduled.
            if share.looks_ahead and self._has_blocks(share) and not sequence.num_pending:
                self._kv.shrink(sequence)
        return outputs

    def undo(self, step: StepInFlight) -> None:
        """Restore the sequences of a step that did not run. Called for the last step first."""
        for share in step.shares:
            sequence = share.sequence
            if sequence.state is SequenceState.FINISHED:
                continue
            sequence.num_pending -= bool(share.answers)
            sequence.num_pooled -= share.num_pooled
            sequence.is_branching = False
            if self._has_blocks(share):
                sequence.num_computed = share.start
                self._kv.blocks.shrink(sequence.seq_id, len(sequence.token_ids))

    def end(self, sequence: Sequence, forget: bool = False) -> None:
        """Free the blocks and forget the sequence and its branches; with `forget` its KV too."""
        sequence.drop_pull()
        self._kv.release(sequence, forget)
        self._live.remove(sequence)
        # The ends of beams are not what answers are like.
        is_sound = not forget and sequence.search is None
        for feature in self._features:
            feature.ended(sequence, is_sound)

    @staticmethod
    def _has_blocks(share: StepShare) -> bool:
        """True if the sequence still has the blocks that the step wrote."""
        running = share.sequence.state is SequenceState.RUNNING
        return running and share.sequence.num_preemptions == share.num_preemptions

    def _take_in(self, share: StepShare, result: ModelOutput, now: float) -> list[RequestOutput]:
        sequence = share.sequence
        seq_id = sequence.seq_id
        if share.guess is not None:
            return [self._take_run(share, share.guess, result.sampled[seq_id], now)]
        if self._has_blocks(share):
            self._kv.written(sequence, share.end)
        if sequence.request.pooling is not None:
            return self._take_pooled(share, result.pooled.get(seq_id), now)
        logprobs = self._new_prompt_logprobs(share, result.prompt_logprobs.get(seq_id, ()))
        if sequence.search is not None:
            draws = result.sampled.get(seq_id)
            return self._take_beam(share, sequence.search, draws, logprobs, now)
        if share.answers:
            return self._take_draws(share, result.sampled[seq_id], logprobs, now)
        return [sequence.output(prompt_logprobs=logprobs)] if logprobs else []

    def _take_pooled(
        self, share: StepShare, sums: list[float] | None, now: float
    ) -> list[RequestOutput]:
        """Add the summed hidden states, also for a sequence that has lost its blocks since: it does
        not run those positions again. The step that ends the prompt ends the sequence.
        """
        sequence = share.sequence
        if sums is not None:
            sequence.pool(sums)
        if not share.answers:
            return []
        sequence.num_pending -= 1
        self._count_prompt(sequence)
        sequence.first_token_seconds = sequence.last_token_seconds = now
        self.end(sequence)
        return [sequence.output(finish_reason=FinishReason.STOP, pooled=sequence.embedding())]

    def _count_prompt(self, sequence: Sequence) -> None:
        """Count a prompt when this engine draws the first token after it."""
        if sequence.first_token_seconds is not None:
            return
        self._counters.prompt_tokens += sequence.num_prompt
        self._counters.prompt_tokens_cached += sequence.num_cached
        self._counters.prompt_tokens_external += sequence.num_external
        self._counters.prompt_tokens_host += sequence.num_from_host
        self._counters.prompt_tokens_disk += sequence.num_from_disk

    def fail(self, sequence: Sequence, error: str) -> list[RequestOutput]:
        """End a sequence that cannot be answered, and the others of its search; forget their KV."""
        if sequence.search is not None:
            return self.beams.fail(sequence.search, error)
        names = (sequence.request_id, *(branch.request_id for branch in sequence.branches))
        self.end(sequence, forget=True)
        return [
            sequence.output(finish_reason=FinishReason.ERROR, error=error, request_id=name)
            for name in names
        ]

    @staticmethod
    def _new_prompt_logprobs(
        share: StepShare, logprobs: tuple[TokenLogprobs, ...]
    ) -> tuple[TokenLogprobs, ...]:
        """Return the prompt's log probabilities that were not reported before a preemption."""
        sequence = share.sequence
        new = logprobs[max(0, sequence.num_prompt_logprobs - share.start) :]
        sequence.num_prompt_logprobs += len(new)
        return new

    def _take_draws(
        self,
        share: StepShare,
        draws: tuple[Draw, ...],
        logprobs: tuple[TokenLogprobs, ...],
        now: float,
    ) -> list[RequestOutput]:
        """Append one token to each answer that is still wanted; branches become sequences first,
        while the first answer still has the blocks.
        """
        parent = share.sequence
        parent.num_pending -= 1
        parent.is_branching = False
        self._count_prompt(parent)
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
                reason, stop_token = self._append(member, draw, now)
                offer = None if reason is None else self._end_well(member)
                own = logprobs if member is parent else ()
                outputs.append(member.output((draw,), reason, stop_token, own, kv_offer=offer))
        return outputs

    def _take_beam(
        self,
        share: StepShare,
        search: BeamSearch,
        draws: tuple[Draw, ...] | None,
        logprobs: tuple[TokenLogprobs, ...],
        now: float,
    ) -> list[RequestOutput]:
        """Record the candidates of one beam; with the last ones the search takes its step."""
        sequence = share.sequence
        outputs = [self.beams.report(search, prompt_logprobs=logprobs)] if logprobs else []
        if not draws:
            return outputs
        sequence.num_pending -= 1
        self._counters.generation_tokens += 1
        self._count_prompt(sequence)
        return outputs + self.beams.take(search, sequence, draws[0], now)

    def _end_well(self, sequence: Sequence) -> KvOffer | None:
        """End a sequence whose answer is complete; return the offer of its KV, if exported."""
        offer = None
        if sequence.state is SequenceState.RUNNING:
            for feature in self._features:
                offer = feature.offer(sequence) or offer
        self.end(sequence)
        return offer

    def _take_run(
        self, share: StepShare, guess: Guess, draws: tuple[Draw, ...], now: float
    ) -> RequestOutput:
        """Append the draws one by one, up to one that ends the sequence; the rest is discarded."""
        sequence = share.sequence
        sequence.num_pending -= 1
        self._count_prompt(sequence)
        num_accepted = _num_accepted(guess, draws)
        for feature in self._features:
            feature.verified(sequence, guess, num_accepted)
        reason, stop_token, num_taken = None, None, 0
        while reason is None and num_taken < len(draws):
            reason, stop_token = self._append(sequence, draws[num_taken], now)
            num_taken += 1
        if self._has_blocks(share):
            sequence.num_computed = min(sequence.num_computed + num_accepted, sequence.num_tokens)
            self._kv.written(sequence, min(share.end + num_accepted, len(sequence.token_ids)))
        offer = None if reason is None else self._end_well(sequence)
        return sequence.output(draws[:num_taken], reason, stop_token, kv_offer=offer)

    def _append(
        self, sequence: Sequence, draw: Draw, now: float
    ) -> tuple[FinishReason | None, int | None]:
        self._counters.generation_tokens += 1
        sequence.append(draw.token_id, now)
        return policies.check_stop(
            sequence.params,
            sequence.eos_token_ids,
            sequence.token_ids,
            sequence.num_prompt,
            sequence.max_tokens_total,
        )


def _num_accepted(guess: Guess, draws: tuple[Draw, ...]) -> int:
    """Return the number of accepted drafts. Raises IntegrityError if draws do not match."""
    num_accepted = len(draws) - 1
    accepted = tuple(draw.token_id for draw in draws[:-1])
    # Otherwise the KV that was written would be that of other tokens.
    if not draws or accepted != guess.token_ids[:num_accepted]:
        raise IntegrityError(f"drafts {guess.token_ids} cannot have been accepted as {accepted}")
    return num_accepted
