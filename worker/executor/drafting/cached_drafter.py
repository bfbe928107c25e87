"""A drafter with its own network and cache; `draft_cache` describes how the cache keeps up.

A draft model has already run most drafts when the target verifies them, and skips them where the
next step has the same tokens in the same slots. (A head ran them on guessed states, and reads all
but the first again.)

A memory bound may shorten drafting, and so decides which drafts are verified. It uses only the
numbers of drafts and sequences, never drawn tokens (docs/decisions/0017).
"""

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from worker.executor.drafting.captured import CapturedRounds
from worker.executor.drafting.draft_cache import DraftCache
from worker.executor.drafting.interface import Drafted, DraftNetwork, DraftRequest
from worker.executor.drafting.rounds import (
    CatchUp,
    DraftedRun,
    DraftRounds,
    RowSpan,
    most_rows,
    plan_catch_up,
)
from worker.executor.state import DeviceState, Ints
from worker.executor.step_batch import StepBatch
from worker.models.llama import LlamaModel, StepTensors
from worker.ops.draft import GREEDY, PROBABILISTIC
from worker.types import Drafts, KvLoad, ScheduledSequence

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Ahead:
    """Tokens that the network ran at `slots` from position `start` on, before the target did."""

    start: int
    token_ids: list[int]
    slots: Ints


@dataclass(frozen=True, slots=True)
class _Proposal:
    drafts: Drafts
    q: Tensor


class CachedDrafter:
    """Drafts the next tokens; sole owner of the network and of a cache in the target's blocks.

    The calls of a step come in the order `copy_blocks`, `load`, `proposals`, `record`, `propose`;
    none of them changes the target's answers. Where graphs run the step, `follow` replaces
    `record`, and `drafted` replaces `propose` if they draft, too. `load_network` returns the
    network for a target; `blocks` are the number of cache blocks and the size of one; `kv_dtype`
    None: the dtype of activations. With `must_agree`, other ranks draft the same, so a failure,
    which they may not have, is raised. `record` takes the inputs of the target's `layers`.
    """

    def __init__(
        self,
        load_network: Callable[[LlamaModel], DraftNetwork],
        network: DraftNetwork,
        target: LlamaModel,
        blocks: tuple[int, int],
        method: str,
        kv_dtype: torch.dtype | None = None,
        must_agree: bool = False,
    ) -> None:
        self._load_network = load_network
        self._network: DraftNetwork | None = network
        self._vocab_size = target.config.vocab_size
        self._method = method
        self._must_agree = must_agree
        self._reads_states = network.reads_states
        self.layers = network.layers
        self._new_cache = functools.partial(
            DraftCache,
            network.config,
            network.config.hidden_size if network.reads_states else 0,
            blocks,
            target.dtype,
            target.device,
            kv_dtype,
        )
        self._block_size = blocks[1]
        self._state = DeviceState(blocks[1], target.device)
        self._first_position = 1 if network.reads_states else 0
        self._ahead: dict[int, _Ahead] = {}
        self._proposals: dict[int, _Proposal] = {}
        # Where the next step of a sequence starts if the last one has left no row unsynced.
        self._synced: dict[int, int] = {}
        self._cache: DraftCache | None = self._new_cache()
        self._is_failing = False

    @property
    def weights(self) -> object:
        """The loaded network, as `OffloadedWeights` takes it."""
        return self._network

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy the cached data of blocks; overwritten blocks are no longer ahead of the target."""
        _, cache = self._awake()
        cache.copy_blocks(copies)
        self._overwritten({destination for _, destination in copies})

    def load(self, load: KvLoad) -> None:
        """Note that the target has loaded blocks: the drafter reads their tokens when it drafts."""
        _, cache = self._awake()
        cache.load(cache.slots(load.blocks, 0, len(load.token_ids)), load.token_ids)
        self._overwritten({*load.blocks})

    def _overwritten(self, written: set[int]) -> None:
        size = self._block_size
        self._ahead = {
            seq_id: ahead
            for seq_id, ahead in self._ahead.items()
            if written.isdisjoint((ahead.slots // size).tolist())
        }

    def proposals(self, sequences: Sequence[ScheduledSequence]) -> dict[int, Tensor]:
        """Return, by sequence id, q [k, V] float32 of the last drawn drafts, which this step
        verifies. Drop the distributions of other drafts: coupling verifies those just as exactly.
        """
        held, self._proposals = self._proposals, {}
        found: dict[int, Tensor] = {}
        for sequence in sequences if held else ():
            proposal = held.get(sequence.seq_id)
            if proposal is None or sequence.num_drafts == 0:
                continue
            count, drafts = sequence.num_drafts, proposal.drafts
            position = sequence.start + len(sequence.token_ids) - count
            if position == drafts.position and tuple(sequence.drafts) == drafts.token_ids[:count]:
                found[sequence.seq_id] = proposal.q[:count]
        return found

    def record(self, batch: StepBatch, states: Tensor, inputs: Sequence[Tensor]) -> None:
        """Note that the target ran the rows of `batch`; its `states` are from before the final
        norm, and `inputs` those that enter `layers`, all [T, hidden_size]. Rows that were run ahead
        stay synced.
        """
        self.record_rows(batch.tensors, states, inputs)
        _, cache = self._awake()
        self._synced = {}
        ahead, self._ahead = self._ahead, {}
        if ahead:
            ahead_slots = [*self._still_ahead(batch, ahead)]
            cache.mark(np.concatenate([batch.slots[:0], *ahead_slots]), True)

    def _still_ahead(self, batch: StepBatch, ahead: dict[int, _Ahead]) -> Iterable[Ints]:
        first = 0
        for sequence in batch.sequences:
            known = batch.slots[first : first + len(sequence.token_ids)]
            first += sequence.num_tokens
            mine = ahead.get(sequence.seq_id)
            if mine is not None and mine.start == sequence.start:
                pairs = zip(
                    zip(mine.token_ids, mine.slots.tolist(), strict=True),
                    zip(sequence.token_ids, known.tolist(), strict=True),
                    strict=False,
                )
                yield mine.slots[: _num_equal(pairs)]

    def captured(self) -> CapturedRounds | None:
        """Return the launches of graphs that draft; None if a drafter of this method waits for the
        host. Valid until `sleep`.
        """
        if self._method != GREEDY:
            return None
        network, cache = self._awake()
        return CapturedRounds(network, cache, self._first_position)

    def record_rows(self, step: StepTensors, states: Tensor, inputs: Sequence[Tensor]) -> None:
        """Launch the part of `record` that a graph repeats."""
        network, cache = self._awake()
        cache.record(step, network.reduce(states, inputs) if self._reads_states else None)

    def follow(
        self, sequences: Sequence[ScheduledSequence], moved: Collection[int]
    ) -> list[int] | None:
        """Note a step whose rows a graph records. Return for each sequence the position where its
        room for drafts ends, 0 if it gets none; None: `propose` has to draft. Sequences in `moved`,
        by their index, have other blocks than before. The rows of those that follow are synced if
        the step before has made drafts.
        """
        network, _ = self._awake()
        synced, self._synced, self._ahead = self._synced, {}, {}
        limits: list[int] = []
        size, most = self._block_size, network.max_positions
        for index, sequence in enumerate(sequences):
            if not sequence.num_to_draft:
                limits.append(0)
            elif sequence.limit or (
                synced.get(sequence.seq_id) == sequence.start and index not in moved
            ):
                room = len(sequence.block_table) * size
                limits.append(room if room < most else most)
            else:
                return None
        return limits

    def drafted(self, starts: dict[int, int]) -> None:
        """Note, by sequence id, where the next steps start of the sequences that a graph has
        drafted for, and whose logits were numbers.
        """
        self._synced = starts

    def propose(self, requests: Sequence[DraftRequest], num_step_tokens: int) -> Drafted:
        """Catch up and draft; repeated failures are logged once, unless ranks must agree. Drafts
        made before a failure count, since they may depend on the drawn tokens.
        """
        self._ahead, self._synced = {}, {}
        lines: list[DraftedRun] = []
        seconds = 0.0
        try:
            rounds, plan = self._prepare(requests, most_rows(num_step_tokens))
            seconds, ready = self._catch_up(rounds, plan)
            self._propose(rounds, ready, lines)
        except Exception:
            if self._must_agree:
                raise
            if not self._is_failing:
                logger.exception("drafting failed; steps continue without drafts")
            self._is_failing = True
        else:
            self._is_failing = False
        drafts = {line.request.seq_id: _drafts(line) for line in lines if line.token_ids}
        return Drafted(drafts, seconds)

    def _prepare(
        self, requests: Sequence[DraftRequest], max_rows: int
    ) -> tuple[DraftRounds, CatchUp]:
        network, cache = self._awake()
        fitting = [self._fit(request, network) for request in requests]
        fitting = [request for request in fitting if request.num_drafts > 0]
        if self._method == PROBABILISTIC:
            fitting = bound_drawn(fitting, self._vocab_size)
        plan = plan_catch_up(cache, fitting, self._first_position, max_rows)
        layout = (self._state, self._first_position)
        rounds = DraftRounds(network, cache, *layout, self._method)
        return rounds, plan

    def _catch_up(self, rounds: DraftRounds, plan: CatchUp) -> tuple[float, list[RowSpan]]:
        """Run the rows of catch-up alone; return the seconds it took, and the spans to draft."""
        if not plan.behind:
            return 0.0, plan.ready
        started = time.perf_counter()
        failed = rounds.read(plan.behind)
        ready = [span for span in plan.ready if span.request.seq_id not in failed]
        return time.perf_counter() - started, ready

    def _propose(
        self, rounds: DraftRounds, ready: Sequence[RowSpan], lines: list[DraftedRun]
    ) -> None:
        """Append the drafts to `lines`, even if an error is raised."""
        if not ready:
            return
        _, cache = self._awake()
        try:
            rounds.run(ready, self._vocab_size)
        finally:
            for line in rounds.lines:
                self._note(line, cache)
                lines.append(line)

    def _fit(self, request: DraftRequest, network: DraftNetwork) -> DraftRequest:
        """Limit the drafts to the blocks. The last draft is never run, so it needs no block."""
        positions = len(request.block_table) * self._block_size
        room = min(positions, network.max_positions) - (request.position - 1)
        return dataclasses.replace(request, num_drafts=min(request.num_drafts, room))

    def _note(self, line: DraftedRun, cache: DraftCache) -> None:
        request, start = line.request, line.request.position - 1
        # This comes first: the way to verify drawn drafts must not depend on their outcome.
        if line.proposals:
            self._proposals[request.seq_id] = _Proposal(_drafts(line), torch.stack(line.proposals))
        if not line.is_sound:
            return
        self._synced[request.seq_id] = start
        # A head's later rows come from its own states, which differ from the target's.
        count = min(1, line.num_rows) if self._reads_states else line.num_rows
        token_ids = [request.last_token, *line.token_ids][:count]
        slots = cache.slots(request.block_table, start, start + count)
        self._ahead[request.seq_id] = _Ahead(start, token_ids, slots)

    def sleep(self, level: int) -> None:
        """Drop the cache; at level 2 drop the network too."""
        if level < 1:
            return
        self._cache = None
        self._ahead, self._proposals, self._synced = {}, {}, {}
        if level > 1:
            self._network = None

    def wake(self, tags: frozenset[str], target: LlamaModel | None) -> None:
        """Load the network for the target in its present form, and allocate an empty cache."""
        if "weights" in tags and self._network is None and target is not None:
            self._network = self._load_network(target)
        if "kv_cache" in tags and self._cache is None:
            self._cache = self._new_cache()

    def _awake(self) -> tuple[DraftNetwork, DraftCache]:
        if self._network is None or self._cache is None:
            raise RuntimeError("the drafter sleeps: wake it before a step")
        return self._network, self._cache


def _num_equal(pairs: Iterable[tuple[object, object]]) -> int:
    count = 0
    for one, other in pairs:
        if one != other:
            break
        count += 1
    return count


def _drafts(line: DraftedRun) -> Drafts:
    return Drafts(line.request.position, tuple(line.token_ids), tuple(line.confidences))


MAX_PROPOSAL_BYTES = 256 << 20
_ROW_ITEM_BYTES = 4  # float32


def bound_drawn(
    requests: Sequence[DraftRequest], vocab_size: int, max_bytes: int = MAX_PROPOSAL_BYTES
) -> list[DraftRequest]:
    """Return the requests, with fewer drafts for those that sample if their rows would take more
    than `max_bytes`: the longest runs are cut to a common length, and the first of them get one
    draft more while there is room. Greedy requests need no rows.
    """
    counts = [r.num_drafts if r.params.temperature > 0 else 0 for r in requests]
    room = max_bytes // (vocab_size * _ROW_ITEM_BYTES)
    if sum(counts) <= room:
        return list(requests)
    length = _common_length(counts, room)
    spare = room - sum(min(count, length) for count in counts)
    bounded = []
    for request, count in zip(requests, counts, strict=True):
        if count > length:
            extra = 1 if spare > 0 else 0
            spare -= extra
            request = dataclasses.replace(request, num_drafts=length + extra)
        if request.num_drafts > 0:
            bounded.append(request)
    return bounded


def _common_length(counts: Sequence[int], room: int) -> int:
    """Return the largest length to which the counts can be cut so that `room` holds their sum."""
    length, left = 0, room
    while True:
        longer = sum(count > length for count in counts)
        if longer == 0 or longer > left:
            return length
        left -= longer
        length += 1
