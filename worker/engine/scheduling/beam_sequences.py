"""Beam searches: each step moves live beams among the sequences of a search.

A search has as many sequences as it may have live beams. A beam's sequence continues with the
likeliest of the beams that follow from it; sequences of beams that ended take over the others by a
fork, so they keep their ids, their places in line and their seats. The answers are reported at the
end: until then any beam may become one.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq

from worker.engine.messages import RequestOutput
from worker.engine.sequences.beams import Beam, BeamSearch
from worker.engine.sequences.live_sequences import LiveSequences
from worker.engine.sequences.sequence import Sequence, SequenceState
from worker.engine.sequences.sequence_kv import SequenceKv
from worker.errors import IntegrityError
from worker.types import Draw, FinishReason, TokenLogprobs


class BeamSequences:
    """Moves beams among the sequences of their searches; keeps no state. `end` frees the blocks of
    a sequence and forgets it, and its KV too if the second argument is True.
    """

    def __init__(
        self, live: LiveSequences, kv: SequenceKv, end: Callable[[Sequence, bool], None]
    ) -> None:
        self._live = live
        self._kv = kv
        self._end = end

    def take(
        self, search: BeamSearch, sequence: Sequence, draw: Draw, now: float
    ) -> list[RequestOutput]:
        """Record the candidates of one beam; return the answers, if that ends the search."""
        if draw.logprobs is None:
            raise IntegrityError(f"no candidates were found for beam {sequence.seq_id}")
        search.found[sequence.seq_id] = draw.logprobs
        if sequence.first_token_seconds is None:
            sequence.first_token_seconds = now
        if len(search.found) < len(search.members):
            return []
        before = self._live.of(search.members)
        search.advance()
        if search.beams.is_over:
            return self._answers(search, now)
        self._move(search, before)
        return []

    def report(
        self,
        search: BeamSearch,
        draws: tuple[Draw, ...] = (),
        reason: FinishReason | None = None,
        stop_token: int | None = None,
        prompt_logprobs: tuple[TokenLogprobs, ...] = (),
        *,
        error: str | None = None,
        request_id: str | None = None,
    ) -> RequestOutput:
        """Return an output of a search; without `request_id`, the output of its first answer."""
        name = next(iter(search.wanted.values())) if request_id is None else request_id
        first = self._live.of(search.slots)[0]
        return first.output(
            draws, reason, stop_token, prompt_logprobs, error=error, request_id=name
        )

    def abort(self, search: BeamSearch, request_id: str) -> RequestOutput | None:
        """Give up an answer; return its output, the beam that has its rank so far, or None if it
        was given up before. The search ends with its last answer.
        """
        index = next((i for i, name in search.wanted.items() if name == request_id), None)
        if index is None:
            return None
        best = search.best()[index : index + 1]
        draws = _draws(best[0]) if best else ()
        output = self.report(search, draws, FinishReason.ABORT, request_id=request_id)
        del search.wanted[index]
        if not search.wanted:
            self._end_all(search)
        return output

    def fail(self, search: BeamSearch, error: str) -> list[RequestOutput]:
        outputs = [
            self.report(search, reason=FinishReason.ERROR, error=error, request_id=name)
            for name in search.wanted.values()
        ]
        search.wanted.clear()
        self._end_all(search, forget=True)
        return outputs

    def check_integrity(self) -> None:
        for search in {id(s.search): s.search for s in self._live if s.search is not None}.values():
            sequences = {s.seq_id: s for s in self._live.of(search.slots)}
            if not search.wanted or not set(search.members) <= sequences.keys():
                raise IntegrityError("a search has no answers or no sequences")
            if not search.found.keys() < set(search.members):
                raise IntegrityError("a search has not taken its step")
            for seq_id, beam in zip(search.members, search.beams.live, strict=True):
                sequence = sequences[seq_id]
                if beam.token_ids != tuple(sequence.token_ids[sequence.num_prompt :]):
                    raise IntegrityError(f"sequence {seq_id} is not its beam")
                if sequence.is_held and sequence.num_pending:
                    raise IntegrityError(f"sequence {seq_id} is held, yet runs")

    def _answers(self, search: BeamSearch, now: float) -> list[RequestOutput]:
        outputs = []
        self._live.of(search.slots)[0].last_token_seconds = now
        for index, name in search.wanted.items():
            if index >= len(search.beams.ended):
                few = f"the search has only {len(search.beams.ended)} answers"
                output = self.report(search, reason=FinishReason.ERROR, error=few, request_id=name)
            else:
                beam = search.beams.ended[index]
                reason = FinishReason.LENGTH if beam.end_token is None else FinishReason.STOP
                output = self.report(search, _draws(beam), reason, beam.end_token, request_id=name)
            outputs.append(output)
        self._end_all(search)
        return outputs

    def _move(self, search: BeamSearch, before: Seq[Sequence]) -> None:
        """Give each live beam a sequence; `before` has those of the live beams before the step."""
        if before[0].branches:
            self._live.branch(before[0])
        parents = [before[place] for place in search.beams.parents]
        staying = {sequence.seq_id for sequence in parents}
        spare = [s for s in self._live.of(search.slots) if s.seq_id not in staying]
        for sequence in spare:
            sequence.drop_pull()
            self._kv.release(sequence)
            sequence.num_computed = sequence.num_written = 0
        members: list[int] = []
        moves: list[tuple[Sequence, Beam]] = []
        taking_over = iter(spare)
        for parent, beam in zip(parents, search.beams.live, strict=True):
            member = parent
            if parent.seq_id in members:
                member = next(taking_over)
                self._share(parent, member)
            members.append(member.seq_id)
            moves.append((member, beam))
        chains = [parent.block_hashes for parent in parents]
        for (member, beam), chain in zip(moves, chains, strict=True):
            member.hold(beam, chain)
        for sequence in taking_over:
            self._leave(sequence)
        search.members = members

    def _share(self, parent: Sequence, member: Sequence) -> None:
        """Let a sequence without blocks share those of the parent, if both run."""
        member.first_token_seconds = parent.first_token_seconds
        # The beam lost its blocks while it was held: what follows from it waits, too.
        if parent.state is not SequenceState.RUNNING:
            self._leave(member)
        elif member.state is SequenceState.RUNNING:
            self._kv.fork(parent, member)

    def _leave(self, sequence: Sequence) -> None:
        if sequence.state is SequenceState.RUNNING:
            self._live.preempt(sequence)

    def _end_all(self, search: BeamSearch, forget: bool = False) -> None:
        for sequence in self._live.of(search.slots):
            self._end(sequence, forget)


def _draws(beam: Beam) -> tuple[Draw, ...]:
    if not beam.entries:
        return tuple(map(Draw, beam.token_ids))
    return tuple(map(Draw, beam.token_ids, beam.entries))
