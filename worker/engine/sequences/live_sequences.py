"""Every unfinished sequence: by id, and in the line of waiting or running ones."""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import replace
from operator import attrgetter

from worker.engine.messages import AddRequest
from worker.engine.sequences.beams import BeamRules, BeamSearch
from worker.engine.sequences.sequence import Branch, Sequence, SequenceState
from worker.errors import IntegrityError
from worker.types import BeamParams, PullStats

_by_rank = attrgetter("rank")


class LiveSequences:
    """Sole owner of the lines of waiting and running sequences, both in order of rank.

    A request with n answers is one sequence until its prompt has been run; it counts as n, takes n
    ids from the start, and each of its request ids leads to it.
    """

    def __init__(self) -> None:
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._by_seq_id: dict[int, Sequence] = {}
        self._by_request_id: dict[str, Sequence] = {}
        self._next_seq_id = 0
        self._num_running = 0
        self._num_waiting = 0

    def __len__(self) -> int:
        return len(self._by_seq_id)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._by_seq_id.values())

    @property
    def num_running(self) -> int:
        return self._num_running

    @property
    def num_waiting(self) -> int:
        return self._num_waiting

    def pulls(self) -> PullStats:
        """Count the waiting sequences that pull KV."""
        pulls = [s.kv_pull.done for s in self.waiting if s.kv_pull is not None]
        return PullStats(pulls.count(False), pulls.count(True))

    def running_adapters(self) -> set[int]:
        return {s.request.adapter.number for s in self.running if s.request.adapter is not None}

    def find(self, request_id: str) -> Sequence | None:
        return self._by_request_id.get(request_id)

    def of(self, seq_ids: Iterable[int]) -> list[Sequence]:
        return [self._by_seq_id[seq_id] for seq_id in seq_ids if seq_id in self._by_seq_id]

    def first_in_use(self, request_ids: Iterable[str]) -> str | None:
        """Return the first id that a live sequence has or that is repeated, if there is one."""
        seen: set[str] = set()
        for request_id in request_ids:
            if request_id in self._by_request_id or request_id in seen:
                return request_id
            seen.add(request_id)
        return None

    def add(self, sequence: Sequence) -> None:
        self._next_seq_id += sequence.num_answers
        self._by_seq_id[sequence.seq_id] = sequence
        for request_id in (sequence.request_id, *(b.request_id for b in sequence.branches)):
            self._by_request_id[request_id] = sequence
        insort(self.waiting, sequence, key=_by_rank)
        self._num_waiting += sequence.num_answers

    @property
    def next_seq_id(self) -> int:
        return self._next_seq_id

    def start(self, sequence: Sequence) -> None:
        self._remove(self.waiting, sequence)
        self._num_waiting -= sequence.num_answers
        sequence.state = SequenceState.RUNNING
        insort(self.running, sequence, key=_by_rank)
        self._num_running += sequence.num_answers

    def preempt(self, sequence: Sequence) -> None:
        """Move a running sequence back to its old place among the waiting."""
        self._remove(self.running, sequence)
        self._num_running -= sequence.num_answers
        sequence.preempt()
        insort(self.waiting, sequence, key=_by_rank)
        self._num_waiting += sequence.num_answers

    def branch(self, parent: Sequence) -> list[Sequence]:
        """Make the parent's branches sequences of their own, in the parent's line."""
        children = []
        base = parent.seq_id
        for branch in parent.branches:
            child = parent.child(branch, base + branch.index)
            child.state = parent.state
            self._by_seq_id[child.seq_id] = child
            self._by_request_id[child.request_id] = child
            line = self.running if parent.state is SequenceState.RUNNING else self.waiting
            insort(line, child, key=_by_rank)
            children.append(child)
        parent.branches = []
        return children

    def drop_branch(self, sequence: Sequence, request_id: str) -> None:
        """Drop one answer of several; if it is the leading one, the first branch replaces it."""
        if request_id == sequence.request_id:
            sequence.lead(sequence.branches.pop(0))
        else:
            sequence.branches = [b for b in sequence.branches if b.request_id != request_id]
        del self._by_request_id[request_id]
        if sequence.state is SequenceState.RUNNING:
            self._num_running -= 1
        else:
            self._num_waiting -= 1

    def remove(self, sequence: Sequence) -> None:
        if sequence.state is SequenceState.RUNNING:
            self._remove(self.running, sequence)
            self._num_running -= sequence.num_answers
        else:
            self._remove(self.waiting, sequence)
            self._num_waiting -= sequence.num_answers
        sequence.state = SequenceState.FINISHED
        del self._by_seq_id[sequence.seq_id]
        for request_id in (sequence.request_id, *(b.request_id for b in sequence.branches)):
            del self._by_request_id[request_id]

    def check_integrity(self) -> None:
        for line, state, count in (
            (self.waiting, SequenceState.WAITING, self._num_waiting),
            (self.running, SequenceState.RUNNING, self._num_running),
        ):
            ranks = [sequence.rank for sequence in line]
            _require(ranks == sorted(set(ranks)), f"the {state.name} line is out of order")
            _require(
                all(s.state is state for s in line),
                f"a sequence of another state is in the {state.name} line",
            )
            _require(
                sum(s.num_answers for s in line) == count, f"the {state.name} line is miscounted"
            )
        lines = {s.seq_id: s for s in (*self.waiting, *self.running)}
        _require(lines == self._by_seq_id, "ids and lines name different sequences")
        ids = {
            name: sequence
            for sequence in self
            for name in (sequence.request_id, *(b.request_id for b in sequence.branches))
        }
        _require(ids == self._by_request_id, "request ids and sequences differ")

    @staticmethod
    def _remove(line: list[Sequence], sequence: Sequence) -> None:
        del line[bisect_left(line, sequence.rank, key=_by_rank)]


def new_sequence(
    request: AddRequest,
    seq_id: int,
    priority: int,
    max_model_len: int,
    eos_token_ids: frozenset[int],
) -> Sequence:
    wanted = len(request.prompt_token_ids) + request.params.max_tokens
    branches = [Branch(name, index) for index, name in enumerate(request.branch_ids, 1)]
    sequence = Sequence(
        seq_id, request, priority, min(wanted, max_model_len), eos_token_ids, branches=branches
    )
    if request.params.beam is not None:
        _search(sequence, request.params.beam)
    return sequence


def _search(sequence: Sequence, beam: BeamParams) -> None:
    """Begin the beam search of a request, with as many branches as there may be beams."""
    params, num_prompt = sequence.params, sequence.num_prompt
    names = [sequence.request_id, *(branch.request_id for branch in sequence.branches)]
    max_outputs = sequence.max_tokens_total - num_prompt
    ends = frozenset[int]() if params.ignore_eos else sequence.eos_token_ids
    rules = BeamRules(beam, num_prompt, max_outputs, ends)
    slots = [sequence.seq_id + index for index in range(max(beam.width, len(names)))]
    sequence.search = BeamSearch(rules, dict(enumerate(names)), slots)
    sequence.branches += [
        Branch(f"{sequence.request_id}\0{index}", index) for index in range(len(names), len(slots))
    ]
    asked = params.logprobs or 0
    count = -1 if asked < 0 else max(asked, rules.num_candidates)
    sequence.params = replace(params, logprobs=count)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise IntegrityError(message)
